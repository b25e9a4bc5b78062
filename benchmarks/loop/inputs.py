"""The model of the outer-step benchmark, and the real deltas of its workers.

A Llama learns the words of Python's standard library, a word's number being a hash of it. After
common warm-up steps every worker goes on alone with its own part of the text, and what it moves
by is its delta.
"""

from __future__ import annotations

import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Size:
    """A Llama's size and the steps that its workers take."""

    hidden: int = 512
    layers: int = 8
    ffn: int = 1376
    heads: int = 8
    vocabulary: int = 32000
    context: int = 64
    batch: int = 8
    warmup: int = 10
    steps: int = 10
    learning_rate: float = 1e-3

    @property
    def label(self) -> str:
        """What names this size in files."""
        return f"llama-{self.hidden}x{self.layers}-{self.vocabulary}"


SMOKE = Size(hidden=64, layers=2, ffn=160, heads=4, vocabulary=512, context=16, batch=2)


def new_model(size: Size) -> nn.Module:
    """Return the model at its seeded initial values, float32, embedding and head untied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.ffn,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads,
        max_position_embeddings=size.context,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def delta_of(worker: int, size: Size, cache: Path) -> dict[str, Tensor]:
    """Return θ_r − anchor of a worker by parameter name, training it at the first call."""
    steps = f"{size.warmup}+{size.steps}"
    file = cache / f"{size.label}-{steps}-worker{worker}.safetensors"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        save_file(_train(worker, size), file)
    return load_file(file)


def _train(worker: int, size: Size) -> dict[str, Tensor]:
    model, words = new_model(size), _words(size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=size.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    _steps(model, optimizer, words, size, size.warmup, seed=0)
    anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
    _steps(model, optimizer, words, size, size.steps, seed=worker + 1)
    return {name: p.detach() - anchor[name] for name, p in model.named_parameters()}


def _words(size: Size) -> Tensor:
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = b"".join(source.read_bytes() for source in sources)
    return torch.tensor([crc32(w) % size.vocabulary for w in re.findall(rb"\w+|[^\w ]", text)])


def _steps(
    model: nn.Module, optimizer: Any, words: Tensor, size: Size, steps: int, *, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(words) - size.context, (size.batch, 1), generator=generator)
        tokens = words[starts + torch.arange(size.context)]
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
