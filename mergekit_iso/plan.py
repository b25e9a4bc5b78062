"""What a merge will do, known from headers alone before any work."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch

from .checkpoints.align import Match, align
from .checkpoints.checkpoint import Checkpoint, open_checkpoint
from .checkpoints.files import carried_files
from .checkpoints.ties import untied_config
from .checkpoints.vocabulary import check_rows, check_tokenizers
from .errors import CheckpointError, MethodError
from .methods.base import MergeMethod, finite_number, resolve_weights
from .methods.registry import resolve_method
from .tensors import (
    DEFAULT_EXCLUDE,
    Role,
    TensorInfo,
    as_patterns,
    classify,
    compute_dtype,
    describe,
    matches_tensor,
)

Reference = str | os.PathLike[str] | Checkpoint
R = TypeVar("R", bound=Reference)

_OUT_DTYPES = ("float32", "float16", "bfloat16", "float64")
_COMPUTE_DTYPES = ("float32", "float64")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B|B)?\s*", re.IGNORECASE)
_POWERS = "BKMGT"
_MAX_SIZE = 1 << 63


@dataclass(frozen=True)
class TensorPlan:
    """What happens to one output tensor.

    ``info`` describes the output: the base's name and shape, the output dtype. ``copy`` means
    the base's own values (cast where ``info`` has another dtype). ``base_source`` is its name in
    the base's files (for an untied head the embedding's), ``model_sources`` its name in each
    model's files, in order (empty for a copy). ``same_as`` names the output tensor whose merged
    values this tied duplicate repeats. ``compute`` is float32 or float64.
    """

    info: TensorInfo
    action: Literal["merge", "copy"]
    base_source: str
    model_sources: tuple[str, ...]
    same_as: str | None
    compute: torch.dtype


@dataclass(frozen=True)
class Plan:
    """Everything a merge will do, from headers alone.

    ``tensors`` are in the order in which they are executed and written (the base's file order);
    ``shards`` are (file name, output tensor names); ``max_shard_size`` is in bytes of tensors;
    ``config`` is the output's config.json where it must differ from the base's, else None;
    ``carried`` are the base's files that come along byte for byte (config.json among them where
    ``config`` is None).
    """

    base: Checkpoint
    models: tuple[Checkpoint, ...]
    method: MergeMethod
    weights: tuple[float, ...]
    scale: float
    seed: int
    round: int
    exclude: tuple[str, ...]
    keep_base: tuple[str, ...]
    out_dtype: torch.dtype | None
    max_shard_size: int
    tensors: tuple[TensorPlan, ...]
    shards: tuple[tuple[str, tuple[str, ...]], ...]
    config: Mapping[str, Any] | None
    carried: tuple[str, ...]
    warnings: tuple[str, ...]


def plan(
    base: Reference,
    models: Sequence[Reference],
    method: str | MergeMethod,
    *,
    weights: Sequence[float] | float | Literal["mean"] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    round: int = 0,
    exclude: str | Sequence[str] = DEFAULT_EXCLUDE,
    keep_base: str | Sequence[str] = (),
    out_dtype: str | None = None,
    dtype: str = "float32",
    max_shard_size: int | str = "5GB",
    allow_pickle: bool = False,
    **options: Any,
) -> Plan:
    """Plan a merge: match tensors, check that the models belong together, lay out the output.

    Nothing is written; what is read is headers, tokenizers and a few values to compare.

    Args:
        base: the checkpoint that all models were fine-tuned from: a folder, a .safetensors file,
            a hub id ``org/name[@revision]``, or an open checkpoint.
        models: the fine-tuned checkpoints, at least one.
        method: a registered name with its options beside it, or a method object.
        weights: one for each model; None is 1 each, ``"mean"`` 1/T each.
        scale: factor on the merged delta, finite.
        seed: keys the random masks.
        round: keys the random masks too; 0 outside of a training loop.
        exclude: patterns of matrices that spectral methods average like vectors; one may stand
            alone. See :func:`mergekit_iso.tensors.describe` for their form.
        keep_base: patterns of tensors that stay at the base, of the same form.
        out_dtype: float32, float16, bfloat16 or float64 for every weight; None keeps the base's.
        dtype: float32 or float64, in which deltas are computed (float64 inputs always in it).
        max_shard_size: bytes of tensors in a file, or a text such as 200MB, 5GB or 1GiB; a
            single larger tensor has a file of its own.
        allow_pickle: read ``.bin`` files too, weights-only.
        **options: the method's options, where it is given by name.

    Raises:
        MethodError: no models, nothing left to merge, or an option that is out of range or does
            not fit the method.
        IncompatibleError: models that do not belong to the base (tensors, shapes, vocabulary).
        CheckpointError: a file that cannot be read.
    """
    operator = resolve_method(method, options)
    models = model_list(models)
    resolved = resolve_weights(weights, len(models))
    scale = finite_number("the scale", scale)
    for name, number in (("seed", seed), ("round", round)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise MethodError(f"the {name} cannot be {number!r}: give a whole number")
    target = None if out_dtype is None else _dtype("out_dtype", out_dtype, _OUT_DTYPES)
    minimum = _dtype("dtype", dtype, _COMPUTE_DTYPES)
    limit = parse_size(max_shard_size)
    exclude, keep_base = as_patterns("exclude", exclude), as_patterns("keep_base", keep_base)

    base, *models = [_opened(reference, allow_pickle) for reference in (base, *models)]
    alignment = align(base, models)
    row_warnings = check_rows(base)
    for model in models:
        check_rows(model)
    tokenizer_warnings = check_tokenizers(base, models)
    kept = _kept(alignment.matches, keep_base)
    steps = tuple(
        _step(
            match,
            None if match.name in kept else models,
            describe(match.name, match.stored.shape, target or match.stored.dtype, exclude),
            minimum,
        )
        for match in alignment.matches
    )
    infos = [s.info for s in steps if s.action == "merge" and s.same_as is None]
    if kept and not infos:
        raise MethodError(
            "keep_base leaves no tensor to merge", hint="give patterns that fit fewer tensors"
        )
    config = _output_config(base.config, alignment.untied, target)
    return Plan(
        base=base,
        models=tuple(models),
        method=operator,
        weights=resolved,
        scale=scale,
        seed=seed,
        round=round,
        exclude=exclude,
        keep_base=keep_base,
        out_dtype=target,
        max_shard_size=limit,
        tensors=steps,
        shards=_shards([s.info for s in steps], limit),
        config=config,
        carried=_carried(base, config),
        warnings=(
            *alignment.warnings,
            *row_warnings,
            *tokenizer_warnings,
            *_idle_patterns(steps, exclude, keep_base),
            *operator.check(infos, resolved),
        ),
    )


def model_list(models: Iterable[R]) -> list[R]:
    """Return the models to merge; MethodError if there are none, or one that is no list."""
    if isinstance(models, (str, os.PathLike, Checkpoint)):
        raise MethodError(
            "models must be a list, not a single model", hint="put it in brackets: [model]"
        )
    found = list(models)
    if not found:
        raise MethodError("no models were given to merge", hint="name at least one fine-tune")
    return found


def _opened(reference: Reference, allow_pickle: bool) -> Checkpoint:
    if isinstance(reference, Checkpoint):
        return reference
    return open_checkpoint(reference, allow_pickle=allow_pickle)


def parse_size(size: int | str) -> int:
    """Return a number of bytes: an int, or text with a unit (powers of 1000, or 1024 with an i).

    Raises:
        MethodError: no size, less than a byte, or 2^63 bytes and more.
    """
    hint = "give bytes, or a size such as 200MB, 5GB or 1GiB"
    number: float = 0
    if isinstance(size, int) and not isinstance(size, bool):
        number = size
    elif found := _SIZE.fullmatch(str(size)):
        unit = (found[2] or "B").upper()
        number = float(found[1]) * (1024 if "I" in unit else 1000) ** _POWERS.index(unit[0])
    if number >= _MAX_SIZE:
        raise MethodError("a size must be less than 2^63 bytes", hint=hint)
    if number < 1:
        raise MethodError(f"a size cannot be {size!r}", hint=hint)
    return int(number)


def _dtype(option: str, name: str, valid: tuple[str, ...]) -> torch.dtype:
    if name not in valid:
        raise MethodError(f"{option} cannot be {name!r}", hint=f"give one of {', '.join(valid)}")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _kept(found: Sequence[Match], keep_base: Sequence[str]) -> set[str]:
    """Return the output names that a pattern keeps at the base; tied ones are kept together."""
    named = {
        m.name
        for m in found
        if any(matches_tensor(pattern, m.name, _role(m)) for pattern in keep_base)
    }
    originals = {m.same_as or m.name for m in found if m.name in named}
    return {m.name for m in found if (m.same_as or m.name) in originals}


def _role(match: Match) -> Role:
    return classify(match.name, match.stored.shape, match.stored.dtype)


def _step(
    match: Match, models: Sequence[Checkpoint] | None, info: TensorInfo, minimum: torch.dtype
) -> TensorPlan:
    """Return one tensor's plan; ``models`` is None where it stays at the base."""
    stored, sources = match.stored, match.model_sources
    if not sources:
        info = replace(info, dtype=stored.dtype)
    if models is None or not sources:
        compute = compute_dtype(minimum, stored.dtype)
        return TensorPlan(info, "copy", stored.name, (), None, compute)
    dtypes = [m.tensors[source].dtype for m, source in zip(models, sources, strict=True)]
    compute = compute_dtype(minimum, stored.dtype, *dtypes)
    return TensorPlan(info, "merge", stored.name, sources, match.same_as, compute)


