"""A plan as text for people and as a document for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .output import format_bytes, shown, table

if TYPE_CHECKING:
    from ..methods import MergeMethod
    from ..plan import Plan, TensorPlan


def plan_text(plan: Plan, method: str, *, every_tensor: bool = False) -> str:
    """Return what a merge would do, a few lines; with ``every_tensor`` a line for each.

    ``method`` is the name that the plan's method was asked for by.
    """
    models = zip(plan.models, plan.weights, strict=True)
    lines = [
        ", ".join([method, *_settings(plan.method, method), f"scale {plan.scale:g}"]),
        table(
            [("base", plan.base.label, "")]
            + [("model", model.label, f"weight {weight:g}") for model, weight in models],
            indent="  ",
        ),
        "tensors",
        _tensors(plan) if every_tensor else _groups(plan),
        "written",
        table([(name, f"{len(names)} tensors") for name, names in plan.shards], indent="  "),
    ]
    if plan.carried:
        lines += ["carried over from the base", *(f"  {name}" for name in plan.carried)]
    total = sum(t.info.nbytes for t in plan.tensors)
    lines.append(f"{len(plan.tensors)} tensors, {format_bytes(total)}")
    return "\n".join(lines)


def _settings(method: MergeMethod, name: str) -> Iterator[str]:
    """Yield the options that differ from the defaults of that name, as ``--set`` takes them."""
    from ..methods import method_entry
    from ..options import Options

    for option, default in method_entry(name).defaults.items():
        value = getattr(method, option)
        if not isinstance(value, Options):
            if value != default:
                yield f"{option}={shown(value)}"
            continue
        plain = value.options()
        if type(value) is not type(default):
            default = type(value)()
            yield f"{option}={shown(plain)}"
        usual = default.options()
        yield from (f"{option}.{k}={shown(v)}" for k, v in plain.items() if v != usual[k])


def _groups(plan: Plan) -> str:
    groups: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for tensor in plan.tensors:
        groups[tensor.info.role, _treatment(tensor)].append(tensor.info.nbytes)
    return table(
        [
            (str(len(sizes)), role, treatment, format_bytes(sum(sizes)))
            for (role, treatment), sizes in groups.items()
        ],
        indent="  ",
    )


def _tensors(plan: Plan) -> str:
    return table(
        [
            (
                t.info.name,
                "×".join(map(str, t.info.shape)),
                _dtype(t.info.dtype),
                t.info.role,
                _treatment(t),
            )
            for t in plan.tensors
        ],
        indent="  ",
    )


def _treatment(tensor: TensorPlan) -> str:
    if tensor.action == "copy":
        return "kept from the base"
    if tensor.same_as:
        return f"tied to {tensor.same_as}"
    return "merged, excluded from spectral methods" if tensor.info.excluded else "merged"


def plan_document(plan: Plan) -> dict[str, Any]:
    """Return the plan as plain data, for JSON."""
    return {
        "method": plan.method.name,
        "options": plan.method.options(),
        "scale": plan.scale,
        "seed": plan.seed,
        "round": plan.round,
        "exclude": list(plan.exclude),
        "keep_base": list(plan.keep_base),
        "base": plan.base.label,
        "models": [
            {"model": model.label, "weight": weight}
            for model, weight in zip(plan.models, plan.weights, strict=True)
        ],
        "bytes": sum(t.info.nbytes for t in plan.tensors),
        "tensors": [
            {
                "name": t.info.name,
                "shape": list(t.info.shape),
                "dtype": _dtype(t.info.dtype),
                "role": t.info.role,
                "excluded": t.info.excluded,
                "action": t.action,
                "same_as": t.same_as,
                "compute": _dtype(t.compute),
            }
            for t in plan.tensors
        ],
        "files": [{"file": name, "tensors": list(names)} for name, names in plan.shards],
        "carried": list(plan.carried),
        "warnings": list(plan.warnings),
    }


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
