from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from mergekit_iso.kernels.halley import halley, halley_mild, image, legs, weights
from mergekit_iso.kernels.polar import (
    Exact,
    Fast,
    Halley,
    NewtonSchulz,
    PolarPolicy,
    decompose,
)
from mergekit_iso.kernels.products import (
    commuting_product,
    gram,
    positive_inverse,
    quick_float32_products,
)
from mergekit_iso.kernels.spectrum import low_rank_svd, polar_by_gram
from tests.kernels.matrices import exact_polar, gaussian, power_law, relative, with_spectrum

SPECTRA = ["gaussian", "power law 1e3", "power law 1e5", "low rank and noise"]


@cache
def matrix(spectrum: str, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a float32 matrix and the float64 Iso-C of it."""
    r = min(rows, columns)
    if spectrum == "gaussian":
        A = gaussian(rows, columns)
    elif spectrum == "low rank and noise":
        head = torch.linspace(1, 0.1, r // 20, dtype=torch.float64)
        noise = torch.logspace(-3, -4.9, r - len(head), dtype=torch.float64)
        A = with_spectrum(torch.cat([head, noise]), rows, columns)
    else:
        A = with_spectrum(power_law(float(spectrum.split()[-1]), r), rows, columns)
    A = A.float()
    sigma = torch.linalg.svdvals(A.double())
    return A, exact_polar(A) * sigma.mean()


def iso_error(A: Tensor, expected: Tensor, polar: PolarPolicy) -> float:
    factor, scale, _ = decompose(A, polar)
    return relative(factor * scale, expected)


def svd_error(A: Tensor, expected: Tensor) -> float:
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    return relative((U @ Vh) * sigma.mean(), expected)


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(520, 520), (1100, 513)], ids=str)
def test_fast_and_halley_keep_the_tolerance(spectrum: str, shape: tuple[int, int]) -> None:
    A, expected = matrix(spectrum, *shape)
    for polar in (Halley(), Halley(smallest=1e-3), Fast()):
        assert iso_error(A, expected, polar) < 1e-3, polar
    assert 0 < float(decompose(A, Fast()).residual) < 1e-3
    assert iso_error(A, expected, Fast(tolerance=2e-2)) < 2e-2


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(770, 770), (768, 1700)], ids=str)
def test_exact_is_no_worse_than_a_float32_svd(spectrum: str, shape: tuple[int, int]) -> None:
    A, expected = matrix(spectrum, *shape)
    assert iso_error(A, expected, Exact()) < max(1.5 * svd_error(A, expected), 5e-6)


@pytest.mark.parametrize("polar", [Exact(), Fast()], ids=repr)
def test_null_directions_are_dropped_at_every_size(polar: PolarPolicy) -> None:
    sigma = torch.linspace(1, 0.5, 100, dtype=torch.float64)
    A = with_spectrum(sigma, 800, 780).float()
    factor, scale, residual = decompose(A, polar)
    assert relative(factor, exact_polar(A, 100)) < 1e-4
    assert float(scale) == pytest.approx(float(sigma.sum()) / 780, rel=1e-5)
    assert float(residual) == 0  # exact, by the SVD


def test_halley_leaves_null_directions_and_says_so() -> None:
    A = with_spectrum(torch.ones(300, dtype=torch.float64), 520, 600).float()
    factor, _, residual = decompose(A, Halley())
    # Rounding noise at 1e-7 is raised to 0.2 in those directions; the others are right.
    assert relative(factor, exact_polar(A, 300)) < 0.4
    assert float(residual) > 1e-3


@pytest.mark.parametrize("exponent", [-90, 99])
@pytest.mark.parametrize("polar", [Halley(), Fast(), Exact()], ids=repr)
def test_the_scale_of_the_input_does_not_matter(exponent: int, polar: PolarPolicy) -> None:
    A, _ = matrix("power law 1e3", 800, 780)
    plain, scaled = decompose(A, polar), decompose(A * 2.0**exponent, polar)
    assert torch.equal(plain.factor, scaled.factor)
    assert torch.equal(plain.scale * 2.0**exponent, scaled.scale)


def test_zero_stays_zero_alone_and_in_a_stack() -> None:
    A = torch.stack([torch.zeros(520, 530), gaussian(520, 530, dtype=torch.float32)])
    for polar in (Halley(), Fast()):
        stacked = decompose(A, polar)
        assert not stacked.factor[0].any()
        assert torch.equal(stacked.factor[1], decompose(A[1], polar).factor)


def test_a_stack_on_one_call_is_each_matrix_alone() -> None:
    # Off the CPU stacks are worked on at once; the same code must hold there.
    X = torch.stack([gaussian(60, 90, seed=s, dtype=torch.float64) for s in range(3)])
    together, grams = halley(X, 1e-5, 1e-3)
    for x, got, R in zip(X, together, grams, strict=True):
        alone, own = halley(x, 1e-5, 1e-3)
        assert relative(got, alone) < 1e-12
        assert relative(R, own) < 1e-9


def test_the_input_is_not_modified() -> None:
    A, _ = matrix("gaussian", 770, 770)
    before = A.clone()
    for polar in (Halley(), Fast(), Exact()):
        decompose(A, polar)
    assert torch.equal(A, before)


@pytest.mark.parametrize("lower", [1e-6, 1e-4, 1e-2, 0.5])
def test_the_weights_take_the_interval_to_their_promise(lower: float) -> None:
    step = weights(lower)
    sigma = torch.logspace(torch.tensor(lower).log10(), 0, 2000, dtype=torch.float64)
    mapped = torch.tensor([image(float(s), [step]) for s in sigma])
    assert float(mapped.min()) == pytest.approx(step.lower, rel=1e-6)
    assert float(mapped.max()) < 1 + 1e-9


def test_legs_are_bounded_and_arrive() -> None:
    for lower in (1e-6, 1e-5, 1e-3, 0.1):
        sigma = lower
        for leg in legs(lower, 1e-3):
            assert leg
            assert leg[0].c <= 1000 * (1 + 1e-6)
            sigma = image(sigma, leg)
        assert 1 - sigma < 1e-3


@pytest.mark.parametrize("r", [5, 200, 513, 700])
def test_symmetric_products_and_inverse(r: int) -> None:
    X = gaussian(r, r + 40)
    R = gram(X)
    assert relative(R, X @ X.T) < 1e-14
    assert relative(R, R.T) < 1e-15
    M = torch.linalg.inv(torch.eye(r, dtype=torch.float64) + R / r)
    assert relative(positive_inverse(torch.eye(r, dtype=torch.float64) + R / r), M) < 1e-12
    assert relative(commuting_product(M, R), M @ R) < 1e-12


def test_an_indefinite_matrix_is_refused() -> None:
    A = torch.eye(600)
    A[-1, -1] = -1
    with pytest.raises(torch.linalg.LinAlgError):
        positive_inverse(A)


def test_quick_products_are_float32_accurate_and_restored() -> None:
    A = gaussian(600, 600, dtype=torch.float32)
    before = torch.backends.mkldnn.matmul.fp32_precision
    with quick_float32_products(), quick_float32_products():
        assert relative(A @ A, A.double() @ A.double()) < 2e-6
    assert torch.backends.mkldnn.matmul.fp32_precision == before


@pytest.mark.parametrize("polar", [Exact(), Fast()], ids=repr)
@pytest.mark.parametrize("shape", [(520, 900), (900, 520), (600, 600)], ids=str)
def test_low_rank_deltas_are_exact(polar: PolarPolicy, shape: tuple[int, int]) -> None:
    sigma = torch.logspace(0, -3, 24, dtype=torch.float64)
    A = with_spectrum(sigma, *shape).float()
    factor, scale, residual = decompose(A, polar)
    assert relative(factor, exact_polar(A, 24)) < 1e-4
    assert float(scale) == pytest.approx(float(sigma.sum()) / min(shape), rel=1e-5)
    assert float(residual) == 0


def test_a_low_rank_is_taken_only_where_what_is_missed_is_null() -> None:
    head = with_spectrum(torch.ones(24, dtype=torch.float64), 600, 640)
    below, above = (head + with_spectrum(torch.full((600,), s), 600, 640, 7) for s in (1e-9, 1e-5))
    assert low_rank_svd(below.float()) is not None
    assert low_rank_svd(above.float()) is None
    assert low_rank_svd(gaussian(600, 640, dtype=torch.float32)) is None


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", [(64, 200), (200, 64), (130, 700)], ids=str)
def test_wide_matrices_are_exact_to_float64(spectrum: str, shape: tuple[int, int]) -> None:
    A, expected = matrix(spectrum, *shape)
    assert iso_error(A, expected, Exact()) < 1e-6


@pytest.mark.parametrize("rank", [0, 1, 40])
def test_the_gram_matrix_shows_null_directions(rank: int) -> None:
    A = with_spectrum(torch.ones(rank, dtype=torch.float64), 60, 200).float()
    factor, sigma = polar_by_gram(A, 2e-6)
    assert int((sigma > 0).sum()) == rank
    if rank:
        assert relative(factor, exact_polar(A, rank)) < 1e-5
    else:
        assert not factor.any()


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("tolerance", [1e-3, 2e-2])
def test_far_longer_matrices_are_within_the_tolerance(spectrum: str, tolerance: float) -> None:
    A, expected = matrix(spectrum, 520, 10_000)
    for x, wanted in ((A, expected), (A.T.contiguous(), expected.T)):
        result = decompose(x, Fast(tolerance=tolerance))
        assert iso_error(x, wanted, Fast(tolerance=tolerance)) < tolerance
        assert float(result.residual) < 2 * tolerance
        assert result.factor.is_contiguous()


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_scales_whose_squares_leave_float32(size: float) -> None:
    A = gaussian(520, 3500, dtype=torch.float32)
    for polar in (Fast(), Exact(), Halley(), NewtonSchulz()):
        near, far = decompose(A, polar), decompose(A * size, polar)
        assert relative(far.factor, near.factor) < 1e-5
        assert float(far.scale) == pytest.approx(size * float(near.scale), rel=1e-5)


@pytest.mark.parametrize("shape", [(256, 400), (400, 256), (300, 900)], ids=str)
def test_exact_on_mild_oblongs_is_as_accurate_as_a_float32_svd(shape: tuple[int, int]) -> None:
    A = gaussian(*shape, dtype=torch.float32)
    U, _, Vh = torch.linalg.svd(A, full_matrices=False)
    expected = exact_polar(A)
    result = decompose(A, Exact())
    assert relative(result.factor, expected) < relative(U @ Vh, expected)
    assert float(result.residual) == 0
    X = A if shape[0] < shape[1] else A.T
    assert float(halley_mild(X)[1]) < 2e-4


@pytest.mark.parametrize("smallest", [0.0, 1e-3, 0.02, 0.05])
def test_mild_steps_show_a_direction_that_they_leave_short(smallest: float) -> None:
    sigma = torch.ones(256, dtype=torch.float64)
    sigma[-1] = smallest
    _, left = halley_mild(with_spectrum(sigma, 256, 400).float())
    assert float(left) > 2e-4
