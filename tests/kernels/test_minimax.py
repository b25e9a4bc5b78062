from __future__ import annotations

import numpy as np
import pytest

from mergekit_iso.kernels.minimax import best_quintic, minimax_quintics


def deviation(schedule: tuple[tuple[float, float, float], ...], lower: float) -> float:
    sigma = np.geomspace(lower, 1, 20_001)
    for a, b, c in schedule:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return float(abs(sigma - 1).max())


@pytest.mark.parametrize("low", [1e-6, 1e-3, 0.3, 0.9])
def test_best_quintic_equioscillates(low: float) -> None:
    a, b, c = best_quintic(low, 1.0)
    x = np.linspace(low, 1, 200_001)
    error = a * x + b * x**3 + c * x**5 - 1
    largest = abs(error).max()
    turns = np.flatnonzero(np.diff(np.sign(np.diff(error)))) + 1
    at = [0, *turns, len(x) - 1]
    assert len(at) == 4
    assert np.allclose(error[at], largest * np.array([-1, 1, -1, 1]), rtol=1e-4)


def test_best_quintic_of_a_point_is_the_taylor_limit() -> None:
    assert best_quintic(1.0 - 1e-9, 1.0) == (1.875, -1.25, 0.375)
    wide, narrow = best_quintic(0.999, 1.0), best_quintic(1 - 1e-6, 1.0)
    assert np.allclose(wide, narrow, atol=1e-2)


@pytest.mark.parametrize(
    ("lower", "steps", "expected"), [(1e-2, 5, 1e-6), (1e-3, 5, 0.113), (1e-5, 9, 3.3e-3)]
)
def test_the_composition_has_the_best_known_deviation(
    lower: float, steps: int, expected: float
) -> None:
    """Five steps leave ±0.11 from 1e-3 on, whatever their coefficients."""
    schedule = minimax_quintics(lower, steps, cushion=1e-9, safety=1.0)
    assert deviation(schedule, lower) == pytest.approx(expected, rel=0.3)


def test_cushion_bounds_the_slope_and_costs_little() -> None:
    plain = minimax_quintics(1e-5, 9, cushion=1e-9, safety=1.0)
    cushioned = minimax_quintics(1e-5, 9)
    assert cushioned[0][0] < plain[0][0]
    assert deviation(cushioned, 1e-5) < 2e-2


def test_values_pushed_above_one_come_back() -> None:
    sigma = np.full(1, 1.004)
    for a, b, c in minimax_quintics(1e-3, 6):
        sigma = 1.004 * (a * sigma + b * sigma**3 + c * sigma**5)
    assert abs(sigma / 1.004 - 1) < 2e-2


@pytest.mark.parametrize(("lower", "steps"), [(0.0, 3), (1.0, 3), (1e-3, 0)])
def test_refusals(lower: float, steps: int) -> None:
    with pytest.raises(ValueError, match="no schedule"):
        minimax_quintics(lower, steps)
