"""The reference runner: everything in memory, one tensor after another.

Every other engine is tested against it, so it is short. Elements are worked on in chunks that fit
a cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from typing import Any, Literal

import torch
from torch import Tensor

from .errors import IncompatibleError, MergeWarning, MethodError, NonFiniteError
from .kernels.memory import keep_freed_memory, room_for
from .methods.base import (
    Context,
    DeltaStream,
    MergeMethod,
    Worker,
    finite_number,
    local_delta,
    merge_unit,
    resolve_weights,
)
from .methods.registry import resolve_method
from .tensors import (
    DEFAULT_EXCLUDE,
    TensorInfo,
    apply_delta,
    as_patterns,
    compute_dtype,
    describe,
    task_vector_of,
)

Tensors = Mapping[str, Tensor]

# Elements of a flat chunk: those of all workers and what is computed from them stay in cache.
_CHUNK = 1 << 18


def task_vector(base: Tensors, finetuned: Tensors) -> dict[str, Tensor]:
    """Return the task vector θ − θ_base of every floating tensor that both models have.

    Both sides are upcast first: float64 where one is float64, else float32, in which the result
    is. Raises IncompatibleError where names or shapes differ.
    """
    missing = sorted(base.keys() ^ finetuned.keys())
    if missing:
        side = "the base" if missing[0] in finetuned else "the fine-tuned model"
        raise IncompatibleError(f"{side} has no tensor {missing[0]}")
    vector = {}
    for name, weight in base.items():
        tuned = finetuned[name]
        if tuned.shape != weight.shape:
            raise IncompatibleError(
                f"{name} has shape {tuple(tuned.shape)} in the fine-tuned model and "
                f"{tuple(weight.shape)} in the base"
            )
        if weight.is_floating_point():
            dtype = compute_dtype(weight.dtype, tuned.dtype)
            vector[name] = task_vector_of(weight.detach(), tuned.detach(), dtype)
    return vector


def merge(
    base: Tensors,
    deltas: Sequence[Tensors],
    method: str | MergeMethod,
    *,
    weights: Sequence[float] | float | Literal["mean"] | None = None,
    scale: float = 1.0,
    seed: int = 0,
    round: int = 0,
    masks: Sequence[Tensors] | None = None,
    exclude: Sequence[str] = DEFAULT_EXCLUDE,
    **options: Any,
) -> dict[str, Tensor]:
    """Return base + scale · M(Δ_1 … Δ_T), each tensor in the base's dtype and device.

    Args:
        base: the base model's tensors by name. Tensors that no delta has, and buffers (integer,
            boolean and known constant ones), come back as they are (the same values, a copy).
        deltas: T task vectors θ_t − θ_base; all with the same names, each name and shape the
            base's. Any floating dtype; computed in float32, or float64 where base or delta is.
        method: a registered name, with its options beside it, or a method object.
        weights: one per delta; None is 1 each, "mean" is 1/T each. A weight of 0 takes part in
            nothing.
        scale: α, applied to every merged tensor at the end.
        seed: key of the random masks, with the round, the delta's number and the tensor's name.
        round: number of the outer step; 0 offline.
        masks: explicit keep masks (bool) per delta and name, instead of drawn ones.
        exclude: patterns of matrices that spectral methods average like vectors: a glob if it
            has any of ``*?[``, ``role:NAME`` for a role, else a substring of the name.
        **options: the method's options, where it is given by name.

    Raises:
        MethodError: a method, option, weight or scale that does not exist or fit.
        IncompatibleError: deltas whose names or shapes differ from each other or the base.
        NonFiniteError: a NaN or infinity in an input, or in the result (overflow).
    """
    operator = resolve_method(method, options)
    _check_types(base, deltas, seed, round)
    scale = finite_number("the scale", scale)
    weight = resolve_weights(weights, len(deltas))
    infos = _describe(base, deltas, as_patterns("exclude", exclude))
    _check_masks(masks, deltas)
    for sentence in operator.check(infos, weight):
        warnings.warn(sentence, MergeWarning, stacklevel=2)

    keep_freed_memory()
    taking_part = [t for t in range(len(deltas)) if weight[t] != 0]
    ctx = Context(weights=tuple(weight[t] for t in taking_part) or (0.0,), seed=seed, round=round)
    if not taking_part:  # one zero delta of weight 0 stands for them
        taking_part = [0]
        deltas = [{name: d.new_zeros(()).expand(d.shape) for name, d in deltas[0].items()}]

    def dtype(info: TensorInfo) -> torch.dtype:
        return compute_dtype(info.dtype, *(delta[info.name].dtype for delta in deltas))

    def cut(x: Tensor, info: TensorInfo) -> tuple[Tensor, ...]:
        whole = operator.requires.unit == "matrix" and info.spectral
        return (x,) if whole else torch.split(x.reshape(-1), _CHUNK)

    def units(
        info: TensorInfo, models: Sequence[int], stats: Mapping[int, Any] | None = None
    ) -> Iterator[tuple[Context, Iterator[Worker]]]:
        stats, wide = stats or {}, dtype(info)
        cut_deltas = [cut(deltas[t][info.name].detach(), info) for t in models]
        keeps = [masks[t].get(info.name) if masks else None for t in models]
        cut_keeps = [repeat(None) if keep is None else iter(cut(keep, info)) for keep in keeps]
        offset = 0
        for pieces in zip(*cut_deltas, strict=True):
            kept = [next(keep) for keep in cut_keeps]
            yield (
                replace(ctx, offset=offset),
                (
                    Worker(t, piece.to(wide), stats.get(t), keep)
                    for t, piece, keep in zip(models, pieces, kept, strict=True)
                ),
            )
            offset += pieces[0].numel()

    def stream(t: int, chosen: Sequence[TensorInfo]) -> DeltaStream:
        def chunks() -> Iterator[tuple[TensorInfo, Tensor, Context]]:
            for info in chosen:
                for unit, (w,) in units(info, [t]):
                    yield info, w.delta, replace(unit, worker=t, mask=w.mask)

        return DeltaStream(sum(i.numel for i in chosen), chunks, compute_dtype(*map(dtype, chosen)))

    def stats(info: TensorInfo) -> Mapping[int, Any]:
        if "worker_tensor" in operator.requires.stats:
            return {t: operator.measure(stream(t, [info])) for t in taking_part}
        return of_model

    def partials() -> Iterator[int]:
        for info in infos:
            for unit, workers in units(info, taking_part, stats(info)):
                yield operator.partial(
                    [local_delta(operator, w, info, unit) for w in workers], info, unit
                )

    of_model: dict[int, Any] = {}
    if "worker_model" in operator.requires.stats:
        of_model = {t: operator.measure(stream(t, infos)) for t in taking_part}
    if "merged_model" in operator.requires.stats:
        ctx = replace(ctx, elected=cache(lambda: operator.elect(partials())))

    merged = dict(base)
    for info in infos:
        theta, result = base[info.name].detach(), room_for(base[info.name])
        for old, new, (unit, workers) in zip(
            cut(theta, info), cut(result, info), units(info, taking_part, stats(info)), strict=True
        ):
            tau = merge_unit(operator, workers, info, unit)
            new.copy_(apply_delta(old, tau, scale, theta.dtype))
        merged[info.name] = _checked(result, info.name)
    return {k: v.detach().clone() if v is base[k] else v for k, v in merged.items()}


def _check_types(base: Any, deltas: Any, seed: Any, round: Any) -> None:
    if isinstance(deltas, Mapping) or not isinstance(deltas, Sequence):
        raise MethodError(
            f"the deltas must be a list of mappings, not {type(deltas).__name__}",
            hint="put a single task vector into a list",
        )
    if not deltas:
        raise MethodError("there is nothing to merge: no delta was given")
    for what, tensors in (("the base", base), *((f"delta {t}", d) for t, d in enumerate(deltas))):
        if not isinstance(tensors, Mapping):
            raise MethodError(
                f"{what} must map names to tensors, and is a {type(tensors).__name__}",
                hint="of a module take module.state_dict()",
            )
        for name, x in tensors.items():
            if not isinstance(name, str) or not isinstance(x, Tensor):
                raise MethodError(f"{what} maps {name!r} to a {type(x).__name__}, not a tensor")
            if x.layout != torch.strided or x.is_meta or x.is_quantized:
                raise MethodError(f"{name} of {what} has no plain values: {x.layout}, {x.device}")
    for option, value in (("seed", seed), ("round", round)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise MethodError(f"the {option} cannot be {value!r}: give a whole number")


def _describe(base: Tensors, deltas: Sequence[Tensors], exclude: Sequence[str]) -> list[TensorInfo]:
    names = deltas[0].keys()
    for t, delta in enumerate(deltas):
        for name in sorted(delta.keys() ^ names):
            without, has = (0, t) if name in delta else (t, 0)
            raise IncompatibleError(f"delta {without} has no tensor {name}, which delta {has} has")
        for name, d in delta.items():
            if name not in base:
                raise IncompatibleError(f"delta {t} has a tensor {name}, which the base has not")
            if d.shape != base[name].shape:
                raise IncompatibleError(
                    f"{name} has shape {tuple(d.shape)} in delta {t} and "
                    f"{tuple(base[name].shape)} in the base"
                )
    infos = []
    for name in base:
        info = describe(name, base[name].shape, base[name].dtype, exclude)
        if name in names and info.role != "buffer" and info.numel:
            infos.append(info)
            for t, delta in enumerate(deltas):
                if not delta[name].is_floating_point():
                    raise IncompatibleError(f"{name} of delta {t} is {delta[name].dtype}")
            _checked(base[name], f"{name} of the base")
            for t, delta in enumerate(deltas):
                _checked(delta[name], f"{name} of delta {t}")
    return infos


def _check_masks(masks: Sequence[Tensors] | None, deltas: Sequence[Tensors]) -> None:
    if masks is None:
        return
    if len(masks) != len(deltas):
        raise MethodError(f"{len(masks)} sets of masks were given for {len(deltas)} deltas")
    for t, (keep, delta) in enumerate(zip(masks, deltas, strict=True)):
        for name, mask in keep.items():
            if name not in delta:
                raise MethodError(f"there is a mask of {name}, which delta {t} has not")
            if mask.dtype != torch.bool or mask.shape != delta[name].shape:
                raise MethodError(
                    f"the mask of {name} of delta {t} must be bool of the delta's shape, "
                    f"not {mask.dtype} {tuple(mask.shape)}"
                )


def _checked(x: Tensor, what: str) -> Tensor:
    if all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(x)):
        return x
    bad = x.numel() - int(torch.isfinite(x).sum())
    if bad:
        raise NonFiniteError(f"{bad} of {x.numel()} values of {what} are NaN or infinite")
    return x
