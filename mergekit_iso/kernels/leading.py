"""The leading singular triplets of one matrix, without the others where that is quicker.

Two ways around the full SVD, both through the Gram matrix R = A Aᵀ of the shorter side in
float64, whose eigenvalues are σ². One is R's own eigendecomposition. The other finds only a
subspace, in float32, and leaves the accuracy to what follows it: a Rayleigh–Ritz step, which is
the float64 decomposition of the small QᵀA, and a residual that is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .products import gram, positive_inverse, quick_float32_products
from .spectrum import SVD, low_rank_svd, normalised, null_rtol, svd

# Sizes and shares at which the ways around the SVD win (measured, see docs/benchmarks.md).
_SMALLEST_SUBSPACE = 512
_SMALLEST_WIDE_SUBSPACE = 768
_OBLONG = 1.5
# Of the subspace over the rank, so that rounding in float32 stays away from where A is cut.
_OVERSAMPLING = 1.15
# A Gram matrix with λ₁ beyond this many λ_k is compressed before it is rounded to float32.
_MILD = 8.0
_ACCEPTED = 4e-6


def leading(A: Tensor, rank: int | None = None, rtol: float | None = None) -> SVD:
    """Return the leading singular triplets of one matrix A (m, n), at most ``rank`` of them.

    Directions with σ_i ≤ rtol·σ₁ (default :func:`null_rtol`) are dropped: they are rounding,
    and their vectors are whatever the solver left there. A zero matrix has none.
    """
    rtol = null_rtol(A.dtype) if rtol is None else rtol
    U, sigma, Vh = low_rank_svd(A) or _quicker(A, rank, rtol) or svd(A)
    k = int((sigma > rtol * sigma[:1]).sum())
    k = k if rank is None else min(k, rank)
    return SVD(U[:, :k], sigma[:k], Vh[:k])


def leading_beyond(
    U: Tensor, matrices: Sequence[Tensor], rank: int, rtol: float | None = None
) -> list[SVD]:
    """Return the leading triplets of (I − U Uᵀ)D for every D (m, n), U (m, c) orthonormal.

    As :func:`leading` has them. Where U spans most of the rows, what it leaves is taken in a
    basis Q (m, m − c) of the complement: QᵀD has few rows.
    """
    m, c = U.shape
    if not matrices or m > matrices[0].shape[1] or 2 * c < m:
        return [leading(D - U @ (U.T @ D), rank, rtol) for D in matrices]
    Q = torch.linalg.qr(U, mode="complete")[0][:, c:]
    found = [leading(Q.T @ D, rank, rtol) for D in matrices]
    return [triplets._replace(U=Q @ triplets.U) for triplets in found]


def _quicker(A: Tensor, rank: int | None, rtol: float) -> SVD | None:
    """Return at least the triplets that :func:`leading` keeps, or None where the SVD is due."""
    short, long = sorted(A.shape)
    if A.dtype != torch.float32 or short < 2 or not A.any():
        return None
    rank = short if rank is None else min(rank, short)
    found = None
    share = 4 if short >= _SMALLEST_WIDE_SUBSPACE else 8
    if short >= _SMALLEST_SUBSPACE and 0 < rank <= short // share:
        found = by_subspace(A, rank)
    if found is None and long >= _OBLONG * short and rtol >= null_rtol(A.dtype):
        found = by_gram(A, rank)
    return found


def by_gram(A: Tensor, rank: int) -> SVD:
    """Return the ``rank`` leading triplets of float32 A (m, n) from R's eigenvectors in float64.

    Forming R squares the condition: float32's null bound of 2e-6 becomes 4e-12, well within
    float64. Directions far below it come with vectors that are not normalised.
    """
    X, largest = normalised(_wide(A).double())
    eigenvalues, Q = torch.linalg.eigh(gram(X))
    sigma = eigenvalues[-rank:].flip(0).clamp_min(0).sqrt()
    U = Q[:, -rank:].flip(1)
    Vh = (U.T @ X) / torch.where(sigma > 0, sigma, 1.0)[:, None]
    return _oriented(A, U, sigma * largest[0], Vh)


def by_subspace(A: Tensor, rank: int) -> SVD | None:
    """Return the ``rank`` leading triplets of float32 A (m, n), or None if they are inaccurate.

    The subspace is that of the leading eigenvectors in float32 of R, or where σ₁² ≫ σ_k² of
    R(R + μI)⁻¹, formed in float64: it has the same eigenvectors, and its eigenvalues
    σ²/(σ² + μ) with μ near σ_k² are all within float32's reach. The result is returned if
    ‖A V_k − U_k Σ_k‖_F ≤ 4e-6 ‖Σ_k‖_F, as a float32 SVD has it within a small factor.
    """
    X, largest = normalised(_wide(A))
    width = min(len(X), max(int(_OVERSAMPLING * rank), rank + 16))
    with quick_float32_products():
        G = _compressed(gram(X.double()), rank, width)
        if G is None:
            return None
        Q = torch.linalg.eigh(G)[1][:, -width:]
        B = Q.T @ X
        U, sigma, Vh = _rayleigh_ritz(Q, B.double(), rank)
        missed = torch.linalg.matrix_norm(X @ Vh.T - U * sigma)
    if not bool(missed <= _ACCEPTED * torch.linalg.vector_norm(sigma)):
        return None
    return _oriented(A, U, sigma * largest[0], Vh)


def _compressed(R: Tensor, rank: int, width: int) -> Tensor | None:
    """Return R in float32, or R(R + μI)⁻¹ where R's leading eigenvalues span too much.

    λ₁ and λ_k are those of a Nyström approximation, low by a small factor. None where it shows
    λ_k to be that of a null direction.
    """
    generator = torch.Generator().manual_seed(0)
    sketch = torch.randn(len(R), width, generator=generator, dtype=R.dtype).to(R.device)
    Y = R @ sketch
    factor, failed = torch.linalg.cholesky_ex(sketch.T @ Y)
    if bool(failed):
        return None
    C = torch.linalg.solve_triangular(factor, Y.T, upper=False)
    estimates = torch.linalg.eigvalsh(gram(C))
    largest, smallest = float(estimates[-1]), float(estimates[-rank])
    if smallest <= null_rtol(torch.float32) ** 2 * largest:
        return None
    if largest <= _MILD * smallest:
        return (R / largest).float()
    shifted = R / (2 * smallest)
    shifted.diagonal().add_(1)
    G = -positive_inverse(shifted)
    G.diagonal().add_(1)
    return G.float()


def _rayleigh_ritz(Q: Tensor, B: Tensor, rank: int) -> SVD:
    """Return the leading triplets of Q B, Q (r, p) float32 near orthonormal, B = QᵀX float64.

    What Q lacks in orthogonality (1e-6) would mix directions on both sides of the cut: one
    Newton step, folded into the p × p problem, takes it to 1e-12.
    """
    root = -0.5 * gram(Q.T.double())
    root.diagonal().add_(1.5)
    eigenvalues, W = torch.linalg.eigh(root @ gram(B) @ root)
    sigma = eigenvalues[-rank:].flip(0).clamp_min(0).sqrt()
    W = root @ W[:, -rank:].flip(1)
    Vh = (W.T @ B) / torch.where(sigma > 0, sigma, 1.0)[:, None]
    return SVD(Q @ W.to(Q), sigma.to(Q), Vh.to(Q))


def _wide(A: Tensor) -> Tensor:
    return A.T if A.shape[0] > A.shape[1] else A


def _oriented(A: Tensor, U: Tensor, sigma: Tensor, Vh: Tensor) -> SVD:
    U, sigma, Vh = U.to(A), sigma.to(A), Vh.to(A)
    return SVD(Vh.T, sigma, U.T) if A.shape[0] > A.shape[1] else SVD(U, sigma, Vh)
