"""Merges that are killed, interrupted, run twice at once, or large: each in its own process."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergekit_iso.checkpoints.verify import verify
from mergekit_iso.errors import OutputError
from mergekit_iso.execute import merge_checkpoints

# Merges base and m0 into out, and waits in the middle until it is stopped.
WAITING = """
import sys, time
from mergekit_iso.events import Progress
from mergekit_iso.execute import merge_checkpoints

def wait(event):
    if isinstance(event, Progress):
        print("waiting", flush=True)
        time.sleep(60)

folder = sys.argv[1]
merge_checkpoints(f"{folder}/base", [f"{folder}/m0"], "average", f"{folder}/out", on_event=wait)
"""

PEAK = """
import sys
from pathlib import Path
from mergekit_iso.execute import merge_checkpoints

folder = sys.argv[1]
models = [f"{folder}/m{i}" for i in range(3)]
merge_checkpoints(f"{folder}/base", models, "task_arithmetic", f"{folder}/out")
# Not ru_maxrss, which a new process takes over from the one that started it.
print(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("base", "m0"):
        (tmp_path / name).mkdir()
        model = {"a.weight": 1 + 0.02 * torch.randn(8, 4), "b": 1 + 0.02 * torch.randn(5)}
        save_file(model, tmp_path / name / "model.safetensors")
    return tmp_path


@contextmanager
def waiting_merge(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "waiting\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def names_in(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_second_run_is_refused_and_a_killed_one_leaves_no_output(folder: Path) -> None:
    out = folder / "out"
    with waiting_merge(folder) as process:
        with pytest.raises(OutputError, match="another run is writing"):
            merge_checkpoints(folder / "base", [folder / "m0"], "average", out)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not out.exists()
    merge_checkpoints(folder / "base", [folder / "m0"], "average", out)
    assert verify(out).ok
    assert names_in(folder) == {"base", "m0", "out"}


def test_an_interrupted_run_cleans_up(folder: Path) -> None:
    with waiting_merge(folder) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) != 0
    assert names_in(folder) == {"base", "m0"}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    peaks = []
    for layers in (8, 64):
        folder = tmp_path / str(layers)
        for name in ("base", "m0", "m1", "m2"):
            (folder / name).mkdir(parents=True)
            model = {f"{i}.weight": 1 + 0.02 * torch.randn(512, 512) for i in range(layers)}
            save_file(model, folder / name / "model.safetensors")
        run = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder)], capture_output=True, text=True, check=True
        )
        peaks.append(int(run.stdout))
    assert peaks[1] < 1.1 * peaks[0]
