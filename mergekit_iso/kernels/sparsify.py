"""Exact selection by magnitude over tensors that come in chunks, and trimming."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import compiled

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY: dict[torch.dtype, type[np.floating[Any]]] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
}

# Entries held of the first sample, and of those between the two values that enclose the k-th.
_SAMPLED = 1 << 18
_HELD = 1 << 24
# The two values are this many standard deviations of a random sample from the k-th. Further
# apart they enclose more entries, closer together they miss it more often: a pass more.
_SPREAD = 4.0
# Elements worked on at once on the CPU: what is between two steps stays in its cache.
_BLOCK = 1 << 17


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

    A first pass over ``chunks`` samples them at a fixed stride; two of the sampled values
    enclose the k-th in all likelihood. A second pass counts the entries below and holds those
    between, among which the k-th is selected. Where the values turn out not to enclose it, or
    more entries are between than can be held, further passes narrow down what is left: the
    result is exact for any input, only the number of passes depends on it. Up to 2¹⁸ entries
    take one pass, up to a billion two; at most 2²⁴ entries are held (128 MB at the peak in
    float32, twice that in float64). Chunks: any shape, no NaN, of ``dtype`` or narrower; they
    are iterated several times. Raises ValueError if k is not within the count.
    """
    return _find(chunks, k, dtype).value


def largest_threshold(
    chunks: Iterable[Tensor], keep: int, count: int, *, dtype: torch.dtype = torch.float32
) -> Threshold:
    """Return the threshold that keeps exactly ``keep`` of ``count`` entries, the largest ones.

    Of entries tied at the threshold those with the lowest flat index are kept, which takes one
    more pass than :func:`kth_magnitude` if not all of them are. ``chunks`` are consecutive
    pieces of one tensor, iterated several times; ``keep`` is from 1 to ``count``.
    """
    found = _find(chunks, count - keep + 1, dtype)
    free = keep - (count - found.below - found.equal)
    if free == found.equal:
        return Threshold(found.value)
    offset = 0
    for chunk in chunks:
        tied = (chunk.reshape(-1).abs() == found.value).nonzero().reshape(-1)
        if len(tied) >= free:
            return Threshold(found.value, offset + int(tied[free - 1]))
        free -= len(tied)
        offset += chunk.numel()
    raise ValueError("the chunks changed between two passes over them")


def trim(x: Tensor, threshold: Threshold, offset: int = 0) -> Tensor:
    """Return ``x`` with the entries below the threshold set to zero; same shape and dtype.

    ``offset`` is the flat index of x's first element in the tensor the threshold is of.
    """
    value = float(_NUMPY[x.dtype](threshold.value))
    if value < threshold.value:  # found among float64 entries, rounded down by x's dtype
        value = _next(value, inf, x.dtype)
    if threshold.last_tied is None:
        # What exceeds the next smaller number is what reaches the value.
        return torch.nn.functional.hardshrink(x, _next(value, -inf, x.dtype))
    index = torch.arange(offset, offset + x.numel(), device=x.device).view(x.shape)
    magnitude = x.abs()
    keep = magnitude > value
    keep |= (magnitude == value) & (index <= threshold.last_tied)
    return torch.where(keep, x, 0.0)


@dataclass(frozen=True)
class _Found:
    """The k-th magnitude, how many entries are smaller, and how many equal to it."""

    value: float
    below: int
    equal: int


class _Thinned:
    """Every ``stride``-th of the magnitudes added: the least power of 3 that holds ``limit``.

    Which ones does not depend on chunks. Widths of layers are multiples of powers of 2, so
    that powers of 3 visit all their columns.
    """

    def __init__(self, limit: int, dtype: torch.dtype) -> None:
        self.stride = 1
        self.count = 0
        self._limit = limit
        self._dtype = dtype
        self._pieces: list[Array] = []
        self._held = 0

    def add(self, x: Tensor | Array) -> None:
        piece = x[-self.count % self.stride :: self.stride]
        if isinstance(piece, Tensor):
            piece = piece.to(self._dtype).abs().cpu().numpy()
        self.count += len(x)
        self._pieces.append(piece)
        self._held += len(piece)
        while self._held > self._limit:
            self._pieces = [self.values()[::3].copy()]
            self._held = len(self._pieces[0])
            self.stride *= 3

    def values(self) -> Array:
        return np.concatenate(self._pieces)

    def kth(self, k: int) -> _Found:
        values = self.values()
        value = np.partition(values, k - 1)[k - 1]
        below, equal = (np.count_nonzero(found) for found in (values < value, values == value))
        return _Found(float(value), int(below), int(equal))

    def around(self, k: int, low: float, high: float) -> tuple[float, float]:
        """Return values that enclose the k-th in all likelihood; ``low``, ``high`` do for sure."""
        values = self.values()
        share = k / self.count
        spread = _SPREAD * sqrt(len(values) * share * (1 - share)) + 2
        first = int(share * len(values) - spread)
        last = ceil(share * len(values) + spread)
        places = [place for place in (first, last) if 0 <= place < len(values)]
        values.partition(places)
        return (
            float(values[first]) if first in places else low,
            float(values[last]) if last in places else high,
        )


