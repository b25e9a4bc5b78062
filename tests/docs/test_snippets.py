"""The code in README.md and CONTRIBUTING.md runs as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

from safetensors.torch import load_file

from mergekit_iso import list_methods, merge, task_vector
from tests.checkpoints_factory import make_family

ROOT = Path(__file__).parents[2]
PROGRAM = Path(sysconfig.get_path("scripts")) / "mergekit-iso"


def blocks(document: str, language: str) -> list[str]:
    text = (ROOT / document).read_text()
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(code) for _, code in found]


def python(code: str, folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def named_family(folder: Path) -> None:
    base, experts = make_family(folder / "made", "llama", finetunes=2)
    base.rename(folder / "base")
    for expert, name in zip(experts, ("math", "code"), strict=True):
        expert.rename(folder / name)


def test_the_library_in_the_readme(tmp_path: Path) -> None:
    named_family(tmp_path)
    (library,) = (code for code in blocks("README.md", "python") if "import merge" in code)
    python(library, tmp_path)
    base, math, code = (
        load_file(tmp_path / name / "model.safetensors") for name in ("base", "math", "code")
    )
    expected = merge(base, [task_vector(base, m) for m in (math, code)], "iso_c", scale=0.7)
    merged = load_file(tmp_path / "merged.safetensors")
    assert merged.keys() == expected.keys()
    assert all((merged[k] == expected[k]).all() for k in merged)


def test_the_commands_in_the_readme(tmp_path: Path) -> None:
    named_family(tmp_path)
    commands = [
        line.removeprefix("$ ").partition("  #")[0]
        for block in blocks("README.md", "console")
        for line in block.splitlines()
        if line.startswith("$ mergekit-iso merge base math code")
    ]
    assert len(commands) == 3
    for command in commands:
        arguments = [*command.split()[1:], "--force"]
        subprocess.run([PROGRAM, *arguments], cwd=tmp_path, check=True, capture_output=True)
    verified = subprocess.run([PROGRAM, "verify", "merged"], cwd=tmp_path, check=False)
    assert verified.returncode == 0


def test_the_table_in_the_readme_names_every_method() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == {entry.name for entry in list_methods()}


def test_every_method_has_its_page() -> None:
    pages = "".join(p.read_text() for p in (ROOT / "docs/reference/methods").glob("*.md"))
    for entry in list_methods():
        assert f"`{entry.name}`" in pages
        for option in entry.defaults:
            assert f"`{option}`" in pages, f"option {option} of {entry.name}"


def test_the_method_in_contributing(tmp_path: Path) -> None:
    (method,) = blocks("CONTRIBUTING.md", "python")
    (tmp_path / "sign_sgd.py").write_text(method)
    python(
        "import sign_sgd; from mergekit_iso.testing import check_method; check_method('sign_sgd')",
        tmp_path,
    )
