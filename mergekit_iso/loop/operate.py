"""The operator on one tensor of the loop: whole where it is a matrix to it, else in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..methods.base import (
    Context,
    DeltaStream,
    MergeMethod,
    Worker,
    combine_unit,
    local_delta,
    weighted_sum,
)
from .contribution import CHUNK, Contribution, Source
from .parameters import Slot


@dataclass(frozen=True)
class Gathered:
    """All contributions to one tensor that take part, and the anchor they started from."""

    slot: Slot
    anchor: Tensor
    contributions: Sequence[Contribution]


def combine(
    method: MergeMethod,
    gathered: Gathered,
    stats: Mapping[int, Any],
    ctx: Context,
    *,
    finalized: bool,
) -> Tensor:
    """Return what the workers' deltas combine to, in compute dtype and the tensor's shape.

    ``finalized`` says whether the operator's ``finalize`` is applied; ``stats`` are the
    workers' statistics of the whole model, by worker.
    """
    slot, dtype = gathered.slot, gathered.slot.compute
    of_tensor = _tensor_stats(method, gathered, ctx) or stats

    def work(part: slice | None, unit: Context) -> Tensor:
        workers = (
            Worker(c.worker, c.delta(gathered.anchor, dtype, part), of_tensor.get(c.worker))
            for c in gathered.contributions
        )
        total = combine_unit(method, workers, slot.info, unit)
        return method.finalize(total, slot.info, unit) if finalized else total

    return by_units(method, slot, ctx, work, gathered.anchor.device)


def adds_up(method: MergeMethod, slot: Slot) -> bool:
    """Whether a matrix operator on this slot needs but the sum of plain deltas."""
    return (
        method.requires.workers == "sum"
        and method.requires.unit == "matrix"
        and slot.info.spectral
        and type(method).local is MergeMethod.local
    )


def sum_of(gathered: Gathered, ctx: Context) -> Tensor:
    """Return Σ w_r Δ_r in compute dtype and the tensor's shape, entry by entry."""
    slot = gathered.slot
    total = torch.empty(slot.info.shape, dtype=slot.compute, device=gathered.anchor.device)
    for offset in range(0, slot.info.numel, CHUNK):
        part = slice(offset, offset + CHUNK)
        deltas = (c.delta(gathered.anchor, slot.compute, part) for c in gathered.contributions)
        total.view(-1)[part] = weighted_sum(deltas, ctx.weights)
    return total


def term(method: MergeMethod, source: Source, slot: Slot, weight: float, ctx: Context) -> Tensor:
    """Return one worker's term of the sum, w_r · local(Δ_r); zero where it takes no part.

    The shape is the slot's, the dtype its compute dtype.
    """
    values, anchor = source.values[slot.index], source.anchor[slot.index]
    if weight == 0:  # not a product with it: the values may be NaN
        return torch.zeros(values.shape, dtype=slot.compute, device=values.device)
    contribution = Contribution(source.worker, values.contiguous(), is_delta=False)

    def work(part: slice | None, unit: Context) -> Tensor:
        worker = Worker(source.worker, contribution.delta(anchor, slot.compute, part))
        return local_delta(method, worker, slot.info, unit) * weight

    return by_units(method, slot, ctx, work, values.device)


def finalize(method: MergeMethod, slot: Slot, total: Tensor, ctx: Context) -> Tensor:
    """Return ``method.finalize`` of a combined tensor, unit by unit."""

    def work(part: slice | None, unit: Context) -> Tensor:
        x = total if part is None else total.reshape(-1)[part]
        return method.finalize(x, slot.info, unit)

    return by_units(method, slot, ctx, work, total.device)


def finalize_alike(
    method: MergeMethod, slots: Sequence[Slot], totals: Sequence[Tensor], ctx: Context
) -> list[Tensor]:
    """Return ``finalize`` of matrices of one shape, as one stack: what each alone gives.

    One call per step of an iteration, in place of one per matrix, is what a GPU needs. A method
    that draws by name is given each alone.
    """
    if len(slots) == 1 or method.requires.random:
        return [finalize(method, s, t, ctx) for s, t in zip(slots, totals, strict=True)]
    first = slots[0].info
    info = replace(first, shape=(len(slots), *first.shape), role="experts")
    return list(method.finalize(torch.stack(list(totals)), info, ctx).unbind(0))


