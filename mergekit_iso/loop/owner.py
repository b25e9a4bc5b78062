"""The tensors one rank decides: float32 masters and the outer optimizer that moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from ..errors import MethodError
from .parameters import Slot
from .settings import Order

OuterFactory = Callable[[list[Tensor]], Optimizer]


@dataclass
class Owner:
    """Masters and outer optimizer of the slots that one rank owns.

    The outer optimizer is any of torch.optim. In ``merge_then_momentum`` it steps the masters by
    the pseudo-gradient, minus the merged delta. In ``momentum_then_merge`` it steps zeros by
    minus the combined delta, which leaves its own update there; the operator's ``finalize`` of
    that update (operators are homogeneous, so the step size commutes) is added to the masters.

    ``anchor`` are the values that the workers were handed, whole, in the model's dtype.
    """

    slots: Sequence[Slot]
    anchor: dict[int, Tensor]
    order: Order
    factory: OuterFactory
    masters: dict[int, Tensor] = field(init=False)
    optimizer: Optimizer = field(init=False)

    def __post_init__(self) -> None:
        with torch.no_grad():
            self.masters = {
                s.index: self.anchor[s.index].to(s.compute, copy=True) for s in self.slots
            }
        self._moved = {i: torch.zeros_like(m) for i, m in self.masters.items()}
        if self.order == "merge_then_momentum":
            self._moved = self.masters
        # An optimizer needs a parameter, also where this rank owns nothing: schedulers attach.
        self.optimizer = self.factory(list(self._moved.values()) or [torch.zeros(())])
        if self.order == "momentum_then_merge" and any(
            group.get("weight_decay") for group in self.optimizer.param_groups
        ):
            raise MethodError(
                "an outer optimizer with weight decay cannot come before the merge",
                hint="use order='merge_then_momentum', or weight_decay=0",
            )

    @torch.no_grad()
    def step(
        self, combined: Mapping[int, Tensor], finalize: Callable[[Slot, Tensor], Tensor]
    ) -> None:
        """Take one outer step from each slot's combined delta, which is used up.

        In ``merge_then_momentum`` the deltas are finalized already.
        """
        for slot in self.slots:
            moved, delta = self._moved[slot.index], combined.get(slot.index)
            moved.grad = None if delta is None else delta.neg_()
            if self.order == "momentum_then_merge":
                moved.zero_()
        self.optimizer.step()
        for slot in self.slots:
            moved = self._moved[slot.index]
            moved.grad = None
            if self.order == "momentum_then_merge" and slot.index in combined:
                self.masters[slot.index] += finalize(slot, moved)

    def value(self, slot: Slot) -> Tensor:
        """Return a slot's master, float32 or float64."""
        return self.masters[slot.index]

    def save(self, slots: Iterable[Slot]) -> Saved:
        """Return a copy of the masters and optimizer state of some slots, to go back to."""
        return Saved(
            {s.index: self.masters[s.index].clone() for s in slots},
            {s.index: _copied(self.optimizer.state.get(self._moved[s.index], {})) for s in slots},
        )

    @torch.no_grad()
    def restore(self, saved: Saved) -> None:
        """Go back to what ``save`` returned."""
        for index, master in saved.masters.items():
            self.masters[index].copy_(master)
            state = saved.states[index]
            if state:
                self.optimizer.state[self._moved[index]] = state
            else:
                self.optimizer.state.pop(self._moved[index], None)

    def state(self, slot: Slot) -> dict[str, Any]:
        """Return the optimizer's state of a slot, empty before its first step."""
        return dict(self.optimizer.state.get(self._moved[slot.index], {}))

    @torch.no_grad()
    def load(self, slot: Slot, master: Tensor, state: Mapping[str, Any]) -> None:
        """Take a slot's master and optimizer state, on the master's own device."""
        own = self.masters[slot.index]
        own.copy_(master)
        moved = self._moved[slot.index]
        self.optimizer.state.pop(moved, None)
        if state:
            self.optimizer.state[moved] = {
                k: v.to(own.device, copy=True) if isinstance(v, Tensor) and v.dim() else v
                for k, v in state.items()
            }


@dataclass(frozen=True)
class Saved:
    """Masters and optimizer states by slot index."""

    masters: Mapping[int, Tensor]
    states: Mapping[int, dict[str, Any]]


def sgd(lr: float, momentum: float, nesterov: bool | None) -> OuterFactory:
    """Return the factory of torch's SGD; Nesterov where there is momentum, unless told."""
    nesterov = momentum > 0 if nesterov is None else nesterov
    return lambda params: SGD(params, lr=lr, momentum=momentum, nesterov=nesterov)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
