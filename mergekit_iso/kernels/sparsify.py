"""Exact selection by magnitude over tensors that come in chunks, trimming, and dropping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_DIGIT = 16


@dataclass(frozen=True)
class Threshold:
    """Which entries a trim keeps: |x| > value, and of those equal to it the ones up to an index.

    ``last_tied`` is the flat index, in the unsharded tensor, of the last entry with
    |x| = value that is kept; None keeps all of them.
    """

    value: float
    last_tied: int | None = None


def kth_magnitude(chunks: Iterable[Tensor], k: int, *, dtype: torch.dtype = torch.float32) -> float:
    """Return the k-th smallest |x| (k from 1) over all chunks, exactly.

    A radix selection on the float bits, whose order as integers is the order of magnitudes:
    a histogram of the leading 16 bits of |x| finds the bin of the k-th, the next pass looks
    only at that bin's members, and so on: two passes over ``chunks`` in float32, four in
    float64. Nothing but one histogram is held. Chunks: any shape, no NaN, of ``dtype`` or
    narrower; they are iterated several times. Raises ValueError if k is not within the count.
    """
    key_type = torch.int64 if dtype == torch.float64 else torch.int32
    bits = 8 * dtype.itemsize
    prefix = 0
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        histogram = torch.zeros(1 << _DIGIT, dtype=torch.int64)
        for chunk in chunks:
            keys = chunk.reshape(-1).to(dtype).abs().view(key_type)
            if shift < bits - _DIGIT:
                keys = keys[(keys >> (shift + _DIGIT)) == prefix]
            digits = ((keys >> shift) & ((1 << _DIGIT) - 1)).to(torch.int64)
            histogram += torch.bincount(digits, minlength=1 << _DIGIT).cpu()
        below = histogram.cumsum(0)
        if not 1 <= k <= int(below[-1]):
            raise ValueError(f"no {k}-th magnitude among {int(below[-1])} entries")
        digit = int(torch.searchsorted(below, k))
        k -= int(below[digit - 1]) if digit else 0
        prefix = (prefix << _DIGIT) | digit
    return float(torch.tensor([prefix], dtype=key_type).view(dtype))


def largest_threshold(
    chunks: Iterable[Tensor], keep: int, count: int, *, dtype: torch.dtype = torch.float32
) -> Threshold:
    """Return the threshold that keeps exactly ``keep`` of ``count`` entries, the largest ones.

    Of entries tied at the threshold those with the lowest flat index are kept. ``chunks`` are
    consecutive pieces of one tensor, iterated several times; ``keep`` is from 1 to ``count``.
    """
    value = kth_magnitude(chunks, count - keep + 1, dtype=dtype)
    free = keep - sum(int((chunk.abs() > value).sum()) for chunk in chunks)
    offset = 0
    for chunk in chunks:
        tied = (chunk.reshape(-1).abs() == value).nonzero().reshape(-1)
        if len(tied) >= free:
            return Threshold(value, offset + int(tied[free - 1]))
        free -= len(tied)
        offset += chunk.numel()
    raise ValueError("the chunks changed between two passes over them")


def trim(x: Tensor, threshold: Threshold, offset: int = 0) -> Tensor:
    """Return ``x`` with the entries below the threshold set to zero; same shape and dtype.

    ``offset`` is the flat index of x's first element in the tensor the threshold is of.
    """
    magnitude = x.abs()
    if x.dtype == torch.float32 and torch.tensor(threshold.value).item() != threshold.value:
        magnitude = magnitude.double()  # a threshold found among float64 entries
    if threshold.last_tied is None:
        keep = magnitude >= threshold.value
    else:
        index = torch.arange(offset, offset + x.numel(), device=x.device).view(x.shape)
        keep = magnitude > threshold.value
        keep |= (magnitude == threshold.value) & (index <= threshold.last_tied)
    return torch.where(keep, x, 0.0)
