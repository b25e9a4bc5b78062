"""Reading a plan's inputs in order: every value checked, every tensor's CRC-32 taken once."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod

import torch
from torch import Tensor

from ..errors import CheckpointError, NonFiniteError
from .checkpoint import Checkpoint
from .output import os_errors
from .writer import tensor_bytes

#: Elements of a flat chunk: a few MB per live delta, which stays in a core's cache.
CHUNK = 1 << 20

Stamp = tuple[tuple[int, int], ...]


@dataclass
class InputReader:
    """Streams of tensors out of the base (number 0) and the models (1 … T).

    The first full read of a tensor takes its CRC-32 (over the stored bytes) and checks that
    its values are finite; later reads of it are plain.
    """

    checkpoints: Sequence[Checkpoint]
    device: torch.device
    crc32: list[dict[str, int]] = field(init=False)
    _checked: set[tuple[int, str]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self.crc32 = [{} for _ in self.checkpoints]

    def chunks(
        self, number: int, name: str, *, whole: bool = False, finite: bool = True
    ) -> Iterator[Tensor]:
        """Yield a tensor in its own dtype: flat chunks in order, or once in its shape.

        With ``finite``, raises NonFiniteError that counts the NaNs and infinities of the whole
        tensor. A tensor without elements yields nothing.
        """
        checkpoint = self.checkpoints[number]
        take_crc = name not in self.crc32[number]
        check = finite and (number, name) not in self._checked
        crc = 0
        for chunk in _pieces(checkpoint, name, whole):
            if take_crc:
                crc = zlib.crc32(tensor_bytes(chunk), crc)
            if check and not all_finite(chunk):
                raise self._non_finite(checkpoint, name)
            yield chunk.to(self.device)
        if take_crc:
            self.crc32[number][name] = crc
        if check:
            self._checked.add((number, name))

    def stamps(self) -> tuple[Stamp, ...]:
        """Return size and modification time of every weight file of every input."""
        return tuple(_stamp(checkpoint) for checkpoint in self.checkpoints)

    @staticmethod
    def _non_finite(checkpoint: Checkpoint, name: str) -> NonFiniteError:
        bad = sum(int((~torch.isfinite(c)).sum()) for c in _pieces(checkpoint, name, whole=False))
        values = "value that is" if bad == 1 else "values that are"
        return NonFiniteError(
            f"{name} of {checkpoint.label!r} has {bad:,} {values} not finite (NaN or infinity)",
            hint="the model is damaged or its training diverged: merge another checkpoint of it",
        )


def all_finite(values: Tensor) -> bool:
    """Whether a tensor of any shape holds no NaN and no infinity.

    By its extremes, which a NaN takes over: 20 times faster than looking at each value.
    """
    if values.numel() == 0:
        return True
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(values))


def refuse_changed(
    checkpoints: Sequence[Checkpoint], before: Sequence[Stamp], after: Sequence[Stamp]
) -> None:
    """CheckpointError naming the input whose files are not what they were."""
    for checkpoint, old, new in zip(checkpoints, before, after, strict=True):
        for file, was, now in zip(checkpoint.weight_files, old, new, strict=True):
            if was != now:
                raise CheckpointError(
                    f"{file} of {checkpoint.label!r} was changed while it was being merged",
                    hint="wait until nothing writes to the inputs, then merge again",
                )


def _stamp(checkpoint: Checkpoint) -> Stamp:
    found = []
    for file in checkpoint.weight_files:
        path = checkpoint.folder / file
        with os_errors(path, "read"):
            status = path.stat()
        found.append((status.st_size, status.st_mtime_ns))
    return tuple(found)


def _pieces(checkpoint: Checkpoint, name: str, whole: bool) -> Iterator[Tensor]:
    stored = checkpoint.tensors[name]
    numel = prod(stored.shape)
    step = numel if whole else CHUNK
    for start in range(0, numel, step or 1):
        with os_errors(checkpoint.folder / stored.file, "read"):
            piece = checkpoint.read_flat(name, start, min(start + step, numel))
        yield piece.reshape(stored.shape) if whole else piece
