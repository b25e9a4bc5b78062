"""The polar factor by dynamically weighted Halley steps in Gram form, with restarts.

One step is X ← X (aI + bXᵀX)(I + cXᵀX)⁻¹, whose weights (Nakatsukasa, Bai and Gygi 2010,
"Optimizing Halley's iteration for computing the matrix polar decomposition") take the interval
[l, 1] of singular values as near to 1 as three weights can. With R = X Xᵀ and M = (I + cR)⁻¹ it
is X ← Z X, Z = (b/c) I + (a − b/c) M, and the next R follows from M and M² alone, so that a few
steps need two long products. Forming R squares the condition: rounding in R is amplified by c.
So a *leg* (the steps on one R) is kept short and c bounded, then X ← Z X and R are formed anew.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from .products import commuting_product, gram, positive_inverse, symmetric_times

#: Largest shift c of a first step in float32 (an error of about 2e-4), and of a leg's product.
_MOST_SHIFT = 1000.0
_MOST_PRODUCT = 10_000.0
#: Singular values down to this share of σ₁ are converged; those below count as null.
REACH = 2e-6
_MILD = 0.1
_STEEP = 1e-5


class Weights(NamedTuple):
    """The weights of one step and the lower end of the interval after it."""

    a: float
    b: float
    c: float
    lower: float


def weights(lower: float, most_shift: float = float("inf")) -> Weights:
    """Return the optimal weights for singular values in [lower, 1], with c ≤ most_shift.

    Where the bound takes hold the weights are those of the longest interval within it.
    """
    designed = max(lower, _shortest(most_shift))
    a, b, c = _optimal(designed)
    return Weights(a, b, c, lower * (a + b * lower**2) / (1 + c * lower**2))


def legs(lower: float, done: float) -> Iterator[list[Weights]]:
    """Yield the steps of each leg until the interval [lower, 1] is within ``done`` of 1."""
    while 1 - lower > done:
        leg: list[Weights] = []
        product = 1.0
        while 1 - lower > done:
            step = weights(lower, _MOST_SHIFT)
            product *= step.c
            if leg and product > _MOST_PRODUCT:
                break
            leg.append(step)
            lower = step.lower
        yield leg


def image(sigma: float, steps: Sequence[Weights]) -> float:
    """Return what the steps make of a singular value."""
    for a, b, c, _ in steps:
        sigma = sigma * (a + b * sigma**2) / (1 + c * sigma**2)
    return sigma


def halley(X: Tensor, lower: float, done: float, share: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the polar factor P of wide X (…, r, n), and P Pᵀ (…, r, r), which tells its error.

    The first legs are designed for singular values in [lower, 1]·σ₁, or from ``share`` of the
    smallest pivot on where that is larger. Where the deviation
    (:func:`deviation`) then exceeds ``done``, more legs follow for those down to REACH; what
    deviates after them is null, or rounding. Zero stays zero. float32 or float64.
    Raises torch.linalg.LinAlgError where rounding leaves X Xᵀ indefinite.
    """
    R = gram(X)
    size = largest_eigenvalue(R)
    X, R = X / size.sqrt(), R / size
    if share:
        lower = max(lower, share * smallest_pivot(R))
    reached = REACH
    for leg in legs(lower, done):
        X = one_leg(X, R, leg)
        R = gram(X)
        reached = image(reached, leg)
    return _down_to_reach(X, R, reached, done)


def halley_steep(X: Tensor, done: float) -> tuple[Tensor, Tensor]:
    """Return what :func:`halley` does for float32 X (…, r, n), made for singular values to 1e-5·σ₁.

    The first step's Gram matrix and inverse are in float64, with its full shift, which spares a
    leg; its factor, up to 5e3, is applied in float32, an error of about 3e-4.
    Raises torch.linalg.LinAlgError where rounding leaves X Xᵀ indefinite.
    """
    wide = gram(X.double())
    size = largest_eigenvalue(wide)
    first = weights(_STEEP)
    Z = first_factor(wide / size, first).to(X.dtype)
    X = symmetric_times(Z, X / size.sqrt().to(X.dtype))
    R = gram(X)
    reached = image(REACH, [first])
    for leg in legs(first.lower, done):
        X = one_leg(X, R, leg)
        R = gram(X)
        reached = image(reached, leg)
    return _down_to_reach(X, R, reached, done)


def _down_to_reach(X: Tensor, R: Tensor, reached: float, done: float) -> tuple[Tensor, Tensor]:
    """Take more legs where singular values that were at REACH, and now are at ``reached``, lack."""
    if bool((deviation(R) > done).any()):
        for leg in legs(reached, done):
            X = one_leg(X, R, leg)
            R = gram(X)
    return X, R


