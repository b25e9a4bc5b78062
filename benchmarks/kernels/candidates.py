"""The ways to compute Iso-C that are compared: the SVD, every polar policy, and what fails."""

from __future__ import annotations

from collections.abc import Callable
from math import nan, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from mergekit_iso.kernels import polar
from mergekit_iso.kernels.newton_schulz import SCHEDULES
from mergekit_iso.kernels.polar import Fast, NewtonSchulz, PolarPolicy

BASELINE = "svd"


class IsoC(NamedTuple):
    """Iso-C of one matrix.

    out (m, n): the result.
    scale: the mean singular value in it.
    residual: what the policy reports of its own error, where it does.
    notes: whatever else the policy reports, such as a fallback.
    """

    out: Tensor
    scale: float
    residual: float | None
    notes: dict[str, float]


_KNOWN = {"factor", "scale", "residual"}

Candidate = Callable[[Tensor], IsoC]


def candidates() -> dict[str, Candidate]:
    """Return every candidate by label: the baseline first, then the library's policies."""
    policies: dict[str, PolarPolicy] = {}
    for name, policy in polar.POLICIES.items():
        if policy is NewtonSchulz:
            policies |= {preset: NewtonSchulz(preset=preset) for preset in SCHEDULES}
        elif policy is Fast:
            policies |= {f"fast({t:g})": Fast(tolerance=t) for t in (1e-3, 2e-2)}
        else:
            policies[name] = policy()
    by_policy = {label: _by_policy(policy) for label, policy in policies.items()}
    return {BASELINE: by_svd, "eigh64": by_eigh64, **by_policy}


def failing() -> dict[str, Candidate]:
    """Return candidates that are measured only to show why they are not used."""
    return {
        "eigh32": by_eigh32,
        "bf16_gram": by_bf16_gram,
        "row_preconditioned": by_row_preconditioning,
        "rms_scale": by_rms_scale,
    }


def _by_policy(policy: PolarPolicy) -> Candidate:
    def iso_c(A: Tensor) -> IsoC:
        try:
            result = polar.decompose(A, policy)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            return IsoC(A * nan, nan, nan, {})
        fields = result._asdict()
        notes = {name: float(fields[name]) for name in fields.keys() - _KNOWN}
        out = result.factor * result.scale
        return IsoC(out, float(result.scale), float(result.residual), notes)

    return iso_c


def by_svd(A: Tensor) -> IsoC:
    """Iso-C as its authors write it: float32 SVD, no direction dropped."""
    U, sigma, Vh = torch.linalg.svd(A, full_matrices=False)
    scale = sigma.mean()
    return IsoC(scale * (U @ Vh), float(scale), None, {})


def by_eigh64(A: Tensor) -> IsoC:
    """Eigendecomposition of the float64 Gram matrix of the smaller side."""
    return _by_eigh(A, A.double())


def by_eigh32(A: Tensor) -> IsoC:
    """Eigendecomposition of the float32 Gram matrix: its rounding is eps·condition²."""
    return _by_eigh(A, A)


def _by_eigh(A: Tensor, X: Tensor) -> IsoC:
    if A.shape[0] > A.shape[1]:
        out, scale, residual, notes = _by_eigh(A.T, X.T)
        return IsoC(out.T, scale, residual, notes)
    values, Q = torch.linalg.eigh(X @ X.T)
    sigma = values.clamp_min(0).sqrt()
    kept = sigma > sqrt(A.shape[1]) * torch.finfo(torch.float32).eps / 2 * sigma[-1]
    inverse = torch.where(kept, 1 / torch.where(kept, sigma, 1.0), 0.0)
    scale = (sigma * kept).mean()
    out = ((scale * Q * inverse) @ Q.T).float() @ A
    return IsoC(out, float(scale), None, {})


def by_bf16_gram(A: Tensor) -> IsoC:
    """Polar Express on the Gram matrix alone in bfloat16, one product with A at the end."""
    X = A if A.shape[0] <= A.shape[1] else A.T
    X = X / X.norm()
    R = (X @ X.T).bfloat16()
    Q = torch.eye(len(R), dtype=R.dtype)
    for a, b, c in SCHEDULES["polar_express8"]:
        Z = b * R + c * (R @ R)
        Z.diagonal().add_(a)
        Q, R = Z @ Q, Z @ R @ Z
    return _with_inner_product(A, Q.float() @ X)


def by_row_preconditioning(A: Tensor) -> IsoC:
    """Rows scaled by the Gram matrix's row sums (AOL, Turbo-Muon), then Polar Express."""
    X = A if A.shape[0] <= A.shape[1] else A.T
    rows = (X @ X.T).abs().sum(1).rsqrt()
    return _with_inner_product(A, NewtonSchulz().decompose(rows[:, None] * X).factor)


def _with_inner_product(A: Tensor, P: Tensor) -> IsoC:
    P = P if P.shape == A.shape else P.T
    scale = (P * A).sum(dtype=torch.float64).float() / min(A.shape)
    return IsoC(P * scale, float(scale), None, {})


def by_rms_scale(A: Tensor) -> IsoC:
    """The exact factor with ‖A‖_F/√r instead of the mean singular value."""
    U, _, Vh = torch.linalg.svd(A, full_matrices=False)
    scale = A.norm() / sqrt(min(A.shape))
    return IsoC(scale * (U @ Vh), float(scale), None, {})
