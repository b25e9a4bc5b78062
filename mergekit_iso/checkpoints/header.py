"""The header of a safetensors file, read and checked without touching its data."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..errors import CheckpointError

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_LFS = b"version https://git-lfs.github.com/spec/"
# The format's own limit (safetensors reference implementation, MAX_HEADER_SIZE).
_MAX_HEADER = 100_000_000

#: (name, shape, dtype, position of the first data byte in the file)
Entry = tuple[str, tuple[int, ...], torch.dtype, int]


def read_header(path: Path, where: str) -> list[Entry]:
    """Return the tensors that a safetensors file declares, in the order of their data.

    ``where`` names file and checkpoint in messages. The declared ranges must fill the file
    exactly, without holes or overlaps, and fit dtype and shape.

    Raises:
        CheckpointError: not a safetensors file (a Git LFS pointer is named as such), truncated,
            corrupt, or of a quantised dtype.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS))
        if start == _LFS:
            raise CheckpointError(
                f"{where} is a Git LFS pointer, not the weights it stands for",
                hint="run `git lfs pull` in that folder, or download the file itself",
            )
        length = int.from_bytes(start[:8], "little")
        if len(start) < 8 or length > _MAX_HEADER or length + 8 > size:
            raise CheckpointError(
                f"{where} is no complete safetensors file: it has {size} bytes and its header "
                f"claims {length if len(start) >= 8 else 'at least 8'}",
                hint="download or copy it again",
            )
        file.seek(8)
        raw = file.read(length)
    header = _parse(raw, where)
    header.pop("__metadata__", None)
    entries = sorted((_entry(name, item, where) for name, item in header.items()), key=_by_range)
    _check_ranges(entries, size - 8 - length, where)
    return [(name, shape, dtype, 8 + length + begin) for name, shape, dtype, begin, _ in entries]


def _parse(raw: bytes, where: str) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(items := dict(pairs)) != len(pairs):
            raise ValueError("a name stands in it twice")
        return items

    try:
        header = json.loads(raw.decode(), object_pairs_hook=unique)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(
            f"{where} has a corrupt header: {reason}", hint="download or copy the file again"
        ) from None
    return header


_Ranged = tuple[str, tuple[int, ...], torch.dtype, int, int]


def _by_range(entry: _Ranged) -> tuple[int, int, str]:
    return entry[3], entry[4], entry[0]


def _entry(name: str, item: Any, where: str) -> _Ranged:
    try:
        kind, shape, (begin, end) = item["dtype"], tuple(item["shape"]), item["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound or not isinstance(kind, str) or not name.isprintable():
        raise CheckpointError(f"{where} has a corrupt header entry for {name!r}")
    dtype = _DTYPES.get(kind)
    if dtype is None:
        if kind.startswith(("F8", "F6", "F4")):
            raise CheckpointError(
                f"{where} is quantised (quantized): {name} is stored as {kind}",
                hint="merge the unquantised model in float16, bfloat16 or float32",
            )
        raise CheckpointError(f"{where} stores {name} in the unknown dtype {kind}")
    if end - begin != prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{where} gives {name} {end - begin} bytes, but shape {shape} in {kind} takes "
            f"{prod(shape) * dtype.itemsize}"
        )
    return name, shape, dtype, begin, end


def _check_ranges(entries: list[_Ranged], data_bytes: int, where: str) -> None:
    position = 0
    for name, _, _, begin, end in entries:
        if begin != position:
            kind = "overlaps another tensor" if begin < position else "lies behind unclaimed bytes"
            raise CheckpointError(f"{where} has a corrupt header: {name} {kind}")
        position = end
    if position != data_bytes:
        kind = "truncated" if position > data_bytes else "longer than its header says"
        raise CheckpointError(
            f"{where} is {kind}: its header describes {position} bytes of data, "
            f"and {data_bytes} are there",
            hint="download or copy it again",
        )
