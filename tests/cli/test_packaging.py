from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = tmp_path_factory.mktemp("source")
    for name in ("mergekit_iso", "cli"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, source)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "--no-build-isolation",
            "--no-index",
            "--wheel-dir",
            source / "dist",
            source,
        ],
        check=True,
        timeout=100,
    )
    return next((source / "dist").glob("*.whl"))


def test_the_wheel_has_one_top_level_name_and_every_module(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        files = {n for n in archive.namelist() if ".dist-info/" not in n}
    assert {n.partition("/")[0] for n in files} == {"mergekit_iso"}
    library = {p.relative_to(ROOT) for p in (ROOT / "mergekit_iso").rglob("*.py")}
    program = {Path("mergekit_iso") / p.relative_to(ROOT) for p in (ROOT / "cli").rglob("*.py")}
    assert {Path(n) for n in files} == library | program | {Path("mergekit_iso/py.typed")}


def test_the_wheel_runs_outside_the_clone(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mergekit_iso.cli import main; print(main.__file__); main.main()",
            "--version",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(site)},
    )
    assert result.stdout.splitlines()[0] == str(site / "mergekit_iso" / "cli" / "main.py")


def test_every_package_on_disk_is_listed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    found = {
        ".".join(p.parent.relative_to(ROOT).parts) for p in ROOT.glob("mergekit_iso/**/__init__.py")
    }
    assert set(listed) == found | {"mergekit_iso.cli"}


def test_the_folder_cli_cannot_be_imported_by_that_name() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "import cli"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "mergekit_iso.cli" in result.stderr.splitlines()[-1]
