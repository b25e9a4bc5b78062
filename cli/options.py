"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click
import yaml
from click.shell_completion import CompletionItem

from .output import Output

F = TypeVar("F", bound=Callable[..., Any])


def _switch(*names: str, attribute: str, text: str) -> Callable[[F], F]:
    def apply(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given:
            setattr(ctx.ensure_object(Output), attribute, True)

    return click.option(
        *names, is_flag=True, is_eager=True, expose_value=False, callback=apply, help=text
    )


_AS_JSON = _switch("--json", attribute="as_json", text="Print the result as one JSON document.")
_QUIET = _switch("-q", "--quiet", attribute="quiet", text="No progress, no notes.")
_VERBOSE = _switch("-v", "--verbose", attribute="verbose", text="A line for every tensor.")
_DEBUG = _switch("--debug", attribute="debug", text="Show the traceback of an error.")


def output_options(command: F) -> F:
    """Add what every command takes: --json, --quiet, --verbose, --debug."""
    for option in (_DEBUG, _VERBOSE, _QUIET, _AS_JSON):
        command = option(command)
    return command


def merge_inputs(command: F) -> F:
    """Add what says what is merged and how: the arguments and options of merge and plan."""
    for option in reversed(_MERGE_INPUTS):
        command = option(command)
    return command


def output_folder(ctx: click.Context, param: click.Parameter, given: str | None) -> Path | None:
    """Return the folder that an option or argument names, ``~`` expanded as in inputs."""
    if given is None:
        return None
    if not given:
        raise click.BadParameter("the name of a folder is empty", ctx, param)
    return Path(os.path.expanduser(given))


def complete_paths(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Have the shell complete files and folders."""
    return [CompletionItem(incomplete, type="file")]


def complete_methods(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    """Complete the names of the methods."""
    from ..methods import list_methods

    return [
        CompletionItem(entry.name, help=entry.summary)
        for entry in list_methods()
        if entry.name.startswith(incomplete)
    ]


def _weights(
    ctx: click.Context, param: click.Parameter, given: tuple[str, ...]
) -> list[float] | Literal["mean"] | None:
    if not given:
        return None
    if "mean" in given:
        if len(given) > 1:
            raise click.BadParameter("'mean' stands alone", ctx, param)
        return "mean"
    try:
        return [float(w) for w in given]
    except ValueError as error:
        text = str(error).rpartition(": ")[2]
        raise click.BadParameter(f"{text} is neither a number nor 'mean'", ctx, param) from None


def _settings(ctx: click.Context, param: click.Parameter, given: tuple[str, ...]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for item in given:
        key, equals, text = item.partition("=")
        if not equals or not all(key.split(".")):
            raise click.BadParameter(f"{item!r} is not of the form KEY=VALUE", ctx, param)
        try:
            value = _completed(yaml.safe_load(text))
        except Exception:  # besides YAMLError whatever int(), date() and recursion raise
            raise click.BadParameter(
                f"the value of {key!r} cannot be read as YAML", ctx, param
            ) from None
        _put(settings, key.split("."), value)
    return settings


def _completed(value: Any) -> Any:
    """Read what YAML 1.1 takes for strings: 1e-3 without a point, and Python's None."""
    if isinstance(value, list):
        return [_completed(v) for v in value]
    if not isinstance(value, str):
        return value
    if value.lower() == "none":
        return None
    try:
        return float(value)
    except ValueError:
        return value


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    """Set a dotted key; a value set at a prefix of it is that record's name."""
    *parents, last = path
    for parent in parents:
        below = settings.setdefault(parent, {})
        if not isinstance(below, dict):
            below = settings[parent] = {"name": below}
        settings = below
    if isinstance(settings.get(last), dict) and not isinstance(value, dict):
        settings[last]["name"] = value
    else:
        settings[last] = value


_MERGE_INPUTS = (
    click.argument("base", shell_complete=complete_paths),
    click.argument(
        "models", metavar="MODEL...", nargs=-1, required=True, shell_complete=complete_paths
    ),
    click.option(
        "--method",
        required=True,
        shell_complete=complete_methods,
        help="See 'mergekit-iso methods'.",
    ),
    click.option(
        "--scale",
        type=float,
        default=1.0,
        show_default=True,
        metavar="S",
        help="Factor on the merged delta: base + S·M(deltas).",
    ),
    click.option(
        "--weight",
        "weights",
        multiple=True,
        callback=_weights,
        metavar="W",
        help="A number per model, in their order; or once 'mean', which is 1/T each."
        "  [default: 1 each]",
    ),
    click.option(
        "--set",
        "settings",
        multiple=True,
        callback=_settings,
        metavar="KEY=VALUE",
        help="An option of the method; dots reach inside: --set polar=newton_schulz "
        "--set polar.steps=8.",
    ),
    click.option(
        "--exclude",
        multiple=True,
        metavar="PATTERN",
        help="Spectral methods only average these tensors: a glob on the whole name, a "
        "part of the name, or role:embedding, role:head, …  "
        "[default: text_projection]",
    ),
    click.option("--no-exclude", is_flag=True, help="Exclude nothing."),
    click.option(
        "--keep-base",
        multiple=True,
        metavar="GLOB",
        help="Leave these tensors as they are in BASE.",
    ),
    click.option(
        "--seed",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Seed of random methods.",
    ),
    click.option(
        "--round",
        "round_",
        type=int,
        default=0,
        show_default=True,
        metavar="N",
        help="Round that random masks are drawn for.",
    ),
    click.option(
        "--dtype",
        type=click.Choice(["float32", "float64"]),
        default="float32",
        show_default=True,
        help="Dtype to compute in.",
    ),
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="Dtype to write: float32, bfloat16, float16, …  [default: BASE's]",
    ),
    click.option(
        "--max-shard-size",
        default="5GB",
        show_default=True,
        metavar="SIZE",
        help="Largest weight file: bytes, or 200MB, 5GB.",
    ),
    click.option(
        "--allow-pickle", is_flag=True, help="Read .bin files too (weights only, no code is run)."
    ),
)
