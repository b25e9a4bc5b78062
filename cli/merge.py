"""``merge`` and ``plan``: the same inputs, carried out or only looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import click

from ..errors import MethodError
from .options import complete_paths, merge_inputs, output_folder, output_options
from .output import Output, format_bytes, format_seconds, symbol
from .plan import plan_document, plan_text
from .progress import progress
from .signals import unwinding

if TYPE_CHECKING:
    from ..events import Event
    from ..execute import MergeResult
    from ..methods import MergeMethod
    from ..plan import Plan


class MergeInputs(TypedDict):
    """What ``merge_inputs`` parses."""

    base: str
    models: tuple[str, ...]
    method: str
    scale: float
    weights: list[float] | Literal["mean"] | None
    settings: dict[str, Any]
    exclude: tuple[str, ...]
    no_exclude: bool
    keep_base: tuple[str, ...]
    seed: int
    round_: int
    dtype: str
    out_dtype: str | None
    max_shard_size: str
    allow_pickle: bool


class Planning(TypedDict):
    """The keywords of ``plan``, which ``merge_checkpoints`` takes too."""

    weights: list[float] | Literal["mean"] | None
    scale: float
    seed: int
    round: int
    exclude: tuple[str, ...]
    keep_base: tuple[str, ...]
    dtype: str
    out_dtype: str | None
    max_shard_size: str
    allow_pickle: bool


def _threads(ctx: click.Context, param: click.Parameter, given: int | None) -> int | None:
    cpus = os.cpu_count()
    if given is not None and cpus is not None and given > cpus:
        raise click.BadParameter(f"{given} is more than the {cpus} CPUs here", ctx, param)
    return given


@click.command(short_help="Merge models into a new checkpoint.")
@merge_inputs
@click.option(
    "-o",
    "--out",
    required=True,
    callback=output_folder,
    shell_complete=complete_paths,
    metavar="OUT",
    help="Folder to write; must not exist, or be empty.",
)
@click.option("--device", default="cpu", show_default=True, help="cpu, or cuda[:N].")
@click.option(
    "--threads",
    type=click.IntRange(min=1),
    callback=_threads,
    metavar="N",
    help="CPU threads to use, at most one for each CPU.",
)
@click.option("--hash-inputs", is_flag=True, help="Record the sha256 of every input file.")
@click.option("--force", is_flag=True, help="Replace OUT if it is a model already.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing.")
@output_options
@click.pass_obj
def merge(
    output: Output,
    out: Path,
    device: str,
    threads: int | None,
    hash_inputs: bool,
    force: bool,
    dry_run: bool,
    **inputs: Unpack[MergeInputs],
) -> None:
    """Merge MODEL... into BASE and write the result to OUT.

    BASE and each MODEL are a folder, a .safetensors file or a hub id (org/name[@revision]).
    Every MODEL must be a fine-tune of BASE.

    \b
    mergekit-iso merge base math code --method iso_c -o merged
    mergekit-iso merge base math code --method ties --set density=0.3 -o merged
    mergekit-iso merge base math code --method average --weight 2 --weight 1 -o merged
    """
    if dry_run:
        _show(_plan(inputs, out, force=force), inputs["method"], output)
        return
    from ..execute import merge_checkpoints

    method, planning = _method(inputs), _planning(inputs)
    with progress(output) as show, unwinding() as heed_signals:

        def on_event(event: Event) -> None:
            # First when the output is begun: before, there are downloads to abandon at once.
            heed_signals()
            show(event)

        result = merge_checkpoints(
            inputs["base"],
            inputs["models"],
            method,
            out,
            **planning,
            force=force,
            threads=threads,
            device=device,
            hash_inputs=hash_inputs,
            on_event=on_event,
        )
    output.note(_summary(result))
    output.data(str(result.out), result.to_json())


@click.command(short_help="Show what a merge would do.")
@merge_inputs
@output_options
@click.pass_obj
def plan(output: Output, **inputs: Unpack[MergeInputs]) -> None:
    """Show what merging MODEL... into BASE would do, from the files' headers alone.

    Nothing is written; with --verbose every tensor is listed.
    """
    _show(_plan(inputs), inputs["method"], output)


def _plan(inputs: MergeInputs, out: Path | None = None, *, force: bool = False) -> Plan:
    from ..checkpoints.output import check_output, source_paths
    from ..plan import plan

    planned = plan(inputs["base"], inputs["models"], _method(inputs), **_planning(inputs))
    if out is not None:
        check_output(out, source_paths(planned.base, *planned.models), force=force)
    return planned


def _planning(inputs: MergeInputs) -> Planning:
    from ..tensors import DEFAULT_EXCLUDE

    if inputs["no_exclude"] and inputs["exclude"]:
        raise click.UsageError("--exclude and --no-exclude contradict each other")
    return {
        "weights": inputs["weights"],
        "scale": inputs["scale"],
        "seed": inputs["seed"],
        "round": inputs["round_"],
        "exclude": () if inputs["no_exclude"] else inputs["exclude"] or DEFAULT_EXCLUDE,
        "keep_base": inputs["keep_base"],
        "dtype": inputs["dtype"],
        "out_dtype": inputs["out_dtype"],
        "max_shard_size": inputs["max_shard_size"],
        "allow_pickle": inputs["allow_pickle"],
    }


def _method(inputs: MergeInputs) -> MergeMethod:
    from ..methods import get_method

    name = inputs["method"]
    try:
        return get_method(name, **inputs["settings"])
    except MethodError as error:
        error.hint = error.hint or f"see mergekit-iso methods {name}"
        raise


def _show(planned: Plan, method: str, output: Output) -> None:
    for message in planned.warnings:
        output.warning(message)
    output.data(plan_text(planned, method, every_tensor=output.verbose), plan_document(planned))


def _summary(result: MergeResult) -> str:
    done = symbol("✓", "done:")
    amount = f"{result.tensors} tensors, {format_bytes(result.bytes)}"
    return f"{done} {result.out}  {amount}, {format_seconds(result.seconds)}"
