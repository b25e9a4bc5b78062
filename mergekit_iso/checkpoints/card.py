"""The model card: README.md with its front matter, for readers and for the hub."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

from ..errors import MethodError
from ..methods.registry import MethodEntry, method_entry
from ..plan import Plan
from ..tensors import DEFAULT_EXCLUDE
from .manifest import Recipe, hub_id, recipe_of

CARD_NAME = "README.md"
#: What the reproducing command calls its output, whatever this run's folder is called.
_OUT = "merged"


def model_card(plan: Plan) -> str:
    """Return the card: what was merged and how, and the command that does it again."""
    recipe = recipe_of(plan)
    entry = _entry(recipe.method)
    ids = dict.fromkeys(i for c in (plan.base, *plan.models) if (i := hub_id(c)) is not None)
    base_model = ["base_model:", *(f"- {json.dumps(i)}" for i in ids)] if ids else []
    paper = f" ([{entry.paper}]({_url(entry.paper)}))" if entry and entry.paper else ""
    count = "1 model" if len(recipe.models) == 1 else f"{len(recipe.models)} models"
    lines = [
        "---",
        *base_model,
        "library_name: transformers",
        "tags:",
        "- merge",
        "- mergekit-iso",
        "---",
        "",
        f"# {recipe.method} of {count}",
        "",
        f"This model was merged with mergekit-iso: {count} into the base `{recipe.base}` "
        f"by `{recipe.method}`{paper}.",
        "",
        "| model | weight |",
        "|---|---|",
        *(f"| `{m.name}` | {m.weight:g} |" for m in recipe.models),
        "",
        "## Method",
        "",
        *([f"{entry.summary} `{entry.formula}`", ""] if entry else []),
        "| option | value |",
        "|---|---|",
        *(f"| {name} | `{_text(value)}` |" for name, value in _settings(recipe)),
        "",
        "## Reproduce",
        "",
        "```",
        shlex.join(reproduce_command(recipe, entry)),
        "```",
        "",
        "`mergekit_iso.json` lists all checksums; `mergekit-iso verify` checks them.",
    ]
    return "\n".join(lines) + "\n"


def reproduce_command(recipe: Recipe, entry: MethodEntry | None) -> list[str]:
    """Return the command line that merges the same inputs in the same way."""
    command = ["mergekit-iso", "merge", recipe.base, *(m.name for m in recipe.models)]
    command += ["--method", recipe.method]
    if any(m.weight != 1.0 for m in recipe.models):
        command += [part for m in recipe.models for part in ("--weight", repr(m.weight))]
    if recipe.scale != 1.0:
        command += ["--scale", repr(recipe.scale)]
    defaults = entry.cls(**entry.preset).options() if entry else {}
    for name, value in recipe.options.items():
        if value != defaults.get(name):
            command += [part for s in _set(name, value) for part in ("--set", s)]
    if recipe.seed:
        command += ["--seed", str(recipe.seed)]
    if recipe.round:
        command += ["--round", str(recipe.round)]
    if not recipe.exclude:
        command += ["--no-exclude"]
    elif recipe.exclude != DEFAULT_EXCLUDE:
        command += [part for pattern in recipe.exclude for part in ("--exclude", pattern)]
    command += [part for pattern in recipe.keep_base for part in ("--keep-base", pattern)]
    if recipe.dtype != "float32":
        command += ["--dtype", recipe.dtype]
    if recipe.out_dtype is not None:
        command += ["--out-dtype", recipe.out_dtype]
    return [*command, "--max-shard-size", str(recipe.max_shard_size), "-o", _OUT]


def _entry(method: str) -> MethodEntry | None:
    try:
        return method_entry(method)
    except MethodError:  # an object of a class that nobody registered
        return None


def _settings(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    yield from recipe.options.items()
    for name in ("scale", "seed", "round", "exclude", "keep_base", "dtype", "out_dtype"):
        yield name, getattr(recipe, name)


def _set(name: str, value: Any) -> list[str]:
    if isinstance(value, dict) and "name" in value:
        given = {k: v for k, v in value.items() if k != "name" and v is not None}
        return [f"{name}={value['name']}", *(f"{name}.{k}={_text(v)}" for k, v in given.items())]
    return [f"{name}={_text(value)}"]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _url(paper: str) -> str:
    return f"https://arxiv.org/abs/{paper.removeprefix('arXiv:')}" if "arXiv:" in paper else paper
