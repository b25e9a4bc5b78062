"""Write miniature checkpoints of what real users ran into.

  python make_cases.py [--out DIR]     (default: ./cases beside this script)

Each case is a folder NN-slug, NN being the number of the report; cases.json lists
what must come of it. torch, safetensors and the standard library only.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

import caselib as L

W = [0.5, 0.5]


def trio(seed=0, **kw):
    base = L.llama_tensors(seed, **kw)
    return base, L.finetune(base, seed + 1), L.finetune(base, seed + 2)


def plain(c, cid, tensors=None, cfg=None, **kw):
    """base, a and b as ordinary checkpoints; returns the folder and the three dicts."""
    d = c.folder(cid)
    base, a, b = tensors or trio()
    cfg = cfg or L.llama_config()
    for n, t in (("base", base), ("a", a), ("b", b)):
        L.write_checkpoint(d / n, cfg, t, **kw)
    return d, base, a, b


def expected(d, base, models, weights=W):
    e = L.ref_task_arithmetic(base, models, weights)
    L.write_expected(d / "expected", e)
    return e


CLOSE = dict(check="close", to="expected")
KEYS = dict(check="keys_equal")
FINITE = dict(check="all_finite")
NOOUT = dict(check="no_output")


def says(*any_):
    return dict(check="mentions", any=list(any_))


def build(c: L.Cases):
    P = dict(weights=W)

    # ------------------------------------------------ vocabulary and tokenizers
    d = c.folder("01-added-pad-token-rows")
    base, a, _ = trio()
    b97 = {k: v.clone() for k, v in L.finetune(base, 9).items()}
    for k in ("model.embed_tokens.weight", "lm_head.weight"):
        b97[k] = torch.cat([b97[k], torch.zeros(1, L.HIDDEN, dtype=torch.bfloat16)])
    L.write_checkpoint(d / "base", L.llama_config(), base)
    L.write_checkpoint(d / "a", L.llama_config(), a)
    L.write_checkpoint(
        d / "b",
        L.llama_config(vocab=97),
        b97,
        tokenizer=L.tokenizer_files(size=97, extra_special=["<extra>"]),
    )
    c.add(
        "01-added-pad-token-rows",
        1,
        "error",
        "one fine-tune has one embedding row more: say which tensor of which "
        "model, and both shapes, before anything is computed; never crop, pad or skip in silence",
        [says("embed_tokens", "lm_head"), says("97"), NOOUT],
        params=P,
        loadable=["base", "a", "b"],
    )

    d, *_ = plain(
        c, "02-config-vocab-stale", cfg=L.llama_config(vocab=104), tokenizer=L.tokenizer_files(96)
    )
    c.add(
        "02-config-vocab-stale",
        2,
        "error",
        "config.json says 104 rows, the tensors have 96: stop and say so "
        "(or write a config that fits the tensors); never an output that will not load",
        [says("vocab_size"), NOOUT],
        also="ok",
        params=P,
    )

    d = c.folder("05-same-shape-other-tokenizer")
    base, a, b = trio(5)
    for n, t in (("base", base), ("a", a)):
        L.write_checkpoint(d / n, L.llama_config(), t)
    L.write_checkpoint(
        d / "b",
        L.llama_config(),
        b,
        tokenizer=L.tokenizer_files(order=lambda n: list(range(n))[::-1]),
    )
    c.add(
        "05-same-shape-other-tokenizer",
        5,
        "error",
        "equal shapes, but token ids mean other words in model b: "
        "refuse (or warn loudly under an explicit override) rather than average unrelated rows",
        [dict(check="warns", any=["tokenizer", "vocabulary"])],
        also="ok",
        params=P,
        loadable=["base", "a", "b"],
    )

    # ------------------------------------------------ tied embeddings
    d = c.folder("09-head-in-one-input-only")
    base = L.llama_tensors(9, tie=True, qkv_bias=True)
    a, b = L.finetune(base, 10), L.finetune(base, 11)
    emb = "model.embed_tokens.weight"
    b["lm_head.weight"] = L.finetune({"x": b[emb]}, 12)["x"]
    L.write_checkpoint(d / "base", L.qwen2_config(), base)
    L.write_checkpoint(d / "a", L.qwen2_config(), a)
    L.write_checkpoint(d / "b", L.qwen2_config(tie=False), b)
    full = [
        dict(m, **({} if "lm_head.weight" in m else {"lm_head.weight": m[emb].clone()}))
        for m in (base, a, b)
    ]
    e = L.ref_task_arithmetic(full[0], full[1:], W)
    L.write_expected(d / "expected", e)
    c.add(
        "09-head-in-one-input-only",
        9,
        "ok",
        "a tied model counts as having lm_head = embedding; as one input unties "
        "them, the output has its own lm_head and tie_word_embeddings false",
        [
            dict(check="keys_equal", keys=sorted(e)),
            CLOSE,
            dict(check="config", values=dict(tie_word_embeddings=False)),
            says("lm_head", "tie"),
        ],
        also="error",
        params=P,
        loadable=["base", "a", "b"],
    )

    d, base, a, b = plain(
        c,
        "10-tied-no-head-anywhere",
        cfg=L.qwen2_config(),
        tensors=(
            t0 := L.llama_tensors(20, tie=True, qkv_bias=True),
            L.finetune(t0, 21),
            L.finetune(t0, 22),
        ),
    )
    expected(d, base, [a, b])
    c.add(
        "10-tied-no-head-anywhere",
        10,
        "ok",
        "no file has lm_head.weight: no KeyError, none invented, still tied",
        [KEYS, CLOSE, dict(check="config", values=dict(tie_word_embeddings=True))],
        params=P,
        loadable=["base", "a", "b"],
    )

    # ------------------------------------------------ key sets and layouts
    d, base, a, b = plain(c, "16-tensor-missing-in-one")
    lost = "model.layers.1.mlp.up_proj.weight"
    L.write_checkpoint(d / "b", L.llama_config(), {k: v for k, v in b.items() if k != lost})
    c.add(
        "16-tensor-missing-in-one",
        16,
        "error",
        "name the missing tensor and the model that lacks it, before any work",
        [says(lost), NOOUT],
        params=P,
        loadable=["base", "a"],
    )

    d, base, a, b = plain(c, "16-extra-tensor-in-one")
    L.write_checkpoint(
        d / "b", L.llama_config(), dict(b, **{"v_head.weight": torch.ones(1, L.HIDDEN)})
    )
    expected(d, base, [a, b])
    c.add(
        "16-extra-tensor-in-one",
        16,
        "error",
        "a fine-tune has a tensor the base lacks (a value head): refuse, or warn "
        "by name and leave it out; never drop it in silence",
        [dict(check="warns", any=["v_head"]), KEYS, CLOSE],
        also="ok",
        params=P,
    )

    d, base, a, b = plain(c, "17-vision-wrapper-prefix")
    L.write_checkpoint(
        d / "b",
        dict(
            architectures=["LlavaForConditionalGeneration"],
            model_type="llava",
            text_config=L.llama_config(),
        ),
        {("language_model." + k): v for k, v in b.items()},
        tokenizer=L.tokenizer_files(),
    )
    expected(d, base, [a, b])
    c.add(
        "17-vision-wrapper-prefix",
        17,
        "error",
        "model b holds the same language model under another prefix: say that "
        "the architectures or names do not match (or map them), not a bare KeyError",
        [says("language_model", "architecture", "model_type", "prefix"), KEYS, CLOSE],
        also="ok",
        params=P,
    )

    d = c.folder("18-expert-layouts-mixed")
    E, I = 4, 6  # 2 * I < HIDDEN: a narrow expert, so shapes alone do not tell the orientation
    cfg = L.qwen3_config()
    cfg.update(
        architectures=["Qwen3MoeForCausalLM"],
        model_type="qwen3_moe",
        num_experts=E,
        num_experts_per_tok=2,
        moe_intermediate_size=I,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        norm_topk_prob=True,
        router_aux_loss_coef=0.0,
    )
    base = {k: v for k, v in L.llama_tensors(30, qk_norm=True).items() if ".mlp." not in k}
    g = torch.Generator().manual_seed(31)
    for i in range(L.LAYERS):
        base[f"model.layers.{i}.mlp.gate.weight"] = L._rand(g, E, L.HIDDEN, dtype=torch.bfloat16)
        for e_ in range(E):
            p = f"model.layers.{i}.mlp.experts.{e_}."
            base[p + "gate_proj.weight"] = L._rand(g, I, L.HIDDEN, dtype=torch.bfloat16)
            base[p + "up_proj.weight"] = L._rand(g, I, L.HIDDEN, dtype=torch.bfloat16)
            base[p + "down_proj.weight"] = L._rand(g, L.HIDDEN, I, dtype=torch.bfloat16)
    a, b = L.finetune(base, 32), L.finetune(base, 33)
    fused = {k: v for k, v in b.items() if ".experts." not in k}
    for i in range(L.LAYERS):
        p = f"model.layers.{i}.mlp.experts."
        fused[p + "gate_up_proj"] = torch.stack(
            [
                torch.cat([b[f"{p}{j}.gate_proj.weight"], b[f"{p}{j}.up_proj.weight"]])
                for j in range(E)
            ]
        )
        fused[p + "down_proj"] = torch.stack([b[f"{p}{j}.down_proj.weight"] for j in range(E)])
    for n, t in (("base", base), ("a", a), ("b", fused)):
        L.write_checkpoint(d / n, cfg, t)
    expected(d, base, [a, b])
    c.add(
        "18-expert-layouts-mixed",
        18,
        "error",
        "base and a list every expert, b stacks them into one tensor: say that the "
        "layouts differ, or convert exactly; never leave the experts unmerged",
        [says("experts"), KEYS, CLOSE],
        also="ok",
        params=P,
        loadable=["base", "a", "b"],
        note="2 * moe_intermediate_size < hidden_size on purpose (log 19)",
    )

    d, base, a, b = plain(c, "20-wrapper-prefixes")
    L.write_checkpoint(d / "a", L.llama_config(), {"_orig_mod." + k: v for k, v in a.items()})
    L.write_checkpoint(
        d / "b", L.llama_config(), {"module._orig_mod." + k: v for k, v in b.items()}
    )
    expected(d, base, [a, b])
    c.add(
        "20-wrapper-prefixes",
        20,
        "ok",
        "names left by torch.compile and DDP are stripped, nested too; output names are the base's",
        [KEYS, CLOSE, says("_orig_mod", "prefix")],
        also="error",
        params=P,
    )

    d = c.folder("21-persisted-rotary-buffers")
    base, a, b = trio(40)
    inv = 1.0 / (10000.0 ** (torch.arange(0, L.HEAD_DIM, 2).float() / L.HEAD_DIM))
    old = dict(
        base,
        **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": inv.clone() for i in range(L.LAYERS)},
    )
    L.write_checkpoint(d / "base", L.llama_config(), old)
    L.write_checkpoint(d / "a", L.llama_config(), a)
    L.write_checkpoint(d / "b", L.llama_config(), b)
    expected(d, base, [a, b])
    c.add(
        "21-persisted-rotary-buffers",
        21,
        "ok",
        "an old base still stores inv_freq, the fine-tunes do not: no error over a "
        "recomputed buffer; it is copied or left out, never merged",
        [CLOSE, FINITE],
        params=P,
        loadable=["base", "a", "b"],
    )

    d = c.folder("22-gpt2-conv1d-and-masks")
    base = L.gpt2_tensors(50)
    for i in range(L.LAYERS):
        base[f"transformer.h.{i}.attn.bias"] = torch.tril(
            torch.ones(64, 64, dtype=torch.uint8)
        ).view(1, 1, 64, 64)
        base[f"transformer.h.{i}.attn.masked_bias"] = torch.tensor(-10000.0)
    keep = lambda k: not k.endswith(("attn.bias", "masked_bias"))
    a, b = L.finetune(base, 51, only=keep), L.finetune(base, 52, only=keep)
    for n, t in (("base", base), ("a", a), ("b", b)):
        L.write_checkpoint(d / n, L.gpt2_config(), t)
    expected(d, base, [a, b])
    c.add(
        "22-gpt2-conv1d-and-masks",
        22,
        "ok",
        "mask buffers named `bias` are no weights and stay as in the base; the (in, out) "
        "matrices merge like any other",
        [CLOSE, dict(check="same_as_base", names=["*.attn.bias"])],
        params=P,
        loadable=["base", "a", "b"],
    )

    plain(c, "25-base-among-the-models")
    c.add(
        "25-base-among-the-models",
        25,
        "error",
        "the base is listed as a model too: its zero task vector would still count as "
        "a task (rank shares, means); refuse or warn",
        [dict(check="warns", any=["warn", "error"]), dict(check="warns", any=["base"])],
        also="ok",
        models=("a", "base"),
        method="tsv",
        params={},
    )

    # ------------------------------------------------ reading files
    d, base, a, b = plain(c, "26-shard-missing")
    L.write_checkpoint(d / "a", L.llama_config(), a, shards=3)
    (d / "a" / "model.safetensors").unlink()
    (d / "a" / "model-00002-of-00003.safetensors").unlink()
    c.add(
        "26-shard-missing",
        26,
        "error",
        "name the shard that the index wants and that is not there",
        [says("model-00002-of-00003.safetensors"), NOOUT],
        params=P,
        loadable=["base", "b"],
    )

    d = c.folder("27-stray-weights-beside-index")
    base, a, b = trio(60)
    L.write_checkpoint(d / "base", L.llama_config(), base, shards=2)
    save_file(
        {k: torch.full_like(v, 7.0) for k, v in base.items()},
        str(d / "base" / "model-old.safetensors"),
        metadata={"format": "pt"},
    )
    save_file(
        {k: torch.full_like(v, 9.0) for k, v in base.items()},
        str(d / "base" / "consolidated.safetensors"),
        metadata={"format": "pt"},
    )
    L.write_checkpoint(d / "a", L.llama_config(), a)
    L.write_checkpoint(d / "b", L.llama_config(), b, shards=3)
    expected(d, base, [a, b])
    c.add(
        "27-stray-weights-beside-index",
        27,
        "ok",
        "the index alone says which files count; strays are neither read nor copied",
        [
            KEYS,
            CLOSE,
            dict(check="absent", globs=["model-old.safetensors", "consolidated.safetensors"]),
        ],
        params=P,
        loadable=["base", "a", "b"],
    )

    d = c.folder("29-index-omits-a-tensor")
    base, a, b = trio(70)
    L.write_checkpoint(d / "base", L.llama_config(), base)
    L.write_checkpoint(d / "b", L.llama_config(), b)
    L.write_checkpoint(d / "a", L.llama_config(), a, shards=2)
    ip = d / "a" / "model.safetensors.index.json"
    j = json.loads(ip.read_text())
    j["weight_map"].pop("model.norm.weight")
    L.write_json(ip, j)
    expected(d, base, [a, b])
    c.add(
        "29-index-omits-a-tensor",
        29,
        "error",
        "a shard holds model.norm.weight, the index does not list it: say so "
        "(or read it and warn); never treat it as zero or skip it",
        [dict(check="warns", any=["model.norm.weight"]), KEYS, CLOSE],
        also="ok",
        params=P,
    )

    d, base, a, b = plain(c, "30-lfs-pointer")
    (d / "a" / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456789\n"
    )
    c.add(
        "30-lfs-pointer",
        30,
        "error",
        "a Git LFS pointer stands where the weights should be: name the file and say what it is",
        [says("model.safetensors"), says("lfs", "pointer"), NOOUT],
        params=P,
        loadable=["base", "b"],
    )

    d, base, a, b = plain(c, "32-pickle-only")

    class Side:
        def __reduce__(self):
            return os.mkdir, ("unpickled-marker",)

    (d / "b" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Side()}, str(d / "b" / "pytorch_model.bin"))
    c.add(
        "32-pickle-only",
        32,
        "error",
        "a pickle that would run code on loading (here: make an empty folder `unpickled-marker`): "
        "refused, and nothing run",
        [
            says("pickle", "pytorch_model.bin", "safetensors"),
            dict(check="no_marker", name="unpickled-marker"),
            NOOUT,
        ],
        params=P,
    )

    d, base, a, b = plain(c, "33-inputs-without-metadata", metadata=None)
    p = d / "b" / "model.safetensors"
    raw = p.read_bytes()
    n = struct.unpack("<Q", raw[:8])[0]
    head = json.loads(raw[8 : 8 + n])
    head = {"__metadata__": {}, **head}
    hb = json.dumps(head).encode()
    hb += b" " * (-len(hb) % 8)
    p.write_bytes(struct.pack("<Q", len(hb)) + hb + raw[8 + n :])
    expected(d, base, [a, b])
    c.add(
        "33-inputs-without-metadata",
        33,
        "ok",
        "inputs lack the optional metadata (b: empty); read them all the same, and write format=pt",
        [KEYS, CLOSE],
        params=P,
        loadable=["base", "a"],
    )

    d, base, a, b = plain(c, "34-gptq-input")
    q = {k: v for k, v in a.items() if "q_proj" not in k}
    for i in range(L.LAYERS):
        m = f"model.layers.{i}.self_attn.q_proj."
        q[m + "qweight"] = torch.zeros(L.HIDDEN // 8, L.HIDDEN, dtype=torch.int32)
        q[m + "qzeros"] = torch.zeros(1, L.HIDDEN // 8, dtype=torch.int32)
        q[m + "scales"] = torch.ones(1, L.HIDDEN, dtype=torch.float16)
        q[m + "g_idx"] = torch.zeros(L.HIDDEN, dtype=torch.int32)
    L.write_checkpoint(
        d / "a",
        L.llama_config(quantization_config=dict(quant_method="gptq", bits=4, group_size=16)),
        q,
    )
    c.add(
        "34-gptq-input",
        34,
        "error",
        "a quantised model: say so by that word, before any work",
        [says("quant"), NOOUT],
        params=P,
        loadable=["base", "b"],
    )

    d, base, *_ = plain(c, "36-adapter-folders")
    out = {k: v.double() for k, v in base.items()}
    for n, r, alpha, rs in (("a", 4, 8, False), ("b", 2, 8, True)):
        for f in (d / n).iterdir():
            f.unlink()
        g = torch.Generator().manual_seed(80 + r)
        sd, scale = {}, alpha / (math.sqrt(r) if rs else r)
        for i in range(L.LAYERS):
            m = f"model.layers.{i}.self_attn.q_proj"
            A, B = L._rand(g, r, L.HIDDEN), L._rand(g, L.HIDDEN, r)
            sd[f"base_model.model.{m}.lora_A.weight"], sd[f"base_model.model.{m}.lora_B.weight"] = (
                A,
                B,
            )
            out[m + ".weight"] += 0.5 * scale * (B.double() @ A.double())
        save_file(sd, str(d / n / "adapter_model.safetensors"), metadata={"format": "pt"})
        L.write_json(
            d / n / "adapter_config.json",
            dict(
                peft_type="LORA",
                r=r,
                lora_alpha=alpha,
                use_rslora=rs,
                bias="none",
                target_modules=["q_proj"],
                base_model_name_or_path="base",
                task_type="CAUSAL_LM",
                fan_in_fan_out=False,
            ),
        )
    L.write_expected(d / "expected", {k: v.to(base[k].dtype) for k, v in out.items()})
    c.add(
        "36-adapter-folders",
        36,
        "error",
        "the models are LoRA adapters (ranks 4 and 2, one rank-stabilised): say that they are "
        "adapters and must be applied first, or merge B A with each adapter's own scale",
        [says("adapter", "peft", "lora"), KEYS, CLOSE],
        also="ok",
        params=P,
        loadable=["base"],
    )

    # ------------------------------------------------ dtype and precision
    plain(c, "39-bf16-spectral")
    c.add(
        "39-bf16-spectral",
        39,
        "ok",
        "bf16 inputs on the CPU: SVD and Newton-Schulz run in float32 or more, the output is bf16 again",
        [
            KEYS,
            FINITE,
            dict(check="dtypes_as_base"),
            dict(check="differs_from_base", names=["*.q_proj.weight", "*.down_proj.weight"]),
        ],
        method="iso_c",
        params={},
        note="run it with every spectral method, and DARE with a float16 copy (log 38)",
        loadable=["base", "a", "b"],
    )

    d = c.folder("41-integer-and-boolean-tensors")
    base, a, b = trio(90)
    for t, n in ((base, 3), (a, 5), (b, 8)):
        t["model.position_ids"] = torch.arange(64).view(1, 64)
        t["model.norm_stats.num_batches_tracked"] = torch.tensor(n)
        t["model.causal_mask"] = torch.tril(torch.ones(4, 4, dtype=torch.bool))
    for n, t in (("base", base), ("a", a), ("b", b)):
        L.write_checkpoint(d / n, L.llama_config(), t)
    expected(d, base, [a, b])
    c.add(
        "41-integer-and-boolean-tensors",
        41,
        "ok",
        "tensors that are not floating are the base's, bit for bit, never averaged or cast",
        [
            KEYS,
            CLOSE,
            dict(check="dtypes_as_base"),
            dict(
                check="same_as_base",
                names=["model.position_ids", "*num_batches_tracked", "model.causal_mask"],
            ),
        ],
        params=P,
    )

    d = c.folder("42-round-once")
    base = L.llama_tensors(100)
    models = [L.finetune(base, 101 + i, scale=0.004) for i in range(8)]
    L.write_checkpoint(d / "base", L.llama_config(), base)
    for i, m in enumerate(models):
        L.write_checkpoint(d / f"m{i}", L.llama_config(), m)
    expected(d, base, models, [0.125] * 8)
    c.add(
        "42-round-once",
        42,
        "ok",
        "eight bf16 models, small changes: sum in float32 or more, round once at the end",
        [dict(check="exact_fraction", to="expected", at_least=0.999)],
        models=[f"m{i}" for i in range(8)],
        params=dict(weights=[0.125] * 8),
        loadable=["base", "m0"],
    )

    d = c.folder("43-mixed-dtypes")
    base = L.llama_tensors(110, dtype=torch.float32)
    a = {k: v.to(torch.bfloat16) for k, v in L.finetune(base, 111).items()}
    b = {k: v.to(torch.float16) for k, v in L.finetune(base, 112).items()}
    for n, t, dt in (("base", base, "float32"), ("a", a, "bfloat16"), ("b", b, "float16")):
        L.write_checkpoint(d / n, L.llama_config(dtype=dt), t)
    expected(d, base, [a, b])
    c.add(
        "43-mixed-dtypes",
        43,
        "ok",
        "float32 base, one bf16 and one float16 fine-tune: no dtype error; the output has the base's dtype",
        [KEYS, CLOSE, dict(check="dtypes_as_base")],
        params=P,
        loadable=["base", "a", "b"],
    )

    d, base, a, b = plain(
        c,
        "44-weights-as-given",
        tensors=(t0 := L.llama_tensors(120), t1 := L.finetune(t0, 121), t1),
    )
    expected(d, base, [a, b], [0.1, 1.0])
    c.add(
        "44-weights-as-given",
        44,
        "ok",
        "weights 0.1 and 1.0 mean just that: base + 1.1 delta; no hidden normalising",
        [CLOSE],
        params=dict(weights=[0.1, 1.0]),
        loadable=["base", "a"],
    )

    # ------------------------------------------------ operators on odd inputs
    plain(c, "45-density-zero")
    c.add(
        "45-density-zero",
        45,
        "ok",
        "keeping nothing gives the base back; no 0/0",
        [FINITE, dict(check="same_as_base", names=["*"]), says("density")],
        also="error",
        method="dare",
        params=dict(weights=W, density=0.0),
        note="TIES with density 0 likewise",
        loadable=["base", "a", "b"],
    )

    d = c.folder("47-frozen-layers")
    base = L.llama_tensors(130)
    moved = lambda k: k.startswith("model.layers.1.mlp")
    a, b = L.finetune(base, 131, only=moved), L.finetune(base, 132, only=moved)
    for n, t in (("base", base), ("a", a), ("b", b)):
        L.write_checkpoint(d / n, L.llama_config(), t)
    c.add(
        "47-frozen-layers",
        47,
        "ok",
        "most tensors never moved: a zero update stays exactly zero in every method",
        [
            KEYS,
            FINITE,
            dict(
                check="same_as_base",
                names=[
                    "model.layers.0.*",
                    "model.embed_tokens.weight",
                    "lm_head.weight",
                    "*.q_proj.weight",
                ],
            ),
            dict(check="differs_from_base", names=["model.layers.1.mlp.*"]),
        ],
        method="ties",
        params=dict(weights=W, density=0.5),
        note="run it with every method, the fast one above all (log 62)",
        loadable=["base", "a", "b"],
    )

    d = c.folder("50-odd-shapes")
    base = L.llama_tensors(140)
    g = torch.Generator().manual_seed(141)
    for n, s in (
        ("logit_scale", ()),
        ("model.one", (1, 1)),
        ("model.row", (1, 16)),
        ("model.col", (16, 1)),
        ("model.vec", (1,)),
        ("model.conv", (4, 2, 3)),
    ):
        base[n] = torch.randn(s, generator=g)
    a, b = L.finetune(base, 142), L.finetune(base, 143)
    for n, t in (("base", base), ("a", a), ("b", b)):
        L.write_checkpoint(d / n, L.llama_config(), t)
    expected(d, base, [a, b])
    c.add(
        "50-odd-shapes",
        50,
        "ok",
        "0-d, one-element, one-row, one-column and 3-d tensors keep shape and dtype",
        [KEYS, CLOSE, dict(check="dtypes_as_base")],
        params=P,
        note="run it with every method",
    )

    for cid, f in (("53-rank-deficient-update", 1.0), ("60-tiny-update", 1e-12)):
        d = c.folder(cid)
        g = torch.Generator().manual_seed(150)
        dt = {}
        for i in range(2):
            for n, s in (("square", (16, 16)), ("tall", (24, 16)), ("wide", (8, 16))):
                m = torch.randn(*s, generator=g)
                if f == 1.0:
                    m = torch.randn(s[0], 1, generator=g) @ torch.randn(1, s[1], generator=g)
                dt[f"task{i}.{n}"] = m * f
        save_file(dt, str(d / "deltas.safetensors"), metadata={"format": "pt"})
        if f != 1.0:
            L.write_expected(
                d / "expected",
                {
                    n: L.ref_iso_c([dt[f"task{i}.{n}"] for i in range(2)]).float()
                    for n in ("square", "tall", "wide")
                },
            )
            c.add(
                cid,
                60,
                "ok",
                "Iso-C of updates of size 1e-12: exact path within 1e-4 of expected/ (relative, Frobenius), the fast "
                "path within its stated tolerance; the result for c * delta is c times that for delta",
                kind="operator",
            )
        else:
            c.add(
                cid,
                53,
                "ok",
                "two rank-1 updates in larger matrices: the common value is the arithmetic mean over min(m, n) singular "
                "values (zeros too), so the result is finite, not zero, and has nuclear norm equal to that of the sum",
                kind="operator",
            )

    d, base, a, b = plain(c, "58-nan-in-one-tensor")
    bad = {k: v.clone() for k, v in b.items()}
    bad["model.layers.0.mlp.gate_proj.weight"][3, 4] = float("nan")
    L.write_checkpoint(d / "b", L.llama_config(), bad)
    c.add(
        "58-nan-in-one-tensor",
        58,
        "error",
        "one NaN in one tensor of one model: name both, instead of a message about convergence",
        [says("model.layers.0.mlp.gate_proj.weight"), says("nan", "finite"), NOOUT],
        method="iso_c",
        params={},
        loadable=["base", "a", "b"],
    )

    # ------------------------------------------------ what is written
    gen = dict(
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=0,
        do_sample=False,
        temperature=0.9,
        top_p=0.6,
    )
    d, base, a, b = plain(c, "65-generation-config-kept", extra={"generation_config.json": gen})
    expected(d, base, [a, b])
    c.add(
        "65-generation-config-kept",
        65,
        "ok",
        "generation_config.json is carried over as it is, although a strict writer would "
        "call it invalid",
        [CLOSE, dict(check="file_as_base", names=["generation_config.json"], json=True)],
        params=P,
        loadable=["base", "a", "b"],
    )

    jinja = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}\n"
    d, base, a, b = plain(c, "67-chat-template-file", extra={"chat_template.jinja": jinja})
    expected(d, base, [a, b])
    c.add(
        "67-chat-template-file",
        67,
        "ok",
        "the chat template lives in its own file: it and the tokenizer files come along unchanged",
        [
            CLOSE,
            dict(
                check="file_as_base",
                names=[
                    "chat_template.jinja",
                    "tokenizer.json",
                    "tokenizer_config.json",
                    "special_tokens_map.json",
                ],
            ),
        ],
        params=P,
        loadable=["base", "a", "b"],
    )

    d = c.folder("70-sharded-in-and-out")
    base, a, b = trio(160)
    for n, t, s in (("base", base, 3), ("a", a, 1), ("b", b, 5)):
        L.write_checkpoint(d / n, L.llama_config(), t, shards=s)
    expected(d, base, [a, b])
    c.add(
        "70-sharded-in-and-out",
        70,
        "ok",
        "inputs sharded three ways; output split at 4 KiB: the index is complete, total_size is bytes, "
        "every shard has format=pt",
        [KEYS, CLOSE, dict(check="has", names=["model.safetensors.index.json"])],
        params=dict(weights=W, max_shard_bytes=4096),
        loadable=["base", "a", "b"],
    )

    d, base, a, b = plain(c, "72-output-folder-in-use")
    L.write_checkpoint(d / "out_prefill", L.llama_config(), L.llama_tensors(999), shards=4)
    expected(d, base, [a, b])
    c.add(
        "72-output-folder-in-use",
        72,
        "error",
        "copy out_prefill/ to the output path first: refuse a folder in use, or replace it whole; "
        "old shards never lie beside new ones",
        [says("exist", "empty", "overwrite"), CLOSE],
        also="ok",
        params=P,
        loadable=["base", "a", "b"],
    )


def main():
    here = Path(__file__).resolve().parent
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", type=Path, default=here / "cases")
    a = ap.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    c = L.Cases(a.out)
    build(c)
    c.finish(a.out / "cases.json")
    print(f"{len(c.items)} cases in {a.out}")


if __name__ == "__main__":
    main()
