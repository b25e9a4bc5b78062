"""Whether an output folder is still what its manifest says."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from .header import Entry, read_header
from .manifest import Manifest, TensorRecord, dtype_name, hex_crc, read_manifest, sha256_of
from .output import os_errors
from .ties import tie_flag
from .vocabulary import INPUT, OUTPUT, vocab_size
from .writer import COPY_BYTES, INDEX_NAME

_CONFIG = "config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class VerifyReport:
    """What ``verify`` found: a sentence per problem, and how much was checked."""

    out: Path
    problems: tuple[str, ...]
    tensors: int
    bytes: int

    @property
    def ok(self) -> bool:
        """Whether there is no problem."""
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {**asdict(self), "out": str(self.out), "ok": self.ok}


def verify(out: str | os.PathLike[str]) -> VerifyReport:
    """Check a folder that a merge wrote against its ``mergekit_iso.json``.

    Reads every byte: headers, index, the CRC-32 of each tensor, the SHA-256 of each carried
    file, stray weight files, and whether config.json fits the tensors.

    Raises:
        CheckpointError: there is no manifest, it is damaged, or the folder cannot be read.
    """
    folder = Path(out)
    manifest = read_manifest(folder)
    check = _Check(folder, manifest)
    with os_errors(folder, "read"):
        problems = tuple(check.run())
    return VerifyReport(folder, problems, check.tensors, check.bytes)


class _Check:
    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest
        self._records = {t.name: t for t in manifest.tensors}
        self._shards = dict.fromkeys(t.file for t in manifest.tensors)
        self.tensors = 0
        self.bytes = 0

    def run(self) -> Iterator[str]:
        for shard in self._shards:
            yield from self._shard(shard)
        yield from self._index()
        yield from self._files()
        yield from self._strays()
        yield from self._config()

    def _shard(self, shard: str) -> Iterator[str]:
        path = self._folder / shard
        if not path.is_file():
            yield f"{shard} is missing"
            return
        try:
            entries = read_header(path, shard)
        except CheckpointError as error:
            yield str(error)
            return
        expected = {n for n, record in self._records.items() if record.file == shard}
        for entry in entries:
            if entry[0] in expected:
                yield from self._tensor(path, entry, self._records[entry[0]])
            else:
                yield f"{shard} holds {entry[0]}, which the manifest does not place there"
        yield from (f"{shard} lacks {n}" for n in sorted(expected - {e[0] for e in entries}))

    def _tensor(self, path: Path, entry: Entry, record: TensorRecord) -> Iterator[str]:
        name, shape, dtype, begin = entry
        if (shape, dtype_name(dtype)) != (record.shape, record.dtype):
            yield (
                f"{name} in {path.name} is {dtype_name(dtype)} of shape {shape}, and the manifest "
                f"says {record.dtype} of shape {record.shape}"
            )
            return
        left, crc = prod(shape) * dtype.itemsize, 0
        self.tensors += 1
        self.bytes += left
        with path.open("rb") as file:
            file.seek(begin)
            while left and (data := file.read(min(left, COPY_BYTES))):
                crc = zlib.crc32(data, crc)
                left -= len(data)
        if hex_crc(crc) != record.crc32:
            yield (
                f"{name} in {path.name} has been changed or damaged: its CRC-32 is "
                f"{hex_crc(crc)}, and the manifest says {record.crc32}"
            )

    def _index(self) -> Iterator[str]:
        path = self._folder / INDEX_NAME
        if len(self._shards) == 1:
            if path.exists():
                yield f"{INDEX_NAME} is there, though the weights are in one file"
            return
        index = _json_object(path)
        if index is None:
            yield f"{INDEX_NAME} is missing or is no JSON object"
            return
        weight_map = index.get("weight_map")
        if weight_map != {name: record.file for name, record in self._records.items()}:
            yield f"{INDEX_NAME} does not place the tensors where the manifest does"
        metadata = index.get("metadata")
        total = metadata.get("total_size") if isinstance(metadata, dict) else None
        if self.tensors == len(self._records) and total != self.bytes:
            yield f"{INDEX_NAME} says total_size {total}, and the tensors have {self.bytes} bytes"

    def _files(self) -> Iterator[str]:
        for name, sha256 in self._manifest.files.items():
            path = self._folder / name
            if not path.is_file():
                yield f"{name} is missing"
            elif sha256_of(path) != sha256:
                yield f"{name} has been changed: its SHA-256 is not the manifest's"

    def _strays(self) -> Iterator[str]:
        known = {*self._shards, *self._manifest.files}
        for path in sorted(self._folder.rglob("*")):
            name = path.relative_to(self._folder).as_posix()
            if path.suffix in _WEIGHT_SUFFIXES and name not in known:
                yield f"{name} is a weight file that the manifest does not know"

    def _config(self) -> Iterator[str]:
        config = _json_object(self._folder / _CONFIG)
        if config is None:
            if _CONFIG in self._manifest.files and (self._folder / _CONFIG).is_file():
                yield f"{_CONFIG} is no JSON object"
            return
        size = vocab_size(config)
        for group in (self._named(INPUT), self._named(OUTPUT)):
            # Of several vocabularies the config's is the largest.
            widest = max(group, key=lambda r: r.shape[0], default=None)
            if size is not None and widest is not None and widest.shape[0] != size:
                yield (
                    f"{_CONFIG} says vocab_size {size}, and {widest.name} has "
                    f"{widest.shape[0]} rows"
                )
        yield from self._ties(config)

    def _ties(self, config: Mapping[str, Any]) -> Iterator[str]:
        embeddings, heads = self._named(INPUT), self._named(OUTPUT)
        tied = tie_flag(config)
        for head in heads if tied and len(embeddings) == 1 else ():
            if (head.shape, head.crc32) != (embeddings[0].shape, embeddings[0].crc32):
                yield (
                    f"{_CONFIG} says tie_word_embeddings true, and {head.name} differs from "
                    f"{embeddings[0].name}"
                )
        names = config.get("architectures")
        causal = isinstance(names, list) and any("ForCausalLM" in str(name) for name in names)
        if tied is False and causal and embeddings and not heads:
            yield f"{_CONFIG} says tie_word_embeddings false, and there is no head"

    def _named(self, pattern: re.Pattern[str]) -> list[TensorRecord]:
        records = self._records.values()
        return [r for r in records if len(r.shape) == 2 and pattern.search(r.name)]


def _json_object(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
