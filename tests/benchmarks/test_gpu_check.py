from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu_check.inputs import MODELS, gaussian_problem, power_law_problem
from benchmarks.gpu_check.measure import half_work
from benchmarks.gpu_check.report import table
from benchmarks.gpu_check.timing import Budget, interleaved

ROOT = Path(__file__).parents[2]


def gpu_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_check", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")
def test_smoke_run_checks_everything_and_claims_no_time(tmp_path: Path) -> None:
    done = gpu_check("--smoke", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == (tmp_path / "gpu_check.txt").read_text()
    assert done.stdout.count("112 matrices in at most 60 ms: not measured") == 1
    assert " ms " not in done.stdout.partition("goals")[0]
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert len(result["checks"]) > 30
    assert all(check["passed"] for check in result["checks"])
    assert not result["measured"]
    assert not result["skipped"]
    for record in [*result["products"], *result["sets"]]:
        assert set(record["seconds"].values()) == {None}
        assert "ratio" not in record


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_full_run_on_a_gpu(tmp_path: Path) -> None:
    done = gpu_check("--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "gpu_check.json").read_text())["measured"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_one_sentence_says_what_to_do() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert "no CUDA device here; --smoke" in done.stderr
    assert "Traceback" not in done.stderr


def measured(**seconds: float) -> dict[str, Any]:
    return {
        "device": "a GPU",
        "versions": {"torch": "2"},
        "measured": True,
        "checks": [
            {"name": "good", "bound": 1e-3, "error": 5e-4, "passed": True, "failure": None},
            {"name": "bad", "bound": 1e-3, "error": 2e-3, "passed": False, "failure": None},
            {"name": "broken", "bound": 1, "error": None, "passed": False, "failure": "Oops: x"},
        ],
        "products": [
            {
                "shape": [32, 2048, 2048],
                "seconds": {"plain": 1.5, "symmetric": 1.0, "(64, 64, 4, 4)": 1.2},
                "ratio": 1.5,
                "tflops": 600.0,
                "plain_tflops": 700.0,
            }
        ],
        "drops": [{"numel": 10, "ns_per_element": {"fused": 0.01}}],
        "sets": [
            {
                "model": "Llama-1B",
                "matrices": 112,
                "timed_layers": 4,
                "scaled_by": 4.0,
                "seconds": seconds,
                "tflops": 500.0,
                "errors": {"gaussian 8×8": 1e-2},
            }
        ],
        "skipped": ["torch.linalg.svd of 4096×14336"],
    }


def test_table_of_a_measured_run() -> None:
    text = table(measured(**{"float16 symmetric": 0.05, "torch.linalg.svd": 20.0}))
    assert "checks: 1 of 3 passed" in text
    assert "FAILED bad: error 2.0e-03 (bound 1e-03)" in text
    assert "FAILED broken: Oops: x" in text
    assert "timed on 4 layers, times 4" in text
    assert "1.50 ×  1000.000 ms    600 TFLOP/s" in text
    assert "skipped for time: torch.linalg.svd of 4096×14336" in text
    assert "in at most 60 ms: 50.0 ms (met)" in text
    assert "torch.linalg.svd: 400 × (met)" in text
    assert "(lowest): 1.50 × (met)" in text


def test_goals_that_are_missed_or_were_not_reached() -> None:
    text = table(measured(**{"float16 symmetric": 0.5}))
    assert "in at most 60 ms: 500.0 ms (NOT met)" in text
    assert "100 × torch.linalg.svd: not measured" in text


def test_sets_are_those_of_the_models() -> None:
    assert [model.matrices for model in MODELS] == [112, 112, 224]
    groups = MODELS[0].groups(1)
    assert sum(group.count for group in groups) == 7
    assert {(2048, 2048), (512, 2048), (8192, 2048), (2048, 8192)} == {
        (group.rows, group.columns) for group in groups
    }
    # 32.8 TFLOP by hand for 9 steps on squares and the Gram form elsewhere, and the norms' 1 %.
    assert half_work(MODELS[0].groups(16)) == pytest.approx(32.8e12, rel=0.03)


def test_problems_know_their_iso_c() -> None:
    for problem in (
        gaussian_problem(12, 20, device="cpu", batch=(2,)),
        gaussian_problem(20, 12, device="cpu"),
        power_law_problem(20, 12, 100, device="cpu"),
    ):
        U, sigma, Vh = torch.linalg.svd(problem.A.double(), full_matrices=False)
        expected = sigma.mean(-1)[..., None, None] * (U @ Vh)
        assert torch.allclose(problem.exact, expected, atol=1e-5)
        assert problem.error(U @ Vh) < 1e-5


def test_budget_names_what_it_skips() -> None:
    assert Budget(10.0).allows("a")
    spent = Budget(0.0)
    assert not spent.allows("b")
    assert spent.skipped == ["b"]


def test_rounds_interleave() -> None:
    calls: list[str] = []
    work = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = interleaved(work, "cpu", rounds=2, warm_up=1)
    assert calls == ["a", "b"] * 3
    assert all(taken >= 0 for taken in seconds.values())
