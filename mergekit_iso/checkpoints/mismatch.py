"""Why two sets of tensor names do not fit, in a sentence that helps."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import NoReturn

from ..errors import IncompatibleError
from .checkpoint import Checkpoint, listed

_LISTED_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
_STACKED_EXPERTS = re.compile(r"(^|\.)experts\.(?!\d+\.)")


def refuse_names(
    base: Checkpoint,
    model: Checkpoint,
    missing: Sequence[str],
    extra: Sequence[str],
    all_names: Collection[str],
) -> NoReturn:
    """Raise the IncompatibleError that explains a model's missing or extra tensors.

    ``missing`` are the base's weights that the model lacks, ``extra`` the model's that the base
    lacks, ``all_names`` all of the model's weights.
    """
    who = f"model {model.label!r}"
    for first, second, how in (
        (missing, extra, "the base lists each expert, the model stacks them"),
        (extra, missing, "the base stacks its experts, the model lists each"),
    ):
        if any(map(_LISTED_EXPERT.search, first)) and any(map(_STACKED_EXPERTS.search, second)):
            raise IncompatibleError(
                f"{who} and the base have different layouts of the experts: {how} "
                f"({listed(missing, 1)})",
                hint="load and save one of them with the transformers version of the other",
            )
    if missing and (prefixes := _renaming(missing, extra, all_names)):
        ours, theirs = prefixes
        raise IncompatibleError(
            f"{who} ({_architecture(model)}) has the tensors of the base ({_architecture(base)}) "
            f"under another prefix: {theirs or 'none'} in place of {ours or 'none'}, such as "
            f"{theirs}{missing[0].removeprefix(ours)}",
            hint="extract the part that the two architectures share, then merge that",
        )
    if missing:
        noun = "tensor" if len(missing) == 1 else f"{len(missing)} tensors"
        raise IncompatibleError(
            f"{who} lacks the {noun} {listed(missing)} of the base",
            hint="merge models of one architecture that were fine-tuned from this base",
        )
    noun = "tensor" if len(extra) == 1 else f"{len(extra)} tensors"
    raise IncompatibleError(
        f"{who} has the {noun} {listed(extra)}, which the base lacks",
        hint="remove what is no part of the base (such as a value head) from the model first",
    )


def _architecture(checkpoint: Checkpoint) -> str:
    names = checkpoint.config.get("architectures")
    if isinstance(names, list) and names:
        return str(names[0])
    return str(checkpoint.config.get("model_type", "unknown architecture"))


def _renaming(
    missing: Sequence[str], extra: Sequence[str], all_names: Collection[str]
) -> tuple[str, str] | None:
    """Return (base's prefix, model's prefix) if exchanging them finds most missing tensors."""
    first = missing[0].split(".")
    for kept in range(len(first), 1, -1):
        tail = ".".join(first[-kept:])
        ours = ".".join(first[:-kept])
        ours = ours + "." if ours else ""
        for name in extra:
            if name == tail or name.endswith("." + tail):
                theirs = name.removesuffix(tail)
                moved = [n for n in missing if n.startswith(ours)]
                found = sum(theirs + n.removeprefix(ours) in all_names for n in moved)
                if found > len(missing) // 2:
                    return ours, theirs
    return None
