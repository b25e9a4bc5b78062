"""Averaging and Task Arithmetic (Ilharco et al., ICLR 2023, arXiv:2212.04089)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..tensors import TensorInfo
from .base import LINEAR, Context, MergeMethod, OuterSettings, weighted_mean
from .registry import register

_DILOCO = OuterSettings(lr=0.7, momentum=0.9)  # Douillard et al., arXiv:2311.08105, section 3


@register(
    "average",
    paper="arXiv:2203.05482",
    formula="τ = Σ wₜ Δₜ / Σ wₜ",
    cost="one pass over the models",
)
@dataclass(frozen=True, kw_only=True)
class Average(MergeMethod):
    """The mean of the models (model soups; DiLoCo's own aggregation)."""

    symmetries = LINEAR

    def outer(self, workers: int) -> OuterSettings:
        """Return DiLoCo's own."""
        return _DILOCO

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Return the weighted sum over the sum of weights, any shape."""
        return weighted_mean(total, info, ctx)


@register(
    "task_arithmetic",
    paper="arXiv:2212.04089",
    formula="τ = Σ wₜ Δₜ",
    cost="one pass over the models",
)
@dataclass(frozen=True, kw_only=True)
class TaskArithmetic(MergeMethod):
    """The sum of the task vectors."""

    symmetries = LINEAR

    def outer(self, workers: int) -> OuterSettings:
        """Return DiLoCo's own."""
        return _DILOCO
