"""TSV-Merge: low-rank task matrices, whitened against each other.

Gargiulo et al., "Task Singular Vectors", CVPR 2025, arXiv:2412.00081, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..kernels.leading import leading
from ..kernels.polar import Exact, Polar, polar_factor, rank_cutoff
from ..tensors import TensorInfo
from .base import (
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


@register(
    "tsv",
    paper="arXiv:2412.00081",
    formula="wₜ Δₜ ≈ Uₜ Σₜ Vₜᵀ (rank k);  τ = polar[U₁ … U_T] · diag(Σ₁ … Σ_T) · polar[V₁ … V_T]ᵀ",
    cost="T + 2 SVDs of every matrix; all T deltas of a matrix at once",
)
@dataclass(frozen=True, kw_only=True)
class TSV(MergeMethod):
    """Keep each task's leading singular vectors and decorrelate them; singular values stay."""

    rank_fraction: Annotated[
        float | None,
        Field(gt=0, le=1, description="share of min(m, n) kept per task; None is 1/T"),
    ] = None
    min_rank: Annotated[int, Field(ge=0, description="least rank kept per task")] = 0
    polar: Polar = Exact()
    rank_tolerance: Annotated[
        float | None,
        Field(ge=0, lt=1, description="drop σ ≤ this·σ₁ of each delta; None drops null ones"),
    ] = None

    requires = Requires(workers="each", unit="matrix", wire="bfloat16")

    @property
    def symmetries(self) -> frozenset[Symmetry]:
        """One task comes back unchanged where all its directions are kept."""
        all_kept = self.rank_fraction in (None, 1.0) and not self.rank_tolerance
        return TRANSPOSABLE | {"identity"} if all_kept else TRANSPOSABLE

    def rank(self, r: int, tasks: int) -> int:
        """Return k, the singular triplets kept per task of a matrix with min(m, n) = r."""
        # The authors' product of floats: at T = 49 it is one less than r // T for multiples of 49.
        k = int(r * (1 / tasks if self.rank_fraction is None else self.rank_fraction))
        return min(r, max(k, self.min_rank))

    def outer(self, workers: int) -> OuterSettings:
        """Return the authors' of arXiv:2607.03011, who add the deltas up where a loop averages."""
        return OuterSettings(lr=0.6 * workers)

    def check(self, infos: Sequence[TensorInfo], weights: Sequence[float]) -> list[str]:
        """Warn of matrices so small that no task keeps a direction (T > r)."""
        tasks = sum(w != 0 for w in weights)
        lost = [
            i.name
            for i in infos
            if tasks and i.spectral and i.numel and self.rank(min(i.shape[-2:]), tasks) == 0
        ]
        if not lost:
            return []
        names = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        return [
            f"tsv keeps no direction per task of {tasks} in matrices too small for its rank, so "
            f"these stay at the base: {names} (min_rank=1 keeps one per task)"
        ]

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        """Return τ of deltas (…, m, n); the weighted mean where the tensor is no matrix."""
        if not info.spectral:
            return weighted_mean(weighted_sum(deltas, ctx.weights), info, ctx)
        return matrix_by_matrix(self._merge, deltas, ctx)

    def _merge(self, deltas: Sequence[Tensor], ctx: Context) -> Tensor:
        k = self.rank(min(deltas[0].shape), len(deltas))
        rtol = rank_cutoff(self.polar, self.rank_tolerance, deltas[0].dtype)
        parts = [leading(w * D, k, rtol) for w, D in zip(ctx.weights, deltas, strict=True)]
        s = torch.cat([p.sigma for p in parts])
        if len(s) == 0:
            return torch.zeros_like(deltas[0])
        U_perp = polar_factor(torch.cat([p.U for p in parts], dim=1), self.polar)
        V_perp_h = polar_factor(torch.cat([p.Vh for p in parts], dim=0), self.polar)
        return (U_perp * s) @ V_perp_h
