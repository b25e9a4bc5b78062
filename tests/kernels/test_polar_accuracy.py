"""The error of the policies against an SVD in float64, by spectrum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mergekit_iso.kernels.polar import Exact, Fast, NewtonSchulz, decompose
from tests.kernels.matrices import exact_polar, gaussian, power_law, relative, with_spectrum

ROWS, COLUMNS = 48, 80

LOW_RANK_AND_NOISE = torch.cat([torch.linspace(2, 1, 8), torch.full((ROWS - 8,), 1e-3)]).double()
SPECTRA = {
    "gaussian": torch.linalg.svdvals(gaussian(ROWS, COLUMNS)),
    "power law, condition 1e2": power_law(1e2, ROWS),
    "power law, condition 1e4": power_law(1e4, ROWS),
    "low rank and noise": LOW_RANK_AND_NOISE,
}
# Largest errors ‖P − UVᵀ‖_F / ‖UVᵀ‖_F allowed in float32: a few times those measured.
BOUNDS = {
    "gaussian": (3e-6, 4e-6, 4e-6),
    "power law, condition 1e2": (8e-6, 4e-6, 4e-6),
    "power law, condition 1e4": (4e-4, 4e-3, 1e-3),
    "low rank and noise": (5e-4, 2e-4, 1e-3),
}


def matrix(spectrum: str, dtype: torch.dtype, *, tall: bool = False) -> Tensor:
    A = with_spectrum(SPECTRA[spectrum], ROWS, COLUMNS).to(dtype)
    return A.mT.contiguous() if tall else A


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("spectrum", SPECTRA)
def test_errors_in_float32(spectrum: str, tall: bool) -> None:
    A = matrix(spectrum, torch.float32, tall=tall)
    expected = exact_polar(A)
    mean = float(SPECTRA[spectrum].mean())
    for polar, bound in zip((Exact(), NewtonSchulz(), Fast()), BOUNDS[spectrum], strict=True):
        factor, scale, _ = decompose(A, polar)
        assert relative(factor, expected) < bound, polar
        assert float(scale) == pytest.approx(mean, rel=1e-5), polar


@pytest.mark.parametrize("spectrum", SPECTRA)
def test_exact_in_float64(spectrum: str) -> None:
    A = matrix(spectrum, torch.float64)
    assert relative(decompose(A).factor, exact_polar(A)) < 1e-11


@pytest.mark.parametrize("condition", [1e1, 1e2, 1e3, 1e4, 1e5, 1e6])
@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (64, 64)], ids=str)
def test_fast_keeps_its_tolerance_at_every_condition(
    condition: float, shape: tuple[int, int]
) -> None:
    A = with_spectrum(power_law(condition, min(shape)), *shape)
    factor, _, residual = decompose(A, Fast(tolerance=1e-3))
    assert relative(factor, exact_polar(A)) < 1e-3
    assert float(residual) < 2e-3
    sigma = torch.linalg.svdvals(factor)
    assert float(sigma.min()) > 1 - 1e-2
    assert float(sigma.max()) < 1 + 1e-3


def test_fast_is_exact_where_an_svd_is_quickest() -> None:
    A = matrix("gaussian", torch.float32)
    for got, expected in zip(decompose(A, Fast()), decompose(A, Exact()), strict=True):
        assert torch.equal(got, expected)


def test_exact_drops_by_its_own_tolerance() -> None:
    sigma = torch.tensor([1.0, 0.5, 0.09, 0.01], dtype=torch.float64)
    A = with_spectrum(sigma, 6, 4)
    for rtol, rank in ((0.0, 4), (0.05, 3), (0.1, 2), (0.6, 1)):
        factor, scale, _ = decompose(A, Exact(null_rtol=rtol))
        assert relative(factor, exact_polar(A, rank)) < 1e-12
        assert float(scale) == pytest.approx(float(sigma[:rank].sum()) / 4, rel=1e-12)


def test_the_default_null_tolerance_is_sixteen_eps_of_the_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        A = torch.diag(torch.tensor([1.0, 17 * eps, 15 * eps], dtype=dtype))
        kept = torch.linalg.svdvals(decompose(A).factor).round()
        assert kept.tolist() == [1, 1, 0]