@dataclass(frozen=True)
class _Scan:
    """How many magnitudes are below, at and between two values, with those between thinned."""

    below: int
    at_low: int
    between: _Thinned
    at_high: int


def _find(chunks: Iterable[Tensor], k: int, dtype: torch.dtype) -> _Found:
    sample = _Thinned(_SAMPLED, dtype)
    for chunk in chunks:
        sample.add(chunk.reshape(-1))
    if not 1 <= k <= sample.count:
        raise ValueError(f"no {k}-th magnitude among {sample.count} entries")
    if sample.stride == 1:
        return sample.kth(k)
    low, high = 0.0, inf  # these enclose the k-th for sure
    left, right = sample.around(k, low, high)
    while True:
        scan = _scan(chunks, left, right, dtype)
        rank = k - scan.below
        if rank <= 0:
            high = _next(left, -inf, dtype)
            left, right = low, high
            continue
        if rank <= scan.at_low:
            return _Found(left, scan.below, scan.at_low)
        rank -= scan.at_low
        if rank <= scan.between.count:
            if scan.between.stride == 1:
                found = scan.between.kth(rank)
                return _Found(found.value, found.below + scan.below + scan.at_low, found.equal)
            low, high = left, right
            left, right = scan.between.around(rank, low, high)
            continue
        rank -= scan.between.count
        if rank <= scan.at_high:
            return _Found(right, k - rank, scan.at_high)
        low = _next(right, inf, dtype)
        left, right = low, high


def _scan(chunks: Iterable[Tensor], left: float, right: float, dtype: torch.dtype) -> _Scan:
    below = at_low = at_high = 0
    between = _Thinned(_HELD, dtype)
    within = _Within(left, right, dtype)
    for chunk in chunks:
        flat = chunk.reshape(-1).to(dtype)
        on_cpu = flat.device.type == "cpu"
        for block in torch.split(flat, _BLOCK) if on_cpu else (flat,):
            smaller, inside = within.on_cpu(block) if on_cpu else within.elsewhere(block)
            below += smaller
            lows, highs = inside == left, inside == right
            at_low += int(np.count_nonzero(lows))
            if left != right:
                at_high += int(np.count_nonzero(highs))
            between.add(inside[~(lows | highs)])
    return _Scan(below, at_low, between, at_high)


class _Within:
    """Counts the magnitudes of 1-D tensors below two values, and picks those within them."""

    def __init__(self, left: float, right: float, dtype: torch.dtype) -> None:
        self._left, self._right = left, right
        self._magnitude: Array = torch.empty(_BLOCK, dtype=dtype).numpy()
        self._reach, self._inside = np.empty((2, _BLOCK), dtype=bool)

    def elsewhere(self, x: Tensor) -> tuple[int, Array]:
        magnitude = x.abs()
        inside = magnitude[(magnitude >= self._left) & (magnitude <= self._right)]
        return int((magnitude < self._left).sum()), inside.cpu().numpy()

    def on_cpu(self, x: Tensor) -> tuple[int, Array]:
        if compiled.worthwhile(x):
            return compiled.within(x, self._left, self._right, self._magnitude)
        # On the CPU its comparisons and selections are 3 to 10 times faster than PyTorch's.
        n = len(x)
        magnitude = np.abs(x.numpy(), out=self._magnitude[:n])
        reach = np.greater_equal(magnitude, self._left, out=self._reach[:n])
        inside = np.less_equal(magnitude, self._right, out=self._inside[:n])
        inside &= reach
        return n - int(np.count_nonzero(reach)), np.compress(inside, magnitude)


def _next(value: float, towards: float, dtype: torch.dtype) -> float:
    """Return the next number of a dtype."""
    number = _NUMPY[dtype]
    return float(np.nextafter(number(value), number(towards)))
