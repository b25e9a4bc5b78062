"""Errors of one process, kept until all have met again, so that none waits for another."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from .. import errors
from ..errors import MergekitIsoError, SyncError
from .exchange import Exchange

P = ParamSpec("P")
T = TypeVar("T")


class Guard:
    """Runs work until something fails; ``agree`` then raises it in every process."""

    def __init__(self) -> None:
        self._error: MergekitIsoError | None = None

    def run(self, what: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
        """Return ``work(…)``; None where it fails, or anything failed before."""
        if self._error is not None:
            return None
        try:
            return work(*args, **kwargs)
        except SyncError:  # the network's own, which ends the round in every process
            raise
        except MergekitIsoError as error:
            self._error = error
        except (RuntimeError, ValueError, ArithmeticError) as error:
            reason = " ".join(str(error).split())[:200]
            self._error = SyncError(f"{what} failed: {reason}")
            self._error.__cause__ = error
        return None

    def agree(self, exchange: Exchange) -> None:
        """Raise the error of the first process that has one in all of them."""
        mine = self._error
        said = None if mine is None else (type(mine).__name__, str(mine), mine.hint)
        for other in exchange.gather_all(said):
            if other is None:
                continue
            if other == said and mine is not None:
                raise mine
            kind, message, hint = other
            raise getattr(errors, kind, SyncError)(message, hint=hint)
