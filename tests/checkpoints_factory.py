"""Tiny real transformers checkpoints for tests: a base and fine-tunes of it, in a second or two.

    base, finetunes = make_family(tmp_path, "llama", finetunes=3, dtype=torch.bfloat16)

Every folder is what ``save_pretrained`` writes (config, weights, generation config) beside a
real word-level tokenizer, so it loads in transformers as any checkpoint from the hub does.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

Architecture = Literal["llama", "qwen2", "gpt2", "mixtral", "mixtral_packed", "bert"]
ARCHITECTURES: tuple[Architecture, ...] = get_args(Architecture)

VOCABULARY = 128
HIDDEN = 32
SPECIAL_TOKENS = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
PAD, UNK, BOS, EOS, MASK = range(len(SPECIAL_TOKENS))

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": PAD,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}


def make_family(
    folder: str | Path,
    arch: Architecture,
    finetunes: int = 2,
    dtype: torch.dtype = torch.float32,
    shard_size: int | str | None = None,
    tie: bool | None = None,
    seed: int = 0,
    strength: float = 0.05,
) -> tuple[Path, list[Path]]:
    """Write ``folder/base`` and ``folder/ft1``, ``ft2``, ... and return their paths.

    ``arch`` is one of ``ARCHITECTURES``; ``bert`` is a masked language model, the others are
    causal ones. ``mixtral`` is stored with a tensor per expert, as on the hub, and
    ``mixtral_packed`` with all experts of a layer stacked in one 3-D tensor. ``shard_size`` is
    transformers' ``max_shard_size`` (None: one file). ``tie`` is ``tie_word_embeddings`` (None:
    the architecture's own, so tied for qwen2, gpt2 and bert).
    A fine-tune is the base plus, per matrix, a low-rank and a dense random delta whose RMS is
    ``strength`` times the base's; vectors move by a tenth of that. ``seed`` fixes every value.
    """
    root = Path(folder)
    base = make_model(arch, tie=tie, seed=seed)
    packed = arch == "mixtral_packed"
    base_path = save(base.to(dtype), root / "base", shard_size, packed=packed)
    paths = []
    for number in range(1, finetunes + 1):
        model = make_model(arch, tie=tie, seed=seed)
        perturb(model, seed=seed, number=number, strength=strength)
        paths.append(save(model.to(dtype), root / f"ft{number}", shard_size, packed=packed))
    return base_path, paths


def make_model(arch: Architecture, *, tie: bool | None = None, seed: int = 0) -> PreTrainedModel:
    """Return a randomly initialised float32 model of hidden size 32 with two layers."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _build(arch, tie)
        # Zero biases and unit norms would make a vector's base indistinguishable from its default.
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(0.02 * torch.randn_like(parameter))
    return model.eval()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer whose vocabulary fills all ``VOCABULARY`` rows."""
    words = [f"word{number}" for number in range(VOCABULARY - len(SPECIAL_TOKENS))]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *words))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL_TOKENS[UNK]))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", BOS)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        mask_token="<mask>",
        model_max_length=64,
    )


def perturb(model: PreTrainedModel, *, seed: int, number: int, strength: float) -> None:
    """Move every parameter of ``model`` in place as fine-tune ``number`` of a family."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = zlib.crc32(f"{seed}/{number}/{name}".encode())
            generator = torch.Generator().manual_seed(key)
            delta = _random_delta(parameter.shape, generator)
            size = strength if parameter.ndim > 1 else 0.1 * strength
            rms = parameter.square().mean().sqrt()
            parameter.add_(delta * (size * rms / delta.square().mean().sqrt()))


def save(
    model: PreTrainedModel,
    folder: Path,
    shard_size: int | str | None = None,
    *,
    packed: bool = False,
) -> Path:
    """Write ``model`` and its tokenizer to ``folder`` as ``save_pretrained`` does.

    ``packed`` keeps the stacked experts that the model holds in memory.
    """
    model.save_pretrained(
        folder, max_shard_size=shard_size or "5GB", save_original_format=not packed
    )
    make_tokenizer().save_pretrained(folder)
    return folder


def _random_delta(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    dense = torch.randn(shape, generator=generator)
    if len(shape) < 2:
        return dense
    rank = max(1, min(shape[-2:]) // 8)
    left = torch.randn((*shape[:-1], rank), generator=generator)
    right = torch.randn((*shape[:-2], rank, shape[-1]), generator=generator)
    return left @ right / rank**0.5 + 0.3 * dense


def _build(arch: Architecture, tie: bool | None) -> PreTrainedModel:
    tied: dict[str, Any] = {} if tie is None else {"tie_word_embeddings": tie}
    match arch:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**_DECODER, **tied))
        case "qwen2":
            tied = tied or {"tie_word_embeddings": True}
            return Qwen2ForCausalLM(Qwen2Config(**_DECODER, **tied))
        case "mixtral" | "mixtral_packed":
            experts: dict[str, Any] = {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "head_dim": 8,
            }
            return MixtralForCausalLM(MixtralConfig(**_DECODER, **experts, **tied))
        case "gpt2":
            return GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=VOCABULARY,
                    n_embd=HIDDEN,
                    n_layer=2,
                    n_head=4,
                    n_positions=64,
                    pad_token_id=PAD,
                    bos_token_id=BOS,
                    eos_token_id=EOS,
                    **tied,
                )
            )
        case "bert":
            return BertForMaskedLM(
                BertConfig(
                    vocab_size=VOCABULARY,
                    hidden_size=HIDDEN,
                    intermediate_size=80,
                    num_hidden_layers=2,
                    num_attention_heads=4,
                    max_position_embeddings=64,
                    pad_token_id=PAD,
                    **tied,
                )
            )


__all__ = ["ARCHITECTURES", "Architecture", "make_family", "make_model", "make_tokenizer"]
