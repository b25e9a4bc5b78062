"""The program is told to stop: while it starts, and while there is something to clean up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
MERGE = ("merge", "base", "a", "--method", "average", "-o", "out")

# Sends the process a signal when it comes to import a module.
SENDER = """
import os, sys

class Sender:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number:d})

sys.meta_path.insert(0, Sender())
"""


@pytest.mark.parametrize("module", ["click", "torch.nn", "numpy"])
@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_a_signal_ends_the_imports_silently(
    program: Path, family, sent: signal.Signals, code: int, module: str
) -> None:
    (family.folder / "sitecustomize.py").write_text(SENDER.format(module=module, number=sent))
    result = subprocess.run(
        [program, *MERGE],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        cwd=family.folder,
        env=os.environ | {"PYTHONPATH": str(family.folder)},
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (code, b"", b"")
    assert not list(family.folder.glob("out*"))


@pytest.fixture
def many_tensors(tmp_path: Path) -> Path:
    # A line for each of these tensors is more than a pipe holds: the merge waits for a reader.
    names = [f"layers.{'0' * 90}{i}.weight" for i in range(2000)]
    for value, folder in ((1.0, "base"), (1.1, "a")):
        (tmp_path / folder).mkdir()
        tensors = {name: torch.full((1,), value) for name in names}
        save_file(tensors, tmp_path / folder / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(("sent", "code"), SIGNALS)
def test_an_interrupted_merge_leaves_no_output(
    program: Path, many_tensors: Path, sent: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        [program, *MERGE, "-v"],
        cwd=many_tensors,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "layers." in process.stderr.readline()
        assert (many_tensors / "out.partial").exists()
        process.send_signal(sent)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == code
    assert stdout == ""
    last = stderr.splitlines()[-1]
    assert last == f"error: {'interrupted' if sent == signal.SIGINT else 'terminated'}"
    assert "Traceback" not in stderr
    assert not list(many_tensors.glob("out*"))


def test_an_ignored_signal_stays_ignored(program: Path, many_tensors: Path) -> None:
    with subprocess.Popen(
        ["nohup", program, *MERGE, "-v"],
        cwd=many_tensors,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "layers." in process.stderr.readline()
        process.send_signal(signal.SIGHUP)
        process.communicate(timeout=60)
    assert process.returncode == 0
    assert (many_tensors / "out").exists()


SWALLOWED = """
import os, signal
from mergekit_iso.cli.signals import Stopped, unwinding

class Finaliser:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000): pass

try:
    with unwinding() as heed_signals:
        heed_signals()
        {body}
        print("went on")
        {after}
except Stopped as error:
    print(error.exit_code)
"""


@pytest.mark.parametrize(
    ("body", "after", "printed"),
    [
        ("Finaliser()", "heed_signals()", "went on\n143\n"),
        ("Finaliser()", "pass", "went on\n143\n"),
        ("Finaliser()", "1 / 0", "went on\n143\n"),
        ("os.kill(os.getpid(), signal.SIGINT)", "pass", "130\n"),
    ],
)
def test_a_signal_that_a_finaliser_swallows_is_raised_again(
    body: str, after: str, printed: str
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", SWALLOWED.format(body=body, after=after)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert (result.stdout, result.stderr) == (printed, "")
