"""Says whether what a merger did with one case is what the case asks for.

  python check_case.py CASE_DIR --rc 0 --out OUT_DIR [--log FILE]

--rc   the merger's exit status; --log a file with its stdout and stderr together.
Prints one line a failed check and exits 1, or prints `ok` and exits 0.
Only `kind: merge` cases are judged here.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
from pathlib import Path

import torch
from safetensors import safe_open


def load_weights(folder: Path):
    """Tensors of a checkpoint folder, by its index where it has one."""
    idx = folder / "model.safetensors.index.json"
    out = {}
    if idx.exists():
        wmap = json.loads(idx.read_text())["weight_map"]
        for fn in sorted(set(wmap.values())):
            with safe_open(str(folder / fn), "pt") as f:
                for k in f.keys():
                    if wmap.get(k) == fn:
                        out[k] = f.get_tensor(k)
    else:
        with safe_open(str(folder / "model.safetensors"), "pt") as f:
            out = {k: f.get_tensor(k) for k in f.keys()}
    return out


def same_bits(a, b):
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(
            a.contiguous().reshape(-1).view(torch.uint8) if a.numel() else a.reshape(-1),
            b.contiguous().reshape(-1).view(torch.uint8) if b.numel() else b.reshape(-1),
        )
    )


def general(out: Path, base: Path, bad):
    """What every successful merge owes, whatever the case."""
    idx, single = out / "model.safetensors.index.json", out / "model.safetensors"
    if not idx.exists() and not single.exists():
        bad.append("no model.safetensors and no index in the output")
        return None
    if idx.exists() and single.exists():
        bad.append("both model.safetensors and an index in the output")
    present = set()
    for f in sorted(out.glob("*.safetensors")):
        try:
            with safe_open(str(f), "pt") as h:
                if (h.metadata() or {}).get("format") != "pt":
                    bad.append(f"{f.name}: metadata lacks format=pt")
                present |= set(h.keys())
        except Exception as e:
            bad.append(f"{f.name}: unreadable: {e}")
            return None
    if idx.exists():
        j = json.loads(idx.read_text())
        for k, fn in j["weight_map"].items():
            if not (out / fn).exists():
                bad.append(f"index names {fn}, which is not there")
                return None
        if present - set(j["weight_map"]):
            bad.append(
                f"tensors on disk that the index does not name: {sorted(present - set(j['weight_map']))[:5]}"
            )
    w = load_weights(out)
    if idx.exists():
        total = sum(t.numel() * t.element_size() for t in w.values())
        if j.get("metadata", {}).get("total_size") != total:
            bad.append(
                f"index total_size {j.get('metadata', {}).get('total_size')} is not the {total} bytes of the tensors"
            )
    cfg = json.loads((out / "config.json").read_text())
    vocab = cfg.get("vocab_size", cfg.get("text_config", {}).get("vocab_size"))
    for k, t in w.items():
        if (
            k.endswith(("embed_tokens.weight", "lm_head.weight", "wte.weight"))
            and vocab
            and t.shape[0] != vocab
        ):
            bad.append(f"{k} has {t.shape[0]} rows, config.json says vocab_size {vocab}")
    emb = next((t for k, t in w.items() if k.endswith("embed_tokens.weight")), None)
    if (
        cfg.get("tie_word_embeddings")
        and "lm_head.weight" in w
        and emb is not None
        and not torch.equal(w["lm_head.weight"], emb)
    ):
        bad.append("config.json ties the embeddings, but lm_head.weight differs from the embedding")
    return w


def judge(case, cdir: Path, rc, out: Path, log: str):
    bad, low = [], log.lower()
    outcome = "ok" if rc == 0 else "error"
    if outcome != case["expect"] and outcome != case.get("also_acceptable"):
        return [f"expected {case['expect']}, got exit status {rc}"]
    base = cdir / case["base"]
    w = general(out, base, bad) if outcome == "ok" else None
    if outcome == "ok" and w is None:
        return bad
    bt = None
    for c in case["checks"]:
        k = c["check"]
        if c.get("when", outcome) != outcome:
            continue
        if k in ("mentions", "warns"):
            if k == "mentions" and "when" not in c and outcome != "error":
                continue
            if not any(s.lower() in low for s in c["any"]):
                bad.append(f"message names none of {c['any']}")
            continue
        if k == "no_output":
            if out.exists() and any(out.glob("*.safetensors")):
                bad.append("weights were written before the error")
            continue
        if k == "no_marker":
            if (cdir / c["name"]).exists() or Path(c["name"]).exists():
                bad.append(f"{c['name']} exists: code from the checkpoint was run")
            continue
        if outcome != "ok":
            continue
        if k == "keys_equal":
            want = set(c["keys"]) if "keys" in c else set(load_weights(base))
            if set(w) != want:
                bad.append(
                    f"keys: missing {sorted(want - set(w))[:5]}, extra {sorted(set(w) - want)[:5]}"
                )
        elif k == "all_finite":
            for n, t in w.items():
                if t.is_floating_point() and not torch.isfinite(t.float()).all():
                    bad.append(f"{n} is not finite")
        elif k == "dtypes_as_base":
            bt = bt or load_weights(base)
            for n in set(w) & set(bt):
                if w[n].dtype != bt[n].dtype:
                    bad.append(f"{n}: {w[n].dtype}, the base has {bt[n].dtype}")
        elif k == "close":
            exp = load_weights(cdir / c["to"])
            for n, e in exp.items():
                if "only" in c and not any(fnmatch.fnmatch(n, p) for p in c["only"]):
                    continue
                if n not in w:
                    bad.append(f"{n} is missing")
                elif w[n].shape != e.shape:
                    bad.append(f"{n}: shape {tuple(w[n].shape)}, expected {tuple(e.shape)}")
                else:
                    rtol = c.get(
                        "rtol", {torch.bfloat16: 1e-2, torch.float16: 2e-3}.get(e.dtype, 1e-5)
                    )
                    atol = c.get(
                        "atol", 5e-4 if e.element_size() < 4 else 1e-6
                    )  # one late rounding more is no fault here
                    if not torch.allclose(w[n].double(), e.double(), rtol=rtol, atol=atol):
                        bad.append(
                            f"{n}: differs by up to {(w[n].double() - e.double()).abs().max():.3g}"
                        )
        elif k == "exact_fraction":
            exp = load_weights(cdir / c["to"])
            same = sum(
                int((w[n] == e).sum()) for n, e in exp.items() if n in w and w[n].shape == e.shape
            )
            total = sum(e.numel() for e in exp.values())
            if same < c["at_least"] * total:
                bad.append(
                    f"only {same / total:.4f} of the elements are the correctly rounded ones"
                )
        elif k == "same_as_base":
            bt = bt or load_weights(base)
            for n in (x for x in bt if any(fnmatch.fnmatch(x, p) for p in c["names"])):
                if n not in w or not same_bits(w[n], bt[n]):
                    bad.append(f"{n} is not the base tensor, bit for bit")
        elif k == "differs_from_base":
            bt = bt or load_weights(base)
            for n in (x for x in bt if any(fnmatch.fnmatch(x, p) for p in c["names"])):
                if n not in w or torch.equal(w[n], bt[n]):
                    bad.append(f"{n} did not move from the base")
        elif k == "config":
            cfg = json.loads((out / "config.json").read_text())
            for key, val in c["values"].items():
                if cfg.get(key) != val:
                    bad.append(f"config.json {key} is {cfg.get(key)!r}, expected {val!r}")
        elif k == "file_as_base":
            for n in c["names"]:
                if not (out / n).exists():
                    bad.append(f"{n} was not carried over")
                elif c.get("json"):
                    if json.loads((out / n).read_text()) != json.loads((base / n).read_text()):
                        bad.append(f"{n} says something else than the base's")
                elif (out / n).read_bytes() != (base / n).read_bytes():
                    bad.append(f"{n} is not the base's, byte for byte")
        elif k == "has":
            bad += [f"{n} is not in the output" for n in c["names"] if not (out / n).exists()]
        elif k == "absent":
            for p in c["globs"]:
                for f in out.glob(p):
                    bad.append(f"{f.name} should not be in the output")
        elif k == "close_any":
            for n in c["names"]:
                ok = False
                for to in c["to"]:
                    e = load_weights(cdir / to)[n]
                    ok |= (
                        n in w
                        and w[n].shape == e.shape
                        and torch.allclose(
                            w[n].double(),
                            e.double(),
                            rtol=c.get("rtol", 1e-2),
                            atol=c.get("atol", 1e-4),
                        )
                    )
                if not ok:
                    bad.append(f"{n} fits none of {c['to']}")
        else:
            bad.append(f"unknown check {k}")
    return bad


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("case", type=Path)
    ap.add_argument("--rc", type=int, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--log", type=Path)
    a = ap.parse_args()
    case = json.loads((a.case / "case.json").read_text())
    if case["kind"] != "merge":
        sys.exit(f"{case['id']} is of kind {case['kind']}: judge it with your own test")
    log = a.log.read_text(errors="replace") if a.log else ""
    bad = judge(case, a.case, a.rc, a.out, log)
    print("\n".join(bad) if bad else "ok")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
