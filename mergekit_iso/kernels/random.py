"""A counter-based random mask: the same bits on every device, in any order, for any chunking.

The draw of element i is a hash of (key, i) and nothing else, so no generator state exists.
The key is a hash of (seed, round, worker, tensor name); i is the flat index in the unsharded
tensor. The 32-bit finaliser below has two multiplications and a bias near the ideal
(constants found by C. Wellons' hash prospector, public domain); it is applied twice, with the
key entering by xor before the first and by addition before the second, because one round with
an additive key would give two tensors shifted copies of one mask.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
from torch import Tensor

_SIGN = 0x80000000
_CHUNK = 1 << 32


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
    start = 0
    while start < numel:
        high, low = divmod(offset + start, _CHUNK)
        stop = min(numel, start + _CHUNK - low)
        k0, k1 = _key(seed, round, worker, name, high)
        counter = torch.arange(low, low + stop - start, dtype=torch.int64, device=device)
        h = _mix(_mix(counter.to(torch.int32) ^ _signed(k0)) + _signed(k1))
        # An unsigned comparison, by moving both sides down half the range.
        torch.lt(h ^ _signed(_SIGN), keep_below - 2**31, out=mask[start:stop])
        start = stop
    return mask


def _key(seed: int, round: int, worker: int, name: str, high: int) -> tuple[int, int]:
    text = f"{seed}\0{round}\0{worker}\0{high}\0{name}".encode()
    digest = blake2b(text, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def _signed(value: int) -> int:
    return value - 2**32 if value >= 2**31 else value


def _mix(h: Tensor) -> Tensor:
    # int32 products wrap modulo 2³²; a right shift copies the sign bit, which the mask removes.
    h = h ^ ((h >> 16) & 0xFFFF)
    h = h * _signed(0x7FEB352D)
    h = h ^ ((h >> 15) & 0x1FFFF)
    h = h * _signed(0x846CA68B)
    return h ^ ((h >> 16) & 0xFFFF)
