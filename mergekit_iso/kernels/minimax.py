"""Schedules of quintic Newton–Schulz steps that are optimal for a stated condition.

The composition that brings every singular value of [lower, 1] closest to 1 is greedy: each step
is the best odd quintic for the interval that the one before leaves (Amsel et al. 2025, "The
Polar Express", arXiv:2505.16932). One best quintic is found by Remez exchange.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

Triple = tuple[float, float, float]

_EXCHANGES = 100


@lru_cache(maxsize=64)
def minimax_quintics(
    lower: float, steps: int, *, cushion: float = 0.02, safety: float = 1.01
) -> tuple[Triple, ...]:
    """Return (a, b, c) of ``steps`` steps σ ← aσ + bσ³ + cσ⁵ for singular values in [lower, 1].

    ``cushion`` bounds the slope of the first steps, and so how much rounding they raise: values
    below that share of the largest are not brought closer than a step for it would. ``safety``
    lets rounding push values that much above 1 in every step but the last, which has the fixed
    point 1. Raises ValueError unless 0 < lower < 1 and steps ≥ 1.
    """
    if not 0 < lower < 1 or steps < 1:
        raise ValueError(f"no schedule of {steps} steps for singular values from {lower} to 1")
    low, high = lower, 1.0
    schedule = []
    for step in range(steps):
        a, b, c = best_quintic(max(low, cushion * high), high)
        # Centred on 1 between the images of both ends, which the cushion moved apart.
        centre = (_value((a, b, c), low) + _value((a, b, c), high)) / 2
        a, b, c = a / centre, b / centre, c / centre
        low = _value((a, b, c), low)
        high = 2 - low
        slack = safety if step < steps - 1 else 1.0
        schedule.append((a / slack, b / slack**3, c / slack**5))
    return tuple(schedule)


def best_quintic(low: float, high: float) -> Triple:
    """Return the (a, b, c) for which aσ + bσ³ + cσ⁵ deviates least from 1 on [low, high]."""
    if low > (1 - 1e-5) * high:  # the exchange's equations become singular: the Taylor limit
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = (3 * low + high) / 4, (low + 3 * high) / 4
    signs = np.array([1.0, -1.0, 1.0, -1.0])
    previous = 0.0
    for _ in range(_EXCHANGES):
        # p + signs·error = 1 at the four points where the deviation is largest.
        at = np.array([low, *inner, high])
        a, b, c, error = np.linalg.solve(np.stack([at, at**3, at**5, signs], 1), np.ones(4))
        if abs(error - previous) <= 1e-14:
            break
        previous = error
        extrema = np.roots([5 * c, 3 * b, a]).real
        inner = tuple(np.sqrt(np.sort(extrema)))
    return float(a), float(b), float(c)


def _value(triple: Triple, sigma: float) -> float:
    a, b, c = triple
    return a * sigma + b * sigma**3 + c * sigma**5
