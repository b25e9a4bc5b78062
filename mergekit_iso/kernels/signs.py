"""TIES' sign election and disjoint merge (Yadav et al. 2023, arXiv:2306.01708, section 3).

Signs are bits that are flipped, not masks that select: a selection costs a CPU, whose branches
cannot guess it, many times as much.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vote(deltas: Sequence[Tensor], *, by: str = "total") -> Tensor:
    """Return a number per entry whose sign is the elected one, in the deltas' shape and dtype.

    ``by="total"`` sums the values, ``by="frequency"`` their signs; 0 is a tie.
    """
    total: Tensor | None = None
    for delta in deltas:
        ballot = delta.sign() if by == "frequency" else delta
        total = ballot.clone() if total is None else total.add_(ballot)
    if total is None:
        raise ValueError("an election needs at least one delta")
    return total


def disjoint_merge(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    votes: Tensor,
    *,
    aggregate: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Combine, entry by entry, only the deltas that agree with the elected sign.

    ``deltas`` are w_t Δ_t, all of one shape, float32 or float64; where ``votes`` (same shape and
    dtype) are 0 or more the positive entries take part, elsewhere the negative ones.
    ``aggregate`` is ``sum`` (Σ w_t Δ_t), ``mean`` (that over Σ w_t of those taking part) or
    ``max`` (the largest in magnitude). Returns the result and Σ w_t of those taking part;
    entries without any are zero.
    """
    integers = torch.int64 if votes.dtype == torch.float64 else torch.int32
    signs = votes.view(integers) & torch.iinfo(integers).min
    result, share = torch.zeros_like(votes), torch.zeros_like(votes)
    agreeing = torch.empty_like(votes)
    for delta, weight in zip(deltas, weights, strict=True):
        torch.bitwise_xor(delta.view(integers), signs, out=agreeing.view(integers))
        agreeing.clamp_(min=0)
        if aggregate == "max":
            torch.maximum(result, agreeing, out=result)
        else:
            result += agreeing
        share.add_(agreeing.sign_(), alpha=weight)
    if aggregate == "mean":
        smallest = torch.finfo(share.dtype).tiny * torch.finfo(share.dtype).eps
        result /= torch.clamp(share, min=smallest, out=agreeing)
    result.view(integers).bitwise_xor_(signs)
    return result, share
