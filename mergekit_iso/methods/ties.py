"""TIES-Merging: trim, elect sign, disjoint merge (Yadav et al., NeurIPS 2023, arXiv:2306.01708)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from ..errors import MethodError
from ..kernels import compiled
from ..kernels.signs import disjoint_merge, vote
from ..kernels.sparsify import Threshold, kth_magnitude, largest_threshold, trim
from ..tensors import TensorInfo
from .base import Context, DeltaStream, MergeMethod, OuterSettings, Requires
from .registry import register


@register(
    "ties",
    paper="arXiv:2306.01708",
    formula="γ = sign Σ wₜ trim(Δₜ);  τ = mean of the trimmed wₜ Δₜ whose sign is γ",
    cost="two more passes over each model for its threshold, one if votes cancel",
)
@dataclass(frozen=True, kw_only=True)
class TIES(MergeMethod):
    """Trim small entries, elect a sign for each, merge what agrees with it."""

    density: Annotated[float, Field(ge=0, le=1, description="share of entries kept per model")] = (
        0.2
    )
    scope: Annotated[
        Literal["model", "tensor"],
        Field(description="trim over the whole model (the authors') or within each tensor"),
    ] = "model"
    sign: Annotated[
        Literal["total", "frequency"],
        Field(description="elect by the sum of values (the authors') or the count of signs"),
    ] = "total"
    aggregate: Annotated[
        Literal["mean", "sum", "max"], Field(description="how agreeing entries are combined")
    ] = "mean"

    symmetries = frozenset({"permutation", "scale"})

    @property
    def requires(self) -> Requires:
        """Thresholds over the chosen scope; over the model, also the majority sign."""
        if self.scope == "tensor":
            return Requires(workers="each", stats=("worker_tensor",))
        return Requires(workers="each", stats=("worker_model", "merged_model"))

    def outer(self, workers: int) -> OuterSettings:
        """Return the authors' of arXiv:2607.03011."""
        return OuterSettings(lr=0.7)

    def measure(self, stream: DeltaStream) -> Threshold | None:
        """Return the trim threshold over the stream; None keeps everything or nothing.

        Over the model the authors keep every entry at or above the k-th smallest magnitude,
        k = d − int(d·density), ties included; within a tensor exactly int(density·n) entries.
        """
        if self.density in (0.0, 1.0) or stream.numel == 0:
            return None
        chunks = _Chunks(stream)
        if self.scope == "tensor":
            keep = int(self.density * stream.numel)
            if keep == 0:
                return Threshold(float("inf"))
            return largest_threshold(chunks, keep, stream.numel, dtype=stream.dtype)
        k = stream.numel - int(stream.numel * self.density)
        return Threshold(kth_magnitude(chunks, k, dtype=stream.dtype))

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Trim: return the delta with its small entries set to zero, any shape."""
        if self.density == 0:
            return torch.zeros_like(delta)
        return delta if ctx.stats is None else trim(delta, ctx.stats, ctx.offset)

    def partial(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> int:
        """Return the net vote of a unit: entries elected + less those elected −."""
        votes = vote(_weighted(deltas, ctx), by=self.sign)
        return int(votes.sign_().sum(dtype=torch.float64))

    def elect(self, partials: Iterable[int]) -> int:
        """Return the majority sign of the merged model, for entries whose own vote is a tie."""
        net = sum(partials)
        return (net > 0) - (net < 0)

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        """Elect and merge disjointly; a tie takes the majority, within a tensor +."""
        weighted = _weighted(deltas, ctx)
        default = (self.sign, self.aggregate) == ("total", "mean") and min(ctx.weights) > 0
        if default and compiled.worthwhile(deltas[0]):
            merged = torch.empty_like(deltas[0], memory_format=torch.contiguous_format)
            cancelled = compiled.elect_and_merge(weighted, ctx.weights, merged)
            if self.scope == "tensor" or not cancelled:
                return merged
        votes = vote(weighted, by=self.sign)
        merged, share = disjoint_merge(weighted, ctx.weights, votes, aggregate=self.aggregate)
        if self.scope == "model":
            self._settle_ties(merged, share, weighted, votes, ctx)
        if self.aggregate == "mean" and min(ctx.weights) < 0:
            short = (share <= 0) & (merged != 0)
            if bool(short.any()):
                raise MethodError(
                    f"the weights of the models that agree sum to 0 or less at {int(short.sum())} "
                    f"entries of {info.name}, so their mean is not defined",
                    hint="give positive weights, or aggregate=sum",
                )
        return merged

    def _settle_ties(
        self,
        merged: Tensor,
        share: Tensor,
        weighted: Sequence[Tensor],
        votes: Tensor,
        ctx: Context,
    ) -> None:
        """Redo the entries whose votes cancel, unless the majority is + as they took it."""
        if min(ctx.weights) > 0:
            # They are positive, so their sum shows without a mask whether there are any.
            tied = torch.eq(votes, 0, out=torch.empty_like(votes))
            if float(torch.dot(tied.reshape(-1), merged.reshape(-1))) == 0:
                return
        cancelled = (votes == 0) & (merged != 0)
        if not bool(cancelled.any()) or ctx.elected() == 1:
            return
        merged[cancelled], share[cancelled] = disjoint_merge(
            [d[cancelled] for d in weighted],
            ctx.weights,
            votes[cancelled] - 1,
            aggregate=self.aggregate,
        )


@dataclass(frozen=True)
class _Chunks:
    """The tensors of a stream without their infos, iterable more than once."""

    stream: DeltaStream

    def __iter__(self) -> Iterator[Tensor]:
        return (chunk for _, chunk, _ in self.stream)


def _weighted(deltas: Sequence[Tensor], ctx: Context) -> list[Tensor]:
    return [d if w == 1.0 else d * w for d, w in zip(deltas, ctx.weights, strict=True)]
