from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mergekit_iso import list_methods

from .conftest import install_plugin

COMMANDS = ("completion", "demo", "env", "merge", "methods", "plan", "verify")


@pytest.mark.parametrize("command", [(), *((c,) for c in COMMANDS)])
def test_help_goes_to_stdout_and_imports_nothing_heavy(
    program: Path, command: tuple[str, ...]
) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", program, *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert result.stdout.startswith(f"Usage: {' '.join(('mergekit-iso', *command))} ")
    imported = {line.rpartition("|")[2].strip() for line in result.stderr.splitlines()}
    assert "click" in imported
    assert not imported & {"torch", "transformers", "pydantic", "numpy", "huggingface_hub"}


def test_help_lists_every_command_with_a_line(run) -> None:
    listing = run("--help").stdout.partition("Commands:\n")[2].splitlines()
    described = {line.split()[0]: len(line.split()) > 2 for line in listing}
    assert described == dict.fromkeys(COMMANDS, True)


def test_every_option_of_merge_is_explained(run) -> None:
    options = run("merge", "--help").stdout.partition("Options:\n")[2].splitlines()
    for line, following in zip(options, [*options[1:], ""], strict=True):
        if line.startswith(("  -", "      --")):
            alone = "  " not in line.strip()
            assert not alone or following.startswith(" " * 10), line


def test_version(run) -> None:
    result = run("--version")
    assert result.returncode == 0
    assert result.stdout.startswith("mergekit-iso 0.")


def test_no_command_shows_the_help_as_an_error(run) -> None:
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: mergekit-iso")


@pytest.mark.parametrize(
    ("shell", "word"), [("bash", "complete "), ("zsh", "compdef"), ("fish", "complete ")]
)
def test_completion_script(run, shell: str, word: str) -> None:
    result = run("completion", shell)
    assert result.returncode == 0
    assert "_MERGEKIT_ISO_COMPLETE" in result.stdout
    assert word in result.stdout


def complete(run, line: str, **environment: str) -> list[str]:
    """Return what bash is told when the last word of ``line`` is completed."""
    words = line.split(" ")
    result = run(
        _MERGEKIT_ISO_COMPLETE="bash_complete",
        COMP_WORDS=line,
        COMP_CWORD=str(len(words) - 1),
        **environment,
    )
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout.split("\n")[:-1]


def test_completion_answers_with_commands(run) -> None:
    assert complete(run, "mergekit-iso m") == ["plain,merge", "plain,methods"]


@pytest.mark.parametrize(
    "line",
    ["merge b", "merge base mo", "merge base model mo", "plan b", "merge b -o o", "verify o"],
)
def test_completion_leaves_paths_to_the_shell(run, line: str) -> None:
    assert complete(run, f"mergekit-iso {line}") == [f"file,{line.split(' ')[-1]}"]


@pytest.mark.parametrize("line", ["merge base a --method iso_c", "methods iso_c"])
def test_completion_knows_the_methods_and_keeps_quiet_on_broken_plugins(
    run, tmp_path: Path, line: str
) -> None:
    install_plugin(tmp_path / "site", "broken_plugin", "1 / 0")
    answer = complete(run, f"mergekit-iso {line}", PYTHONPATH=str(tmp_path / "site"))
    names = [entry.name for entry in list_methods() if entry.name.startswith("iso_c")]
    assert answer == [f"plain,{name}" for name in names]


def test_exit_codes_are_listed(run) -> None:
    text = " ".join(run("--help").stdout.split())
    codes = text.partition("Exit codes: ")[2].partition("Options:")[0]
    assert all(code in codes for code in ("0", "1", "2", "3", "4", "129", "130", "141", "143"))
