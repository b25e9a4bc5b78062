"""The polar benchmark end to end on tiny shapes, each command in its own process."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import inputs
from benchmarks.kernels.candidates import by_svd
from benchmarks.kernels.inputs import Case
from benchmarks.kernels.timing import ratio, rounds

ROOT = Path(__file__).parents[2]


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", f"benchmarks.kernels.{module}", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_smoke_run_and_report(tmp_path: Path) -> None:
    out = ("--out", str(tmp_path), "--smoke")
    lines = run("polar", *out).splitlines()
    assert any("attention-real" in line and "fast(0.001)" in line for line in lines)
    assert run("polar", *out) == "", "finished cells were measured again"
    again = run("polar", *out, "--again", "--only", "64x64-gaussian/exact").splitlines()
    assert len(again) == 1
    run("pool", *out)
    document = tmp_path / "document.md"
    document.write_text("before\n<!-- kernels: real -->\nold\n<!-- end -->\nafter\n")
    figures = tmp_path / "figures"
    said = run("report", str(tmp_path), "--figures", str(figures), "--fill", str(document))

    record = json.loads((tmp_path / "timed-64x64-gaussian-1t.json").read_text())
    assert record["clock"] == "process CPU time"
    assert record["machine"]["torch"] == torch.__version__
    assert record["matrices"]["count"] == 1
    for label, result in record["results"].items():
        assert result["error"] >= result["in_range"] >= 0, label
        assert len(result["seconds"]) == len(result["baseline_seconds"]) >= 2, label
        assert result["ratio"] > 0, label
    assert record["results"]["exact"]["error"] < 1e-4
    assert record["results"]["muon5"]["error"] > 1e-2
    assert record["results"]["exact"]["residual"] is not None
    pool = json.loads((tmp_path / "pool-real-2w.json").read_text())
    assert pool["results"]["exact"]["ratio"] > 0
    report = (tmp_path / "report.md").read_text()
    assert "## real" in report
    assert "| `fast(0.001)` |" in report
    filled = document.read_text()
    assert filled.startswith("before\n<!-- kernels: real -->\n| matrices |")
    assert filled.endswith("|\n<!-- end -->\nafter\n")
    if find_spec("matplotlib") is None:
        assert "figures skipped" in said
    else:
        drawn = sorted(file.name for file in figures.iterdir())
        assert drawn == ["kernels-condition.svg", "kernels-error-time.svg"]
        assert all("</svg>" in (figures / name).read_text() for name in drawn)


@pytest.mark.parametrize(
    ("spectrum", "condition"), [("power1", 1e1), ("power3", 1e3), ("power5", 1e5)]
)
def test_power_law_has_the_condition_of_its_name(
    spectrum: str, condition: float, tmp_path: Path
) -> None:
    (problem,) = inputs.problems(Case("48x80", spectrum), tmp_path)
    assert float(problem.sigma[0] / problem.sigma[-1]) == pytest.approx(condition, rel=0.05)


@pytest.mark.parametrize("shape", ["40x64", "64x40"])
def test_errors_tell_range_and_leak_apart(shape: str, tmp_path: Path) -> None:
    (problem,) = inputs.problems(Case(shape, "rank_half"), tmp_path)
    assert int(problem.kept.sum()) == 20
    exact = problem.factor * problem.scale
    assert inputs.errors(problem, exact, problem.scale)["error"] < 1e-6
    found = inputs.errors(problem, exact * 1.01, problem.scale * 1.01)
    assert found["in_range"] == pytest.approx(0.01, rel=1e-3)
    assert found["leak"] < 1e-6
    assert found["scale_error"] == pytest.approx(0.01, rel=1e-3)
    # The plain SVD fills the null half with directions of full weight.
    out, scale, _, _ = by_svd(problem.A)
    svd = inputs.errors(problem, out, scale)
    assert svd["leak"] > 0.9
    assert svd["in_range"] < 1e-4


def test_rounds_take_turns_and_ratio_is_the_median_of_pairs() -> None:
    ticks = iter(range(100))
    order: list[str] = []
    work = {name: lambda name=name: order.append(name) for name in "ab"}
    seconds = rounds(work, clock=lambda: float(next(ticks)), budget=0.0, fewest=3, most=9)
    assert order == list("ababab")
    assert seconds == {"a": [1.0] * 3, "b": [1.0] * 3}
    assert ratio([2.0, 9.0, 4.0], [1.0, 1.0, 1.0]) == 4.0
