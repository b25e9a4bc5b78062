"""The vote before bulk traffic: who takes part in a round, and with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from math import isfinite, sqrt

import torch
from torch import Tensor

from ..errors import IncompatibleError, NonFiniteError, SyncError
from ..tensors import task_vector_of
from .contribution import CHUNK, Source
from .parameters import Slot
from .settings import LoopSettings

_NONE = -1


@dataclass(frozen=True)
class Ballot:
    """What one worker says before a sync; all numbers, so that it is one row of a tensor.

    ``bad`` is the index of its first tensor with a NaN or infinity, ``changed`` that of a
    parameter which is no longer what it was at construction; −1 is none.
    """

    round: int
    step: int
    fragment: int
    tokens: float
    norm: float
    bad: int = _NONE
    changed: int = _NONE

    def row(self) -> Tensor:
        """Return the ballot as float64 (n,)."""
        return torch.tensor(astuple(self), dtype=torch.float64)

    @classmethod
    def read(cls, row: Tensor) -> Ballot:
        """Return the ballot that a row stands for."""
        round_, step, fragment, tokens, norm, bad, changed = row.tolist()
        return cls(int(round_), int(step), int(fragment), tokens, norm, int(bad), int(changed))

    @classmethod
    def of_worker(cls, rows: Tensor) -> Ballot:
        """Return the ballot of a worker from those of its ranks (S, n): their model's parts.

        Norms and tokens add up. What all ranks should agree on is that of the first which does
        not agree with the first rank.
        """
        ballots = [cls.read(row) for row in rows]
        first = ballots[0]
        odd = next((b for b in ballots if b.place() != first.place()), first)
        return replace(
            odd,
            tokens=sum(b.tokens for b in ballots),
            norm=sqrt(sum(b.norm * b.norm for b in ballots)),
            bad=max(b.bad for b in ballots),
            changed=max(b.changed for b in ballots),
        )

    def place(self) -> tuple[int, int, int]:
        """Return where in its training the rank is."""
        return self.round, self.step, self.fragment


@dataclass(frozen=True)
class Participants:
    """Who takes part in a round, by worker number in order, with weights that sum to 1."""

    workers: tuple[int, ...]
    weights: tuple[float, ...]
    norms: tuple[float, ...]
    tokens: float
    left_out: tuple[str, ...] = ()


def measure(source: Source, slots: Sequence[Slot]) -> tuple[float, int]:
    """Return ‖Δ_r‖ over all slots, and the index of the first slot that is not finite, or −1."""
    total = 0.0
    for slot in slots:
        square = _square_norm(source, slot)
        if not isfinite(square):
            return sqrt(square) if square > 0 else square, slot.index
        total += square
    return sqrt(total), _NONE


def _square_norm(source: Source, slot: Slot) -> float:
    """Return ‖Δ_r‖² of a slot, a cache-sized chunk at a time; not finite where Δ_r is not."""
    values, anchor = source.values[slot.index].reshape(-1), source.anchor[slot.index].reshape(-1)
    total = 0.0
    for offset in range(0, len(values), CHUNK):
        part = slice(offset, offset + CHUNK)
        delta = task_vector_of(anchor[part], values[part], slot.compute)
        square = float(torch.dot(delta, delta))
        if not 1e-30 < square < 1e30:  # it may have left the range of float32
            square = float(delta.double().square().sum())
        total += square
    return total


def count(ballots: Sequence[Ballot], settings: LoopSettings, names: Sequence[str]) -> Participants:
    """Return who takes part. Every process comes to the same result from the same ballots.

    Raises:
        IncompatibleError: a worker's parameters changed, or workers are at different steps.
        NonFiniteError: a worker is not finite, and ``nonfinite`` is "raise".
        SyncError: fewer than ``min_workers`` are left, or ``weights="tokens"`` without tokens.
    """
    for r, ballot in enumerate(ballots):
        if ballot.changed != _NONE:
            where = f", the first is {names[ballot.changed]}" if ballot.changed < len(names) else ""
            raise IncompatibleError(
                f"the trainable parameters of worker {r} changed since the merger was made{where}",
                hint="make a new LoopedMerger after adding, freezing or replacing parameters",
            )
        mine, first = (ballot.step, ballot.fragment), (ballots[0].step, ballots[0].fragment)
        if mine != first or ballot.round != ballots[0].round:
            raise IncompatibleError(
                f"worker {r} is at step {ballot.step} of round {ballot.round} and worker 0 at "
                f"step {first[0]} of round {ballots[0].round}",
                hint="call step() once per iteration on every worker",
            )
    bad = [r for r, ballot in enumerate(ballots) if ballot.bad != _NONE]
    sentences = tuple(f"worker {r} has a NaN or infinity in {names[ballots[r].bad]}" for r in bad)
    if bad and settings.nonfinite == "raise":
        raise NonFiniteError(
            "; ".join(sentences), hint="the anchor is restored; nonfinite='leave_out' goes on"
        )
    workers = tuple(r for r in range(len(ballots)) if r not in bad)
    if len(workers) < settings.min_workers:
        raise SyncError(
            f"{len(workers)} of {len(ballots)} workers can take part, fewer than "
            f"min_workers={settings.min_workers}" + (f": {'; '.join(sentences)}" if bad else "")
        )
    tokens = sum(ballots[r].tokens for r in workers)
    shares = [ballots[r].tokens if settings.weights == "tokens" else 1.0 for r in workers]
    if sum(shares) <= 0:
        raise SyncError(
            "weights='tokens' needs the tokens of a round, and none were reported",
            hint="call step(tokens=…) with the number of tokens of every iteration",
        )
    return Participants(
        workers,
        tuple(share / sum(shares) for share in shares),
        tuple(ballots[r].norm for r in workers),
        tokens,
        sentences,
    )
