"""Turns whatever ends a run into a message and an exit code.

0 done, 1 the answer is no, 2 usage, 3 inputs or the machine, 4 a bug, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any, TextIO

import click

from ..errors import (
    MergekitIsoError,
    MergeWarning,
    MethodError,
    OutputError,
    RecipeError,
)
from .output import Output

USAGE, INPUT, BUG = 2, 3, 4
INTERRUPTED, TERMINATED, PIPE_CLOSED = 128 + signal.SIGINT, 128 + signal.SIGTERM, 141


class Terminated(BaseException):
    """SIGTERM arrived; unwinds like a KeyboardInterrupt."""


def exit_code_of(run: Callable[[], int], output: Output) -> int:
    """Call ``run`` and return the program's exit code, having said on stderr what went wrong."""
    signal.signal(signal.SIGTERM, _terminate)
    _show_warnings(output)
    try:
        code = run()
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except (KeyboardInterrupt, Terminated) as error:
        stopped = isinstance(error, Terminated)
        output.error("terminated" if stopped else "interrupted")
        return TERMINATED if stopped else INTERRUPTED
    except BrokenPipeError:
        _abandon_stdout()
        return PIPE_CLOSED
    except Exception as error:
        return _report(error, output)
    return code


def _report(error: Exception, output: Output) -> int:
    code, message, hint = describe(error)
    if code == BUG or output.debug:
        traceback.print_exception(error)
    output.error(message, hint)
    if isinstance(error, OSError):
        _abandon_stdout()
    return code


def describe(error: Exception) -> tuple[int, str, str | None]:
    """Return an error's exit code, what to say about it, and what to do about it."""
    if isinstance(error, click.UsageError):
        return USAGE, *_usage(error)
    if isinstance(error, (MethodError, RecipeError, OutputError)):
        return USAGE, str(error), error.hint
    if isinstance(error, MergekitIsoError):
        return INPUT, str(error), error.hint
    if _is_out_of_memory(error):
        return INPUT, "out of memory", "free some memory, or use fewer --threads"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        where = f": {error.filename}" if error.filename else ""
        return INPUT, f"{reason[0].lower()}{reason[1:]}{where}", None
    return (
        BUG,
        f"unexpected {type(error).__name__}: {error}",
        "this is a bug: please report it with the traceback above and the output of "
        "'mergekit-iso env'",
    )


def _usage(error: click.UsageError) -> tuple[str, str]:
    message = error.format_message()
    hint = f"see {error.ctx.command_path if error.ctx else 'mergekit-iso'} --help"
    if isinstance(error, click.NoSuchOption) and _takes_method_options(error.ctx):
        name = error.option_name.lstrip("-").replace("-", "_")
        hint = f"an option of the method is given as --set {name}=VALUE; {hint}"
    if isinstance(error, (click.NoSuchOption, click.NoSuchCommand)):
        message = error.message
        if error.possibilities:
            hint = f"did you mean {error.possibilities[0]}? {hint}"
    return message[:1].lower() + message[1:].rstrip("."), hint


def _takes_method_options(ctx: click.Context | None) -> bool:
    return ctx is not None and any("--set" in p.opts for p in ctx.command.params)


def _is_out_of_memory(error: Exception) -> bool:
    torch: Any = sys.modules.get("torch")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.OutOfMemoryError))
        or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))
    )


def _show_warnings(output: Output) -> None:
    if sys.warnoptions:
        return
    show = warnings.showwarning

    def show_ours(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if issubclass(category, MergeWarning):
            output.warning(str(message))
        else:
            show(message, category, filename, lineno, file, line)

    warnings.simplefilter("ignore")
    warnings.simplefilter("always", MergeWarning)
    warnings.showwarning = show_ours


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _abandon_stdout() -> None:
    # What is still buffered cannot be written; the interpreter would fail on it once more.
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
