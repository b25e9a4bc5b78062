"""Running a plan: tensors stream from the inputs to the output, one at a time."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from .checkpoints.card import CARD_NAME, model_card
from .checkpoints.checkpoint import Checkpoint
from .checkpoints.manifest import (
    MANIFEST_NAME,
    build_manifest,
    describe_input,
    method_name,
    sha256_of,
)
from .checkpoints.output import (
    check_output,
    os_errors,
    output_folder,
    source_paths,
    write_file,
)
from .checkpoints.stream import InputReader, refuse_changed
from .checkpoints.survey import DeltaSurvey
from .checkpoints.writer import COPY_BYTES, CheckpointWriter
from .engine import Engine
from .errors import MethodError
from .events import Event, Finished, OnEvent, Progress, Started, Warned
from .methods import MergeMethod
from .plan import Plan, model_list, plan
from .tensors import DEFAULT_EXCLUDE

CONFIG_NAME = "config.json"


@dataclass(frozen=True)
class MergeResult:
    """What a merge wrote: the folder, its tensors and their bytes, and what was warned of."""

    out: Path
    method: str
    tensors: int
    bytes: int
    shards: tuple[str, ...]
    seconds: float
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data."""
        return {**asdict(self), "out": str(self.out)}


def execute(
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    force: bool = False,
    threads: int | None = None,
    device: str = "cpu",
    hash_inputs: bool = False,
    on_event: OnEvent | None = None,
) -> MergeResult:
    """Run a plan and write a complete checkpoint to the folder ``out``.

    The output is written aside and gets its name only when it is complete and on the disk, so
    a run that fails, or is interrupted, leaves nothing under ``out`` and the inputs untouched.
    Memory is bounded by the largest single tensor of a spectral method, whatever the model.
    Equal inputs and plans give equal bytes at a given device and thread count.

    Args:
        plan: what to do, from :func:`mergekit_iso.plan`.
        out: the folder to make; parents are created.
        force: replace the model that stands at ``out``, once the new folder is complete; a
            file, or a folder that does not look like a model, is never replaced.
        threads: torch's threads for this run, at most one per CPU; None leaves them as they are.
        device: where tensors are computed, ``cpu`` or ``cuda[:N]``.
        hash_inputs: also record the SHA-256 of the inputs' whole files (reads them once more).
        on_event: called with each event of :mod:`mergekit_iso.events`, in this thread.

    Raises:
        OutputError: ``out`` exists, overlaps an input, or is being written by another run.
        MethodError: a device that does not exist, a number of threads that cannot be had, or
            weights that a mean is undefined for.
        NonFiniteError: a NaN or infinity in an input, or a value that the output dtype, or the
            one that deltas are computed in, cannot hold.
        CheckpointError: an input that changes or cannot be read, a full disk, a failed write,
            a matrix whose decomposition fails, or a tensor that does not fit into memory.
    """
    began = time.perf_counter()
    target = _device(device)
    _check_threads(threads)
    sources = (plan.base, *plan.models)
    path = check_output(out, source_paths(*sources), force=force)
    notify = on_event or _ignore
    reader = InputReader(sources, target)
    survey = DeltaSurvey([m.label for m in plan.models], plan.base.label, plan.method)
    before = reader.stamps()
    size = sum(step.info.nbytes for step in plan.tensors)
    needed = size + sum(_size(plan.base.folder / f) for f in plan.carried)
    warnings = list(plan.warnings)

    with _thread_count(threads), output_folder(path, needed, force=force) as folder:
        notify(Started(len(plan.tensors), size))
        for sentence in plan.warnings:
            notify(Warned(sentence))
        engine = Engine(plan, reader, survey)
        infos = {step.info.name: step.info for step in plan.tensors}
        with CheckpointWriter(folder, plan.shards, infos) as writer:
            for name in engine.write_all(writer):
                notify(Progress(name, infos[name].nbytes))
            writer.finish()
        for sentence in survey.warnings(engine.taking_part):
            warnings.append(sentence)
            notify(Warned(sentence))
        files = _carry(plan, folder)
        manifest = build_manifest(
            plan,
            inputs=[
                describe_input(source, crc32, hash_files=hash_inputs)
                for source, crc32 in zip(sources, reader.crc32, strict=True)
            ],
            tensor_crc32=writer.crc32,
            file_of=writer.file_of,
            files=files,
            warnings=warnings,
        )
        write_file(folder / MANIFEST_NAME, manifest.to_bytes())
        # As in the manifest, names of files need not be text.
        write_file(folder / CARD_NAME, model_card(plan).encode(errors="replace"))
        refuse_changed(sources, before, reader.stamps())

    seconds = time.perf_counter() - began
    notify(Finished(path, len(plan.tensors), size, seconds))
    return MergeResult(
        out=path,
        method=method_name(plan),
        tensors=len(plan.tensors),
        bytes=size,
        shards=tuple(file for file, _ in plan.shards),
        seconds=seconds,
        warnings=tuple(warnings),
    )


