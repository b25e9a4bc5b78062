"""Singular values and vectors of whole matrices, null directions, and flattened spectra."""

from __future__ import annotations

from math import sqrt
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .products import gram, symmetric_times

Norm = Literal["nuclear", "frobenius"]


# Narrower sketches would save nothing.
_NARROWEST_SKETCH = 64
# A matrix with a largest entry between this and its inverse is left as it is.
_SAFE = 1e-10
# Columns of a wide matrix that are worked on in float64 at once.
_COLUMNS = 4096
# A float32 Gram matrix with pivots above this share of its largest entry tells all directions.
_MILD_GRAM = 1e-3


class SVD(NamedTuple):
    """A thin decomposition A = U diag(σ) Vᵀ: U (m, k), sigma (k,) descending, Vh (k, n)."""

    U: Tensor
    sigma: Tensor
    Vh: Tensor


def null_rtol(dtype: torch.dtype) -> float:
    """Return the default share of σ₁ below which a direction counts as null: 16 eps."""
    return 16 * torch.finfo(dtype).eps


def normalised(A: Tensor) -> tuple[Tensor, Tensor]:
    """Return A / c and c (…, 1, 1) of every matrix, c a power of two near max|A|.

    Squares of entries below 1e-19 or above 1e19 leave the range of float32, so whatever sums
    squares works on the first and multiplies by the second at the end. A power of two rounds
    nothing, so where the division is not needed it is left out, and c is 1.
    """
    low, high = A.aminmax() if A.dim() == 2 else A.flatten(-2).aminmax(dim=-1)
    largest = torch.maximum(-low, high)
    if A.dim() == 2 and A.device.type == "cpu" and _SAFE < float(largest) < 1 / _SAFE:
        return A, A.new_ones(1, 1)
    scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1)
    scale = torch.where(largest == 0, 1.0, scale)[..., None, None]
    return A / scale, scale


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
    The quickest exact way for float32 matrices far longer than wide.
    """
    # Squares of float32 numbers are within float64's range.
    X, largest = (
        normalised(A)
        if A.dtype == torch.float64
        else (A, A.new_ones(A.shape[:-2])[..., None, None])
    )
    tall = A.shape[-2] > A.shape[-1]
    X = X.mT if tall else X
    root, sigma = _inverse_root(_wide_gram(X), rtol)
    P = torch.empty_like(X)
    for part, factor in zip(
        torch.split(X, _COLUMNS, -1), torch.split(P, _COLUMNS, -1), strict=True
    ):
        factor.copy_(symmetric_times(root, part.double()))
    return (P.mT if tall else P), (sigma * largest[..., 0].double()).to(A.dtype)


def polar_by_gram_within(X: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the polar factor P of wide float32 X (…, r, n), and P Pᵀ, which tells its error.

    As :func:`polar_by_gram` with the long products in float32, the first of them only where the
    pivots of its Cholesky factor are those of a condition that float32 can square. The error is
    about eps times the condition. None where a direction is null.
    """
    R = gram(X)
    pivots = torch.linalg.cholesky_ex(R).L.diagonal(dim1=-2, dim2=-1)
    largest = R.diagonal(dim1=-2, dim2=-1).amax(-1)
    mild = bool((pivots.amin(-1) ** 2 > _MILD_GRAM * largest).all())
    root, sigma = _inverse_root(R.double() if mild else _wide_gram(X), null_rtol(X.dtype))
    if not bool((sigma > 0).all()):
        return None
    P = symmetric_times(root.to(X.dtype), X)
    return P, gram(P)


def _wide_gram(X: Tensor) -> Tensor:
    """Return X Xᵀ of X (…, r, n) in float64, a part of the columns at a time."""
    first, *others = torch.split(X, _COLUMNS, -1)
    R = gram(first.double())
    for part in others:
        R += gram(part.double())
    return R


def _inverse_root(R: Tensor, rtol: float) -> tuple[Tensor, Tensor]:
    """Return R^(−1/2) of float64 R = X Xᵀ (…, r, r) and X's σ; null directions are 0 in both."""
    eigenvalues, Q = torch.linalg.eigh(R)
    sigma = eigenvalues.clamp_min(0).sqrt()
    kept = sigma > rtol * sigma[..., -1:]
    inverse = torch.where(kept, 1 / torch.where(kept, sigma, 1.0), 0.0)
    return (Q * inverse[..., None, :]) @ Q.mT, torch.where(kept, sigma, 0.0)


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
