"""Small models for the loop's tests, and what stands for H inner steps."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def uneven(seed: int = 1, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Return a model with an embedding, odd shapes, a BatchNorm and a scalar parameter."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Embedding(37, 24), nn.Linear(24, 48), nn.BatchNorm1d(48), nn.Linear(48, 1)
    )
    model.temperature = nn.Parameter(torch.ones(()))
    return model.to(dtype)


@torch.no_grad()
def wander(model: nn.Module, worker: int, round_: int, size: float = 0.01) -> None:
    """Move every trainable parameter as a worker's inner steps might, by worker and round."""
    generator = torch.Generator().manual_seed(1000 * worker + round_)
    for p in model.parameters():
        if p.requires_grad:
            p.add_(size * torch.randn(p.shape, generator=generator).to(p.dtype))


def values(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of all parameters and buffers by name."""
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two models have the same bits."""
    return a.keys() == b.keys() and all(torch.equal(x, b[name]) for name, x in a.items())
