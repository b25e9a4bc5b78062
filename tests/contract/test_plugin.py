"""A method from a package of its own, installed next to the library."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SAMPLE = Path(__file__).parents[1] / "plugin_sample"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install a copy of the sample package into a folder of its own; return the folder."""
    source, target = (tmp_path_factory.mktemp("plugin") / part for part in ("source", "target"))
    shutil.copytree(SAMPLE, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--target", target]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, source], check=True)
    return target


def python(code: str, *path: Path) -> str:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_an_installed_plugin_is_a_method_like_any_other(installed: Path) -> None:
    code = """
import torch
from mergekit_iso import get_method, list_methods, merge
from mergekit_iso.testing import check_method

names = [entry.name for entry in list_methods()]
assert names == sorted(names) and "median" in names, names
assert get_method("median").name == "median"
check_method("median")
deltas = [{"w": torch.tensor([v])} for v in (1.0, 5.0, 2.0)]
print(merge({"w": torch.zeros(1)}, deltas, "median")["w"].item())
"""
    assert python(code, installed) == "2.0\n"


def test_without_it_there_is_no_such_method() -> None:
    code = "from mergekit_iso import list_methods; print([e.name for e in list_methods()])"
    assert "median" not in python(code)
