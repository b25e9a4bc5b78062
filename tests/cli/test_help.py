from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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


def test_completion_answers_with_commands(run) -> None:
    result = run(
        _MERGEKIT_ISO_COMPLETE="bash_complete", COMP_WORDS="mergekit-iso m", COMP_CWORD="1"
    )
    assert result.stdout.split() == ["plain,merge", "plain,methods"]
