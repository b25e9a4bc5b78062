"""Singular values and vectors with null directions dropped, and flattened spectra."""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["nuclear", "frobenius"]


class SVD(NamedTuple):
    """A thin decomposition A = U diag(σ) Vᵀ: U (m, k), sigma (k,) descending, Vh (k, n)."""

    U: Tensor
    sigma: Tensor
    Vh: Tensor


def null_rtol(dtype: torch.dtype) -> float:
    """Return the default share of σ₁ below which a direction counts as null: 16 eps."""
    return 16 * torch.finfo(dtype).eps


def normalised(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return A / max|A| and max|A| (…, 1, 1) of every matrix; a zero matrix is divided by 1.

    Squares of entries below 1e-19 or above 1e19 leave the range of float32, so whatever sums
    squares works on the first and multiplies by the second at the end.
    """
    largest = A.abs().amax(dim=(-2, -1), keepdim=True)
    largest = torch.where(largest == 0, 1.0, largest)
    return A / largest, largest


def svd(A: Tensor) -> SVD:
    """Return the thin SVD of A (…, m, n), float32 or float64, safe at every scale.

    Where LAPACK or the GPU's solver does not converge, float64 on the CPU is tried once.
    """
    m, n = A.shape[-2:]
    if A.dim() == 2 and A.device.type == "cpu" and not A.any():
        # A frozen matrix would cost a full decomposition; its zero vectors stand for no direction.
        r = min(m, n)
        return SVD(A.new_zeros(m, r), A.new_zeros(r), A.new_zeros(r, n))
    X, largest = normalised(A)
    try:
        U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        wide = torch.linalg.svd(X.double().cpu(), full_matrices=False)
        U, sigma, Vh = (factor.to(A) for factor in wide)
    return SVD(U, sigma * largest[..., 0], Vh)


def leading(A: Tensor, rank: int | None = None, rtol: float | None = None) -> SVD:
    """Return the leading singular triplets of one matrix A (m, n), at most ``rank`` of them.

    Directions with σ_i ≤ rtol·σ₁ (default :func:`null_rtol`) are dropped: they are rounding,
    and their vectors are whatever the solver left there. A zero matrix has none.
    """
    U, sigma, Vh = svd(A)
    rtol = null_rtol(A.dtype) if rtol is None else rtol
    k = int((sigma > rtol * sigma[:1]).sum())
    k = k if rank is None else min(k, rank)
    return SVD(U[:, :k], sigma[:k], Vh[:k])


def flatten(sigma: Tensor, r: int, norm: Norm = "nuclear", power: float = 0.0) -> Tensor:
    """Return the flattened singular values of a matrix with r = min(m, n); shape (k,) as ``sigma``.

    ``sigma`` are the k directions that were kept, all above 0. With power 0 the result is one
    value: the mean of all r singular values, r − k of them zero (``nuclear``), or their root
    mean square (``frobenius``). With power 1 it is ``sigma`` itself. Between, it is proportional
    to σ^power, with a norm of (k/r)^(1 − power) times that of ``sigma`` (nuclear, or its square's
    for Frobenius), so that both ends are met; where nothing was dropped that is the same norm.
    """
    k = len(sigma)
    if k == 0:
        return sigma
    s = (sigma / sigma.max()).double()
    shape = s**power
    share = (k / r) ** (1 - power)
    if norm == "nuclear":
        level = share * s.sum() / shape.sum()
    else:
        level = (share * s.square().sum() / shape.square().sum()).sqrt()
    flat: Tensor = (shape * level).to(sigma.dtype) * sigma.max()
    return flat


def rms_singular_value(A: Tensor) -> Tensor:
    """Return ‖A‖_F / √min(m, n) of every matrix of A (…, m, n); shape (…)."""
    X, largest = normalised(A)
    frobenius = X.double().square().sum(dim=(-2, -1)).sqrt()
    return (frobenius / sqrt(min(A.shape[-2:]))).to(A.dtype) * largest[..., 0, 0]
