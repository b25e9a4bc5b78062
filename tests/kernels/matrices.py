"""Seeded matrices with a stated spectrum."""

from __future__ import annotations

import torch
from torch import Tensor


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """Return a float64 matrix (rows, columns) with orthonormal columns."""
    generator = torch.Generator().manual_seed(seed)
    q: Tensor = torch.linalg.qr(
        torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    )[0]
    return q


def with_spectrum(sigma: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """Return a float64 matrix (rows, columns) with the singular values ``sigma``, others zero."""
    U, V = (orthonormal(n, len(sigma), 2 * seed + i) for i, n in enumerate((rows, columns)))
    return (U * sigma) @ V.T


def gaussian(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def power_law(condition: float, r: int) -> Tensor:
    """Return r singular values σ_i ∝ i^(−p) from 1 down to 1/condition."""
    index = torch.arange(1, r + 1, dtype=torch.float64)
    return condition ** -(index.log() / index[-1].log())


def exact_polar(A: Tensor, rank: int | None = None) -> Tensor:
    """Return U Vᵀ of the leading ``rank`` directions, computed in float64."""
    U, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    return U[..., :rank] @ Vh[..., :rank, :]


def relative(got: Tensor, expected: Tensor) -> float:
    """Return the error of ``got`` relative to ``expected`` in the Frobenius norm."""
    error = (got.double() - expected.double()).norm() / expected.double().norm()
    return float(error)
