"""The state of an outer loop: what it takes to go on to the same bits, with any number of workers.

At a sync it is the same on every rank: anchors, masters and outer state, each tensor whole.
Within a round every worker adds its own parameters, under ``worker.<r>.``. Where the group has
failed, a rank's state is what it decides itself; :meth:`OuterLoop.join` puts these together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import IncompatibleError
from .contribution import Source
from .exchange import Exchange
from .owner import OuterFactory, Owner
from .parameters import Slot


@dataclass
class Held:
    """Masters and outer state that a rank has of some slots, by index; of round ``round``."""

    round: int
    masters: dict[int, Tensor] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)


def template(factory: OuterFactory, slot: Slot) -> dict[str, Any]:
    """Return an optimizer's state of a tensor after a step by a gradient of zeros, on the CPU."""
    p = torch.zeros(slot.info.shape, dtype=slot.compute)
    p.grad = torch.zeros_like(p)
    optimizer = factory([p])
    optimizer.step()
    return {k: v for k, v in optimizer.state.get(p, {}).items() if v is not None}


def save_groups(owner: Owner) -> str:
    """Return the optimizer's settings as JSON: learning rate and others, and schedulers' marks."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in owner.optimizer.param_groups]
    return json.dumps(groups, default=lambda x: x.item() if isinstance(x, Tensor) else str(x))


def load_groups(owner: Owner, said: str) -> None:
    """Take the optimizer's settings."""
    for group, settings in zip(owner.optimizer.param_groups, json.loads(said), strict=False):
        for key, value in settings.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value


def outer_state(
    exchange: Exchange, owner: Owner, slots: Iterable[Slot], *, alone: bool
) -> dict[str, Any]:
    """Return masters and outer state of all slots, whole on every rank, which all must call it.

    ``alone`` returns that of the slots this rank owns, without a word to others.
    """
    state: dict[str, Any] = {}
    started = []
    for slot in slots:
        place, mine = exchange.owner_of(slot), slot.index in owner.masters
        if alone and not mine:
            started.append(False)
            continue
        empty = template(owner.factory, slot)
        own = owner.state(slot) if mine else {}
        master = owner.value(slot) if mine else torch.zeros(slot.info.shape, dtype=slot.compute)
        entries = {f"master.{slot.name}": master}
        for key, value in empty.items():
            # Before its first step a tensor's outer state is that of the template, unused.
            entries[f"outer.{slot.name}.{key}"] = torch.as_tensor(own.get(key, value))
        flag = torch.tensor([float(bool(own))])
        if not alone:
            flag = exchange.spread(flag, place)
            entries = {k: exchange.spread(v.detach().clone(), place) for k, v in entries.items()}
        started.append(bool(flag))
        state.update({k: v.detach().clone() for k, v in entries.items()})
    state["started"] = torch.tensor(started)
    return state


def read_outer(
    state: Mapping[str, Any], factory: OuterFactory, slots: Iterable[Slot], round_: int
) -> Held:
    """Return the masters and outer state in a state, of the slots that it has.

    Raises IncompatibleError for a tensor of another shape.
    """
    held = Held(round_)
    for slot in slots:
        master = state.get(f"master.{slot.name}")
        if master is None:
            continue
        check(f"master.{slot.name}", master, tuple(slot.info.shape))
        held.masters[slot.index] = master.detach().clone()
        held.states[slot.index] = {}
        if bool(state["started"][slot.index]):
            held.states[slot.index] = {
                key: restored(value, state[f"outer.{slot.name}.{key}"])
                for key, value in template(factory, slot).items()
                if f"outer.{slot.name}.{key}" in state
            }
    return held


def own_state(
    exchange: Exchange, source: Source, slots: Iterable[Slot], buffers: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return what one worker has within a round: its own parameters, whole, and buffers."""
    own: dict[str, Tensor] = {f"buffer.{name}": b for name, b in buffers.items()}
    for slot in slots:
        own[slot.name] = exchange.joined(slot, source.values[slot.index])
    return {f"worker.{source.worker}.{k}": v.detach().clone() for k, v in own.items()}


def residuals(exchange: Exchange, source: Source, slots: Sequence[Slot]) -> dict[str, Any]:
    """Return what rounding on the wire took from one worker's deltas, in slots that are coded."""
    mine = exchange.provided(source)
    return {
        f"worker.{source.worker}.residual.{s.name}": exchange.joined(
            s, mine.residual(s), provided=True
        ).clone()
        for s in slots
        if source.codecs[s.index] is not None
    }


def held_by(owner: Owner, slots: Iterable[Slot], round_: int) -> Held:
    """Return what a rank owns; nothing before its first outer step."""
    held = Held(round_)
    for slot in slots if round_ else ():
        if slot.index in owner.masters:
            held.masters[slot.index] = owner.value(slot)
            held.states[slot.index] = owner.state(slot)
    return held


def check(key: str, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise IncompatibleError unless a tensor of a state has this shape."""
    if tuple(x.shape) != shape:
        raise IncompatibleError(
            f"{key} has shape {list(x.shape)} in the state and {list(shape)} in the model",
            hint="load the state of a run with the same model",
        )


def restored(like: Any, value: Any) -> Any:
    """Return a value as the optimizer keeps it: a tensor, or a plain number."""
    if isinstance(like, Tensor) or not isinstance(value, Tensor):
        return value.detach().clone() if isinstance(value, Tensor) else value
    return type(like)(value.item())
