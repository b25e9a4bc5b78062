"""R workers in one process, through the same operator and outer code as across a network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..errors import IncompatibleError
from ..methods.base import MergeMethod
from ..methods.registry import resolve_method
from .exchange import LocalExchange
from .outer_loop import OuterLoop, outer_factory
from .owner import OuterFactory
from .parameters import Parameters
from .report import OnReport, OuterReport
from .settings import LoopSettings


class Simulation(OuterLoop):
    """R workers' models and their outer step; made by :func:`simulate`."""

    def step(self, *, tokens: Sequence[float] | float = 0) -> OuterReport | None:
        """Count one iteration of every worker; sync what is due.

        ``tokens`` are those of this iteration, one number per worker or one for each.
        Returns the report of an outer step that was applied, else None. Raises what
        :meth:`sync` does.
        """
        each = tokens if isinstance(tokens, Sequence) else [tokens] * len(self._models)
        return self._count([float(t) for t in each])


def simulate(
    models: Sequence[nn.Module],
    method: str | MergeMethod = "iso_c",
    *,
    outer: OuterFactory | None = None,
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    nesterov: bool | None = None,
    on_event: OnReport | None = None,
    settings: LoopSettings | None = None,
    **options: Any,
) -> Simulation:
    """Return the outer loop of R models in this process, one per worker.

    Arguments are those of LoopedMerger; its settings may be given by name or as ``settings``.
    All models get the first one's values.

    Raises MethodError and IncompatibleError as LoopedMerger does.
    """
    names = LoopSettings.__dataclass_fields__.keys()
    chosen = {k: options.pop(k) for k in list(options) if k in names}
    operator = resolve_method(method, options)
    settings = settings or LoopSettings(**chosen)
    if not models:
        raise IncompatibleError("there is nothing to simulate: no model was given")
    parameters = [Parameters(model, settings.exclude) for model in models]
    for r, p in enumerate(parameters):
        if p.describe() != parameters[0].describe():
            raise IncompatibleError(f"model {r} has other tensors than model 0")
    with torch.no_grad():
        for p in parameters[1:]:
            for x, first in zip(p.local(), parameters[0].local(), strict=True):
                x.copy_(first)
            for name, b in p.buffers.items():
                b.copy_(parameters[0].buffers[name])
    return Simulation(
        parameters,
        operator,
        settings,
        LocalExchange(len(models)),
        outer_factory(operator, len(models), outer, outer_lr, outer_momentum, nesterov),
        on_event=on_event,
    )
