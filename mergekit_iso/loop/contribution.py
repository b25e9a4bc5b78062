"""What one worker brings to a sync: its values, and the delta from the anchor they started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..tensors import task_vector_of
from .parameters import Slot
from .wire import Codec, as_bytes

# Elements of a flat chunk: those of all workers and what is computed from them stay in cache.
CHUNK = 1 << 18


@dataclass(frozen=True)
class Contribution:
    """One worker's share in one tensor: its values, or its delta where the wire is coded."""

    worker: int
    tensor: Tensor
    is_delta: bool

    def delta(self, anchor: Tensor, dtype: torch.dtype, part: slice | None = None) -> Tensor:
        """Return θ_r − anchor in ``dtype``: whole, or a slice of the flat tensor."""
        x = self.tensor if part is None else self.tensor.reshape(-1)[part]
        if self.is_delta:
            return x.to(dtype)
        return task_vector_of(anchor if part is None else anchor.reshape(-1)[part], x, dtype)


@dataclass
class Source:
    """One worker's side of a sync, by slot index.

    ``values`` are its parameters (or a snapshot of them), ``anchor`` the values that it was
    handed at the last sync, ``residuals`` what coding took from its earlier deltas.
    """

    worker: int
    values: Sequence[Tensor]
    anchor: Sequence[Tensor]
    codecs: Sequence[Codec | None]
    residuals: dict[int, Tensor] = field(default_factory=dict)

    def delta(self, slot: Slot) -> Tensor:
        """Return θ_r − anchor of a slot in its compute dtype, before any coding."""
        return task_vector_of(self.anchor[slot.index], self.values[slot.index], slot.compute)

    def residual(self, slot: Slot) -> Tensor:
        """Return what coding took from a slot's earlier deltas; zeros before the first."""
        found = self.residuals.get(slot.index)
        return torch.zeros_like(self.delta(slot)) if found is None else found

    def payload(self, slot: Slot) -> Tensor:
        """Return a slot's contribution as bytes, uint8 (n,); rounding is kept for the next."""
        codec = self.codecs[slot.index]
        if codec is None:
            return as_bytes(self.values[slot.index])
        return self._encode(slot, codec)

    def contribution(self, slot: Slot) -> Contribution:
        """Return a slot's contribution as others decode it; rounding is kept for the next."""
        codec = self.codecs[slot.index]
        if codec is None:
            return self._plain(slot)
        return self.decode(slot, self._encode(slot, codec), self.worker)

    def peek(self, slot: Slot) -> Contribution:
        """Return what ``contribution`` will, without keeping what rounding takes."""
        codec = self.codecs[slot.index]
        if codec is None:
            return self._plain(slot)
        return self.decode(slot, codec.encode(self._corrected(slot)), self.worker)

    def decode(self, slot: Slot, payload: Tensor, worker: int) -> Contribution:
        """Return the contribution that another worker's bytes stand for."""
        codec, mine = self.codecs[slot.index], self.values[slot.index]
        x = decoded(codec, payload, tuple(mine.shape), mine.dtype)
        return Contribution(worker, x, is_delta=codec is not None)

    def payload_bytes(self, slot: Slot) -> int:
        """Return the number of bytes of a slot's contribution."""
        codec, mine = self.codecs[slot.index], self.values[slot.index]
        return mine.nbytes if codec is None else codec.nbytes(tuple(mine.shape))

    def encode_update(self, slot: Slot, new: Tensor) -> Tensor:
        """Return what tells other workers a slot's new value, uint8 (n,): itself, or its update."""
        return encoded_update(self.codecs[slot.index], slot, self.anchor[slot.index], new)

    def decode_update(self, slot: Slot, payload: Tensor) -> Tensor:
        """Return the new value that every worker then has, in the model's dtype."""
        codec, anchor = self.codecs[slot.index], self.anchor[slot.index]
        x = decoded(codec, payload, tuple(anchor.shape), anchor.dtype)
        return x if codec is None else (anchor.to(slot.compute) + x).to(anchor.dtype)

    def _plain(self, slot: Slot) -> Contribution:
        # In the layout in which others receive it: a product's last bits depend on it.
        return Contribution(self.worker, self.values[slot.index].contiguous(), is_delta=False)

    def _corrected(self, slot: Slot) -> Tensor:
        delta, residual = self.delta(slot), self.residuals.get(slot.index)
        return delta if residual is None else delta + residual

    def _encode(self, slot: Slot, codec: Codec) -> Tensor:
        corrected = self._corrected(slot)
        payload = codec.encode(corrected)
        self.residuals[slot.index] = corrected - codec.decode(payload, tuple(corrected.shape))
        return payload


def decoded(
    codec: Codec | None, payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Return what bytes stand for: values in ``dtype``, or a delta where they are coded."""
    if codec is None:
        return payload.view(dtype).view(shape)
    return codec.decode(payload, shape)


def encoded_update(codec: Codec | None, slot: Slot, anchor: Tensor, new: Tensor) -> Tensor:
    """Return what tells others a new value, uint8 (n,): itself, or its update of the anchor."""
    if codec is None:
        return as_bytes(new.to(anchor.dtype))
    return codec.encode(task_vector_of(anchor, new, slot.compute))
