"""Whether all workers were built alike, compared before any of them trains."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ..errors import IncompatibleError
from ..methods.base import MergeMethod
from .comm import Comm
from .parameters import Parameters
from .settings import LoopSettings


@contextmanager
def together(comm: Comm | None) -> Iterator[None]:
    """Let an error in the block be heard by all ranks, which raise IncompatibleError then."""
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    said = None if mine is None else " ".join(str(mine).split())
    everyone = [said] if comm is None else comm.gather_objects(said)
    if mine is not None:
        raise mine
    for rank, other in enumerate(everyone):
        if other is not None:
            raise IncompatibleError(
                f"rank {rank} cannot build its merger: {other}",
                hint="build the same model and LoopedMerger on every rank",
            )


def check_agreement(
    comm: Comm, parameters: Parameters, method: MergeMethod, settings: LoopSettings, outer: str
) -> None:
    """Compare model, method, options and settings of all ranks.

    Raises IncompatibleError in every rank where one differs from rank 0.
    """
    mine = {
        "method": {"name": method.name, **method.options()},
        "settings": settings.options(),
        "outer optimizer": outer,
        "tensors": dict(parameters.describe()),
    }
    plain = json.loads(json.dumps(mine, default=str))
    everyone: Sequence[Mapping[str, Any]] = comm.gather_objects(plain)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise IncompatibleError(
                f"rank {rank} and rank 0 do not agree: {_difference(other, everyone[0])}",
                hint="build the same model and LoopedMerger on every rank",
            )


def _difference(other: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    for what in first:
        a, b = other[what], first[what]
        if a == b:
            continue
        if not isinstance(a, dict):
            return f"{what} is {a} there and {b} here"
        key = next(k for k in (*b, *a) if a.get(k, _MISSING) != b.get(k, _MISSING))
        there, here = (str(x.get(key, "missing")) for x in (a, b))
        return f"{what}: {key} is {there} and {here}"
    return "they have other settings"


_MISSING = object()
