"""The Triton kernels: their results in the interpreter, and that they compile for GPUs.

Triton reads its settings when it is imported, so each test is a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="no triton here")


def run(*arguments: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@needs_triton
def test_every_case_in_the_interpreter() -> None:
    cases = str(HERE / "triton_cases.py")
    output = run("-m", "pytest", "-q", "-p", "no:cacheprovider", cases, TRITON_INTERPRET="1")
    assert " passed" in output
    assert "skipped" not in output


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_to_tensor_core_code(tmp_path: Path) -> None:
    program = str(HERE / "triton_compile.py")
    run(program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_without_triton_the_module_is_there_and_says_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['triton'] = None; import torch\n"
        "from mergekit_iso.kernels import triton_ops\n"
        "from mergekit_iso.errors import MethodError\n"
        "assert not triton_ops.AVAILABLE\n"
        "try: triton_ops.symmetric_product(torch.eye(2))\n"
        "except MethodError as error: print(error, '|', error.hint)\n"
    )
    assert "need triton | pip install triton" in run("-c", code)
