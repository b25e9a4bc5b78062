"""What crosses the wire for one tensor: its values, or its delta in fewer bits.

Values in the model's own dtype are lossless. A coded delta is not: what a worker contributes is
then the decoded delta, on its own side too, and what rounding took is added to its next delta
(error feedback; Seide et al., Interspeech 2014, 1-bit SGD, section 3.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from ..methods.base import Requires
from ..tensors import TensorInfo
from .settings import Wire

_WIDTH: dict[Wire, int] = {"float32": 4, "bfloat16": 2, "int8": 1}
_LEVELS = 127.0


class Codec(Protocol):
    """A lossy format of deltas; both directions are deterministic."""

    def encode(self, delta: Tensor) -> Tensor:
        """Return a float tensor of any shape as bytes, uint8 (n,)."""
        ...

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the delta in float32, from the bytes of ``encode``."""
        ...

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return the number of bytes of a tensor."""
        ...


@dataclass(frozen=True)
class BFloat16:
    """Two bytes an entry: 8 bits of mantissa at float32's range."""

    def encode(self, delta: Tensor) -> Tensor:
        """Return the delta rounded to bfloat16, as bytes."""
        return as_bytes(delta.to(torch.bfloat16))

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the delta, float32."""
        return payload.view(torch.bfloat16).view(shape).float()

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return two for every entry."""
        return 2 * prod(shape)


@dataclass(frozen=True)
class Int8Rows:
    """One byte an entry and a float32 scale for every row: the row's largest magnitude is 127.

    A row is the last dimension; a scalar or vector is one row.
    """

    def encode(self, delta: Tensor) -> Tensor:
        """Return all scales, then all entries, as bytes."""
        rows = _rows(delta.float())
        scale = rows.abs().amax(1, keepdim=True) / _LEVELS
        # A row of zeros has scale 0; its entries are 0 over anything.
        levels = (rows / scale.clamp_min(torch.finfo(torch.float32).tiny)).round_()
        levels.clamp_(-_LEVELS, _LEVELS)
        return torch.cat([as_bytes(scale), as_bytes(levels.to(torch.int8))])

    def decode(self, payload: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Return the delta, float32."""
        n = self._scales(shape)
        scale = payload[: 4 * n].view(torch.float32)
        levels = payload[4 * n :].view(torch.int8)
        return (levels.view(n, -1).float() * scale[:, None]).view(shape)

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Return one for every entry and four for every row."""
        return prod(shape) + 4 * self._scales(shape)

    def _scales(self, shape: tuple[int, ...]) -> int:
        return prod(shape[:-1]) if len(shape) > 1 else 1


def codec_for(info: TensorInfo, wire: Wire, requires: Requires) -> Codec | None:
    """Return how a tensor's deltas are coded; None where its values go as they are.

    The operator has a floor for what it works on as a matrix: a spectral method raises small
    singular values, and rounding noise with them. Values whose own dtype is as narrow as the
    wire are sent themselves, lossless.
    """
    if info.spectral and requires.unit == "matrix":
        wire = max(wire, requires.wire, key=_WIDTH.__getitem__)
    if info.dtype.itemsize <= _WIDTH[wire] or wire == "float32":
        return None
    return BFloat16() if wire == "bfloat16" else Int8Rows()


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 (n,); a view where it is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
