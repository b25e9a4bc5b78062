"""What an outer step reports: sizes, agreement between workers, bytes, seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from math import sqrt
from time import perf_counter
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..methods.base import weighted_sum
from .contribution import CHUNK, Contribution
from .operate import Gathered

# Entries of a tensor that a cheap report looks at.
_SAMPLED = 1 << 14


@dataclass(frozen=True, kw_only=True)
class OuterReport:
    """One outer step, as this rank saw it; numbers about the model are the same on all ranks.

    round: the outer step's number, from 0. participants: workers that took part.
    step: iterations since the last sync. tokens: the participants' since then.
    fragment: which part of the model was synced, None for the whole.
    tensors: how many tensors were synced; statistics "over the model" are over these.
    bytes_sent, bytes_received, bytes_control: this rank's, payload and votes apart.
    seconds: by phase (vote, statistics, exchange, operator, optimizer, return, total), and
    ``waited``: how long training stood still, where the sync went on beside it.
    delta_norm: ‖Δ_r‖ of each participant. update_norm: what the anchor moved by.
    cosine: of each participant's delta with their weighted mean. sign_agreement: the mean over
    entries of |Σ sign Δ_r| / R. Both are from a sample, or of all entries in a full report; None
    where the deltas never meet. stable_rank: ‖D‖_F²/σ₁² of the mean delta and of the update,
    the mean over matrices, in a full report. residual: the largest that a polar factor reported.
    skipped: why the round, or some of its workers, did not count; None if all did.
    """

    round: int
    step: int
    participants: int
    tokens: float
    fragment: int | None = None
    tensors: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_control: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    delta_norm: tuple[float, ...] = ()
    update_norm: float = 0.0
    cosine: tuple[float, ...] | None = None
    sign_agreement: float | None = None
    stable_rank: tuple[float, float] | None = None
    residual: float | None = None
    skipped: str | None = None

    def record(self) -> dict[str, Any]:
        """Return the report as plain data, for a line of JSON or a logger."""
        return asdict(self)

    @classmethod
    def of_record(cls, record: Mapping[str, Any]) -> OuterReport:
        """Return the report that ``record`` gave, also after a way through JSON."""
        lists = ("delta_norm", "cosine", "stable_rank")
        given: dict[str, Any] = dict(record)
        for key in lists:
            given[key] = None if given[key] is None else tuple(given[key])
        return cls(**given)


OnReport = Callable[[OuterReport], None]
T = TypeVar("T")


class Stopwatch:
    """Adds up seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block to a phase."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + perf_counter() - start

    def timed(self, name: str, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, counting the time that getting each takes to a phase."""
        end = object()
        while True:
            with self.phase(name):
                item = next(items, end)
            if item is end:
                return
            yield item  # type: ignore[misc]


class Observer:
    """Gathers what a round's deltas say, at their owner; ``row`` is summed over ranks."""

    def __init__(self, weights: Sequence[float], *, full: bool) -> None:
        self._weights = weights
        self._full = full
        n = len(weights)
        self._dots = torch.zeros(n, dtype=torch.float64)
        self._squares = torch.zeros(n, dtype=torch.float64)
        self._mean_square = 0.0
        self._agreement = 0.0
        self._entries = 0.0
        self._update_square = 0.0
        self._ranks = [0.0, 0.0, 0.0]
        self.residual = -1.0

    def note(self, what: str, value: Tensor) -> None:
        """Take a measurement of an operator."""
        if what == "residual" and value.numel():
            self.residual = max(self.residual, float(value.max()))

    def deltas(self, gathered: Gathered) -> None:
        """Look at the deltas of one tensor."""
        numel = gathered.slot.info.numel
        stride = 1 if self._full else -(-numel // _SAMPLED)
        step = CHUNK * stride
        for offset in range(0, numel, step):
            part = slice(offset, min(offset + step, numel), stride)
            self._look([_entries(c, gathered, part) for c in gathered.contributions], stride)

    def _look(self, deltas: list[Tensor], stride: int) -> None:
        stack = torch.stack(deltas)
        weights = stack.new_tensor(self._weights)
        mean = weights @ stack
        self._dots += stride * (stack @ mean).double().cpu()
        self._squares += stride * stack.square().sum(1).double().cpu()
        self._mean_square += stride * float(mean.square().sum())
        self._agreement += stride * float(stack.sign().sum(0).abs().sum()) / len(deltas)
        self._entries += stride * mean.numel()

    def update(self, before: Tensor, after: Tensor) -> None:
        """Look at what one tensor's master moved by."""
        self._update_square += float(torch.dist(after, before)) ** 2

    def spectra(self, gathered: Gathered, merged: Tensor) -> None:
        """Look at the spectra of the mean delta of one matrix and of what it was merged to."""
        if not gathered.slot.info.spectral or merged.dim() != 2:
            return
        deltas = (c.delta(gathered.anchor, gathered.slot.compute) for c in gathered.contributions)
        mean = weighted_sum(deltas, self._weights)
        pair = stable_rank(mean), stable_rank(merged)
        self._ranks = [self._ranks[0] + 1, self._ranks[1] + pair[0], self._ranks[2] + pair[1]]

    def row(self) -> Tensor:
        """Return everything as float64 (n,), to be added up over ranks."""
        scalars = [self._mean_square, self._agreement, self._entries, self._update_square]
        return torch.cat(
            [self._dots, self._squares, torch.tensor(scalars + self._ranks, dtype=torch.float64)]
        )


@dataclass(frozen=True)
class Observed:
    """What all observers saw together."""

    cosine: tuple[float, ...] | None
    sign_agreement: float | None
    update_norm: float
    stable_rank: tuple[float, float] | None

    @classmethod
    def read(cls, row: Tensor) -> Observed:
        """Return what the sum of all rows says."""
        n = (len(row) - 7) // 2
        dots, squares = row[:n].tolist(), row[n : 2 * n].tolist()
        mean_square, agreement, entries, update_square, count, before, after = row[2 * n :].tolist()
        seen = entries > 0
        return cls(
            tuple(
                d / sqrt(s * mean_square) if s * mean_square > 0 else 0.0
                for d, s in zip(dots, squares, strict=True)
            )
            if seen
            else None,
            agreement / entries if seen else None,
            sqrt(update_square),
            (before / count, after / count) if count else None,
        )


def stable_rank(A: Tensor, steps: int = 8) -> float:
    """Return ‖A‖_F²/σ₁² of a matrix (m, n), σ₁ by power iterations; 0 for a zero matrix."""
    A = A.float()
    square = float(A.square().sum())
    if square == 0:
        return 0.0
    x = A.abs().sum(0)
    for _ in range(steps):
        x = A.mT @ (A @ (x / x.norm().clamp_min(1e-30)))
    return square / float(x.norm().clamp_min(1e-30))


def _entries(contribution: Contribution, gathered: Gathered, part: slice) -> Tensor:
    return contribution.delta(gathered.anchor, gathered.slot.compute, part)
