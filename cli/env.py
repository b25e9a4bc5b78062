"""``env``: what a bug report should say about the machine."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version

import click

from .options import output_options
from .output import Output, table

_PACKAGES = (
    "mergekit-iso",
    "torch",
    "safetensors",
    "huggingface-hub",
    "transformers",
    "numpy",
    "pydantic",
    "click",
    "rich",
    "PyYAML",
)


@click.command(short_help="Show versions, for bug reports.")
@output_options
@click.pass_obj
def env(output: Output) -> None:
    """Show the versions of everything a merge depends on, for bug reports."""
    import torch

    facts = {
        **{package: _version(package) for package in _PACKAGES},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }
    output.data(table([(name, _shown(value)) for name, value in facts.items()]), facts)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _shown(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "none" if value is None else str(value)
