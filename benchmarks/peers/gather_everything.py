"""DiLoCo with Iso-C the straightforward way, to compare with: every rank does everything.

All deltas are gathered on every rank, which takes the SVD of every mean matrix and the outer
step of every parameter itself (Douillard et al., arXiv:2311.08105; Marczak et al.,
arXiv:2502.04959).
"""

from __future__ import annotations

from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn


class GatherEverything:
    """The outer step of one worker of the default group.

    ``at_once`` gathers the deltas of the whole model before anything is merged; otherwise one
    tensor at a time, which holds less and waits for every single one.
    """

    def __init__(
        self, model: nn.Module, *, lr: float = 1.8, momentum: float = 0.8, at_once: bool = True
    ) -> None:
        self.parameters = [p.detach() for p in model.parameters() if p.requires_grad]
        for p in self.parameters:
            dist.broadcast(p, 0)
        self.anchor = [p.clone() for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.anchor, lr=lr, momentum=momentum, nesterov=True)
        self.at_once = at_once

    @torch.no_grad()
    def sync(self) -> dict[str, float]:
        """Take one outer step; return the seconds of exchange and operator."""
        seconds = {"exchange": 0.0, "operator": 0.0}
        gathered: list[list[Tensor]] = []
        pairs = list(zip(self.parameters, self.anchor, strict=True))
        if self.at_once:
            start = perf_counter()
            gathered = [gather(p - a) for p, a in pairs]
            seconds["exchange"] += perf_counter() - start
        for i, (p, a) in enumerate(pairs):
            start = perf_counter()
            deltas = gathered[i] if self.at_once else gather(p - a)
            got = perf_counter()
            a.grad = -iso_c(torch.stack(deltas).mean(0))
            seconds["exchange"] += got - start
            seconds["operator"] += perf_counter() - got
        self.optimizer.step()
        self.optimizer.zero_grad()
        for p, a in pairs:
            p.copy_(a)
        return seconds


def gather(delta: Tensor) -> list[Tensor]:
    """Return every rank's delta."""
    everyone = [torch.empty_like(delta) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, delta)
    return everyone


def iso_c(mean: Tensor) -> Tensor:
    """Return the mean delta with all singular values at their mean; vectors as they are."""
    if mean.dim() != 2:
        return mean
    U, sigma, Vh = torch.linalg.svd(mean, full_matrices=False)
    return sigma.mean() * (U @ Vh)
