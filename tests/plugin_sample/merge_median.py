"""A merge method in a package of its own: the median of the models, entry by entry."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mergekit_iso.methods import Context, MergeMethod, Requires, register
from mergekit_iso.tensors import TensorInfo


@register("median", formula="τ = median of the wₜ Δₜ", cost="one pass over the models")
@dataclass(frozen=True, kw_only=True)
class Median(MergeMethod):
    """The median of the models, entry by entry (of two middle ones the lower)."""

    requires = Requires(workers="each")
    symmetries = frozenset({"permutation", "scale", "transpose", "idempotent", "identity"})

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        """Return the median of deltas of any shape."""
        weighted = [d * w for d, w in zip(deltas, ctx.weights, strict=True)]
        return torch.stack(weighted).median(dim=0).values
