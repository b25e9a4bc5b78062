"""Writing safetensors: shapes are known, so headers go first and values stream in behind.

The format is 8 bytes of header length (little endian), a JSON header and the tensors' bytes
without gaps (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..tensors import TensorInfo
from .output import os_errors, write_file

INDEX_NAME = "model.safetensors.index.json"
COPY_BYTES = 1 << 22

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return a tensor's values as packed bytes in memory order, whatever its layout or device."""
    packed = tensor.detach().to("cpu").contiguous().reshape(-1)
    return packed.view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Slot:
    dtype: torch.dtype
    start: int  # absolute position in the file
    nbytes: int


class ShardWriter:
    """One safetensors file, header first.

    Each tensor arrives in one or more chunks in order; different tensors may interleave.
    Tensors of wider dtypes are laid out first, so that every one is aligned to its dtype.
    The CRC-32 of each tensor's bytes is taken on the way.
    """

    def __init__(self, path: Path, tensors: Sequence[TensorInfo]) -> None:
        header, self._slots = _layout(tensors)
        self.path = path
        self._written = dict.fromkeys(self._slots, 0)
        self._left = sum(slot.nbytes for slot in self._slots.values())
        self._crc = dict.fromkeys(self._slots, 0)
        with os_errors(path):
            # Unbuffered: chunks are large, and closing after a failed write then cannot fail again.
            self._file = path.open("xb", buffering=0)
            try:
                self._write(0, memoryview(header))
            except BaseException:
                self._file.close()
                raise

    @property
    def complete(self) -> bool:
        """Whether every tensor has all its bytes."""
        return self._left == 0

    @property
    def crc32(self) -> dict[str, int]:
        """CRC-32 of each tensor's bytes written so far."""
        return dict(self._crc)

    def write(self, name: str, chunk: Tensor) -> None:
        """Append a chunk, of any shape and layout, to the values of tensor ``name``."""
        if chunk.dtype != self._slots[name].dtype:
            raise ValueError(f"{name} is declared {self._slots[name].dtype}, not {chunk.dtype}")
        self.write_bytes(name, tensor_bytes(chunk))

    def write_bytes(self, name: str, data: memoryview) -> None:
        """Append raw bytes to the values of tensor ``name``."""
        slot, done = self._slots[name], self._written[name]
        if done + len(data) > slot.nbytes:
            raise ValueError(f"{name} takes {slot.nbytes} bytes, not {done + len(data)}")
        if not data:  # the file may be complete and closed
            return
        with os_errors(self.path):
            self._write(slot.start + done, data)
        self._written[name] = done + len(data)
        self._left -= len(data)
        self._crc[name] = zlib.crc32(data, self._crc[name])

    def finish(self) -> None:
        """Bring the file to the disk and close it; ValueError if a tensor is short."""
        if not self.complete:
            short = next(n for n, slot in self._slots.items() if self._written[n] < slot.nbytes)
            raise ValueError(f"{self.path.name} cannot be finished: {short} is short")
        if self._file.closed:
            return
        with os_errors(self.path):
            os.fsync(self._file.fileno())
            self._file.close()

    def close(self) -> None:
        """Close the file as it is."""
        self._file.close()

    def read_bytes(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a completely written tensor, in pieces; also after ``finish``."""
        slot = self._slots[name]
        with os_errors(self.path), self.path.open("rb") as file:
            file.seek(slot.start)
            left = slot.nbytes
            while left and (data := file.read(min(left, COPY_BYTES))):
                left -= len(data)
                yield memoryview(data)

    def _write(self, position: int, data: memoryview) -> None:
        self._file.seek(position)
        while data:
            data = data[self._file.write(data) :]


class CheckpointWriter:
    """All shards of a checkpoint in ``folder``; each is open from its first tensor to its last.

    ``shards`` are (file name, tensor names). Used as a context manager, it closes what is open.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[tuple[str, Sequence[str]]],
        tensors: Mapping[str, TensorInfo],
    ) -> None:
        self._folder = folder
        self._shards = shards
        self._tensors = tensors
        self.file_of: dict[str, str] = {n: file for file, names in shards for n in names}
        self._writers: dict[str, ShardWriter] = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for writer in self._writers.values():
            writer.close()

    @property
    def crc32(self) -> dict[str, int]:
        """CRC-32 of every tensor written so far."""
        return {n: crc for writer in self._writers.values() for n, crc in writer.crc32.items()}

    def write(self, name: str, chunk: Tensor) -> None:
        """Append a chunk to the values of tensor ``name``."""
        writer = self._writer(name)
        writer.write(name, chunk)
        self._close_if_complete(writer)

    def repeat(self, name: str, source: str) -> None:
        """Write tensor ``name`` as a copy of the bytes of ``source``, which must be complete."""
        writer = self._writer(name)
        for data in self._writer(source).read_bytes(source):
            writer.write_bytes(name, data)
        self._close_if_complete(writer)

    def finish(self) -> None:
        """Write the index if there is more than one shard; ValueError if a tensor is short."""
        for file, names in self._shards:
            if file not in self._writers:  # tensors without elements, which nobody writes
                self._writer(names[0])
            self._writers[file].finish()
        if len(self._shards) > 1:
            index = {
                "metadata": {"total_size": sum(t.nbytes for t in self._tensors.values())},
                "weight_map": dict(sorted(self.file_of.items())),
            }
            write_file(self._folder / INDEX_NAME, (json.dumps(index, indent=2) + "\n").encode())

    def _writer(self, name: str) -> ShardWriter:
        file = self.file_of[name]
        if file not in self._writers:
            names = next(names for f, names in self._shards if f == file)
            infos = [self._tensors[n] for n in names]
            self._writers[file] = ShardWriter(self._folder / file, infos)
        return self._writers[file]

    @staticmethod
    def _close_if_complete(writer: ShardWriter) -> None:
        if writer.complete:
            writer.finish()


def _layout(tensors: Sequence[TensorInfo]) -> tuple[bytes, dict[str, _Slot]]:
    ordered = sorted(tensors, key=lambda t: -t.dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for info in ordered:
        end = begin + info.nbytes
        header[info.name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    slots = {
        info.name: _Slot(info.dtype, start + header[info.name]["data_offsets"][0], info.nbytes)
        for info in ordered
    }
    return len(text).to_bytes(8, "little") + text, slots