def merge_checkpoints(
    base: str | os.PathLike[str],
    models: Sequence[str | os.PathLike[str]],
    method: str | MergeMethod,
    out: str | os.PathLike[str],
    *,
    weights: Sequence[float] | float | Literal["mean"] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    round: int = 0,
    exclude: str | Sequence[str] = DEFAULT_EXCLUDE,
    keep_base: str | Sequence[str] = (),
    dtype: str = "float32",
    out_dtype: str | None = None,
    max_shard_size: int | str = "5GB",
    allow_pickle: bool = False,
    force: bool = False,
    threads: int | None = None,
    device: str = "cpu",
    hash_inputs: bool = False,
    on_event: Callable[[Event], None] | None = None,
    **options: Any,
) -> MergeResult:
    """Merge checkpoints on disk or the hub into a new folder: open, plan, execute.

    ``method`` is a registered name with its options beside it, or a method object (options
    beside it raise MethodError). The other keywords are those of :func:`mergekit_iso.plan` and
    :func:`mergekit_iso.execute`, which also name the errors raised.
    """
    models = model_list(models)
    # Once more in execute(); here they spare a download whose result would have no place.
    _device(device)
    _check_threads(threads)
    paths = {os.fspath(r): Path(r).expanduser() for r in (base, *models)}
    local = {label: Path(os.path.realpath(p)) for label, p in paths.items() if os.path.exists(p)}
    check_output(out, local, force=force)
    planned = plan(
        base,
        models,
        method,
        weights=weights,
        scale=scale,
        seed=seed,
        round=round,
        exclude=exclude,
        keep_base=keep_base,
        out_dtype=out_dtype,
        dtype=dtype,
        max_shard_size=max_shard_size,
        allow_pickle=allow_pickle,
        **options,
    )
    return execute(
        planned,
        out,
        force=force,
        threads=threads,
        device=device,
        hash_inputs=hash_inputs,
        on_event=on_event,
    )


def _carry(plan: Plan, folder: Path) -> dict[str, str]:
    """Copy the base's other files and write config.json; return the SHA-256 of each."""
    hashes = {}
    if plan.config is not None:
        text = json.dumps(plan.config, indent=2, ensure_ascii=False) + "\n"
        # Lone surrogates, which JSON can escape but UTF-8 cannot hold, are escaped again.
        data = text.encode(errors="backslashreplace")
        write_file(folder / CONFIG_NAME, data)
        hashes[CONFIG_NAME] = hashlib.sha256(data).hexdigest()
    for name in plan.carried:
        target = folder / name
        with os_errors(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as file:
                for data in _pieces(plan.base, name):
                    file.write(data)
                file.flush()
                os.fsync(file.fileno())
            hashes[name] = sha256_of(target)
    return hashes


def _pieces(base: Checkpoint, name: str) -> Iterator[bytes]:
    with (
        os_errors(f"{name} of the base {base.label!r}", "read"),
        (base.folder / name).open("rb") as file,
    ):
        while data := file.read(COPY_BYTES):
            yield data


def _device(name: str) -> torch.device:
    hint = "use cpu, cuda or cuda:N"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise MethodError(f"device {name!r} is not known", hint=hint) from None
    if device.type not in ("cpu", "cuda"):
        raise MethodError(f"device {name!r} is not supported", hint=hint)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise MethodError(f"device {name!r} cannot be used: {reason}", hint=hint) from None
    return device


def _check_threads(threads: int | None) -> None:
    if threads is None:
        return
    # Far more threads than CPUs end the process inside torch.
    most = os.cpu_count() or 1
    if not isinstance(threads, int) or isinstance(threads, bool) or not 1 <= threads <= most:
        raise MethodError(
            f"the number of threads cannot be {threads!r}",
            hint=f"give a whole number from 1 to {most}, the number of CPUs",
        )


@contextmanager
def _thread_count(threads: int | None) -> Iterator[None]:
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _size(path: Path) -> int:
    with os_errors(path, "read"):
        return path.stat().st_size


def _ignore(event: Event) -> None:
    pass
