"""``demo``: every method on real fine-tunes made on the spot, without a download."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import complete_paths, output_folder, output_options
from .output import Output, format_seconds, table
from .signals import unwinding

if TYPE_CHECKING:
    from ..demo import DemoEvent, DemoReport, Row


@click.command(short_help="Fine-tune a small encoder, merge it with every method, compare.")
@click.option(
    "-o",
    "--out",
    callback=output_folder,
    shell_complete=complete_paths,
    metavar="OUT",
    help="Keep the checkpoints in this new folder.",
)
@output_options
@click.pass_obj
def demo(output: Output, out: Path | None) -> None:
    """Fine-tune a small encoder on four tasks, merge the experts with every method and compare.

    Takes about two minutes on one core and needs no network.
    """
    from ..demo import run

    narrate = _narrator(output)
    with unwinding() as heed_signals:

        def on_event(event: DemoEvent) -> None:
            heed_signals()
            narrate(event)

        heed_signals()
        report = run(out, on_event=on_event)
    output.data(_text(report), report.to_json())


def _narrator(output: Output) -> Callable[[DemoEvent], None]:
    from ..demo import Merging, Scored, Training

    def on_event(event: DemoEvent) -> None:
        match event:
            case Training(task, step, steps):
                if step == 1 or output.verbose:
                    output.note(f"fine-tuning on {task}: step {step} of {steps}")
            case Merging(method, number, methods):
                output.note(f"merging with {method} ({number} of {methods})")
            case Scored(row):
                if output.verbose:
                    output.note(f"{row.name}: {row.mean:.1%} correct")

    return on_event


def _text(report: DemoReport) -> str:
    names = [task.name for task in report.tasks]
    header = ("test accuracy in %", *names, "mean", "scale", "seconds")
    lines = [
        *(
            f"{t.name}: {t.question} ({len(t.classes)} classes, {t.test} texts)"
            for t in report.tasks
        ),
        "",
        table([header, *(_cells(row, names) for row in report.rows)]),
        "",
        f"scale: the best of {', '.join(f'{s:g}' for s in report.scales)} on validation texts; "
        "seconds: of the merge alone",
        f"{report.model}, {format_seconds(report.seconds)}",
    ]
    if report.out is not None:
        lines.append(f"checkpoints: {report.out}")
    return "\n".join(lines)


def _cells(row: Row, tasks: list[str]) -> tuple[str, ...]:
    return (
        row.name,
        *(f"{100 * row.scores[task]:.1f}" for task in tasks),
        f"{100 * row.mean:.1f}",
        "" if row.scale is None else f"{row.scale:g}",
        "" if row.seconds is None else f"{row.seconds:.2f}",
    )
