"""``methods``: the operators and their options, read from the registry."""

from __future__ import annotations

import types
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Union, get_args, get_origin

import click

from .options import complete_methods, output_options
from .output import Output, shown, table

if TYPE_CHECKING:
    from ..methods import MethodEntry


class OptionRow(TypedDict):
    """One option of a method, as shown."""

    option: str
    type: str
    range: str
    default: Any
    description: str


@click.command(short_help="List the merging methods, or explain one.")
@click.argument("name", required=False, shell_complete=complete_methods)
@output_options
@click.pass_obj
def methods(output: Output, name: str | None) -> None:
    """List the merging methods; with NAME, its formula, options, cost and paper."""
    from ..methods import list_methods, method_entry

    if name is None:
        entries = list_methods()
        listing = table([(e.name, e.summary) for e in entries])
        output.data(listing, [_document(e) for e in entries])
    else:
        entry = method_entry(name)
        output.data(_text(entry), _document(entry))


def _document(entry: MethodEntry) -> dict[str, Any]:
    requires = entry.cls(**entry.preset).requires
    return {
        "name": entry.name,
        "summary": entry.summary,
        "formula": entry.formula,
        "paper": entry.paper,
        "cost": entry.cost,
        "requires": {
            "workers": requires.workers,
            "unit": requires.unit,
            "stats": list(requires.stats),
            "random": requires.random,
        },
        "options": option_rows(entry.cls, entry.defaults),
    }


def _text(entry: MethodEntry) -> str:
    facts = [
        ("formula", entry.formula),
        ("needs", _needs(entry)),
        ("cost", entry.cost),
        ("paper", entry.paper),
    ]
    parts = [f"{entry.name}: {entry.summary}", table([f for f in facts if f[1]], indent="  ")]
    rows = option_rows(entry.cls, entry.defaults)
    if rows:
        parts.append(f"options, set with --set OPTION=VALUE\n{_option_table(rows)}")
    for title, policy_rows in _policies(entry):
        parts.append(f"{title}\n{_option_table(policy_rows)}" if policy_rows else title)
    return "\n\n".join(parts)


def _needs(entry: MethodEntry) -> str:
    requires = entry.cls(**entry.preset).requires
    needs = [
        "the weighted sum of the deltas" if requires.workers == "sum" else "every model's delta",
        "whole matrices" if requires.unit == "matrix" else "any chunk of a tensor",
    ]
    scans = {
        "worker_tensor": "a scan of each tensor of each model",
        "worker_model": "a scan of each model",
        "merged_model": "a scan of the merged model",
    }
    needs += [scans[stat] for stat in requires.stats]
    if requires.random:
        needs.append("a seed")
    return ", ".join(needs)


def _policies(entry: MethodEntry) -> list[tuple[str, list[OptionRow]]]:
    """Return the policies that the entry's polar option may name, with their own options."""
    from ..kernels.polar import POLICIES, PolarPolicy

    return [
        (
            f"with --set {option}={policy.name}: {_first_line(policy)}",
            option_rows(policy, {f.name: f.default for f in fields(policy)}, prefix=f"{option}."),
        )
        for option, default in entry.defaults.items()
        if isinstance(default, PolarPolicy)
        for policy in POLICIES.values()
    ]


def _first_line(cls: type) -> str:
    return (cls.__doc__ or "").partition("\n")[0]


def _option_table(rows: list[OptionRow]) -> str:
    return table(
        [
            (
                row["option"],
                " ".join(filter(None, (row["type"], row["range"]))),
                f"default {shown(row['default'])}",
                row["description"],
            )
            for row in rows
        ],
        indent="  ",
    )


def option_rows(cls: type, defaults: dict[str, Any], prefix: str = "") -> list[OptionRow]:
    """Return the options of a method or policy from their annotations, with their defaults."""
    from ..options import Options, option_types

    rows = []
    for name, annotation in option_types(cls).items():
        default = defaults[name]
        plain = default.options() if isinstance(default, Options) else default
        metadata = annotation.__metadata__ if get_origin(annotation) is Annotated else ()
        rows.append(
            OptionRow(
                option=prefix + name,
                type="policy" if isinstance(default, Options) else _type(annotation),
                range=_range(metadata),
                default=plain,
                description=next((m.description for m in metadata if _described(m)), ""),
            )
        )
    return rows


def _described(metadata: Any) -> bool:
    return getattr(metadata, "description", None) is not None


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return "|".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_type(a) for a in arguments)
    if origin is tuple:
        return "list"
    return "none" if annotation is type(None) else str(annotation.__name__)


def _range(metadata: tuple[Any, ...]) -> str:
    bounds = {
        kind: getattr(constraint, kind)
        for field in metadata
        for constraint in getattr(field, "metadata", [])
        for kind in ("ge", "gt", "le", "lt")
        if hasattr(constraint, kind)
    }
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    if low is not None and high is not None:
        return (
            f"in {'[' if 'ge' in bounds else '('}{low:g}, {high:g}{']' if 'le' in bounds else ')'}"
        )
    if low is not None:
        return f"{'≥' if 'ge' in bounds else '>'} {low:g}"
    if high is not None:
        return f"{'≤' if 'le' in bounds else '<'} {high:g}"
    return ""
