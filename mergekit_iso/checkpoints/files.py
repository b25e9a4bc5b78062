"""Which files of a model folder are weights, which are left-overs and which belong to the model."""

from __future__ import annotations

import os
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

#: File names of weights in formats other than safetensors, and of their indexes.
OTHER_WEIGHTS: tuple[str, ...] = (
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.ckpt.*",
    "*.h5",
    "*.hdf5",
    "*.msgpack",
    "*.onnx",
    "*.onnx_data*",
    "*.onnx.data",
    "openvino_*.xml",
    "*.gguf",
    "*.ggml",
    "*.ot",
    "*.tflite",
    "*.distcp",
    "*.data-?????-of-?????",
    "*.llamafile",
    "*.nemo",
)
#: File names of weights in any format, and of their indexes.
WEIGHTS: tuple[str, ...] = ("*.safetensors", "*.index.json", *OTHER_WEIGHTS)

#: Names of files and folders that training runs and caches leave beside a model.
LEFT_OVERS: tuple[str, ...] = (
    "trainer_state.json",
    "training_args.*",
    "optimizer.*",
    "optimizer_[0-9]*",
    "scheduler.*",
    "rng_state*",
    "random_states_*",
    "events.out.tfevents.*",
    "zero_to_fp32.py",
    "*.lock",
    ".DS_Store",
    "runs",
    "wandb",
    "checkpoint-*",
    "global_step*",
    ".cache",
    ".git",
    ".ipynb_checkpoints",
    "__pycache__",
)

# Written anew for every output, so never carried over from the folder's top level.
_REWRITTEN = frozenset({"config.json", "README.md", "mergekit_iso.json"})


def carried_files(folder: Path) -> tuple[str, ...]:
    """Return the files of a model folder that an output of the same model needs unchanged.

    That is every file, in subfolders too, but weights in any format, left-overs of training and
    caches, and the three that each output writes anew (``config.json``, ``README.md`` and
    ``mergekit_iso.json``). Paths are relative with forward slashes, in sorted order.
    """
    found: list[str] = []
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not _fits(name, LEFT_OVERS)]
        for name in files:
            path = Path(root, name)
            if path.is_file() and not _fits(name, WEIGHTS) and not _fits(name, LEFT_OVERS):
                found.append(path.relative_to(folder).as_posix())
    return tuple(sorted(set(found) - _REWRITTEN))


def is_plain_relative(name: str) -> bool:
    """Whether ``name`` stays inside the folder it is relative to."""
    path = PurePosixPath(name)
    ordinary = name.isprintable() and "\\" not in name and ":" not in name
    return ordinary and bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _fits(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern.lower()) for pattern in patterns)
