"""Train an expert per task, merge the experts with every method, and score what comes out."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from ..errors import OutputError
from ..execute import MergeResult, merge_checkpoints
from ..methods import list_methods, method_entry
from .encoder import FROZEN, MODEL, Encoder, installed_model, quiet_single_thread
from .report import DemoEvent, DemoReport, Merging, Row, Scored, TaskSummary, Training
from .tasks import Example, Task, load_tasks

STEPS = 30
SEED = 0
SCALES = (0.5, 1.0, 2.0, 4.0)


def run(
    out: Path | None = None,
    *,
    steps: int = STEPS,
    methods: Sequence[str] | None = None,
    on_event: Callable[[DemoEvent], None] | None = None,
) -> DemoReport:
    """Fine-tune a real sentence encoder on four tasks, merge the experts, and score everything.

    As in the papers' experiments with CLIP, every task has a frozen head, here the base's own
    embeddings of the classes' names, so any merge of the encoders can be scored on all tasks.
    The upper three of the six layers are trained and merged, the rest is the base's. Experts
    and merges are checkpoint folders, merged by ``merge_checkpoints`` and loaded by
    transformers. A method's scale is the best of ``SCALES`` on validation texts. With the
    defaults it takes about two minutes on one core; the network is not used, and on one
    machine, with one version of Python and torch, every run gives the same scores.

    Args:
        out: folder to keep the checkpoints in (90 MB each, one per row of the report), new or
            empty; None deletes them.
        steps: optimizer steps per task, with 16 texts each.
        methods: names of the methods to merge with; None is every registered one.
        on_event: called with each event, in this thread.

    Raises:
        CheckpointError: the extra ``demo``, which brings the base model, is not installed.
        OutputError: ``out`` is in use.
        MethodError: a method that does not exist.
        ValueError: fewer than one step.
    """
    if steps < 1:
        raise ValueError(f"an expert needs at least one step, not {steps}")
    began = time.perf_counter()
    names = [entry.name for entry in list_methods()] if methods is None else list(methods)
    for name in names:
        method_entry(name)
    source = installed_model()
    with _folder(out) as folder, quiet_single_thread():
        demo = _Demo(source, folder, keep=out is not None, notify=on_event or _ignore)
        demo.score_base()
        for task in demo.tasks:
            demo.train_expert(task, steps)
        for number, name in enumerate(names, start=1):
            demo.notify(Merging(name, number, len(names)))
            demo.merge_and_score(name)
    return DemoReport(
        model=MODEL,
        tasks=tuple(_summary(task) for task in demo.tasks),
        scales=SCALES,
        rows=tuple(demo.rows),
        seconds=time.perf_counter() - began,
        out=out,
    )


class _Demo:
    """The state of one run: tasks and their heads, the folders made so far and the rows."""

    def __init__(
        self, source: Path, folder: Path, *, keep: bool, notify: Callable[[DemoEvent], None]
    ) -> None:
        self.notify = notify
        self.tasks = load_tasks(SEED)
        self.rows: list[Row] = []
        self._folder = folder
        self._keep = keep
        base = Encoder(source)
        self._heads = {task.name: base.prototypes(task) for task in self.tasks}
        self._base = folder / "base"
        base.save(self._base)
        self._experts: list[Path] = []

    def score_base(self) -> None:
        self._add(Row("base", "base", self._test(Encoder(self._base))))

    def train_expert(self, task: Task, steps: int) -> None:
        encoder = Encoder(self._base)
        encoder.train(
            task.train,
            self._heads[task.name],
            steps=steps,
            seed=SEED,
            on_step=lambda step: self.notify(Training(task.name, step, steps)),
        )
        folder = self._folder / f"expert-{task.name}"
        encoder.save(folder)
        self._experts.append(folder)
        self._add(Row(folder.name, "expert", self._test(encoder)))

    def merge_and_score(self, method: str) -> None:
        merged = self._folder / f"merged-{method}"
        largest = max(SCALES)
        result = self._merge(method, merged, scale=largest)
        scale = self._best_scale(merged, largest)
        if scale != largest:
            result = self._merge(method, merged, scale=scale)
        scores = self._test(Encoder(merged))
        if not self._keep:
            shutil.rmtree(merged)
        self._add(Row(method, "merge", scores, scale=scale, seconds=result.seconds))

    def _merge(self, method: str, merged: Path, *, scale: float) -> MergeResult:
        return merge_checkpoints(
            self._base,
            self._experts,
            method,
            merged,
            scale=scale,
            seed=SEED,
            keep_base=FROZEN,
            force=True,
        )

    def _best_scale(self, merged: Path, merged_scale: float) -> float:
        """Try all scales on the delta of a merge, which is proportional to its scale."""
        encoder = Encoder(merged)
        weights = encoder.parameters()
        base = Encoder(self._base).parameters()
        delta = {name: weight - base[name] for name, weight in weights.items()}

        def validated(scale: float) -> float:
            _set_weights(weights, base, delta, scale / merged_scale)
            return sum(self._scores(encoder, lambda task: task.validation).values())

        return max(SCALES, key=validated)

    def _test(self, encoder: Encoder) -> dict[str, float]:
        return self._scores(encoder, lambda task: task.test)

    def _scores(
        self, encoder: Encoder, examples: Callable[[Task], Sequence[Example]]
    ) -> dict[str, float]:
        return {
            task.name: encoder.accuracy(examples(task), self._heads[task.name])
            for task in self.tasks
        }

    def _add(self, row: Row) -> None:
        self.rows.append(row)
        self.notify(Scored(row))


def _set_weights(
    weights: Mapping[str, Tensor],
    base: Mapping[str, Tensor],
    delta: Mapping[str, Tensor],
    factor: float,
) -> None:
    for name, weight in weights.items():
        torch.add(base[name], delta[name], alpha=factor, out=weight)


def _summary(task: Task) -> TaskSummary:
    sizes = (len(task.train), len(task.validation), len(task.test))
    return TaskSummary(task.name, task.question, task.classes, *sizes)


@contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    if out is None:
        with TemporaryDirectory(prefix="mergekit-iso-demo-") as temporary:
            yield Path(temporary)
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputError(f"{out} exists and is not an empty folder", hint="give a new folder")
    out.mkdir(parents=True, exist_ok=True)
    yield out


def _ignore(event: DemoEvent) -> None:
    pass