def _shards(infos: Sequence[TensorInfo], limit: int) -> tuple[tuple[str, tuple[str, ...]], ...]:
    groups: list[list[str]] = []
    room = 0
    for info in infos:
        if info.nbytes > room or not groups:
            groups.append([])
            room = limit
        groups[-1].append(info.name)
        room -= info.nbytes
    if len(groups) == 1:
        return (("model.safetensors", tuple(groups[0])),)
    return tuple(
        (f"model-{number:05d}-of-{len(groups):05d}.safetensors", tuple(names))
        for number, names in enumerate(groups, 1)
    )


def _output_config(
    config: Mapping[str, Any], untied: bool, target: torch.dtype | None
) -> Mapping[str, Any] | None:
    """Return the config that fits the output, or None where the base's does."""
    if not config:
        return None
    new = untied_config(config) if untied else deepcopy(dict(config))
    if target is not None:
        _set_dtype(new, str(target).removeprefix("torch."))
    return None if new == config else new


def _set_dtype(section: dict[str, Any], name: str) -> None:
    for key, value in section.items():
        if isinstance(value, dict):
            _set_dtype(value, name)
        elif key in ("dtype", "torch_dtype") and value is not None:
            section[key] = name


def _carried(base: Checkpoint, config: Mapping[str, Any] | None) -> tuple[str, ...]:
    if base.single_file:
        return ()
    copied = config is None and (base.folder / "config.json").is_file()
    own = ("config.json",) if copied else ()
    names = sorted((*own, *carried_files(base.folder)))
    for name in names:
        if not _is_text(name):
            raise CheckpointError(
                f"the base {base.label!r} has a file whose name is not UTF-8: {name!r}",
                hint="rename it, or move it out of that folder",
            )
    return tuple(names)


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _idle_patterns(
    steps: Sequence[TensorPlan], exclude: Sequence[str], keep_base: Sequence[str]
) -> list[str]:
    given = [("keep_base", p) for p in keep_base]
    given += [("exclude", p) for p in exclude if p not in DEFAULT_EXCLUDE]
    idle = [
        (option, pattern)
        for option, pattern in given
        if not any(matches_tensor(pattern, s.info.name, s.info.role) for s in steps)
    ]
    return [f"the {option} pattern {pattern!r} matches no tensor" for option, pattern in idle]
