from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import install_plugin


def lines(text: str) -> list[str]:
    return text.rstrip("\n").split("\n")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["mrge"], "no such command 'mrge'", "did you mean merge?"),
        (["merge", "--outdtype=x"], "no such option '--outdtype'", "did you mean --out-dtype?"),
        (
            ["merge", "--density=0.2"],
            "no such option '--density'",
            "--set density=0.2 sets it, an option of dare_ties, ties",
        ),
        (
            ["plan", "base", "a", "--method", "ties", "--density", "0.3"],
            "no such option '--density'",
            "did you mean --set density=0.3?",
        ),
        (
            ["plan", "base", "a", "--method=average", "--drop-rate", "0.3"],
            "no such option '--drop-rate'",
            "--set drop_rate=0.3 sets it, an option of dare, dare_ties",
        ),
        (["plan", "base", "a", "-ox"], "no such option '-o'", "plan writes nothing: -o"),
        (["plan", "base", "a", "--out=x"], "no such option '--out'", "plan writes nothing: --out"),
        (
            ["plan", "base", "a", "--method=ties", "--set", "density=3"],
            "option density of TIES cannot be 3",
            "see mergekit-iso methods ties",
        ),
        (
            ["merge", "base", "a", "--method=average", "-o", ""],
            "'--out': the name of a folder is empty",
            "mergekit-iso merge --help",
        ),
        (
            ["merge", "base", "a", "--method=average", "-oout", "--threads=100000"],
            "'--threads': 100000 is more than",
            "mergekit-iso merge --help",
        ),
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
            "'--set': the value of 'density' cannot be read as YAML",
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


@pytest.mark.parametrize(
    "value", ["2001-99-99", "&a [*a]", "[" * 5000, "9" * 5000, "!!bool x", "!!timestamp x"]
)
def test_values_that_yaml_cannot_make_are_usage_errors(run, value: str) -> None:
    result = run("plan", "base", "a", "--method", "ties", "--set", f"density={value}")
    assert (result.returncode, result.stdout) == (2, "")
    first, _ = lines(result.stderr)
    assert (
        first == "error: invalid value for '--set': the value of 'density' cannot be read as YAML"
    )


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


BUGGY_METHOD = """
from dataclasses import dataclass
from mergekit_iso.methods import MergeMethod, register

@register("buggy")
@dataclass(frozen=True, kw_only=True)
class Buggy(MergeMethod):
    def combine(self, deltas, info, ctx):
        return 1 / 0
    local = combine
"""


def test_a_bug_exits_4_with_a_traceback_and_where_to_turn(run, family, tmp_path: Path) -> None:
    install_plugin(tmp_path / "site", "buggy_plugin", BUGGY_METHOD)
    site = str(tmp_path / "site")
    result = run("merge", "base", "a", "--method", "buggy", "-o", "out", PYTHONPATH=site)
    assert (result.returncode, result.stdout) == (4, "")
    assert "Traceback" in result.stderr
    assert "ZeroDivisionError" in lines(result.stderr)[-2]
    assert "report" in lines(result.stderr)[-1]
