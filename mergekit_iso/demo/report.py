"""What the demo reports: a row per model, and events while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True)
class TaskSummary:
    """A task as the report shows it: the sizes are numbers of texts."""

    name: str
    question: str
    classes: tuple[str, ...]
    train: int
    validation: int
    test: int


@dataclass(frozen=True)
class Row:
    """One model's accuracy (0 to 1) on the test texts of every task, by task name.

    ``scale`` is the one that did best on the validation texts, and ``seconds`` what the merge
    with it took; both are None for a model that is no merge.
    """

    name: str
    kind: Literal["base", "expert", "merge"]
    scores: Mapping[str, float]
    scale: float | None = None
    seconds: float | None = None

    @property
    def mean(self) -> float:
        """Mean accuracy over the tasks."""
        return sum(self.scores.values()) / len(self.scores)

    def to_json(self) -> dict[str, Any]:
        """Return the row as plain data, the mean included."""
        return {**asdict(self), "mean": self.mean}


@dataclass(frozen=True)
class DemoReport:
    """What the demo found: the base first, then an expert per task, then every method.

    ``scales`` is the grid each method's scale was picked from. ``out`` holds the checkpoints, or
    is None where they were not to be kept.
    """

    model: str
    tasks: tuple[TaskSummary, ...]
    scales: tuple[float, ...]
    rows: tuple[Row, ...]
    seconds: float
    out: Path | None

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            **asdict(self),
            "rows": [row.to_json() for row in self.rows],
            "out": None if self.out is None else str(self.out),
        }


@dataclass(frozen=True)
class Training:
    """An expert has taken ``step`` of its ``steps``."""

    task: str
    step: int
    steps: int


@dataclass(frozen=True)
class Merging:
    """Method ``number`` of ``methods`` begins."""

    method: str
    number: int
    methods: int


@dataclass(frozen=True)
class Scored:
    """A row of the report is known."""

    row: Row


DemoEvent = Training | Merging | Scored
