"""What every polar policy promises: orientation, stacks, scales, zeros."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mergekit_iso.kernels.polar import (
    Exact,
    Fast,
    NewtonSchulz,
    PolarPolicy,
    decompose,
    mean_singular_value,
    polar_factor,
)
from tests.kernels.matrices import exact_polar, gaussian, relative, with_spectrum

POLICIES = [Exact(), NewtonSchulz(), NewtonSchulz(preset="muon5"), Fast()]
CONVERGING = [Exact(), NewtonSchulz(), Fast()]
SHAPES = [(6, 6), (9, 5), (5, 9), (1, 7), (7, 1), (1, 1)]

each_policy = pytest.mark.parametrize("polar", POLICIES, ids=repr)
each_converging = pytest.mark.parametrize("polar", CONVERGING, ids=repr)


@each_converging
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_factor_and_scale_are_those_of_the_svd(
    polar: PolarPolicy, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    sigma = torch.linspace(3, 1, min(shape), dtype=torch.float64)
    A = with_spectrum(sigma, *shape).to(dtype)
    factor, scale, residual = decompose(A, polar)
    assert factor.dtype == scale.dtype == residual.dtype == dtype
    assert (factor.shape, scale.shape, residual.shape) == (shape, (), ())
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert relative(factor, exact_polar(A)) < tolerance
    assert float(scale) == pytest.approx(float(sigma.mean()), rel=tolerance)
    assert float(residual) < tolerance


@each_policy
def test_the_transpose_has_the_transposed_factor(polar: PolarPolicy) -> None:
    A = gaussian(9, 5)
    upright, lying = decompose(A, polar), decompose(A.mT, polar)
    assert relative(lying.factor.mT, upright.factor) < 1e-12
    assert float(lying.scale) == pytest.approx(float(upright.scale), rel=1e-12)


@each_policy
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_matrix_has_the_same_bits_alone_and_in_a_stack(
    polar: PolarPolicy, dtype: torch.dtype
) -> None:
    stack = gaussian(2, 3, 7, 5, dtype=dtype)
    stack[1, 1] = 0
    together = decompose(stack, polar)
    for i, j in ((0, 0), (1, 0), (1, 1), (1, 2)):
        alone = decompose(stack[i, j].clone(), polar)
        for part, whole in zip(alone, together, strict=True):
            assert torch.equal(part, whole[i, j])


@each_policy
def test_zero_has_the_factor_zero(polar: PolarPolicy) -> None:
    for part in decompose(torch.zeros(4, 6), polar):
        assert torch.count_nonzero(part) == 0


@each_policy
def test_a_power_of_two_changes_only_the_scale(polar: PolarPolicy) -> None:
    A = gaussian(7, 5, dtype=torch.float32)
    expected = decompose(A, polar)
    for exponent in (-100, -1, 1, 100):
        got = decompose(A * 2.0**exponent, polar)
        assert torch.equal(got.factor, expected.factor)
        assert torch.equal(got.scale, expected.scale * 2.0**exponent)


@each_policy
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1e12, 1e30])
def test_every_size_has_the_same_factor(polar: PolarPolicy, size: float) -> None:
    A = gaussian(7, 5, dtype=torch.float32)
    got, expected = decompose(A * size, polar), decompose(A, polar)
    assert relative(got.factor, expected.factor) < 1e-5
    assert float(got.scale) == pytest.approx(float(expected.scale) * size, rel=1e-5)


@each_policy
def test_the_input_is_left_alone(polar: PolarPolicy) -> None:
    for A in (gaussian(7, 5, dtype=torch.float32), gaussian(5, 7, dtype=torch.float32)):
        before = A.clone()
        decompose(A, polar)
        assert torch.equal(A, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_upcast(dtype: torch.dtype) -> None:
    A = gaussian(4, 6).to(dtype)
    for polar in POLICIES:
        for got, expected in zip(decompose(A, polar), decompose(A.float(), polar), strict=True):
            assert torch.equal(got, expected)
    assert mean_singular_value(A).dtype == torch.float32


@each_converging
def test_null_directions_are_dropped_and_leave_no_residual(polar: PolarPolicy) -> None:
    sigma = torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64)
    A = with_spectrum(sigma, 8, 6)
    factor, scale, residual = decompose(A, polar)
    assert relative(factor, exact_polar(A, rank=3)) < 1e-9
    assert float(scale) == pytest.approx(7 / 6, rel=1e-9)
    assert float(residual) < 1e-9


@given(
    rows=st.integers(1, 10), columns=st.integers(1, 10), rank=st.integers(1, 10), seed=st.integers()
)
def test_the_scale_is_the_mean_of_all_singular_values(
    rows: int, columns: int, rank: int, seed: int
) -> None:
    rank = min(rank, rows, columns)
    sigma = torch.linspace(2, 1, rank, dtype=torch.float64)
    A = with_spectrum(sigma, rows, columns, seed=seed % 1000)
    expected = float(sigma.sum()) / min(rows, columns)
    assert float(mean_singular_value(A)) == pytest.approx(expected, rel=1e-12)
    for polar in CONVERGING:
        assert float(decompose(A, polar).scale) == pytest.approx(expected, rel=1e-9)


def test_mean_singular_value_of_a_stack() -> None:
    stack = gaussian(2, 3, 5, 4)
    stack[0, 1] = 0
    expected = torch.linalg.svdvals(stack).mean(-1)
    assert torch.allclose(mean_singular_value(stack), expected, rtol=1e-12)


def test_polar_factor_is_the_factor_of_decompose() -> None:
    A = gaussian(5, 4)
    assert torch.equal(polar_factor(A), decompose(A).factor)
    assert torch.equal(polar_factor(A, "fast"), decompose(A, Fast()).factor)


def test_a_stack_of_no_matrices_has_no_factors() -> None:
    factor, scale, residual = decompose(torch.zeros(0, 3, 4))
    assert (factor.shape, scale.shape, residual.shape) == ((0, 3, 4), (0,), (0,))
