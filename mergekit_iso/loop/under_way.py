"""An outer step between its sending and its applying, with training going on meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from torch import Tensor

from .contribution import Source
from .parameters import Slot
from .report import OuterReport
from .settings import LoopSettings


@dataclass(frozen=True)
class Outcome:
    """What an outer step came to: new values by slot index, where they have not landed, buffers."""

    report: OuterReport
    staged: Mapping[int, Tensor]
    buffers: Mapping[str, Tensor]


@dataclass
class UnderWay:
    """An outer step of ``slots``: fragment ``fragment``, or the whole model for None.

    ``left`` iterations pass until it is applied. ``sources`` are the workers as they were at
    sending, ``step`` and ``tokens`` their iterations and tokens since the last sync, and
    ``residuals`` what rounding on the wire had taken before.
    """

    fragment: int | None
    slots: Sequence[Slot]
    left: int
    sources: Sequence[Source]
    step: int
    tokens: Sequence[float]
    residuals: Sequence[Mapping[int, Tensor]]
    future: Future[Outcome]

    def outcome(self) -> Outcome | None:
        """Wait for the step; return None where it failed."""
        return self.future.result() if self.future.exception() is None else None


def snapshot(source: Source, slots: Sequence[Slot]) -> Source:
    """Return a worker with some slots' values as they are now, whatever training does to them."""
    values = list(source.values)
    for slot in slots:
        values[slot.index] = values[slot.index].clone()
    return replace(source, values=values)


def applied(settings: LoopSettings, slot: Slot, new: Tensor, now: Tensor, sent: Tensor) -> Tensor:
    """Return what a worker goes on from, given the new value, its own now and when it sent.

    ``overwrite``: the new value. ``mix``: mix·new + (1 − mix)·now. ``rebase``: new + (now − sent),
    which keeps the inner steps taken meanwhile.
    """
    if settings.apply == "mix":
        return now.to(slot.compute).lerp_(new.to(slot.compute), settings.mix)
    if settings.apply == "rebase":
        return new.to(slot.compute) + (now.to(slot.compute) - sent.to(slot.compute))
    return new
