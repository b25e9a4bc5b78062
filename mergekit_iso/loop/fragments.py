"""Parts of a model that are synced at staggered steps (Streaming DiLoCo, arXiv:2501.18512, §2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ..errors import IncompatibleError
from ..tensors import matches_tensor
from .parameters import Slot

#: A number of parts, or the name patterns of each.
Fragments: TypeAlias = int | tuple[tuple[str, ...], ...]


def split(slots: Sequence[Slot], fragments: Fragments) -> tuple[tuple[Slot, ...], ...]:
    """Return the slots of each fragment; every slot is in one.

    For a number F, layer k of the model belongs to fragment k mod F, and what is in no layer
    (embedding, head, last norm) to the smallest fragment. A layer is what shares a name up to its
    first number. With patterns, a tensor belongs to the first fragment that one of its patterns
    fits.
    Raises IncompatibleError for fewer layers than fragments, a tensor in no fragment, and a
    fragment without tensors.
    """
    if isinstance(fragments, int):
        return _strided(slots, fragments)
    parts: list[list[Slot]] = [[] for _ in fragments]
    for slot in slots:
        fits = (
            f
            for f, patterns in enumerate(fragments)
            if any(matches_tensor(p, slot.name, slot.info.role) for p in patterns)
        )
        found = next(fits, None)
        if found is None:
            raise IncompatibleError(
                f"{slot.name} is in no fragment", hint='end the last one with the pattern "*"'
            )
        parts[found].append(slot)
    for f, part in enumerate(parts):
        if not part:
            raise IncompatibleError(
                f"fragment {f} has no tensors: {', '.join(fragments[f])} fits none that is not "
                "in a fragment before it"
            )
    return tuple(map(tuple, parts))


def due(step: int, sync_every: int, fragments: int) -> int | None:
    """Return the fragment that is due after iteration ``step`` of a round (from 1), if any."""
    every = sync_every // fragments
    return step // every - 1 if step % every == 0 else None


def _strided(slots: Sequence[Slot], count: int) -> tuple[tuple[Slot, ...], ...]:
    if count == 1:
        return (tuple(slots),)
    layers: dict[str, list[Slot]] = {}
    outside: list[Slot] = []
    for slot in slots:
        layer = _layer(slot.name)
        if layer is None:
            outside.append(slot)
        else:
            layers.setdefault(layer, []).append(slot)
    if len(layers) < count:
        raise IncompatibleError(
            f"the model has {len(layers)} layers, fewer than fragments={count}",
            hint="give fewer fragments, or the name patterns of each",
        )
    parts: list[list[Slot]] = [[] for _ in range(count)]
    for k, layer_slots in enumerate(layers.values()):
        parts[k % count] += layer_slots
    sizes = [sum(s.info.numel for s in part) for part in parts]
    for slot in sorted(outside, key=lambda s: -s.info.numel):
        smallest = sizes.index(min(sizes))
        parts[smallest].append(slot)
        sizes[smallest] += slot.info.numel
    return tuple(tuple(sorted(part, key=lambda s: s.index)) for part in parts)


def _layer(name: str) -> str | None:
    parts = name.split(".")
    for k, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: k + 1])
    return None
