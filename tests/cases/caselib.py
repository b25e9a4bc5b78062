"""Helpers that write tiny Hugging Face style checkpoints for the miniature cases.

Needs torch, safetensors and the standard library only. Everything is seeded, so
two runs of a generator give the same bytes.

Conventions used by every case (see cases.json for the machine-readable form):

  task_arithmetic   out = base + sum_i w_i * (model_i - base)      (no normalising)
  any other method  only the properties named in the case are checked

`expected/` folders are made here from the formula in float64 and rounded once to
the dtype of the base tensor.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, INTER, LAYERS, HEADS, KV, VOCAB = 16, 24, 2, 2, 1, 96
HEAD_DIM = HIDDEN // HEADS


# ------------------------------------------------------------------ configs
def llama_config(vocab=VOCAB, tie=False, dtype="bfloat16", **more):
    cfg = dict(
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV,
        head_dim=HEAD_DIM,
        hidden_act="silu",
        max_position_embeddings=64,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        tie_word_embeddings=tie,
        torch_dtype=dtype,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        attention_bias=False,
        mlp_bias=False,
        initializer_range=0.02,
        use_cache=True,
    )
    cfg.update(more)
    return cfg


def mistral_config(**kw):
    cfg = llama_config(**kw)
    cfg.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=None)
    return cfg


def qwen2_config(vocab=VOCAB, tie=True, dtype="bfloat16", **more):
    cfg = llama_config(vocab=vocab, tie=tie, dtype=dtype)
    cfg.update(architectures=["Qwen2ForCausalLM"], model_type="qwen2")
    for k in ("attention_bias", "mlp_bias", "head_dim"):
        cfg.pop(k)
    cfg.update(more)
    return cfg


def qwen3_config(vocab=VOCAB, tie=False, dtype="bfloat16", **more):
    cfg = llama_config(vocab=vocab, tie=tie, dtype=dtype)
    cfg.update(architectures=["Qwen3ForCausalLM"], model_type="qwen3")
    cfg.pop("mlp_bias")
    cfg.update(more)
    return cfg


def gpt2_config(vocab=VOCAB, dtype="float32", **more):
    cfg = dict(
        architectures=["GPT2LMHeadModel"],
        model_type="gpt2",
        vocab_size=vocab,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INTER,
        n_positions=64,
        n_ctx=64,
        activation_function="gelu_new",
        layer_norm_epsilon=1e-5,
        torch_dtype=dtype,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    cfg.update(more)
    return cfg


# ------------------------------------------------------------------ tensors
def _rand(gen, *shape, scale=0.05, dtype=torch.float32):
    return (torch.randn(*shape, generator=gen) * scale).to(dtype)


def llama_tensors(
    seed, vocab=VOCAB, tie=False, dtype=torch.bfloat16, qk_norm=False, qkv_bias=False
):
    g = torch.Generator().manual_seed(seed)
    t = {"model.embed_tokens.weight": _rand(g, vocab, HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        t[p + "self_attn.q_proj.weight"] = _rand(g, HEADS * HEAD_DIM, HIDDEN)
        t[p + "self_attn.k_proj.weight"] = _rand(g, KV * HEAD_DIM, HIDDEN)
        t[p + "self_attn.v_proj.weight"] = _rand(g, KV * HEAD_DIM, HIDDEN)
        t[p + "self_attn.o_proj.weight"] = _rand(g, HIDDEN, HEADS * HEAD_DIM)
        if qkv_bias:
            t[p + "self_attn.q_proj.bias"] = _rand(g, HEADS * HEAD_DIM)
            t[p + "self_attn.k_proj.bias"] = _rand(g, KV * HEAD_DIM)
            t[p + "self_attn.v_proj.bias"] = _rand(g, KV * HEAD_DIM)
        if qk_norm:
            t[p + "self_attn.q_norm.weight"] = 1 + _rand(g, HEAD_DIM)
            t[p + "self_attn.k_norm.weight"] = 1 + _rand(g, HEAD_DIM)
        t[p + "mlp.gate_proj.weight"] = _rand(g, INTER, HIDDEN)
        t[p + "mlp.up_proj.weight"] = _rand(g, INTER, HIDDEN)
        t[p + "mlp.down_proj.weight"] = _rand(g, HIDDEN, INTER)
        t[p + "input_layernorm.weight"] = 1 + _rand(g, HIDDEN)
        t[p + "post_attention_layernorm.weight"] = 1 + _rand(g, HIDDEN)
    t["model.norm.weight"] = 1 + _rand(g, HIDDEN)
    if not tie:
        t["lm_head.weight"] = _rand(g, vocab, HIDDEN)
    return {k: v.to(dtype) for k, v in t.items()}


def gpt2_tensors(seed, vocab=VOCAB, dtype=torch.float32):
    """GPT-2 keeps its linear weights as (in, out) and has no lm_head in the file."""
    g = torch.Generator().manual_seed(seed)
    t = {
        "transformer.wte.weight": _rand(g, vocab, HIDDEN),
        "transformer.wpe.weight": _rand(g, 64, HIDDEN),
    }
    for i in range(LAYERS):
        p = f"transformer.h.{i}."
        for n in ("ln_1", "ln_2"):
            t[p + n + ".weight"] = 1 + _rand(g, HIDDEN)
            t[p + n + ".bias"] = _rand(g, HIDDEN)
        t[p + "attn.c_attn.weight"] = _rand(g, HIDDEN, 3 * HIDDEN)
        t[p + "attn.c_attn.bias"] = _rand(g, 3 * HIDDEN)
        t[p + "attn.c_proj.weight"] = _rand(g, HIDDEN, HIDDEN)
        t[p + "attn.c_proj.bias"] = _rand(g, HIDDEN)
        t[p + "mlp.c_fc.weight"] = _rand(g, HIDDEN, INTER)
        t[p + "mlp.c_fc.bias"] = _rand(g, INTER)
        t[p + "mlp.c_proj.weight"] = _rand(g, INTER, HIDDEN)
        t[p + "mlp.c_proj.bias"] = _rand(g, HIDDEN)
    t["transformer.ln_f.weight"] = 1 + _rand(g, HIDDEN)
    t["transformer.ln_f.bias"] = _rand(g, HIDDEN)
    return {k: v.to(dtype) for k, v in t.items()}


def finetune(base, seed, scale=0.01, only=None, skip=()):
    """A fine-tune of `base`: every floating tensor gets a small seeded change."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for k, v in base.items():
        noise = torch.randn(v.shape, generator=g) * scale
        if not v.is_floating_point() or k in skip or (only is not None and not only(k)):
            out[k] = v.clone()
        else:
            out[k] = (v.float() + noise).to(v.dtype)
    return out