def halley_mixed(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factor of wide float32 X (…, r, n) to float32 accuracy, and its deviation.

    The first step is in float64 with its full shift, so that one leg takes all singular values
    down to REACH to within [0.03, 1]; a leg in float32 and a cubic polish do the rest. The
    deviation is that before the polish, which squares it: near 1e-3, and more than 1/(2√r) where
    a direction is null.
    Raises torch.linalg.LinAlgError where rounding leaves X Xᵀ indefinite.
    """
    wide = X.double()
    R = gram(wide)
    size = largest_eigenvalue(R)
    R /= size
    if smallest_pivot(R) < REACH:
        # No pivot is below the smallest singular value: a direction is null, and all else wasted.
        return X, X.new_full(X.shape[:-2], torch.inf)
    first = weights(REACH)
    X = one_leg(wide / size.sqrt(), R, [first]).to(X.dtype)
    for leg in legs(first.lower, 1e-3):
        X = one_leg(X, gram(X), leg)
    R = gram(X)
    return torch.sub(1.5 * X, symmetric_times(R, X), alpha=0.5), deviation(R)


def halley_mild(X: Tensor) -> tuple[Tensor, Tensor]:
    """Return the polar factor of wide float32 X (…, r, n) with σ_r ≥ 0.1·σ₁, and its deviation.

    One leg in float32, whose shift is small for so short an interval, and a cubic polish: as
    exact as :func:`halley_mixed` in half its time. The deviation is that before the polish: 1e-4
    at most, and more for any other matrix, most of which are given back unchanged with an
    infinite one after a Cholesky factor.
    Raises torch.linalg.LinAlgError where rounding leaves X Xᵀ indefinite.
    """
    R = gram(X)
    size = largest_eigenvalue(R)
    R /= size
    if smallest_pivot(R) < _MILD:
        return X, X.new_full(X.shape[:-2], torch.inf)
    X = X / size.sqrt()
    for leg in legs(_MILD, 1e-3):
        X = one_leg(X, R, leg)
        R = gram(X)
    return torch.sub(1.5 * X, symmetric_times(R, X), alpha=0.5), deviation(R)


def one_leg(X: Tensor, R: Tensor, steps: Sequence[Weights]) -> Tensor:
    """Return X (…, r, n) after the steps of one leg, R = X Xᵀ."""
    Z: Tensor | None = None
    for number, step in enumerate(steps):
        M = _shifted_inverse(R, step.c)
        if number + 1 < len(steps):
            R = _next_gram(R, M, step)
        factor = _factor_of(M, step)
        Z = factor if Z is None else commuting_product(factor, Z)
    return X if Z is None else symmetric_times(Z, X)


def first_factor(R: Tensor, step: Weights) -> Tensor:
    """Return Z (…, r, r) of one step X ← Z X, R = X Xᵀ."""
    return _factor_of(_shifted_inverse(R, step.c), step)


def _shifted_inverse(R: Tensor, c: float) -> Tensor:
    M = c * R
    _add_to_diagonal(M, 1.0)
    return positive_inverse(M)


def _factor_of(M: Tensor, step: Weights) -> Tensor:
    """Return Z = (b/c) I + (a − b/c) M, in place of M."""
    M *= step.a - step.b / step.c
    _add_to_diagonal(M, step.b / step.c)
    return M


def _next_gram(R: Tensor, M: Tensor, step: Weights) -> Tensor:
    """Return Z R Z, from R M = (I − M)/c."""
    c = step.c
    alpha, beta = step.b / c, step.a - step.b / c
    R = alpha**2 * R
    R.add_(M, alpha=beta**2 / c - 2 * alpha * beta / c)
    R.sub_(commuting_product(M, M), alpha=beta**2 / c)
    _add_to_diagonal(R, 2 * alpha * beta / c)
    return R


def largest_eigenvalue(R: Tensor, iterations: int = 12) -> Tensor:
    """Return an estimate from below of the largest eigenvalue of positive R (…, r, r): (…, 1, 1).

    A power iteration from the column of the largest diagonal entry; 1 for a zero matrix.
    """
    column = R.diagonal(dim1=-2, dim2=-1).argmax(-1)[..., None, None]
    v = R.take_along_dim(column, dim=-1)
    size = torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    for _ in range(iterations):
        v = R @ (v / torch.where(size == 0, 1.0, size))
        size = torch.linalg.vector_norm(v, dim=-2, keepdim=True)
    return torch.where(size == 0, 1.0, size)


def smallest_pivot(R: Tensor) -> float:
    """Return the smallest pivot of R = X Xᵀ (…, r, r), 0 where rounding leaves it indefinite.

    No pivot of a Cholesky factor is below the smallest singular value of X.
    """
    pivots, failed = torch.linalg.cholesky_ex(R)
    smallest = pivots.diagonal(dim1=-2, dim2=-1).amin(-1)
    return float(torch.where(failed > 0, 0.0, smallest).min())


def deviation(R: Tensor) -> Tensor:
    """Return ‖R − I‖_F / √r of R = X Xᵀ (…, r, r), per matrix: (…)."""
    r = R.shape[-1]
    diagonal = R.diagonal(dim1=-2, dim2=-1).double()
    squares: Tensor = torch.linalg.vector_norm(R, dim=(-2, -1), dtype=torch.float64).square()
    squares = squares - diagonal.square().sum(-1) + (diagonal - 1).square().sum(-1)
    return (squares / r).clamp_min(0).sqrt()


def _add_to_diagonal(A: Tensor, value: float) -> None:
    A.diagonal(dim1=-2, dim2=-1).add_(value)


def _optimal(lower: float) -> tuple[float, float, float]:
    square = lower * lower
    d = (4 * (1 - square) / square**2) ** (1 / 3)
    root = sqrt(1 + d)
    a = root + 0.5 * sqrt(8 - 4 * d + 8 * (2 - square) / (square * root))
    b = (a - 1) ** 2 / 4
    return a, b, a + b - 1


def _shortest(most_shift: float) -> float:
    """Return the smallest lower end whose optimal shift is within the bound, by bisection."""
    if most_shift == float("inf"):
        return 0.0
    low, high = 1e-9, 1.0 - 1e-9
    for _ in range(60):
        middle = sqrt(low * high)
        low, high = (middle, high) if _optimal(middle)[2] > most_shift else (low, middle)
    return high
