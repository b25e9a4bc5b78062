"""Standard output and error, also where they are closed, full or a pipe that nobody reads."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any

_STDOUT, _STDERR = 1, 2


class _Data(io.FileIO):
    """Standard output: what cannot be written is an error that names it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            error.filename = "standard output"
            raise


class _Messages(io.FileIO):
    """Standard error: what cannot be written is dropped, for there is nowhere to say so."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def prepare_streams() -> None:
    """Put streams that fail in a defined way in the place of the process's own."""
    stdout, stderr = sys.stdout, sys.stderr
    _fill_descriptors()
    if stdout is None:
        _break_stdout()
    sys.stdout = _text(_Data(_STDOUT, "w", closefd=False), stdout)
    sys.stderr = _text(_Messages(_STDERR, "w", closefd=False), stderr, line_buffering=True)


def abandon_stdout() -> None:
    """Drop what is still buffered: the interpreter would fail on it once more at its end."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, _STDOUT)
    os.close(devnull)


def _fill_descriptors() -> None:
    # A standard descriptor left closed would be given to the next file opened, and messages
    # would be written into that.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        pass
    os.close(descriptor)


def _break_stdout() -> None:
    reader, writer = os.pipe()
    os.dup2(writer, _STDOUT)
    os.close(reader)
    os.close(writer)


def _text(raw: io.FileIO, replaced: Any, *, line_buffering: bool | None = None) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding=getattr(replaced, "encoding", "utf-8"),
        errors="backslashreplace",
        line_buffering=raw.isatty() if line_buffering is None else line_buffering,
    )
