"""Singular values and vectors of whole matrices, null directions, and flattened spectra."""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Norm = Literal["nuclear", "frobenius"]


# Narrower sketches would save nothing.
_NARROWEST_SKETCH = 64


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


def low_rank_svd(A: Tensor) -> SVD | None:
    """Return the SVD of one matrix A (m, n) of rank at most min(m, n)/8, or None for any other.

    A random sketch Y = AΩ of an eighth of A's width spans its range if the rank is that low, as
    that of LoRA deltas is, and A = QQᵀA then needs the SVD of a far smaller matrix. It is taken
    only if ‖A − QQᵀA‖_F ≤ 16 eps·σ₁, so that every direction missed is null for certain. For
    other matrices the pivots of YᵀY end the attempt after a few hundredths of an SVD's time.
    """
    m, n = A.shape
    width = min(m, n) // 8
    if width < _NARROWEST_SKETCH:
        return None
    X, largest = normalised(A)
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(n, width, generator=generator, dtype=A.dtype).to(A.device)
    Y = X @ sketch
    pivots, failed = torch.linalg.cholesky_ex(Y.double().T @ Y.double())
    diagonal = pivots.diagonal()
    if not bool(failed) and bool(diagonal.min() > 1e-5 * diagonal.max()):
        return None
    wide = X.double()
    Q = torch.linalg.qr(wide @ sketch.double())[0]
    small = svd(Q.T @ wide)
    missed = torch.linalg.matrix_norm(wide - Q @ (small.U * small.sigma @ small.Vh))
    if not bool(missed <= null_rtol(A.dtype) * small.sigma[0]):
        return None
    U, sigma, Vh = (Q @ small.U).to(A), small.sigma.to(A), small.Vh.to(A)
    return SVD(U, sigma * largest[0], Vh)


def polar_by_gram(A: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Return the polar factor of A (…, m, n), its null directions dropped, and σ (…, min(m, n)).

    From the eigenvectors of the smaller Gram matrix, all in float64: forming it squares the
    condition, so float32's null bound of 2e-6 becomes 4e-12, well within float64's precision.
    The quickest exact way for float32 matrices at least twice as long as wide.
    """
    X, largest = normalised(A.double())
    tall = A.shape[-2] > A.shape[-1]
    R = X.mT @ X if tall else X @ X.mT
    eigenvalues, Q = torch.linalg.eigh(R)
    sigma = eigenvalues.clamp_min(0).sqrt()
    kept = sigma > rtol * sigma[..., -1:]
    inverse = torch.where(kept, 1 / torch.where(kept, sigma, 1.0), 0.0)
    root = (Q * inverse[..., None, :]) @ Q.mT
    P = X @ root if tall else root @ X
    sigma = torch.where(kept, sigma, 0.0)
    return P.to(A.dtype), (sigma * largest[..., 0]).to(A.dtype)


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
