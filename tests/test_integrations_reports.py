"""The sinks of reports, with the reports of real outer steps."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from mergekit_iso.integrations.reports import JSONLines, rich_line
from mergekit_iso.loop import OuterReport, simulate


def train(on_event: Callable[[OuterReport], None], rounds: int = 1) -> list[OuterReport]:
    """Take outer steps of two tiny workers; return their reports."""
    models = [nn.Linear(6, 4) for _ in range(2)]
    loop = simulate(models, "iso_c", sync_every=1, on_event=on_event)
    reports = []
    for r in range(rounds):
        for w, model in enumerate(models):
            generator = torch.Generator().manual_seed(10 * r + w)
            with torch.no_grad():
                for p in model.parameters():
                    p += 0.01 * torch.randn(p.shape, generator=generator)
        report = loop.step(tokens=5)
        assert report is not None
        reports.append(report)
    return reports


@pytest.fixture(scope="module")
def report() -> OuterReport:
    return train(lambda _: None)[0]


def strict(line: str) -> dict[str, object]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def line_of(report: OuterReport, *, width: int = 200, terminal: bool = False) -> str:
    out = io.StringIO()
    console = Console(
        file=out, width=width, force_terminal=terminal, color_system="auto" if terminal else None
    )
    rich_line(console)(report)
    return out.getvalue()


def test_json_lines_hold_every_report(tmp_path: Path) -> None:
    path = tmp_path / "reports.jsonl"
    reports = train(JSONLines(path), rounds=3)
    lines = path.read_text().splitlines()
    as_json = [json.loads(json.dumps(r.record())) for r in reports]
    assert [strict(line) for line in lines] == as_json
    assert [r["round"] for r in as_json] == [0, 1, 2]


def test_json_lines_append_and_are_there_at_once(tmp_path: Path, report: OuterReport) -> None:
    path = tmp_path / "reports.jsonl"
    for n in range(1, 4):
        sink = JSONLines(str(path))
        sink(report)
        assert len(path.read_text().splitlines()) == n


def test_json_lines_are_strict(tmp_path: Path, report: OuterReport) -> None:
    path = tmp_path / "reports.jsonl"
    broken = replace(
        report, update_norm=math.nan, cosine=(1.0, math.inf), seconds={"total": -math.inf}
    )
    JSONLines(path)(broken)
    found = strict(path.read_text())
    assert found["update_norm"] is None
    assert found["cosine"] == [1.0, None]
    assert found["seconds"] == {"total": None}


def test_a_file_that_cannot_be_written_is_noticed_before_training(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        JSONLines(tmp_path / "nowhere" / "reports.jsonl")


def test_a_line_per_round(capsys: pytest.CaptureFixture[str]) -> None:
    train(rich_line(), rounds=2)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert [line[:18] for line in lines] == ["round 0  2 workers", "round 1  2 workers"]


def test_the_line_says_what_the_report_does(report: OuterReport) -> None:
    known = replace(
        report,
        update_norm=0.12345,
        cosine=(0.7, 0.513, 0.9),
        bytes_sent=1_234_567,
        seconds={"vote": 0.5, "total": 1.5},
        residual=2.5e-4,
    )
    assert line_of(known) == (
        "round 0  2 workers  update 0.123  cosine 0.51 to 0.90  sent 1.23 MB  1.5 s"
        "  residual 2.5e-04\n"
    )


def test_what_is_unknown_is_left_out(report: OuterReport) -> None:
    bare = replace(report, participants=1, cosine=None, residual=None, seconds={})
    text = line_of(bare)
    assert "1 worker " in text
    assert not any(word in text for word in ("cosine", "residual", " s ", "None", "skipped"))


def test_a_reason_is_shown_as_it_is_on_the_same_line(report: OuterReport) -> None:
    text = line_of(replace(report, skipped="[red]worker 1:\nno tokens"), width=20)
    assert text.endswith("skipped: [red]worker 1: no tokens\n")
    assert text.count("\n") == 1


@pytest.mark.parametrize("count", ["0 B", "999 B", "1 kB", "12.3 MB", "4.56 GB", "5000 GB"])
def test_sizes(report: OuterReport, count: str) -> None:
    number, unit = count.split()
    scale = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9}[unit]
    assert f"sent {count} " in line_of(replace(report, bytes_sent=round(float(number) * scale)))


def test_colours_are_for_terminals_without_no_color(
    report: OuterReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    skipped = replace(report, skipped="no tokens")
    assert "\x1b[33m" in line_of(skipped, terminal=True)
    assert "\x1b" not in line_of(skipped)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[33m" not in line_of(skipped, terminal=True)
