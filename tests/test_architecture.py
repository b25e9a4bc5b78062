"""Which part of the package may import which, and what importing it costs."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mergekit_iso

ROOT = Path(__file__).parents[1]
PACKAGE = "mergekit_iso"

# Anyone may import these; they import nothing but each other.
LEAVES = {"errors", "options", "events"}

# A part may import the parts listed, the leaves, and itself.
FILES = {"checkpoints", "plan", "execute", "engine", "recipe", "inspect", "plots"}
BELOW_ENGINES = {"kernels", "tensors", "methods"}
MAY_IMPORT: dict[str, set[str]] = {
    "kernels": set(),
    "tensors": {"kernels"},
    "methods": {"kernels", "tensors"},
    "merge": BELOW_ENGINES,
    "loop": BELOW_ENGINES,
    **dict.fromkeys(FILES, BELOW_ENGINES | FILES),
    "testing": BELOW_ENGINES | {"merge"},
    "demo": BELOW_ENGINES | FILES | {"merge"},
    "integrations": BELOW_ENGINES | FILES | {"merge", "loop"},
    "cli": BELOW_ENGINES | FILES | {"merge", "loop", "integrations", "demo"},
}


def sources() -> Iterator[tuple[str, Path]]:
    """Yield (module without the package's name, file) for every module, the command's too."""
    for folder, prefix in ((ROOT / PACKAGE, ()), (ROOT / "cli", ("cli",))):
        for path in sorted(folder.rglob("*.py")):
            parts = prefix + path.relative_to(folder).with_suffix("").parts
            yield ".".join(parts), path


MODULES = dict(sources())
each_module = pytest.mark.parametrize("module", MODULES)


def part_of(module: str) -> str:
    return module.partition(".")[0]


def imports(module: str) -> Iterator[str]:
    """Yield what a module imports of the package, as dotted names without the package's name."""
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            parents = [PACKAGE, *module.split(".")][: -node.level]
            prefix = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (n.removeprefix(f"{PACKAGE}.") for n in names if n.startswith(f"{PACKAGE}."))


@each_module
def test_imports_go_downwards(module: str) -> None:
    part = part_of(module)
    if part == "__init__":
        assert not list(imports(module))
        return
    allowed = LEAVES | {"__version__", part}
    if part not in LEAVES:
        allowed |= MAY_IMPORT[part]
    upwards = [name for name in imports(module) if part_of(name) not in allowed]
    assert not upwards


def test_the_leaves_import_only_leaves() -> None:
    assert MODULES.keys() >= LEAVES
    assert {part_of(name) for leaf in LEAVES for name in imports(leaf)} <= LEAVES


def test_kernels_know_no_other_part() -> None:
    kernels = [m for m in MODULES if part_of(m) == "kernels"]
    assert len(kernels) > 3
    assert {part_of(n) for m in kernels for n in imports(m)} <= {"kernels", "errors", "options"}


@each_module
def test_only_the_command_prints_and_reads_the_environment(module: str) -> None:
    if part_of(module) == "cli":
        return
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Name):
            assert node.id != "print"
        elif isinstance(node, ast.Attribute):
            assert node.attr not in ("environ", "environb", "getenv", "stdout", "stderr")
        elif isinstance(node, ast.ImportFrom):
            assert not {a.name for a in node.names} & {"environ", "getenv", "stdout", "stderr"}
        elif isinstance(node, ast.Import):
            assert not {a.name.partition(".")[0] for a in node.names} & {"rich", "click"}


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_package_imports_no_torch() -> None:
    run(
        "import sys, mergekit_iso; dir(mergekit_iso); mergekit_iso.__version__; "
        "heavy = {'torch', 'numpy', 'transformers', 'pydantic'} & sys.modules.keys(); "
        "assert not heavy, heavy"
    )


@pytest.mark.parametrize("name", mergekit_iso.__all__)
def test_public_names_exist_and_are_explained(name: str) -> None:
    value = getattr(mergekit_iso, name)
    assert name in dir(mergekit_iso)
    if name == "__version__":
        assert value[0].isdigit()
        return
    assert not inspect.ismodule(value)
    assert inspect.getdoc(value)


def test_every_public_name_is_its_own() -> None:
    """A docstring that a class inherits says nothing about the class."""
    classes = [v for n in mergekit_iso.__all__ if inspect.isclass(v := getattr(mergekit_iso, n))]
    assert len(classes) > 10
    assert [c.__name__ for c in classes if not c.__dict__.get("__doc__")] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="megre"):
        mergekit_iso.megre  # noqa: B018


NAMED_LIKE_MODULES = ["merge", "execute", "plan"]
SUBMODULES = ", ".join(f"mergekit_iso.{name}" for name in NAMED_LIKE_MODULES)
FUNCTIONS = ", ".join(NAMED_LIKE_MODULES)


@pytest.mark.parametrize(
    "imports",
    [
        *(f"import mergekit_iso.{name}" for name in NAMED_LIKE_MODULES),
        f"from mergekit_iso import {FUNCTIONS}; import {SUBMODULES}, mergekit_iso.testing",
    ],
)
def test_functions_are_not_replaced_by_their_modules(imports: str) -> None:
    """Importing a submodule binds it in its package, where a function has the same name."""
    run(
        f"{imports}; from mergekit_iso import {FUNCTIONS}; assert all(map(callable, ({FUNCTIONS})))"
    )
