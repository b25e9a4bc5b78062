"""Newton–Schulz iterations: odd polynomials that push every singular value towards 1.

One step is X ← aX + (bG + cG²)X with G = X Xᵀ, that is σ ← aσ + bσ³ + cσ⁵: matrix products
alone, which is what makes Iso-C cheap on a GPU (Horoi et al. 2026, arXiv:2607.03011).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from pydantic import FiniteFloat
from torch import Tensor

from .spectrum import normalised

Triple = tuple[FiniteFloat, FiniteFloat, FiniteFloat]

#: Schedules of (a, b, c) in σ ← aσ + bσ³ + cσ⁵, by name.
SCHEDULES: dict[str, tuple[Triple, ...]] = {
    # Jordan et al. 2024, "Muon": five times the same step, tuned for slope, never converges.
    "muon5": ((3.4445, -4.7750, 2.0315),) * 5,
    # You 2025, a five-step quintic; as in NVIDIA Emerging-Optimizers.
    "quintic5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al. 2025, "Polar Express" (arXiv:2505.16932), safety 1.02 folded in; as in dion.
    "polar_express5": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # The same paper's eight steps, the last of which has the fixed point 1 and may be repeated.
    "polar_express8": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
#: The classical quintic of order 3 with the fixed point 1.
POLISH: Triple = (1.875, -1.25, 0.375)


def newton_schulz(
    A: Tensor,
    coefficients: Sequence[Sequence[float]],
    *,
    norm_safety: float = 1.0,
    norm_eps: float = 0.0,
) -> Tensor:
    """Return the raw polynomial iteration on A (…, m, n): σ ← aσ + bσ³ + cσ⁵ for every triple.

    A is first divided by norm_safety·‖A‖_F + norm_eps, so that σ ≤ 1; zero stays zero. Half
    precision is upcast to float32, in which the result then is.
    """
    X = to_unit_norm(A, norm_safety=norm_safety, norm_eps=norm_eps)

    def iterate(X: Tensor) -> Tensor:
        for a, b, c in coefficients:
            X = newton_schulz_step(X, (a, b, c))
        return X

    return wide(X, iterate)


def to_unit_norm(A: Tensor, *, norm_safety: float = 1.0, norm_eps: float = 0.0) -> Tensor:
    """Return A / (norm_safety·‖A‖_F + norm_eps) of A (…, m, n), upcast; zero stays zero."""
    X, largest = normalised(upcast(A))
    frobenius = X.double().square().sum(dim=(-2, -1), keepdim=True).sqrt()
    norm = frobenius * norm_safety + norm_eps / largest.double()
    return X / torch.where(norm == 0, 1.0, norm).to(X.dtype)


def newton_schulz_step(X: Tensor, triple: Triple) -> Tensor:
    """Return aX + (bG + cG²)X, G = X Xᵀ, of wide X (…, r, n)."""
    a, b, c = triple
    G = X @ X.mT
    Y: Tensor = (b * G + c * (G @ G)) @ X
    return Y.add_(X, alpha=a)


def wide(X: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Return ``function`` of X turned wide, turned back: Gram matrices are then min(m, n) large."""
    return function(X.mT).mT if X.shape[-2] > X.shape[-1] else function(X)


def upcast(A: Tensor) -> Tensor:
    """Return A in float32, or float64 where it is that."""
    return A if A.dtype == torch.float64 else A.float()
