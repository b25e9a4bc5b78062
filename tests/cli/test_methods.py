from __future__ import annotations

import json
from pathlib import Path

import pytest

from mergekit_iso.methods import list_methods

from .conftest import install_plugin

TAKEN_NAME = """
from dataclasses import dataclass
from mergekit_iso.methods import MergeMethod, register

@register("{name}")
@dataclass(frozen=True, kw_only=True)
class Mine(MergeMethod):
    pass
"""


def test_the_list_has_a_line_for_every_method(run) -> None:
    result = run("methods")
    assert result.returncode == 0
    listed = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert listed == {e.name: e.summary for e in list_methods()}


def test_the_list_as_json_has_every_option_and_default(run) -> None:
    documents = {d["name"]: d for d in json.loads(run("methods", "--json").stdout)}
    for entry in list_methods():
        options = {row["option"]: row for row in documents[entry.name]["options"]}
        assert set(options) == set(entry.defaults)
        assert all(row["description"] for row in options.values()), entry.name
    assert documents["iso_c_ns"]["options"][0]["default"]["name"] == "newton_schulz"
    assert documents["ties"]["requires"]["workers"] == "each"


def test_one_method_is_explained(run) -> None:
    text = " ".join(run("methods", "ties").stdout.split())
    assert "density float in [0, 1] default 0.2" in text
    assert "aggregate mean|sum|max default mean" in text
    assert "arXiv:2306.01708" in text


def test_policies_are_explained_with_their_dotted_options(run) -> None:
    text = " ".join(run("methods", "iso_c").stdout.split())
    assert "rank_tolerance float or none in [0, 1) default none" in text
    assert "with --set polar=newton_schulz" in text
    assert "polar.steps int or none in [1, 64]" in text


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_formulas_print_in_any_encoding(run, encoding: str) -> None:
    result = run("methods", "iso_c", PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stderr) == (0, "")
    assert "formula" in result.stdout


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import absent_module", "No module named 'absent_module'"),
        ("raise SystemExit(9)", "SystemExit: 9"),
        (
            TAKEN_NAME.format(name="ties"),
            "a method called 'ties' is registered already, by mergekit_iso.methods.ties",
        ),
    ],
)
def test_a_broken_plugin_is_named_and_does_no_harm(
    run, tmp_path: Path, source: str, reason: str
) -> None:
    site = tmp_path / "site"
    install_plugin(site, "broken_plugin", source)
    install_plugin(site, "working_plugin", TAKEN_NAME.format(name="mine"))
    result = run("methods", "--json", PYTHONPATH=str(site))
    assert result.returncode == 0
    names = [document["name"] for document in json.loads(result.stdout)]
    assert names == sorted(["mine", *(entry.name for entry in list_methods())])
    (warning,) = result.stderr.splitlines()
    assert warning.startswith("warning: the plug-in 'broken_plugin' (broken_plugin) ")
    assert "of broken-plugin 1.0 failed to load" in warning
    assert warning.endswith(reason)
