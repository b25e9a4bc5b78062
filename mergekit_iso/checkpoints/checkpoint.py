"""A checkpoint as its headers tell it, and reads of single tensors out of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import CheckpointError
from .files import is_plain_relative
from .header import read_header
from .source import locate

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLE_INDEX = "pytorch_model.bin.index.json"
_PICKLE = "pytorch_model.bin"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")

_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")
# Codes and scales of GPTQ, AWQ, bitsandbytes, compressed-tensors and block-wise FP8.
_QUANTISED = re.compile(
    r"\.(qweight|qzeros|g_idx|absmax|nested_absmax|quant_map|quant_state\.\S+|SCB|weight_packed"
    r"|weight_scale_inv)$"
)
_ADAPTER = re.compile(r"\.(lora_[AB]|lora_embedding_[AB])(\.|$)")


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint as its file declares it.

    ``file`` is relative to the checkpoint's folder, ``begin`` the position of the first byte
    in it (None in a pickle).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    file: str
    begin: int | None


@dataclass(frozen=True)
class Checkpoint:
    """A readable checkpoint: a local folder whose headers have been checked.

    ``label`` is what the user typed and stands in every message; ``commit`` is the hub's
    commit of a downloaded snapshot; ``config`` is the parsed ``config.json`` ({} without one);
    ``tensors`` are keyed by their stored names, in the files' order; ``weight_files`` are the
    files that count, relative to ``folder``. ``single_file`` says that a file was named, not its
    folder: what else lies there is then no part of the checkpoint.
    """

    label: str
    folder: Path
    commit: str | None
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    weight_files: tuple[str, ...]
    single_file: bool = False
    _pickles: dict[str, dict[str, Tensor]] = field(default_factory=dict, repr=False, compare=False)

    def read(self, name: str) -> Tensor:
        """Return the whole tensor ``name`` in its own dtype and shape, in memory of its own."""
        stored = self.tensors[name]
        return self.read_flat(name, 0, prod(stored.shape)).reshape(stored.shape)

    def read_flat(self, name: str, start: int, stop: int) -> Tensor:
        """Return the flat elements [start, stop) of ``name`` in its own dtype, 1-D.

        The bytes are read, not mapped: memory stays what the caller holds, and a disk error is
        an OSError instead of the end of the process. May be called from several threads.

        Raises:
            CheckpointError: the file has become shorter than its header says.
        """
        stored = self.tensors[name]
        if not 0 <= start <= stop <= prod(stored.shape):
            raise ValueError(f"[{start}, {stop}) lies outside {name} of shape {stored.shape}")
        if stored.begin is None:
            return self._unpickled(stored.file)[name].reshape(-1)[start:stop].clone()
        flat = torch.empty(stop - start, dtype=stored.dtype)
        left = memoryview(flat.view(torch.uint8).numpy().data)
        with open(self.folder / stored.file, "rb", buffering=0) as file:
            file.seek(stored.begin + start * stored.dtype.itemsize)
            while left:
                count = file.readinto(left)
                if not count:
                    raise CheckpointError(
                        f"{stored.file} of {self.label!r} ends inside {name}: it has changed "
                        "since it was opened"
                    )
                left = left[count:]
        return flat

    def _unpickled(self, file: str) -> dict[str, Tensor]:
        if file not in self._pickles:
            self._pickles[file] = _unpickle(self.folder / file, f"{file} of {self.label!r}")
        return self._pickles[file]


def open_checkpoint(reference: str | os.PathLike[str], *, allow_pickle: bool = False) -> Checkpoint:
    """Open a checkpoint from its headers alone.

    ``reference`` is a folder, a single .safetensors file or a hub id (see
    :func:`~mergekit_iso.checkpoints.source.locate`). In a folder the index decides which files
    count, without one ``model.safetensors`` or an only .safetensors file; all others are
    ignored. ``allow_pickle`` admits .bin files where there are no others, unpickled by torch's
    weights-only loader, which runs no code.

    Raises:
        CheckpointError: missing, incomplete, corrupt, quantised, an adapter, or pickled.
    """
    source = locate(reference, allow_pickle=allow_pickle)
    label, single_file = source.label, source.path.is_file()
    folder = source.path.parent if single_file else source.path
    config: dict[str, Any] = {}
    files: tuple[str, ...] = (source.path.name,)
    index: dict[str, str] | None = None
    if single_file:
        _refuse_lone_shard(label, folder, source.path.name)
        _refuse_pickle(label, source.path.name, allow_pickle)
    else:
        _refuse_adapter_folder(label, folder)
        if (folder / "config.json").exists():
            config = read_json(folder / "config.json", f"config.json of {label!r}")
        files, index = _weight_files(label, folder, allow_pickle)
    _refuse_quantised_config(label, config)
    _refuse_missing(label, folder, files, index is not None)

    pickles: dict[str, dict[str, Tensor]] = {}
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        where = f"{file} of {label!r}"
        if file.endswith(_PICKLES):
            pickles[file] = _unpickle(folder / file, where)
            found = [
                StoredTensor(name, tuple(t.shape), t.dtype, file, None)
                for name, t in pickles[file].items()
            ]
        else:
            found = [
                StoredTensor(name, shape, dtype, file, begin)
                for name, shape, dtype, begin in read_header(folder / file, where)
            ]
        for stored in found:
            if stored.name in tensors and index is None:
                raise CheckpointError(f"{label!r} holds {stored.name} twice")
            if index is not None and index.get(stored.name) != file:
                _refuse_unindexed(label, stored, index)
            tensors[stored.name] = stored
    for name in sorted((index or {}).keys() - tensors.keys()):
        raise CheckpointError(
            f"the index of {label!r} names {name!r}, and {(index or {})[name]} does not hold it",
            hint="the index and the shards are from different saves; fetch the model again",
        )
    if not tensors:
        raise CheckpointError(f"{label!r} holds no tensors")
    _refuse_kinds(label, tensors.values())
    return Checkpoint(label, folder, source.commit, config, tensors, files, single_file, pickles)


def read_json(path: Path, where: str) -> dict[str, Any]:
    """Return the object in a JSON file; CheckpointError, naming ``where``, if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{where} is not valid JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{where} does not hold a JSON object")
    return content


