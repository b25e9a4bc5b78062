from __future__ import annotations

import os
import pty
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file


def lines(text: str) -> list[str]:
    return text.rstrip("\n").split("\n")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["mrge"], "no such command 'mrge'", "did you mean merge?"),
        (["merge", "--outdtype=x"], "no such option '--outdtype'", "did you mean --out-dtype?"),
        (["merge", "--density=0.2"], "no such option '--density'", "--set density=VALUE"),
        (["merge", "base"], "missing argument 'MODEL...'", "mergekit-iso merge --help"),
        (["merge", "base", "a", "-oout"], "missing option '--method'", "mergekit-iso merge --help"),
        (["completion", "csh"], "'csh' is not one of", "mergekit-iso completion --help"),
        (
            ["plan", "base", "a", "--method=ties", "--weight=heavy"],
            "'heavy' is neither a number nor 'mean'",
            "mergekit-iso plan --help",
        ),
        (
            ["plan", "base", "a", "b", "--method=ties", "--weight=mean", "--weight=1"],
            "'mean' stands alone",
            "mergekit-iso plan --help",
        ),
        (
            ["plan", "base", "a", "--method=ties", "--set", "density"],
            "'density' is not of the form KEY=VALUE",
            "mergekit-iso plan --help",
        ),
        (
            ["plan", "base", "a", "--method=ties", "--set", "density=[0.2"],
            "the value of 'density=[0.2' is not YAML",
            "mergekit-iso plan --help",
        ),
        (["methods", "isoc"], "there is no method 'isoc'", "did you mean 'iso_c'?"),
        (
            ["plan", "base", "a", "--method=ties", "--set", "densty=0.2"],
            "method 'ties' has no option 'densty'",
            "did you mean 'density'?",
        ),
        (
            ["plan", "base", "a", "--method=ties", "--exclude=x", "--no-exclude"],
            "--exclude and --no-exclude contradict each other",
            "--help",
        ),
    ],
)
def test_usage_errors_are_two_lines_and_exit_2(
    run, family, arguments: list[str], error: str, hint: str
) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    first, second = lines(result.stderr)
    assert first.startswith("error: ")
    assert error in first
    assert second.startswith("hint: ")
    assert hint in second


def test_a_missing_input_exits_3_and_names_it(run, family) -> None:
    result = run("merge", "base", "./absent", "--method", "average", "-o", "out")
    assert (result.returncode, result.stdout) == (3, "")
    assert lines(result.stderr)[0].startswith("error: ")
    assert "absent" in lines(result.stderr)[0]
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback_above_the_error(run) -> None:
    result = run("methods", "isoc", "--debug")
    assert result.returncode == 2
    assert result.stderr.startswith("Traceback")
    assert lines(result.stderr)[-2].startswith("error: there is no method")


def test_a_bug_exits_4_with_a_traceback_and_where_to_turn(run, tmp_path: Path) -> None:
    plugin = tmp_path / "plugin"
    metadata = plugin / "broken_plugin-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[mergekit_iso.methods]\nbroken = broken_plugin\n")
    (plugin / "broken_plugin.py").write_text("1 / 0\n")

    result = run("methods", PYTHONPATH=str(plugin))
    assert (result.returncode, result.stdout) == (4, "")
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in lines(result.stderr)[-2]
    assert "report" in lines(result.stderr)[-1]


def test_a_closed_pipe_is_quiet(program: Path) -> None:
    with subprocess.Popen(
        [program, "completion", "bash"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_a_full_disk_exits_3(program: Path) -> None:
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [program, "completion", "bash"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert result.returncode == 3
    assert lines(result.stderr) == ["error: no space left on device"]


@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_merge_leaves_no_output(
    program: Path, tmp_path: Path, sent: signal.Signals, code: int
) -> None:
    # A line for each of these tensors is more than a pipe holds: the merge waits for a reader.
    names = [f"layers.{'0' * 90}{i}.weight" for i in range(2000)]
    for value, folder in ((1.0, "base"), (1.1, "a")):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.full((1,), value) for name in names}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    with subprocess.Popen(
        [program, "merge", "base", "a", "--method", "average", "-o", "out", "-v"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "layers." in process.stderr.readline()
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stdout == ""
    assert lines(stderr)[-1].startswith("error: ")
    assert "Traceback" not in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("environment", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False)]
)
def test_colour_is_for_terminals_that_want_it(
    program: Path, environment: dict[str, str], coloured: bool
) -> None:
    master, terminal = pty.openpty()
    clean = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "TERM"}}
    subprocess.run(
        [program, "mrge"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=terminal,
        timeout=60,
        check=False,
        env=clean | {"TERM": "xterm"} | environment,
    )
    os.close(terminal)
    shown = os.read(master, 10_000)
    os.close(master)
    assert b"error:" in shown
    assert (b"\x1b[" in shown) == coloured
