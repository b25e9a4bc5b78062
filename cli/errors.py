"""Turns whatever ends a run into a message and an exit code.

0 done, 1 the answer is no, 2 usage, 3 inputs or the machine, 4 a bug, 128 + N stopped by signal N,
141 (N is SIGPIPE's) where nobody reads standard output.
"""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import click

from ..errors import (
    MergekitIsoError,
    MergeWarning,
    MethodError,
    OutputError,
    RecipeError,
)
from .hints import usage_hint
from .output import Output
from .signals import Stopped
from .streams import abandon_stdout

USAGE, INPUT, BUG, PIPE_CLOSED = 2, 3, 4, 141


def exit_code_of(run: Callable[[], int], arguments: Sequence[str], output: Output) -> int:
    """Call ``run`` and return the program's exit code, having said on stderr what went wrong.

    ``arguments`` are those of the command line, for hints.
    """
    _show_warnings(output)
    try:
        code = run()
        sys.stdout.flush()
    except click.exceptions.Exit as error:
        return error.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return USAGE
    except Stopped as error:
        output.error(error.reason)
        return error.exit_code
    except BrokenPipeError:
        abandon_stdout()
        return PIPE_CLOSED
    except Exception as error:
        return _report(error, arguments, output)
    return code


def _report(error: Exception, arguments: Sequence[str], output: Output) -> int:
    code, message, hint = describe(error, arguments)
    if code == BUG or output.debug:
        traceback.print_exception(error)
    output.error(message, hint)
    if isinstance(error, OSError):
        abandon_stdout()
    return code


def describe(error: Exception, arguments: Sequence[str]) -> tuple[int, str, str | None]:
    """Return an error's exit code, what to say about it, and what to do about it."""
    if isinstance(error, click.UsageError):
        return USAGE, *_usage(error, arguments)
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


def _usage(error: click.UsageError, arguments: Sequence[str]) -> tuple[str, str]:
    unknown = isinstance(error, (click.NoSuchOption, click.NoSuchCommand))
    message = error.message if unknown else error.format_message()
    return message[:1].lower() + message[1:].rstrip("."), usage_hint(error, arguments)


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