def _weight_files(
    label: str, folder: Path, allow_pickle: bool
) -> tuple[tuple[str, ...], dict[str, str] | None]:
    """Return the weight files that count, sorted, and the index's map if there is an index."""
    if (folder / _INDEX).exists():
        return _indexed(label, folder, _INDEX)
    if (folder / _SINGLE).exists():
        return (_SINGLE,), None
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(others) == 1 and not _SHARD.search(others[0]):
        return (others[0],), None
    if others:
        raise CheckpointError(
            f"{label!r} has no {_INDEX} to say which of its files count: {listed(others)}",
            hint="fetch the index, or name a single .safetensors file",
        )
    pickled = [name for name in (_PICKLE_INDEX, _PICKLE) if (folder / name).exists()]
    pickled = pickled or sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLES)
    if not pickled:
        raise CheckpointError(
            f"{label!r} has no weights: neither {_SINGLE} nor {_INDEX}",
            hint="give the folder that holds the .safetensors files",
        )
    _refuse_pickle(label, pickled[0], allow_pickle)
    if pickled[0] == _PICKLE_INDEX:
        return _indexed(label, folder, _PICKLE_INDEX)
    return (pickled[0],), None


def _indexed(label: str, folder: Path, name: str) -> tuple[tuple[str, ...], dict[str, str]]:
    index = read_json(folder / name, f"{name} of {label!r}").get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise CheckpointError(f"{name} of {label!r} has no weight_map of names to files")
    files = tuple(sorted(set(index.values())))
    for file in files:
        if not is_plain_relative(file):
            raise CheckpointError(f"{name} of {label!r} points outside its folder: {file!r}")
    if not files:
        raise CheckpointError(f"{name} of {label!r} names no tensor")
    return files, index


