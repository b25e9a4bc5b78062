"""``mergekit_iso.json``: what was merged, from what, how, and what came of it.

It holds no time and no absolute path, so that equal merges give equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from .. import __version__
from ..errors import CheckpointError
from ..plan import Plan
from .checkpoint import Checkpoint
from .output import os_errors

MANIFEST_NAME = "mergekit_iso.json"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class ModelRecord:
    """A merged model by its public name, and its weight."""

    name: str
    weight: float


@dataclass(frozen=True)
class Recipe:
    """The resolved recipe: everything that decides the output's values."""

    base: str
    models: tuple[ModelRecord, ...]
    method: str
    options: dict[str, Any]
    scale: float
    seed: int
    round: int
    exclude: tuple[str, ...]
    keep_base: tuple[str, ...]
    dtype: str
    out_dtype: str | None
    max_shard_size: int


@dataclass(frozen=True)
class InputFile:
    """A weight file: size in bytes, SHA-256 of its header (safetensors) and of all of it."""

    name: str
    bytes: int
    header_sha256: str | None
    sha256: str | None


@dataclass(frozen=True)
class InputRecord:
    """An input: hub commit, files, and the CRC-32 (hex) of each tensor that was read."""

    name: str
    commit: str | None
    files: tuple[InputFile, ...]
    crc32: dict[str, str]


@dataclass(frozen=True)
class TensorRecord:
    """An output tensor, where it is stored and the CRC-32 (hex) of its bytes."""

    name: str
    role: str
    action: str
    same_as: str | None
    dtype: str
    shape: tuple[int, ...]
    file: str
    crc32: str


@dataclass(frozen=True)
class Manifest:
    """The whole record; ``files`` are the SHA-256 of config.json and all carried files."""

    format_version: int
    recipe: Recipe
    inputs: tuple[InputRecord, ...]
    versions: dict[str, str]
    tensors: tuple[TensorRecord, ...]
    files: dict[str, str]
    warnings: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Return the file's bytes; the same for equal manifests."""
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"
        # Names of files need not be text: what of them is not becomes a question mark.
        return text.encode(errors="replace")


def build_manifest(
    plan: Plan,
    *,
    inputs: Sequence[InputRecord],
    tensor_crc32: Mapping[str, int],
    file_of: Mapping[str, str],
    files: Mapping[str, str],
    warnings: Sequence[str],
) -> Manifest:
    """Return the manifest of a merge whose tensors and files have been written."""
    tensors = tuple(
        TensorRecord(
            name=step.info.name,
            role=step.info.role,
            action=step.action,
            same_as=step.same_as,
            dtype=dtype_name(step.info.dtype),
            shape=step.info.shape,
            file=file_of[step.info.name],
            crc32=hex_crc(tensor_crc32[step.info.name]),
        )
        for step in plan.tensors
    )
    sources = (plan.base, *plan.models)
    return Manifest(
        format_version=FORMAT_VERSION,
        recipe=recipe_of(plan),
        inputs=tuple(inputs),
        versions={
            "mergekit_iso": __version__,
            "torch": torch.__version__,
            "safetensors": version("safetensors"),
            "python": platform.python_version(),
        },
        tensors=tensors,
        files=dict(sorted(files.items())),
        warnings=tuple(_without_paths(w, sources) for w in warnings),
    )


def recipe_of(plan: Plan) -> Recipe:
    """Return the resolved recipe of a plan, with public names."""
    merged = [step for step in plan.tensors if step.action == "merge"]
    wide = bool(merged) and all(step.compute == torch.float64 for step in merged)
    return Recipe(
        base=public_name(plan.base),
        models=tuple(
            ModelRecord(public_name(m), w) for m, w in zip(plan.models, plan.weights, strict=True)
        ),
        method=method_name(plan),
        options=plan.method.options(),
        scale=plan.scale,
        seed=plan.seed,
        round=plan.round,
        exclude=plan.exclude,
        keep_base=plan.keep_base,
        dtype="float64" if wide else "float32",
        out_dtype=None if plan.out_dtype is None else dtype_name(plan.out_dtype),
        max_shard_size=plan.max_shard_size,
    )


def describe_input(
    checkpoint: Checkpoint, crc32: Mapping[str, int], *, hash_files: bool
) -> InputRecord:
    """Return the record of an input: sizes and headers of its files, CRC-32 of its tensors."""
    files = []
    for name in checkpoint.weight_files:
        path = checkpoint.folder / name
        with os_errors(path, "read"):
            header = _header_bytes(path) if path.suffix == ".safetensors" else None
            files.append(
                InputFile(
                    name=name,
                    bytes=path.stat().st_size,
                    header_sha256=None if header is None else hashlib.sha256(header).hexdigest(),
                    sha256=sha256_of(path) if hash_files else None,
                )
            )
    crcs = {name: hex_crc(crc) for name, crc in sorted(crc32.items())}
    return InputRecord(public_name(checkpoint), checkpoint.commit, tuple(files), crcs)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of an output folder; CheckpointError if there is none or it is broken."""
    path = folder / MANIFEST_NAME
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {MANIFEST_NAME}, so there is nothing to check it against",
            hint="verify works on folders that mergekit-iso wrote",
        )
    with os_errors(path, "read"):
        data = path.read_bytes()
    try:
        return _manifest_adapter.validate_json(data)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{path} is damaged ({where or 'whole file'}: {first['msg']})",
            hint="merge again, or restore the file",
        ) from None


def public_name(checkpoint: Checkpoint) -> str:
    """Return what others may know an input by: ``id@commit`` of the hub, else its folder's name."""
    if checkpoint.commit is not None:
        return f"{hub_id(checkpoint)}@{checkpoint.commit}"
    return Path(os.path.realpath(checkpoint.label)).name


def hub_id(checkpoint: Checkpoint) -> str | None:
    """Return the hub id without its revision; None for a local folder."""
    return None if checkpoint.commit is None else checkpoint.label.partition("@")[0]


def method_name(plan: Plan) -> str:
    """Return the method's registered name, or that of its class."""
    return plan.method.name or type(plan.method).__name__


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def hex_crc(crc: int) -> str:
    """Return a CRC-32 as 8 hexadecimal digits."""
    return f"{crc:08x}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _header_bytes(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(int.from_bytes(file.read(8), "little"))


def _without_paths(sentence: str, sources: Sequence[Checkpoint]) -> str:
    """Replace what the user typed for an input, and where it lies, by its public name."""
    names = {repr(s.label): repr(public_name(s)) for s in sources}
    for source in sources:
        paths = (str(source.folder), source.label)
        names |= {path: public_name(source) for path in paths if os.path.isabs(path)}
    longest_first = sorted(names, key=len, reverse=True)
    pattern = "|".join(re.escape(name) for name in longest_first)
    return re.sub(pattern, lambda found: names[found[0]], sentence)


_manifest_adapter = TypeAdapter(Manifest)
