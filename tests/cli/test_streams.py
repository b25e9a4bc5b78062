"""Standard streams that are closed, full or not read."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

MERGE = ("merge", "base", "a", "--method", "average", "-o", "out")


def shell(program: Path, folder: Path, *arguments: str, redirected: str):
    return subprocess.run(
        ["bash", "-c", f'"$@" {redirected}', "bash", program, *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=60,
        cwd=folder,
        check=False,
    )


def test_a_closed_pipe_is_quiet(program: Path) -> None:
    with subprocess.Popen(
        [program, "completion", "bash"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


@pytest.mark.parametrize("arguments", [("completion", "bash"), ("--help",), ("methods", "--json")])
def test_a_full_disk_exits_3_and_says_what_could_not_be_written(
    program: Path, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    result = shell(program, tmp_path, *arguments, redirected=">/dev/full")
    assert result.returncode == 3
    assert result.stderr == "error: no space left on device: standard output\n"


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_without_stderr_a_merge_is_the_same(program: Path, family, redirected: str) -> None:
    result = shell(program, family.folder, *MERGE, "-v", redirected=redirected)
    assert result.returncode == 0
    assert result.stdout == f"{family.folder / 'out'}\n"
    assert shell(program, family.folder, "verify", "out", redirected="").returncode == 0


@pytest.mark.parametrize("redirected", ["2>&-", "2>/dev/full"])
@pytest.mark.parametrize(("arguments", "code"), [((), 2), (("mrge",), 2), (("verify", "no"), 3)])
def test_without_stderr_the_exit_code_is_as_usual(
    program: Path, tmp_path: Path, arguments: tuple[str, ...], code: int, redirected: str
) -> None:
    result = shell(program, tmp_path, *arguments, redirected=redirected)
    assert (result.returncode, result.stdout, result.stderr) == (code, "", "")


@pytest.mark.parametrize("redirected", [">&-", "<&- >&-", ">&- 2>&-"])
def test_a_closed_stdout_is_a_broken_pipe(program: Path, family, redirected: str) -> None:
    result = shell(program, family.folder, *MERGE, "-q", redirected=redirected)
    assert (result.returncode, result.stderr) == (141, "")
    assert shell(program, family.folder, "verify", "out", redirected="").returncode == 0
    assert shell(program, family.folder, "--help", redirected=redirected).returncode == 141
