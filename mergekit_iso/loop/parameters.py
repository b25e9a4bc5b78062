"""What of a model takes part in the loop: its trainable parameters, once each, and its buffers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..errors import IncompatibleError
from ..tensors import TensorInfo, compute_dtype, describe

# What wrappers (DDP, torch.compile, activation checkpointing) put into names.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True)
class Slot:
    """One tensor of the loop: its place in the fixed order of all, and what it is."""

    index: int
    info: TensorInfo

    @property
    def name(self) -> str:
        """The tensor's name without wrappers' prefixes."""
        return self.info.name

    @property
    def compute(self) -> torch.dtype:
        """The dtype of its deltas and of its master copy: float32, or float64 if it is float64."""
        return compute_dtype(self.info.dtype)


def local(x: Tensor) -> Tensor:
    """Return the storage a process holds of a parameter: a DTensor's shard, else the tensor."""
    return (x.to_local() if isinstance(x, DTensor) else x).detach()


class Parameters:
    """A model's trainable parameters and buffers, in the order of its own names.

    Tied parameters count once, frozen and empty ones not at all. Raises IncompatibleError where
    nothing is trainable, or a parameter has no real values (meta device, complex, sparse).
    """

    def __init__(self, model: nn.Module, exclude: Sequence[str]) -> None:
        self._model = model
        self.tensors: dict[str, nn.Parameter] = {}
        slots: list[Slot] = []
        for name, p in model.named_parameters():
            if not p.requires_grad or not p.numel():
                continue
            if p.is_meta or not p.is_floating_point() or p.layout != torch.strided:
                raise IncompatibleError(
                    f"parameter {name} has no plain values: {p.dtype}, {p.layout}, {p.device}"
                )
            info = describe(plain_name(name), p.shape, p.dtype, exclude)
            if info.role == "buffer":  # it is trained, whatever its name says
                info = TensorInfo(info.name, info.shape, info.dtype, "vector")
            self.tensors[info.name] = p
            slots.append(Slot(len(slots), info))
        if not slots:
            raise IncompatibleError("the model has no trainable parameter")
        self.slots: tuple[Slot, ...] = tuple(slots)
        self.buffers: dict[str, Tensor] = {
            plain_name(f"{path}.{name}" if path else name): b
            for path, module in model.named_modules()
            for name, b in module.named_buffers(recurse=False)
            # What is not saved with a model is recomputed, not learned.
            if b.numel() and name not in module._non_persistent_buffers_set
        }
        self._identity = self._identify()

    def _identify(self) -> dict[str, tuple[Any, ...]]:
        return {
            name: (id(p), p.shape, p.dtype)
            for name, p in self._model.named_parameters()
            if p.requires_grad
        }

    def changed(self) -> str | None:
        """Return the name of a parameter that was replaced, frozen, added or reshaped since."""
        now = self._identify()
        if now == self._identity:
            return None
        return next(
            plain_name(name)
            for name in (*self._identity, *now)
            if now.get(name) != self._identity.get(name)
        )

    def local(self) -> list[Tensor]:
        """Return what this process holds of every slot, sharing storage with the model."""
        return [local(self.tensors[slot.name]) for slot in self.slots]

    def describe(self) -> Mapping[str, tuple[Any, ...]]:
        """Return name → (shape, dtype) of everything exchanged, as plain data."""
        everything = {**self.tensors, **self.buffers}
        return {name: (tuple(x.shape), str(x.dtype)) for name, x in everything.items()}


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefixes of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
