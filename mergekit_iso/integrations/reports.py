"""Where the reports of outer steps can go: sinks for ``LoopedMerger(on_event=…)``."""

from __future__ import annotations

import json
from math import isfinite
from os import PathLike
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from ..loop.report import OnReport, OuterReport


class JSONLines:
    """Appends one line of strict JSON per report to a file; NaN and infinities become null.

    Every line is in the file when the call returns. Each rank reports for itself, so give ranks
    files of their own, or one rank alone a sink. Raises OSError where the file cannot be written,
    at once rather than at the first report.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = Path(path)
        self._append("")

    def __call__(self, report: OuterReport) -> None:
        """Append the report."""
        self._append(json.dumps(_finite(report.record()), allow_nan=False) + "\n")

    def _append(self, text: str) -> None:
        # Opened for each: closing flushes, and nobody has to close the sink.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)


def rich_line(console: Console | None = None) -> OnReport:
    """Return a function that prints a report as one line, by default to stderr.

    Colours are rich's decision: none with NO_COLOR or into a pipe.
    """
    console = console or Console(stderr=True)

    def show(report: OuterReport) -> None:
        console.print(_line(report), soft_wrap=True)

    return show


def _line(report: OuterReport) -> Text:
    workers = "worker" if report.participants == 1 else "workers"
    parts = [
        Text(f"round {report.round}", "bold"),
        Text(f"{report.participants} {workers}"),
        Text(f"update {report.update_norm:.3g}"),
    ]
    if report.cosine:
        low, high = min(report.cosine), max(report.cosine)
        parts.append(Text(f"cosine {low:.2f} to {high:.2f}"))
    parts.append(Text(f"sent {_size(report.bytes_sent)}"))
    if "total" in report.seconds:
        parts.append(Text(f"{report.seconds['total']:.3g} s"))
    if report.residual is not None:
        parts.append(Text(f"residual {report.residual:.1e}"))
    if report.skipped is not None:
        parts.append(Text(f"skipped: {' '.join(report.skipped.split())}", "yellow"))
    return Text("  ").join(parts)


def _size(count: int) -> str:
    size, units = float(count), ["B", "kB", "MB", "GB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.3g} {units[0]}" if size < 999.5 else f"{size:.0f} {units[0]}"


def _finite(value: Any) -> Any:
    """Return plain data with null for every number that JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not isfinite(value) else value
