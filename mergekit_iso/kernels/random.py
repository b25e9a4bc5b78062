"""A counter-based random mask: the same bits on every device, in any order, for any chunking.

The draw of element i is a hash of (key, i) and nothing else, so no generator state exists.
The key is a hash of (seed, round, worker, tensor name); i is the flat index in the unsharded
tensor. The 32-bit finaliser below has two multiplications and a bias near the ideal
(constants found by C. Wellons' hash prospector, public domain); it is applied twice, with the
key entering by xor before the first and by addition before the second, because one round with
an additive key would give two tensors shifted copies of one mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from . import compiled

_SIGN = 0x80000000
_CHUNK = 1 << 32
# Elements drawn at once: on the CPU what its cache holds, elsewhere what is worth a launch.
_CPU_BLOCK = 1 << 17
_BLOCK = 1 << 24


def keep_mask(
    numel: int,
    drop_rate: float,
    *,
    seed: int,
    round: int,
    worker: int,
    name: str,
    offset: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return the keep mask of elements ``offset … offset + numel − 1`` of a tensor, bool (numel,).

    Each element is kept with probability floor((1 − drop_rate)·2³²)/2³², independently.
    """
    keep_below = int((1.0 - drop_rate) * 2**32)
    if keep_below >= 2**32:
        return torch.ones(numel, dtype=torch.bool, device=device)
    mask = torch.empty(numel, dtype=torch.bool, device=device)
    key = _Key(seed, round, worker, name)
    for start, stop, draws in _draws(numel, offset, key, mask.device):
        torch.lt(draws, keep_below - 2**31, out=mask[start:stop])
    return mask


def drop(
    x: Tensor,
    drop_rate: float,
    *,
    seed: int,
    round: int,
    worker: int,
    name: str,
    offset: int = 0,
) -> Tensor:
    """Return x (float32 or float64, any shape) with the entries zero that keep_mask drops.

    The same as ``where(keep_mask(…), x, 0)``, without the mask: it exists a block at a time,
    as bits that select x's.
    """
    keep_below = int((1.0 - drop_rate) * 2**32)
    if keep_below >= 2**32:
        return x.clone()
    flat = x.reshape(-1)
    kept = torch.empty_like(flat)
    key = _Key(seed, round, worker, name)
    if compiled.worthwhile(flat):
        for start, stop, low, (k0, k1) in _pieces(len(flat), offset, key, _CHUNK):
            compiled.drop(flat[start:stop], low, k0, k1, keep_below, kept[start:stop])
        return kept.view(x.shape)
    integers = torch.int64 if x.dtype == torch.float64 else torch.int32
    bits, kept_bits = flat.view(integers), kept.view(integers)
    for start, stop, draws in _draws(len(flat), offset, key, x.device):
        selected = torch.lt(draws, keep_below - 2**31, out=draws).neg_()  # all bits or none
        torch.bitwise_and(bits[start:stop], selected.to(integers), out=kept_bits[start:stop])
    return kept.view(x.shape)


class _Key(NamedTuple):
    seed: int
    round: int
    worker: int
    name: str


def _draws(
    numel: int, offset: int, key: _Key, device: torch.device
) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the draws of elements start … stop − 1, less 2³¹, as int32 in a buffer used again."""
    block = min(numel, _CPU_BLOCK if device.type == "cpu" else _BLOCK)
    count = torch.arange(block, dtype=torch.int32, device=device)
    buffers = torch.empty((2, block), dtype=torch.int32, device=device)
    for start, stop, low, (k0, k1) in _pieces(numel, offset, key, block):
        h, scratch = buffers[:, : stop - start]
        torch.add(count[: stop - start], _scalar(low), out=h).bitwise_xor_(_scalar(k0))
        _mix(h, scratch)
        _mix(h.add_(_scalar(k1)), scratch)
        # The order of unsigned integers is that of signed ones half the range below.
        yield start, stop, h.bitwise_xor_(_scalar(_SIGN))


def _pieces(
    numel: int, offset: int, key: _Key, size: int
) -> Iterator[tuple[int, int, int, tuple[int, int]]]:
    """Yield start, stop, first counter and keys of pieces whose counters have 32 bits."""
    start = 0
    while start < numel:
        high, low = divmod(offset + start, _CHUNK)
        stop = min(numel, start + size, start + _CHUNK - low)
        yield start, stop, low, _key(*key, high)
        start = stop


def _key(seed: int, round: int, worker: int, name: str, high: int) -> tuple[int, int]:
    text = f"{seed}\0{round}\0{worker}\0{high}\0{name}".encode()
    digest = blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _scalar(value: int) -> Tensor:
    return torch.tensor(_signed(value), dtype=torch.int32, device="cpu")


# Shift, what it leaves of an unsigned number, factor. As tensors, which cost an operation
# half the time that a number does.
_STEPS = tuple(
    (_scalar(shift), _scalar((1 << (32 - shift)) - 1), _scalar(factor))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B), (16, 1))
)


def _mix(h: Tensor, scratch: Tensor) -> None:
    # int32 products wrap modulo 2³²; a right shift copies the sign bit, which the mask removes.
    for shift, mask, factor in _STEPS:
        torch.bitwise_right_shift(h, shift, out=scratch)
        h.bitwise_xor_(scratch.bitwise_and_(mask)).mul_(factor)
