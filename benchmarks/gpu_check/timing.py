"""Interleaved times on a device, within a budget of wall time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import torch

Work = Callable[[], object]


@dataclass
class Budget:
    """Wall time after which no measurement is started; ``skipped`` names those that were not."""

    seconds: float
    skipped: list[str] = field(default_factory=list)
    began: float = field(default_factory=perf_counter)

    def allows(self, what: str) -> bool:
        """Return whether ``what`` may start; note it as skipped if not."""
        if perf_counter() - self.began < self.seconds:
            return True
        self.skipped.append(what)
        return False


def seconds_of(work: Work, device: str) -> float:
    """Return the seconds of one call: between CUDA events, or on the wall clock."""
    if device != "cuda":
        began = perf_counter()
        work()
        return perf_counter() - began
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def interleaved(
    work: Mapping[str, Work], device: str, *, rounds: int = 7, warm_up: int = 2
) -> dict[str, float]:
    """Return the median seconds of every piece of work; a round runs each once, in order."""
    for _ in range(warm_up):
        for run in work.values():
            run()
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(rounds):
        for name, run in work.items():
            taken[name].append(seconds_of(run, device))
    return {name: median(seconds) for name, seconds in taken.items()}