# ------------------------------------------------------------------ tokenizer
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>"]


def tokenizer_files(size=VOCAB, order=None, extra_special=(), chat_template=None):
    """A byte-level BPE tokenizer.json of just `size` tokens that AutoTokenizer can read.

    Single characters first, then pairs with a merge rule each; `order` permutes the ids.
    """
    room = size - len(SPECIALS) - len(extra_special)
    chars = [chr(c) for c in range(33, 127)] + ["\u0120"]
    pairs = [(x, y) for x in "abcdefgh" for y in "abcdefgh"]
    words = chars[-min(room, len(chars)) :] if room < len(chars) else chars
    used = pairs[: max(0, room - len(chars))]
    words = words + [x + y for x, y in used]
    if order is not None:
        words = [words[j] for j in order(len(words))]
    vocab = {w: i for i, w in enumerate(SPECIALS + words + list(extra_special))}
    added = [
        dict(
            id=vocab[w],
            content=w,
            single_word=False,
            lstrip=False,
            rstrip=False,
            normalized=False,
            special=True,
        )
        for w in SPECIALS + list(extra_special)
    ]
    tok = dict(
        version="1.0",
        truncation=None,
        padding=None,
        added_tokens=added,
        normalizer=None,
        pre_tokenizer=dict(
            type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True
        ),
        post_processor=None,
        decoder=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True),
        model=dict(
            type="BPE",
            dropout=None,
            unk_token="<unk>",
            continuing_subword_prefix=None,
            end_of_word_suffix=None,
            fuse_unk=False,
            byte_fallback=False,
            ignore_merges=False,
            vocab=vocab,
            merges=[[x, y] for x, y in used],
        ),
    )
    cfg = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=64,
        added_tokens_decoder={
            str(a["id"]): {
                k: a[k]
                for k in ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
            }
            for a in added
        },
    )
    if chat_template is not None:
        cfg["chat_template"] = chat_template
    smap = dict(bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    return {"tokenizer.json": tok, "tokenizer_config.json": cfg, "special_tokens_map.json": smap}


# ------------------------------------------------------------------ writing
def write_json(path: Path, obj):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(obj, indent=2) + "\n")


