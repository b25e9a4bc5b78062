"""The demo: a real encoder, four fine-tunes made on the spot, and every method tried on them."""

from .experiment import run
from .report import DemoEvent, DemoReport, Merging, Row, Scored, TaskSummary, Training
from .tasks import Task, load_tasks

__all__ = [
    "DemoEvent",
    "DemoReport",
    "Merging",
    "Row",
    "Scored",
    "Task",
    "TaskSummary",
    "Training",
    "load_tasks",
    "run",
]
