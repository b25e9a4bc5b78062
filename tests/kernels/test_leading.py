"""Leading singular triplets: as accurate as a float32 SVD's, whichever way they are found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mergekit_iso.kernels.leading import by_gram, by_subspace, leading, leading_beyond
from mergekit_iso.kernels.spectrum import SVD, null_rtol
from tests.kernels.matrices import gaussian, orthonormal, power_law, relative, with_spectrum

SIGMA = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)


def test_leading_triplets() -> None:
    A = with_spectrum(SIGMA, 6, 5)
    for rank in (0, 1, 3, 4):
        U, sigma, Vh = leading(A, rank)
        assert (U.shape, sigma.shape, Vh.shape) == ((6, rank), (rank,), (rank, 5))
        assert torch.allclose(sigma, SIGMA[:rank], rtol=1e-12)
        assert torch.allclose((U * sigma) @ Vh @ Vh.T, A @ Vh.T, atol=1e-12)


def test_null_directions_are_never_led() -> None:
    A = with_spectrum(SIGMA, 6, 5)
    assert len(leading(A).sigma) == 4
    assert len(leading(A, 5).sigma) == 4
    assert len(leading(A, rtol=0.2).sigma) == 3
    assert len(leading(A, 2, rtol=0.2).sigma) == 2


def test_zero_has_no_direction() -> None:
    U, sigma, Vh = leading(torch.zeros(4, 3))
    assert (U.shape, sigma.shape, Vh.shape) == ((4, 0), (0,), (0, 3))


def test_a_direction_at_the_tolerance_is_dropped() -> None:
    assert null_rtol(torch.float32) == 16 * torch.finfo(torch.float32).eps
    A = torch.diag(torch.tensor([1.0, 0.25, 0.125]))
    assert len(leading(A, rtol=0.25).sigma) == 1


def product(triplets: SVD) -> Tensor:
    U, sigma, Vh = (part.double() for part in triplets)
    return (U * sigma) @ Vh


def spiked(rows: int, columns: int) -> Tensor:
    """Return a few strong directions over Gaussian noise."""
    strong = torch.linspace(2000, 400, 10, dtype=torch.float64)
    return with_spectrum(strong, rows, columns) + gaussian(rows, columns, seed=5)


SPECTRA = {
    "gaussian": lambda m, n: gaussian(m, n),
    "power law": lambda m, n: with_spectrum(power_law(1e5, min(m, n)), m, n),
    "spiked": spiked,
}


@pytest.mark.parametrize("way", [by_gram, by_subspace])
@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize(("shape", "rank"), [((160, 160), 40), ((200, 130), 12)], ids=str)
def test_as_accurate_as_a_float32_svd(
    way: Callable[[Tensor, int], SVD | None], spectrum: str, shape: tuple[int, int], rank: int
) -> None:
    A = SPECTRA[spectrum](*shape).float()
    U, sigma, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    expected = SVD(U[:, :rank], sigma[:rank], Vh[:rank])
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    usual = SVD(U[:, :rank], sigma[:rank], Vh[:rank])
    for size in (1.0, 1e-30, 1e30):
        found = way(A * size, rank)
        assert found is not None
        assert [part.shape for part in found] == [part.shape for part in expected]
        assert all(part.dtype == torch.float32 for part in found)
        scaled = found._replace(sigma=found.sigma / size)
        error = relative(product(scaled), product(expected))
        assert error < 1.5 * max(relative(product(usual), product(expected)), 8e-7)
        for basis in (found.U.T, found.Vh):
            gram = basis.double() @ basis.double().T
            assert relative(gram, torch.eye(rank)) < 1e-6


def test_the_same_matrix_has_the_same_triplets() -> None:
    A = spiked(150, 170).float()
    first, second = by_subspace(A, 20), by_subspace(A.clone(), 20)
    assert first is not None
    assert second is not None
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_subspace_of_null_directions() -> None:
    low = with_spectrum(SIGMA, 120, 130).float()
    assert by_subspace(low, 10) is None
    assert len(leading(low, 10).sigma) == 4
    assert by_subspace(torch.full((64, 64), torch.nan), 8) is None


@pytest.mark.parametrize("shape", [(512, 520), (130, 300), (300, 130)], ids=str)
def test_null_directions_are_dropped_by_every_way(shape: tuple[int, int]) -> None:
    sigma = torch.linspace(3, 1, 90, dtype=torch.float64)
    sigma[50:] *= 1e-9
    A = with_spectrum(sigma, *shape).float()
    for rank in (20, 60, None):
        found = leading(A, rank)
        kept = 20 if rank == 20 else 50
        assert len(found.sigma) == kept
        assert torch.allclose(found.sigma.double(), sigma[:kept], rtol=1e-5)


def test_a_subspace_is_what_a_large_matrix_is_led_by() -> None:
    A = gaussian(512, 560, dtype=torch.float32)
    found, expected = leading(A, 64), by_subspace(A, 64)
    assert expected is not None
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("shape", [(20, 20), (20, 31), (31, 20)], ids=str)
@pytest.mark.parametrize("spanned", [0, 5, 16])
def test_what_lies_beyond_a_subspace(shape: tuple[int, int], spanned: int) -> None:
    U = orthonormal(shape[0], shape[0], 1)[:, :spanned]
    matrices = [gaussian(*shape, seed=seed) for seed in (2, 3)]
    for D, found in zip(matrices, leading_beyond(U, matrices, 3), strict=True):
        expected = leading(D - U @ (U.T @ D), 3)
        assert relative(product(found), product(expected)) < 1e-12
        assert relative(found.sigma, expected.sigma) < 1e-12
        assert float((U.T @ found.U).abs().sum()) < 1e-10
    assert leading_beyond(U, [], 3) == []