def _refuse_missing(label: str, folder: Path, files: Iterable[str], indexed: bool) -> None:
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        why = " that its index names" if indexed else ""
        raise CheckpointError(
            f"{label!r} lacks {listed(missing)}{why}",
            hint="fetch it; an interrupted download leaves such a folder",
        )


def _refuse_lone_shard(label: str, folder: Path, name: str) -> None:
    index = folder / _INDEX
    if _SHARD.search(name) and index.exists():
        raise CheckpointError(
            f"{label!r} is one shard of a checkpoint that has several", hint=f"give {str(folder)!r}"
        )


def _refuse_pickle(label: str, file: str, allow_pickle: bool) -> None:
    if not allow_pickle and file.removesuffix(".index.json").endswith(_PICKLES):
        raise CheckpointError(
            f"{label!r} has its weights only as a pickle ({file}), not as safetensors",
            hint="convert it to safetensors, or allow restricted unpickling with --allow-pickle",
        )


def _refuse_adapter_folder(label: str, folder: Path) -> None:
    if (folder / "adapter_config.json").exists():
        _refuse_adapter(label)


def _refuse_adapter(label: str) -> None:
    raise CheckpointError(
        f"{label!r} is a LoRA adapter (PEFT), not a model",
        hint="apply it to its base first and save the whole model (merge_and_unload in peft)",
    )


def _refuse_quantised_config(label: str, config: Mapping[str, Any]) -> None:
    for section in (config, *(c for c in config.values() if isinstance(c, dict))):
        if section.get("quantization_config") or section.get("compression_config"):
            _refuse_quantised(label, "its config.json has a quantization_config")


def _refuse_kinds(label: str, tensors: Iterable[StoredTensor]) -> None:
    """Refuse quantised models and adapters that only their tensors give away."""
    for stored in tensors:
        if _ADAPTER.search(stored.name):
            _refuse_adapter(label)
        matrix_of_codes = (
            stored.name.endswith(".weight")
            and len(stored.shape) >= 2
            and not stored.dtype.is_floating_point
            and not stored.dtype.is_complex
            and stored.dtype != torch.bool
        )
        if matrix_of_codes or _QUANTISED.search(stored.name):
            _refuse_quantised(label, f"{stored.name} holds codes, not weights")
        if "float8" in str(stored.dtype):
            _refuse_quantised(label, f"{stored.name} is stored as {stored.dtype}")


def _refuse_quantised(label: str, reason: str) -> None:
    raise CheckpointError(
        f"{label!r} is quantised (quantized): {reason}",
        hint="merge the unquantised model in float16, bfloat16 or float32",
    )


def _refuse_unindexed(label: str, stored: StoredTensor, index: Mapping[str, str]) -> None:
    if stored.name in index:
        raise CheckpointError(
            f"{stored.file} of {label!r} holds {stored.name}, which its index places in "
            f"{index[stored.name]}",
            hint="the index and the shards are from different saves; fetch the model again",
        )
    raise CheckpointError(
        f"{stored.file} of {label!r} holds {stored.name}, which its index omits",
        hint="repair or fetch the index again; nothing is skipped in silence",
    )


def _unpickle(path: Path, where: str) -> dict[str, Tensor]:
    """Return the tensors of a pickled state dict, read by the loader that runs no code."""
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # saved in the format before torch 1.6, which cannot be mapped
            content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        if isinstance(error, OSError):
            raise
        raise CheckpointError(
            f"{where} cannot be unpickled as weights only ({type(error).__name__})",
            hint="convert it to safetensors where you trust it",
        ) from None
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise CheckpointError(
            f"{where} is not a plain mapping of names to tensors",
            hint="save the model's state_dict as safetensors",
        )
    return content


def listed(names: Iterable[str], most: int = 3) -> str:
    """Return the first names, comma-separated, and how many more there are."""
    names = list(names)
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
