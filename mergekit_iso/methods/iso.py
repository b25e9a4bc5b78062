"""Isotropic merging: Iso-C and Iso-CTS (Marczak et al., ICML 2025, arXiv:2502.04959).

On an averaged pseudo-gradient Iso-C is the aggregation of IsoLoCo (Horoi et al.,
arXiv:2607.03011), whose fast form replaces the SVD by Newton–Schulz iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..errors import MethodError
from ..kernels.leading import leading, leading_beyond
from ..kernels.polar import (
    Exact,
    Fast,
    NewtonSchulz,
    Polar,
    decompose,
    polar_factor,
    rank_cutoff,
)
from ..kernels.spectrum import SVD, Norm, flatten, rms_singular_value
from ..tensors import TensorInfo
from .base import (
    SPECTRAL,
    TRANSPOSABLE,
    Context,
    MergeMethod,
    OuterSettings,
    Requires,
    Symmetry,
    matrix_by_matrix,
    weighted_mean,
    weighted_sum,
)
from .registry import register

NormOption = Annotated[
    Norm,
    Field(description="σ̄: mean singular value (nuclear), or ‖A‖_F/√r (frobenius, the fast proxy)"),
]
PowerOption = Annotated[
    float, Field(ge=0, le=1, description="σ ∝ σ^power at the same norm: 0 flat, 1 untouched")
]
RankTolerance = Annotated[
    float | None,
    Field(ge=0, lt=1, description="drop σ ≤ this·σ₁, as for rounding noise; None drops null ones"),
]


@register(
    "iso_c_fast",
    paper="arXiv:2607.03011",
    formula="as iso_c, U Vᵀ by the fastest kernel that meets a measured tolerance",
    cost="about ten Newton–Schulz steps of every matrix, an SVD where they do not converge",
    summary="Iso-C by the fastest kernel within a tolerance.",
    polar=Fast(),
)
@register(
    "iso_c_ns",
    paper="arXiv:2607.03011",
    formula="as iso_c, U Vᵀ by Newton–Schulz iterations, σ̄ = ⟨U Vᵀ, A⟩/r",
    cost="ten Newton–Schulz steps of every matrix (matrix products only)",
    summary="Iso-C by Newton–Schulz iterations, as IsoLoCo's fast form.",
    polar=NewtonSchulz(),
)
@register(
    "iso_c",
    paper="arXiv:2502.04959",
    formula="A = Σ wₜ Δₜ = U Σ Vᵀ;  τ = σ̄ U Vᵀ,  σ̄ = mean of all min(m, n) singular values",
    cost="one SVD of every matrix; two live deltas",
)
@dataclass(frozen=True, kw_only=True)
class IsoC(MergeMethod):
    """Replace all singular values of the summed delta by their mean."""

    polar: Polar = Exact()
    norm: NormOption = "nuclear"
    power: PowerOption = 0.0
    rank_tolerance: RankTolerance = None

    name = "iso_c"
    requires = Requires(workers="sum", unit="matrix", wire="bfloat16")

    @property
    def symmetries(self) -> frozenset[Symmetry]:
        """A flat spectrum stays as it is where the polar factor is exact."""
        flat = isinstance(self.polar, Exact) and not self.power and not self.rank_tolerance
        return TRANSPOSABLE | {"idempotent"} if flat else TRANSPOSABLE

    def __post_init__(self) -> None:
        super().__post_init__()
        wants_spectrum = self.power > 0 or self.rank_tolerance is not None
        if wants_spectrum and isinstance(self.polar, NewtonSchulz):
            option = "power" if self.power else "rank_tolerance"
            raise MethodError(
                f"option {option} of IsoC needs singular values, which Newton–Schulz has not",
                hint="use polar=exact",
            )

    def outer(self, workers: int) -> OuterSettings:
        """Return IsoLoCo's (Horoi et al., arXiv:2607.03011)."""
        return OuterSettings(lr=1.8, momentum=0.8)

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Return σ̄ U Vᵀ of A (…, m, n); the weighted mean where the tensor is no matrix."""
        if not info.spectral:
            return weighted_mean(total, info, ctx)
        if self.power or self.rank_tolerance is not None:
            return matrix_by_matrix(lambda A, _: self._by_svd(A[0]), [total], ctx)
        factor, mean, residual = decompose(total, self.polar)
        ctx.note("residual", residual)
        level = mean if self.norm == "nuclear" else rms_singular_value(total)
        return factor.mul_(level[..., None, None])

    def _by_svd(self, A: Tensor) -> Tensor:
        U, sigma, Vh = leading(A, rtol=rank_cutoff(self.polar, self.rank_tolerance, A.dtype))
        return (U * flatten(sigma, min(A.shape), self.norm, self.power)) @ Vh


@register(
    "iso_cts",
    paper="arXiv:2502.04959",
    formula="U* = [U₁ … U_T, U_c], Uₜ the first n of (I − U_c U_cᵀ) wₜ Δₜ, U_c the first c of A;  "
    "τ = σ̄* polar(U*) polar(V*)ᵀ",
    cost="T + 3 SVDs of every matrix; all T deltas of a matrix at once",
)
@dataclass(frozen=True, kw_only=True)
class IsoCTS(MergeMethod):
    """Iso-C on a common subspace joined by each task's own leading directions."""

    common_fraction: Annotated[
        float, Field(ge=0, le=1, description="share of min(m, n) in the common subspace")
    ] = 0.8
    polar: Polar = Exact()
    norm: NormOption = "nuclear"
    power: PowerOption = 0.0
    rank_tolerance: RankTolerance = None

    requires = Requires(workers="each", unit="matrix", wire="bfloat16")
    symmetries = SPECTRAL

    def split(self, r: int, tasks: int) -> tuple[int, int]:
        """Return (c, n): common directions, and directions of each task's own, c + n·T = r."""
        c = int(r * self.common_fraction)
        n = round((r - c) / tasks)  # half to even, as the authors'
        return r - n * tasks, n

    def outer(self, workers: int) -> OuterSettings:
        """Return the authors' of arXiv:2607.03011."""
        return OuterSettings(lr=3.1)

    def check(self, infos: Sequence[TensorInfo], weights: Sequence[float]) -> list[str]:
        """Refuse a matrix too small for one direction per task."""
        tasks = sum(w != 0 for w in weights)
        for info in infos if tasks else ():
            if info.spectral and info.numel and self.split(min(info.shape[-2:]), tasks)[0] < 0:
                raise MethodError(
                    f"iso_cts with common_fraction={self.common_fraction:g} asks for more than the "
                    f"{min(info.shape[-2:])} directions of {info.name} from {tasks} tasks",
                    hint="raise common_fraction, or exclude the tensor",
                )
        return []

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        """Return τ of deltas (…, m, n); the weighted mean where the tensor is no matrix."""
        if not info.spectral:
            return weighted_mean(weighted_sum(deltas, ctx.weights), info, ctx)
        return matrix_by_matrix(self._merge, deltas, ctx)

    def _merge(self, deltas: Sequence[Tensor], ctx: Context) -> Tensor:
        r = min(deltas[0].shape)
        c, n = self.split(r, len(deltas))
        A = weighted_sum(deltas, ctx.weights)
        rtol = rank_cutoff(self.polar, self.rank_tolerance, A.dtype)
        common = leading(A, c, rtol)
        own: list[SVD] = []
        if n:
            weighted = [w * D for w, D in zip(ctx.weights, deltas, strict=True)]
            own = leading_beyond(common.U, weighted, n, rtol)
        s = torch.cat([p.sigma for p in (common, *own)])
        if len(s) == 0:
            return torch.zeros_like(A)
        # U_c is orthogonal to every Uₜ, so polar(U*) leaves it alone; V_c is not to the Vₜ.
        U_own = [polar_factor(torch.cat([p.U for p in own], dim=1), self.polar)] if own else []
        U_perp = torch.cat([common.U, *U_own], dim=1)
        V_perp_h = polar_factor(torch.cat([p.Vh for p in (common, *own)], dim=0), self.polar)
        return (U_perp * flatten(s, r, self.norm, self.power)) @ V_perp_h
