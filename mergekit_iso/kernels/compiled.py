"""Element-wise kernels compiled by numba, where the extra ``fast`` has brought it.

Each returns the bits of its counterpart, in one pass where that takes up to thirty. They are
compiled at their first use, which takes about half a second each, so small inputs do without.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

# Elements from which a compiled kernel is used.
_WORTHWHILE = 1 << 16
# Elements that the search for magnitudes skips at once.
_GROUP = 32


def worthwhile(x: Tensor) -> bool:
    """Whether a compiled kernel is there and pays for x: on the CPU, of some size."""
    return x.device.type == "cpu" and x.numel() >= _WORTHWHILE and _kernels() is not None


def elect_and_merge(deltas: Sequence[Tensor], weights: Sequence[float], merged: Tensor) -> bool:
    """Write TIES' disjoint mean by total sign into ``merged``; return whether votes cancel.

    As ``disjoint_merge(deltas, weights, vote(deltas))``: an entry whose votes cancel takes the
    positive side. ``deltas`` are w_t Δ_t, weights positive; all tensors contiguous, of one
    shape and dtype.
    """
    flat = [d.detach().reshape(-1).numpy() for d in deltas]
    scalar = flat[0].dtype.type
    shares = tuple(scalar(w) for w in weights)
    return bool(_kernel("merge")(tuple(flat), shares, scalar(0), merged.view(-1).numpy()))


def within(
    x: Tensor, left: float, right: float, room: np.ndarray[Any, np.dtype[Any]]
) -> tuple[int, np.ndarray[Any, np.dtype[Any]]]:
    """Return how many |x| are below ``left``, and those from there to ``right``; x is 1-D.

    ``room`` is a buffer of x's dtype with at least as many elements; the result is a copy.
    """
    scalar = room.dtype.type
    below, found = _kernel("within")(x.detach().numpy(), scalar(left), scalar(right), room)
    return int(below), room[:found].copy()


def drop(x: Tensor, low: int, k0: int, k1: int, keep_below: int, kept: Tensor) -> None:
    """Write the entries of 1-D x into ``kept``, but 0 where the draw is ``keep_below`` or more.

    The draws are those of the counters from ``low`` on with the 32-bit keys k0 and k1.
    """
    numbers = x.detach().numpy()
    counters = (np.uint32(n) for n in (low, k0, k1, keep_below))
    _kernel("drop")(numbers, *counters, numbers.dtype.type(0), kept.numpy())


def _kernel(name: str) -> Callable[..., Any]:
    kernels = _kernels()
    if kernels is None:
        raise RuntimeError("numba cannot be imported")
    return kernels[name]


@cache
def _kernels() -> dict[str, Callable[..., Any]] | None:
    try:
        from numba import njit  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:  # not installed, or not for this version of NumPy
        return None
    finalise = njit(_finalise, nogil=True)

    def draw(counter: Any, k0: Any, k1: Any) -> Any:
        return finalise(np.uint32(finalise(np.uint32(counter ^ k0)) + k1))

    draw = njit(draw, nogil=True)

    def dropping(x: Any, low: Any, k0: Any, k1: Any, keep_below: Any, zero: Any, kept: Any) -> None:
        for i in range(len(x)):
            kept[i] = x[i] if draw(np.uint32(low + i), k0, k1) < keep_below else zero

    return {
        "within": njit(_within, nogil=True),
        "merge": njit(_merge, nogil=True, error_model="numpy"),
        "drop": njit(dropping, nogil=True),
    }


def _finalise(h: Any) -> Any:
    # Compiled integers widen to 64 bits in every operation.
    h ^= h >> np.uint32(16)
    h = np.uint32(h * np.uint32(0x7FEB352D))
    h ^= h >> np.uint32(15)
    h = np.uint32(h * np.uint32(0x846CA68B))
    return np.uint32(h ^ (h >> np.uint32(16)))


def _within(x: Any, left: Any, right: Any, room: Any) -> Any:
    below: Any = 0
    found: Any = 0
    whole = len(x) // _GROUP * _GROUP
    for start in range(0, whole, _GROUP):
        # Counted by vector operations; only a group with something within is looked through.
        less = np.int32(0)
        up_to = np.int32(0)
        for i in range(_GROUP):
            magnitude = abs(x[start + i])
            less += np.int32(magnitude < left)
            up_to += np.int32(magnitude <= right)
        below += less
        if up_to != less:
            for i in range(start, start + _GROUP):
                magnitude = abs(x[i])
                room[found] = magnitude
                found += (magnitude >= left) & (magnitude <= right)
    for i in range(whole, len(x)):
        magnitude = abs(x[i])
        below += magnitude < left
        if (magnitude >= left) & (magnitude <= right):
            room[found] = magnitude
            found += 1
    return below, found


def _merge(deltas: Any, weights: Any, zero: Any, merged: Any) -> Any:
    cancelled = False
    for i in range(len(merged)):
        total = zero
        for delta in deltas:
            total += delta[i]
        positive = total >= zero
        chosen = zero
        share = zero
        for t in range(len(deltas)):
            value = deltas[t][i]
            agrees = value > zero if positive else value < zero
            chosen += value if agrees else zero
            share += weights[t] if agrees else zero
        cancelled |= (total == zero) & (chosen != zero)
        merged[i] = chosen / share if share != zero else chosen
    return cancelled
