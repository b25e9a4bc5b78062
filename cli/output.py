"""Where everything a command says goes: data to stdout, all else to stderr."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

_STYLES = {"error": "red", "warning": "yellow", "hint": "cyan"}


class Output:
    """What one run of the program prints, in the form its options ask for.

    ``as_json``: data is one JSON document. ``quiet``: no progress and no notes. ``verbose``: one
    line per tensor. ``debug``: errors show their traceback.
    """

    def __init__(self) -> None:
        self.as_json = False
        self.quiet = False
        self.verbose = False
        self.debug = False
        self._warned: set[str] = set()

    def data(self, text: str, document: Any) -> None:
        """Print a command's result: ``text`` to people, ``document`` as JSON to programs."""
        print(json.dumps(document, indent=2) if self.as_json else text)

    def note(self, text: str) -> None:
        """Print a line that quiet runs leave out."""
        if not self.quiet:
            _say(text)

    def warning(self, message: str) -> None:
        """Print a warning, the same one only once."""
        if message not in self._warned:
            self._warned.add(message)
            self._labelled("warning", message)

    def error(self, message: str, hint: str | None = None) -> None:
        """Print what is wrong and, where there is one, the way out."""
        self._labelled("error", message)
        if hint:
            self._labelled("hint", hint)

    def _labelled(self, label: str, message: str) -> None:
        prefix = f"{label}:"
        if _coloured():
            prefix = click.style(prefix, fg=_STYLES[label], bold=True)
        _say(f"{prefix} {' '.join(message.split())}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def is_interactive() -> bool:
    """Whether stderr is a terminal that can redraw a line."""
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _coloured() -> bool:
    return is_interactive() and not os.environ.get("NO_COLOR")


def symbol(preferred: str, plain: str) -> str:
    """Return ``preferred`` where stderr can show it, else ``plain``."""
    try:
        preferred.encode(sys.stderr.encoding)
    except UnicodeEncodeError:
        return plain
    return preferred


def shown(value: Any) -> str:
    """Return an option's value as ``--set`` takes it; a policy is its name."""
    if isinstance(value, dict):
        return str(value["name"])
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def table(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Return rows as text with aligned columns; cells are at most one line each."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(f"{indent}{line}".rstrip() for line in lines)


def format_bytes(count: int) -> str:
    """Return a number of bytes in decimal units, as ``--max-shard-size`` takes them."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Return a duration: ``0.41 s``, ``12 s``, ``3 min 04 s``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
