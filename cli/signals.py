"""Ends the program when it is told to stop, at any time and with something to clean up or not."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

Handler = Callable[[int, FrameType | None], None]

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """One of these signals arrived where there is something to clean up."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.exit_code = 128 + number
        self.reason = "interrupted" if number == signal.SIGINT else "terminated"


def exit_at_once() -> None:
    """From now on end the process, silently, when a signal stops it.

    An exception would be swallowed, or turned into another, by the imports that run first.
    """
    _handle(lambda number, frame: os._exit(128 + number))


@contextmanager
def unwinding() -> Iterator[Callable[[], None]]:
    """Yield a function from whose first call on, until the block ends, signals raise Stopped.

    Call it again now and then: an exception raised inside a finaliser is lost, and is raised
    once more.
    """
    received: list[int] = []
    begun = False
    report_lost = sys.unraisablehook

    def stop(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise Stopped(number)

    def heed() -> None:
        nonlocal begun
        if received:
            raise Stopped(received[0])
        if not begun:
            begun = True
            _handle(stop)

    def report(lost: sys.UnraisableHookArgs) -> None:
        if not isinstance(lost.exc_value, Stopped):
            report_lost(lost)

    sys.unraisablehook = report
    try:
        yield heed
    except Exception:
        if received:
            raise Stopped(received[0]) from None
        raise
    else:
        if received:
            raise Stopped(received[0])
    finally:
        exit_at_once()
        sys.unraisablehook = report_lost


def _handle(handler: Handler) -> None:
    for number in _STOPPING:
        # nohup and shells' background jobs start a program with signals that it must ignore.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)