def nbytes(t):
    return t.numel() * t.element_size()


def write_checkpoint(
    folder: Path, config, tensors, shards=1, metadata="pt", tokenizer=True, extra=None
):
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    meta = {"format": "pt"} if metadata == "pt" else metadata
    tensors = {k: v.contiguous() for k, v in tensors.items()}
    if shards == 1:
        save_file(tensors, str(folder / "model.safetensors"), metadata=meta)
    else:
        names = list(tensors)
        per = -(-len(names) // shards)
        wmap = {}
        for s in range(shards):
            part = names[s * per : (s + 1) * per]
            fn = f"model-{s + 1:05d}-of-{shards:05d}.safetensors"
            save_file({n: tensors[n] for n in part}, str(folder / fn), metadata=meta)
            wmap.update({n: fn for n in part})
        write_json(
            folder / "model.safetensors.index.json",
            dict(metadata=dict(total_size=sum(map(nbytes, tensors.values()))), weight_map=wmap),
        )
    if tokenizer:
        files = (
            tokenizer if isinstance(tokenizer, dict) else tokenizer_files(size=config["vocab_size"])
        )
        for n, obj in files.items():
            write_json(folder / n, obj)
    for n, content in (extra or {}).items():
        p = folder / n
        p.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            p.write_bytes(content)
        elif isinstance(content, str):
            p.write_text(content)
        else:
            write_json(p, content)


def write_expected(folder: Path, tensors):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {k: v.contiguous() for k, v in tensors.items()},
        str(folder / "model.safetensors"),
        metadata={"format": "pt"},
    )


# ------------------------------------------------------------------ float64 references
def ref_task_arithmetic(base, models, weights):
    out = {}
    for k, b in base.items():
        if not b.is_floating_point():
            out[k] = b.clone()
            continue
        acc = b.double()
        for w, m in zip(weights, models):
            acc = acc + w * (m[k].double() - b.double())
        out[k] = acc.to(b.dtype)
    return out


def ref_iso_c(deltas):
    """Sum of the deltas with every singular value replaced by their arithmetic mean."""
    s = sum(d.double() for d in deltas)
    u, sv, vh = torch.linalg.svd(s, full_matrices=False)
    return (u * sv.mean()) @ vh


# ------------------------------------------------------------------ driver
class Cases:
    def __init__(self, root: Path):
        self.root = root
        self.items = []

    def folder(self, cid):
        d = self.root / cid
        if d.exists():
            shutil.rmtree(d)
        d.mkdir(parents=True)
        return d

    def add(
        self,
        cid,
        log,
        expect,
        property_,
        checks=None,
        kind="merge",
        base="base",
        models=("a", "b"),
        method="task_arithmetic",
        params=None,
        also=None,
        note=None,
        loadable=(),
    ):
        item = dict(id=cid, log=log, kind=kind, expect=expect, property=property_)
        if also:
            item["also_acceptable"] = also
        if kind == "merge":
            item.update(base=base, models=list(models), method=method, params=params or {})
        elif params:
            item["params"] = params
        item["checks"] = checks or []
        if note:
            item["note"] = note
        if loadable:
            item["loadable"] = list(loadable)
        self.items.append(item)
        write_json(self.root / cid / "case.json", item)

    def finish(self, also_to: Path | None = None):
        head = dict(
            about="kind=merge: merge `models` onto `base` (folders inside the case) with `method` and `params`; "
            "task_arithmetic means out = base + sum_i weights[i] * (models[i] - base). "
            "`expect` is ok|error; `also_acceptable` names another outcome that is no fault. "
            "kind=operator and kind=online: see `property` and the files in the case. "
            "`loadable`: folders that transformers loads without missing keys.",
            cases=sorted(self.items, key=lambda c: c["id"]),
        )
        write_json(self.root / "cases.json", head)
        if also_to is not None:
            write_json(also_to, head)
