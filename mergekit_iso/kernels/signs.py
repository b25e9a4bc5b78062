"""TIES' sign election and disjoint merge (Yadav et al. 2023, arXiv:2306.01708, section 3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def vote(deltas: Sequence[Tensor], *, by: str = "total") -> Tensor:
    """Return the elected sign of each entry, −1, 0 (a tie) or 1, in the deltas' shape and dtype.

    ``by="total"`` takes the sign of the sum, ``by="frequency"`` that of the sum of signs.
    """
    total = torch.zeros_like(deltas[0])
    for delta in deltas:
        total += delta.sign() if by == "frequency" else delta
    return total.sign()


def disjoint_merge(
    deltas: Sequence[Tensor],
    weights: Sequence[float],
    positive: Tensor,
    *,
    aggregate: str = "mean",
) -> tuple[Tensor, Tensor]:
    """Combine, entry by entry, only the deltas that agree with the elected sign.

    ``deltas`` are w_t Δ_t, all of one shape; ``positive`` (bool) says where the elected sign is
    +, everywhere else the negative entries take part. ``aggregate`` is ``sum`` (Σ w_t Δ_t),
    ``mean`` (that over Σ w_t of those taking part) or ``max`` (the largest in magnitude).
    Returns the result and Σ w_t of those taking part; entries without any are zero.
    """
    result = torch.zeros_like(deltas[0])
    share = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights, strict=True):
        agrees = torch.where(positive, delta > 0, delta < 0)
        chosen = torch.where(agrees, delta, 0.0)
        if aggregate == "max":
            result = torch.where(chosen.abs() > result.abs(), chosen, result)
        else:
            result += chosen
        share += agrees.to(share.dtype) * weight
    if aggregate == "mean":
        result /= torch.where(share == 0, 1.0, share)
    return result, share