class Batches:
    """Slots of equal shape and dtype, gathered until they are worth one call."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._groups: dict[tuple[tuple[int, ...], torch.dtype], list[Slot]] = {}

    def add(self, slot: Slot) -> list[Slot]:
        """Take a slot; return its group where that has reached the limit of bytes, else nothing."""
        key = slot.info.shape, slot.compute
        group = self._groups.setdefault(key, [])
        group.append(slot)
        if len(group) * slot.info.numel * slot.compute.itemsize < self._limit:
            return []
        return self._groups.pop(key)

    def rest(self) -> list[list[Slot]]:
        """Return the groups that are left."""
        groups, self._groups = list(self._groups.values()), {}
        return groups


def partials(
    method: MergeMethod, gathered: Gathered, stats: Mapping[int, Any], ctx: Context
) -> int:
    """Return a tensor's share of the statistic of the merged model."""
    slot, share = gathered.slot, 0
    for part, unit in _units(method, slot, ctx):
        deltas = [
            local_delta(
                method,
                Worker(c.worker, c.delta(gathered.anchor, slot.compute, part), stats[c.worker]),
                slot.info,
                unit,
            )
            for c in gathered.contributions
        ]
        share += method.partial(deltas, slot.info, unit)
    return share


def stream(source: Source, slots: Sequence[Slot], ctx: Context) -> DeltaStream:
    """Return one worker's deltas of all slots, as they will be contributed, in chunks."""

    def whole() -> Iterator[tuple[Slot, Contribution, Tensor]]:
        return ((s, source.peek(s), source.anchor[s.index]) for s in slots)

    return _stream(whole, slots, replace(ctx, worker=source.worker))


def by_units(
    method: MergeMethod,
    slot: Slot,
    ctx: Context,
    work: Callable[[slice | None, Context], Tensor],
    device: torch.device,
) -> Tensor:
    """Return the tensor whose units ``work`` gives, each from its slice of the flat tensor."""
    result: Tensor | None = None
    for part, unit in _units(method, slot, ctx):
        x = work(part, unit)
        if part is None or (part.start == 0 and x.numel() == slot.info.numel):
            return x.view(slot.info.shape)
        if result is None:
            result = torch.empty(slot.info.shape, dtype=slot.compute, device=device)
        result.view(-1)[part] = x
    if result is None:
        return torch.empty(slot.info.shape, dtype=slot.compute, device=device)
    return result


def _units(method: MergeMethod, slot: Slot, ctx: Context) -> Iterator[tuple[slice | None, Context]]:
    if method.requires.unit == "matrix" and slot.info.spectral:
        yield None, ctx
        return
    for offset in range(0, slot.info.numel, CHUNK):
        yield slice(offset, offset + CHUNK), replace(ctx, offset=offset)


def _tensor_stats(method: MergeMethod, gathered: Gathered, ctx: Context) -> dict[int, Any]:
    if "worker_tensor" not in method.requires.stats:
        return {}

    def measured(c: Contribution) -> Any:
        def whole() -> Iterable[tuple[Slot, Contribution, Tensor]]:
            return [(gathered.slot, c, gathered.anchor)]

        return method.measure(_stream(whole, [gathered.slot], replace(ctx, worker=c.worker)))

    return {c.worker: measured(c) for c in gathered.contributions}


def _stream(
    whole: Callable[[], Iterable[tuple[Slot, Contribution, Tensor]]],
    slots: Sequence[Slot],
    ctx: Context,
) -> DeltaStream:
    def chunks() -> Iterator[tuple[Any, Tensor, Context]]:
        for slot, contribution, anchor in whole():
            for offset in range(0, slot.info.numel, CHUNK):
                part = slice(offset, offset + CHUNK)
                delta = contribution.delta(anchor, slot.compute, part)
                yield slot.info, delta, replace(ctx, offset=offset)

    wide = torch.float64 in {s.compute for s in slots}
    dtype = torch.float64 if wide else torch.float32
    return DeltaStream(sum(s.info.numel for s in slots), chunks, dtype)
