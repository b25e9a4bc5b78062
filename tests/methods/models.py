"""Seeded deltas for the tests of methods, and the short way to their merge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mergekit_iso import merge
from mergekit_iso.methods import MergeMethod
from tests.kernels.matrices import gaussian

W = "layer.weight"
B = "layer.bias"


def deltas_of(
    tasks: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64, name: str = W
) -> list[dict[str, Tensor]]:
    """Return deltas with one tensor of Gaussian entries."""
    stack = gaussian(tasks, *shape, seed=seed, dtype=dtype)
    return [{name: stack[t]} for t in range(tasks)]


def merged(
    deltas: Sequence[dict[str, Tensor]], method: str | MergeMethod, **arguments: Any
) -> dict[str, Tensor]:
    """Return M(Δ_1 … Δ_T): the merge onto a base of zeros."""
    zeros = {k: torch.zeros_like(v) for k, v in deltas[0].items()}
    return merge(zeros, deltas, method, **arguments)


def merged_weight(
    deltas: Sequence[dict[str, Tensor]], method: str | MergeMethod, **arguments: Any
) -> Tensor:
    """Return the merged delta of ``layer.weight``."""
    return merged(deltas, method, **arguments)[W]


def total(deltas: Sequence[dict[str, Tensor]], name: str = W) -> Tensor:
    return torch.stack([d[name] for d in deltas]).sum(0)


def singular_values(A: Tensor) -> Tensor:
    sigma: Tensor = torch.linalg.svdvals(A.double())
    return sigma
