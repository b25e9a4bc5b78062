"""What a person at a terminal sees."""

from __future__ import annotations

import os
import pty
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

COLOUR = re.compile(r"\x1b\[[0-9;]*m")

each_terminal = pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)


def on_terminal(folder: Path, *command: object, **environment: str) -> str:
    """Return what a command shows on a terminal as its stderr."""
    clean = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "TERM"}}
    master, terminal = pty.openpty()
    with subprocess.Popen(
        list(map(str, command)),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        env=clean | {"TERM": "xterm", "COLUMNS": "120"} | environment,
    ):
        os.close(terminal)
        shown = b""
        with suppress(OSError):  # how a terminal says that nobody has it open any more
            while part := os.read(master, 10_000):
                shown += part
    os.close(master)
    return shown.decode()


@each_terminal
def test_colour_is_for_terminals_that_want_it(
    program: Path, tmp_path: Path, environment: dict[str, str], coloured: bool
) -> None:
    shown = on_terminal(tmp_path, program, "mrge", **environment)
    assert "error:" in shown
    assert bool(COLOUR.search(shown)) == coloured


@pytest.mark.parametrize(("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_merge_shows_a_bar_with_amounts_and_times(
    program: Path, family, environment: dict[str, str], coloured: bool
) -> None:
    merge = ("merge", "base", "a", "--method", "average", "-o", "out")
    shown = on_terminal(family.folder, program, *merge, **environment)
    bar = COLOUR.sub("", shown)
    assert re.search(r"merging .* 4/4 tensors 224/224 bytes (\?|[\d.,]+ [kM]?B(ytes)?/s) \S+:", bar)
    assert bool(COLOUR.search(shown)) == coloured


def test_a_dumb_terminal_and_quiet_runs_have_no_bar(program: Path, family) -> None:
    merge = ("merge", "base", "a", "--method", "average", "-o", "out")
    shown = on_terminal(family.folder, program, *merge, TERM="dumb")
    assert "\x1b" not in shown
    assert len(shown.splitlines()) == 1
    assert on_terminal(family.folder, program, *merge, "--force", "-q") == ""
