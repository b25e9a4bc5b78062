"""Shows a running merge on stderr: a bar on a terminal, now and then a line in a pipe."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from .output import Output, format_bytes, is_interactive

if TYPE_CHECKING:
    from ..events import Event, OnEvent

_SECONDS_BETWEEN_LINES = 5.0


class _Display(Protocol):
    def start(self, tensors: int, size: int) -> None: ...

    def advance(self, size: int) -> None: ...


@contextmanager
def progress(output: Output) -> Iterator[OnEvent]:
    """Yield the callback to hand to the engine; what it is told is shown until the block ends."""
    with _display(output) as display:
        from ..events import Progress, Started, Warned

        def on_event(event: Event) -> None:
            match event:
                case Started(tensors, size):
                    display.start(tensors, size)
                case Progress(tensor, size):
                    if output.verbose:
                        output.note(tensor)
                    display.advance(size)
                case Warned(message):
                    output.warning(message)

        yield on_event


@contextmanager
def _display(output: Output) -> Iterator[_Display]:
    if output.quiet:
        yield _Silent()
    elif is_interactive():
        with _Bar() as bar:
            yield bar
    else:
        yield _Lines(output)


class _Silent:
    def start(self, tensors: int, size: int) -> None:
        pass

    def advance(self, size: int) -> None:
        pass


class _Lines:
    def __init__(self, output: Output) -> None:
        self._output = output
        self._tensors = self._size = self._done = self._done_size = 0
        self._next = time.monotonic() + _SECONDS_BETWEEN_LINES

    def start(self, tensors: int, size: int) -> None:
        self._tensors, self._size = tensors, size

    def advance(self, size: int) -> None:
        self._done += 1
        self._done_size += size
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._output.note(
                f"merging: {self._done}/{self._tensors} tensors, "
                f"{format_bytes(self._done_size)} of {format_bytes(self._size)}"
            )


class _Bar:
    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("merging"),
            BarColumn(),
            TextColumn("{task.fields[done]}/{task.fields[tensors]} tensors"),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._done = 0

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, tensors: int, size: int) -> None:
        # Not earlier: a download may be showing bars of its own until then.
        self._bar.start()
        self._task = self._bar.add_task("merging", total=size, done=0, tensors=tensors)

    def advance(self, size: int) -> None:
        self._done += 1
        self._bar.update(self._task, advance=size, done=self._done)
