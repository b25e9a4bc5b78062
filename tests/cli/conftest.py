"""The installed program, run as a process, and small checkpoints to run it on."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

PROGRAM = Path(sysconfig.get_path("scripts")) / "mergekit-iso"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def program() -> Path:
    return PROGRAM


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Run the program in ``tmp_path``; environment variables are given as keywords."""

    def run_program(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [PROGRAM, *map(str, arguments)],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=100,
            cwd=tmp_path,
            env=os.environ | environment,
            check=False,
        )

    return run_program


def install_plugin(folder: Path, name: str, source: str) -> None:
    """Make ``folder``, once on the path, hold a package whose module ``name`` is a plug-in."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    distribution = name.replace("_", "-")
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(f"[mergekit_iso.methods]\n{name} = {name}\n")
    (folder / f"{name}.py").write_text(source)


@dataclass(frozen=True)
class Family:
    """Folders of a base and two fine-tunes of it, with their tensors by folder name."""

    folder: Path
    tensors: dict[str, dict[str, torch.Tensor]]


@pytest.fixture
def family(tmp_path: Path) -> Family:
    """``base``, ``a`` and ``b`` in ``tmp_path``: a matrix, a vector and a buffer each."""
    base = {
        "layers.0.weight": torch.randn(6, 4),
        "layers.0.bias": torch.randn(6),
        "text_projection.weight": torch.randn(4, 4),
        "position_ids": torch.arange(5),
    }
    tensors = {"base": base}
    for name in "ab":
        tensors[name] = {
            k: v + 0.1 * torch.randn_like(v) if v.is_floating_point() else v
            for k, v in base.items()
        }
    for name, model in tensors.items():
        (tmp_path / name).mkdir()
        save_file(model, tmp_path / name / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / name / "config.json").write_text('{"architectures": ["Anything"]}')
    return Family(tmp_path, tensors)
