"""Policies as options: names, plain data, schedules, the tolerance of an iteration."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mergekit_iso.errors import MethodError
from mergekit_iso.kernels.polar import (
    POLICIES,
    SCHEDULES,
    Exact,
    Fast,
    NewtonSchulz,
    PolarPolicy,
    decompose,
    newton_schulz,
    polar_policy,
)
from tests.kernels.matrices import exact_polar, gaussian, power_law, relative, with_spectrum

MUON = (3.4445, -4.7750, 2.0315)
FIXED_POINT_ONE = (1.875, -1.25, 0.375)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("exact", Exact()),
        ("newton_schulz", NewtonSchulz()),
        ("fast", Fast()),
        ({"name": "fast", "tolerance": 0.01}, Fast(tolerance=0.01)),
        ({"name": "newton_schulz", "steps": 8}, NewtonSchulz(steps=8)),
        ({"null_rtol": 0.1}, Exact(null_rtol=0.1)),
    ],
)
def test_policies_from_names_and_plain_data(value: Any, expected: PolarPolicy) -> None:
    assert polar_policy(value) == expected
    A = gaussian(5, 7)
    assert torch.equal(decompose(A, value).factor, decompose(A, expected).factor)


def test_the_plain_data_that_was_given_is_not_changed() -> None:
    value = {"name": "fast", "tolerance": 0.01}
    polar_policy(value)
    assert value == {"name": "fast", "tolerance": 0.01}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=str)
def test_options_give_the_policy_back(policy: type[PolarPolicy]) -> None:
    assert polar_policy(policy().options()) == policy()


def test_coefficients_survive_plain_data() -> None:
    policy = NewtonSchulz(coefficients=[MUON, FIXED_POINT_ONE], steps=4, norm_eps=1e-7)
    assert polar_policy(policy.options()) == policy
    assert policy.options()["coefficients"] == [list(MUON), list(FIXED_POINT_ONE)]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("svd", "svd"),
        ({"name": "haley"}, "haley"),
        ({"name": "fast", "tol": 1}, "tol"),
        ({"steps": 3}, "steps"),
        ({"name": ["fast"]}, "fast"),
        (3, "3"),
        (None, "None"),
    ],
)
def test_what_is_no_policy_is_refused(value: Any, message: str) -> None:
    with pytest.raises(MethodError, match=message):
        decompose(torch.ones(2, 2), value)


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(MethodError) as raised:
        polar_policy("svd")
    assert all(name in raised.value.hint for name in POLICIES)


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        (Exact, {"null_rtol": -0.1}),
        (Exact, {"null_rtol": 1.0}),
        (Fast, {"tolerance": 0.0}),
        (Fast, {"tolerance": True}),
        (NewtonSchulz, {"steps": 0}),
        (NewtonSchulz, {"steps": 2.5}),
        (NewtonSchulz, {"steps": True}),
        (NewtonSchulz, {"preset": "muon"}),
        (NewtonSchulz, {"tolerance": 0.0}),
        (NewtonSchulz, {"norm_safety": 0.0}),
        (NewtonSchulz, {"norm_eps": -1.0}),
        (NewtonSchulz, {"coefficients": []}),
        (NewtonSchulz, {"coefficients": [[1.0, 2.0]]}),
        (NewtonSchulz, {"coefficients": [1.0, 2.0, 3.0]}),
        (NewtonSchulz, {"coefficients": [["a", "b", "c"]]}),
        (NewtonSchulz, {"coefficients": "muon5"}),
        (NewtonSchulz, {"coefficients": [[float("nan"), 0.0, 0.0]]}),
    ],
)
def test_values_that_do_not_fit_are_refused(
    policy: type[PolarPolicy], options: dict[str, Any]
) -> None:
    with pytest.raises(MethodError, match=next(iter(options))):
        policy(**options)


def test_schedules() -> None:
    assert NewtonSchulz(preset="muon5").schedule == (MUON,) * 5
    assert NewtonSchulz().schedule == SCHEDULES["polar_express8"] + (FIXED_POINT_ONE,) * 2
    assert NewtonSchulz(steps=3).schedule == SCHEDULES["polar_express8"][:3]
    assert NewtonSchulz(preset="muon5", steps=7).schedule == (MUON,) * 7
    assert NewtonSchulz(coefficients=[MUON, FIXED_POINT_ONE], steps=3).schedule == (
        MUON,
        FIXED_POINT_ONE,
        FIXED_POINT_ONE,
    )


@pytest.mark.parametrize("preset", SCHEDULES)
@pytest.mark.parametrize("shape", [(6, 9), (9, 6)], ids=str)
def test_the_iteration_is_the_polynomial_on_the_singular_values(
    preset: str, shape: tuple[int, int]
) -> None:
    A = gaussian(*shape)
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    x = sigma / (1.02 * sigma.norm() + 0.5)
    for a, b, c in SCHEDULES[preset]:
        x = a * x + b * x**3 + c * x**5
    got = newton_schulz(A, SCHEDULES[preset], norm_safety=1.02, norm_eps=0.5)
    assert relative(got, (U * x) @ Vh) < 1e-12


def test_an_absolute_eps_counts_at_the_matrix_own_size() -> None:
    A = gaussian(4, 6) * 1e-20
    got = newton_schulz(A, [(1.0, 0.0, 0.0)], norm_eps=float(A.norm()))
    assert relative(got, A / (2 * A.norm())) < 1e-12


@pytest.mark.parametrize("preset", SCHEDULES)
def test_the_residual_is_that_of_the_singular_values(preset: str) -> None:
    factor, _, residual = decompose(gaussian(6, 9), NewtonSchulz(preset=preset))
    s = torch.linalg.svdvals(factor)
    expected = float((s**2 - s**4).square().mean().sqrt())
    assert float(residual) == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("preset", SCHEDULES)
def test_a_tolerance_polishes_any_preset(preset: str) -> None:
    A = with_spectrum(power_law(1e2, 12), 12, 20)
    factor, _, residual = decompose(A, NewtonSchulz(preset=preset, tolerance=1e-6))
    assert float(residual) <= 1e-6
    assert relative(factor, exact_polar(A)) < 1e-6


def test_a_tolerance_that_is_met_costs_no_step() -> None:
    A = gaussian(6, 9)
    plain, polished = (decompose(A, NewtonSchulz(tolerance=t)) for t in (None, 1e-3))
    assert torch.equal(plain.factor, polished.factor)
