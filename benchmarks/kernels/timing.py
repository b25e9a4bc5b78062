"""Times of several candidates in turn, so that what else the machine does hits all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import median
from time import perf_counter, process_time

Clock = Callable[[], float]


def clock_of(threads: int) -> tuple[str, Clock]:
    """Return the clock: process CPU time for one thread, wall time for more."""
    return ("process CPU time", process_time) if threads == 1 else ("wall time", perf_counter)


def rounds(
    work: Mapping[str, Callable[[], object]],
    *,
    clock: Clock,
    budget: float,
    fewest: int = 3,
    most: int = 9,
) -> dict[str, list[float]]:
    """Return the seconds of every piece of work in every round; a round runs each once, in order.

    Rounds go on until ``budget`` wall seconds are spent, but there are at least ``fewest`` and at
    most ``most``.
    """
    seconds: dict[str, list[float]] = {name: [] for name in work}
    start = perf_counter()
    for done in range(most):
        if done >= fewest and (perf_counter() - start) * (done + 1) / done > budget:
            break
        for name, run in work.items():
            began = clock()
            run()
            seconds[name].append(clock() - began)
    return seconds


def ratio(baseline: list[float], seconds: list[float]) -> float:
    """Return the median over rounds of baseline time / time: above 1 is faster."""
    return median(b / s for b, s in zip(baseline, seconds, strict=True))
