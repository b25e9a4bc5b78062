"""What real users ran into, as miniature checkpoints with the outcome each should have."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mergekit_iso import list_methods, merge, merge_checkpoints
from mergekit_iso.errors import MergekitIsoError
from tests.cases.check_case import judge

HERE = Path(__file__).parent
PROGRAM = Path(sysconfig.get_path("scripts")) / "mergekit-iso"
MERGES = [
    "01-added-pad-token-rows",
    "02-config-vocab-stale",
    "05-same-shape-other-tokenizer",
    "09-head-in-one-input-only",
    "10-tied-no-head-anywhere",
    "16-extra-tensor-in-one",
    "16-tensor-missing-in-one",
    "17-vision-wrapper-prefix",
    "18-expert-layouts-mixed",
    "20-wrapper-prefixes",
    "21-persisted-rotary-buffers",
    "22-gpt2-conv1d-and-masks",
    "25-base-among-the-models",
    "26-shard-missing",
    "27-stray-weights-beside-index",
    "29-index-omits-a-tensor",
    "30-lfs-pointer",
    "32-pickle-only",
    "33-inputs-without-metadata",
    "34-gptq-input",
    "36-adapter-folders",
    "39-bf16-spectral",
    "41-integer-and-boolean-tensors",
    "42-round-once",
    "43-mixed-dtypes",
    "44-weights-as-given",
    "45-density-zero",
    "47-frozen-layers",
    "50-odd-shapes",
    "58-nan-in-one-tensor",
    "65-generation-config-kept",
    "67-chat-template-file",
    "70-sharded-in-and-out",
    "72-output-folder-in-use",
]


@pytest.fixture(scope="session")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cases")
    command = [sys.executable, str(HERE / "make_cases.py"), "--out", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return folder


def test_every_merge_is_listed(cases: Path) -> None:
    listed = json.loads((cases / "cases.json").read_text())["cases"]
    assert [c["id"] for c in listed if c["kind"] == "merge"] == MERGES


@pytest.mark.parametrize("name", MERGES)
def test_library(cases: Path, name: str, tmp_path: Path) -> None:
    case, keywords = _case(cases, name)
    out = _out(cases / name, tmp_path)
    said = ""
    try:
        result = merge_checkpoints(
            cases / name / case["base"],
            [cases / name / model for model in case["models"]],
            case["method"],
            out,
            **keywords,
        )
        status, said = 0, "warning: ".join(("", *result.warnings))
    except MergekitIsoError as error:
        status, said = 3, f"error: {error} {error.hint}"
    assert _faults(cases / name, status, out, said) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", MERGES)
def test_command_line(cases: Path, name: str, tmp_path: Path) -> None:
    case, keywords = _case(cases, name)
    out = _out(cases / name, tmp_path)
    options = {
        "--scale": keywords.pop("scale", None),
        "--max-shard-size": keywords.pop("max_shard_size", None),
    }
    command = [PROGRAM, "merge", cases / name / case["base"]]
    command += [cases / name / model for model in case["models"]]
    command += ["--method", case["method"], "-o", out]
    command += [x for w in keywords.pop("weights", []) for x in ("--weight", w)]
    command += [x for k, v in options.items() if v is not None for x in (k, v)]
    command += [x for k, v in keywords.items() for x in ("--set", f"{k}={v}")]
    run = subprocess.run(
        [str(part) for part in command],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=100,
        check=False,
    )
    assert "Traceback" not in run.stderr
    said = run.stdout + run.stderr
    assert _faults(cases / name, run.returncode, out, said) == []


@pytest.mark.parametrize("method", [entry.name for entry in list_methods()])
@pytest.mark.parametrize("name", ["39-bf16-spectral", "47-frozen-layers", "50-odd-shapes"])
def test_every_method(cases: Path, name: str, method: str, tmp_path: Path) -> None:
    folder = cases / name
    merge_checkpoints(folder / "base", [folder / "a", folder / "b"], method, tmp_path / "out")
    base, a, b, got = (
        load_file(path / "model.safetensors")
        for path in (folder / "base", folder / "a", folder / "b", tmp_path / "out")
    )
    assert got.keys() == base.keys()
    for key, tensor in got.items():
        assert (tensor.shape, tensor.dtype) == (base[key].shape, base[key].dtype)
        assert torch.isfinite(tensor).all()
        if torch.equal(a[key], base[key]) and torch.equal(b[key], base[key]):
            assert torch.equal(tensor, base[key]), f"{key} moved though no model moved it"


@pytest.mark.parametrize("method", ["iso_c", "iso_c_fast"])
def test_tiny_updates(cases: Path, method: str) -> None:
    folder = cases / "60-tiny-update"
    stored = load_file(folder / "deltas.safetensors")
    expected = load_file(folder / "expected" / "model.safetensors")
    base = {k: torch.zeros_like(v) for k, v in expected.items()}
    deltas = [{k: stored[f"task{t}.{k}"] for k in expected} for t in (0, 1)]
    got = merge(base, deltas, method)
    scaled = merge(base, [{k: v * 2.0**20 for k, v in d.items()} for d in deltas], method)
    tolerance = 1e-4 if method == "iso_c" else 1e-3
    for key, e in expected.items():
        assert (got[key] - e).norm() <= tolerance * e.norm()
        assert (scaled[key] - got[key] * 2.0**20).norm() <= 1e-5 * scaled[key].norm()


def _case(cases: Path, name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    case = json.loads((cases / name / "case.json").read_text())
    keywords = dict(case.get("params") or {})
    if "max_shard_bytes" in keywords:
        keywords["max_shard_size"] = keywords.pop("max_shard_bytes")
    if case["method"].startswith("dare") and "density" in keywords:
        keywords["drop_rate"] = 1 - keywords.pop("density")
    return case, keywords


def _out(case: Path, tmp_path: Path) -> Path:
    out = tmp_path / "out"
    if (case / "out_prefill").exists():
        out.symlink_to(case / "out_prefill")
    return out


def _faults(folder: Path, status: int, out: Path, said: str) -> list[str]:
    case = json.loads((folder / "case.json").read_text())
    return judge(case, folder, status, out, said)
