"""Checkpoints of a few numbers, written with safetensors alone."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

ROWS, WIDTH = 12, 4


def weights(
    seed: int = 0, *, head: bool = True, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return a tiny decoder's tensors, other values for every seed."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (ROWS, WIDTH),
        "model.layers.0.mlp.up_proj.weight": (6, WIDTH),
        "model.layers.0.mlp.down_proj.weight": (WIDTH, 6),
        "model.norm.weight": (WIDTH,),
    }
    if head:
        shapes["lm_head.weight"] = (ROWS, WIDTH)
    return {n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()}


def config(**more: Any) -> dict[str, Any]:
    """Return the config that goes with :func:`weights`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": ROWS,
        "tie_word_embeddings": False,
        "dtype": "float32",
        **more,
    }


def write(
    folder: Path,
    tensors: Mapping[str, Tensor],
    settings: Mapping[str, Any] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """Write a model folder and return it; with shards, an index too."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config() if settings is None else settings))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    index: dict[str, str] = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(list(tensors.items())[number::shards])
        save_file(part, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    write_index(folder, index)
    return folder


def write_index(folder: Path, index: Mapping[str, str]) -> None:
    """Write the index of a sharded model."""
    content = {"metadata": {}, "weight_map": dict(index)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))


def raw_file(path: Path, header: Any, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file in the safetensors format whose header may say anything."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path
