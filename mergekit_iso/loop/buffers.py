"""Buffers (BatchNorm's running statistics): averaged where floating, else the first worker's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..errors import NonFiniteError
from .exchange import Exchange
from .vote import Participants


def gather(
    exchange: Exchange, models: Sequence[Mapping[str, Tensor]], participants: Participants
) -> dict[str, Tensor]:
    """Return the new value of every buffer, from those of this process's workers.

    Buffers are few and small, so every rank gets all of them, as float64.

    Raises NonFiniteError where a buffer of a participant is not finite.
    """
    if not models[0]:
        return {}
    rows = torch.stack(
        [
            torch.cat([b.detach().double().reshape(-1).cpu() for b in buffers.values()])
            for buffers in models
        ]
    )
    everyone = exchange.gather(rows)[list(participants.workers)]
    mean = torch.tensor(participants.weights, dtype=torch.float64) @ everyone
    new, offset = {}, 0
    for name, b in models[0].items():
        part = slice(offset, offset := offset + b.numel())
        values = mean[part] if b.is_floating_point() else everyone[0, part]
        if not bool(torch.isfinite(values).all()):
            raise NonFiniteError(f"buffer {name} is not finite in a worker that takes part")
        new[name] = values.view(b.shape).to(b)
    return new
