"""DARE: drop and rescale (Yu et al., ICML 2024, arXiv:2311.03099), alone and before TIES."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from ..kernels import random
from ..kernels.sparsify import Threshold
from ..tensors import TensorInfo
from .base import Context, DeltaStream, MergeMethod, OuterSettings, Requires
from .registry import register
from .ties import TIES


@register(
    "dare",
    paper="arXiv:2311.03099",
    formula="Δ̂ₜ = mₜ ∘ Δₜ / (1 − p),  mₜ ~ Bernoulli(1 − p);  τ = Σ wₜ Δ̂ₜ",
    cost="one pass over the models",
)
@dataclass(frozen=True, kw_only=True)
class DARE(MergeMethod):
    """Drop entries at random, rescale the rest, add."""

    drop_rate: Annotated[float, Field(ge=0, le=1, description="share of entries dropped")] = 0.1
    rescale: Annotated[bool, Field(description="divide what is kept by 1 − drop_rate")] = True

    requires = Requires(workers="sum", random=True)
    symmetries = frozenset({"scale", "odd"})

    def outer(self, workers: int) -> OuterSettings:
        """Return the authors' of arXiv:2607.03011."""
        return OuterSettings(lr=1.5)

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Drop and rescale: return the delta with dropped entries zero, any shape."""
        return drop(delta, info, ctx, self.drop_rate, rescale=self.rescale)


@register(
    "dare_ties",
    paper="arXiv:2311.03099",
    formula="TIES on Δ̂ₜ = mₜ ∘ Δₜ / (1 − p)",
    cost="as ties",
)
@dataclass(frozen=True, kw_only=True)
class DARETIES(TIES):
    """Drop entries at random, rescale the rest, merge by TIES."""

    drop_rate: Annotated[float, Field(ge=0, le=1, description="share of entries dropped")] = 0.1
    rescale: Annotated[bool, Field(description="divide what is kept by 1 − drop_rate")] = True

    symmetries = frozenset({"scale"})

    @property
    def requires(self) -> Requires:
        """As TIES', and random."""
        return replace(super().requires, random=True)

    def outer(self, workers: int) -> OuterSettings:
        """Return the authors' of arXiv:2607.03011."""
        return OuterSettings(lr=1.5)

    def measure(self, stream: DeltaStream) -> Threshold | None:
        """Return the trim threshold of the deltas after dropping."""
        return super().measure(stream.map(self._drop))

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Drop, rescale, trim: return the delta with the other entries zero, any shape."""
        return super().local(self._drop(delta, info, ctx), info, ctx)

    def _drop(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return drop(delta, info, ctx, self.drop_rate, rescale=self.rescale)


def drop(
    delta: Tensor, info: TensorInfo, ctx: Context, drop_rate: float, *, rescale: bool
) -> Tensor:
    """Return the delta with a share of its entries zero and the rest over 1 − drop_rate.

    The entries are those of ``ctx.mask`` (True keeps) or, without one, drawn by a counter keyed
    by (seed, round, worker, tensor name, index in the unsharded tensor).
    """
    divisor = 1 - drop_rate if rescale and drop_rate < 1 else 1.0
    if ctx.mask is not None:
        return torch.where(ctx.mask.view(delta.shape), delta, 0.0).div_(divisor)
    key = {"seed": ctx.seed, "round": ctx.round, "worker": ctx.worker}
    if delta.is_cuda and delta.dtype == torch.float32:
        from ..kernels import triton_ops  # importing triton takes a quarter of a second

        if triton_ops.AVAILABLE:  # one pass, where torch's operations take twenty
            return triton_ops.drop_and_rescale(
                delta, drop_rate, **key, name=info.name, offset=ctx.offset, divisor=divisor
            )
    kept = random.drop(delta, drop_rate, **key, name=info.name, offset=ctx.offset)
    return kept.div_(divisor) if divisor != 1.0 else kept
