"""Which names mean one tensor: heads tied to embeddings, embeddings that are shared.

A tied head may be left out of the files (it *is* the embedding), stored as a second copy, or
have values of its own although the config calls the two tied. The values decide; the config
(``tie_word_embeddings``, at the top or in its text section) explains a head that is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from .checkpoint import Checkpoint, StoredTensor
from .vocabulary import INPUT, OUTPUT, text_sections

_FLAG = "tie_word_embeddings"
_STEP = 1 << 22
_SAMPLE = 4096


@dataclass(frozen=True)
class Named:
    """A checkpoint's tensors by bare name (no wrapper prefixes), weights apart from buffers."""

    checkpoint: Checkpoint
    weights: Mapping[str, StoredTensor]
    buffers: Mapping[str, StoredTensor]

    @property
    def flag(self) -> bool | None:
        """Whether the config ties head and embedding; None if it does not say."""
        return tie_flag(self.checkpoint.config)

    def same(self, name: str, other: str) -> bool:
        """Whether two of the weights have the same bits."""
        first, second = self.weights[name], self.weights[other]
        return same_bits(self.checkpoint, first.name, self.checkpoint, second.name)


@dataclass(frozen=True)
class Tie:
    """A ``name`` that is, in some checkpoint at least, another name for ``original``.

    ``original`` is a weight of the base. ``head`` tells a head from a shared embedding or bias,
    ``in_base`` whether the base itself ties the two, ``own`` whether the output holds ``name``
    as a tensor of its own because some checkpoint has other values there. ``sources`` and
    ``original_sources`` are the two's stored names in each model (None where there is neither).
    """

    name: str
    original: str
    head: bool
    in_base: bool
    own: bool
    sources: tuple[str | None, ...]
    original_sources: tuple[str | None, ...]

    def may_lack(self, model: Named) -> bool:
        """Whether a model without ``name`` means its ``original`` by it."""
        if not self.head:
            return True
        return model.flag is not False if self.in_base else model.flag is True


def tie_flag(config: Mapping[str, Any]) -> bool | None:
    """Return whether a config ties head and embedding; None if it does not say."""
    flags = (section.get(_FLAG) for section in text_sections(config))
    return next((flag for flag in flags if isinstance(flag, bool)), None)


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a config that says ``tie_word_embeddings`` false, where it spoke of it."""
    copy = deepcopy(dict(config))
    sections: list[Any] = [section for section in text_sections(copy) if _FLAG in section]
    for section in sections or [copy]:
        section[_FLAG] = False
    return copy


def find_ties(base: Named, models: Sequence[Named]) -> dict[str, Tie]:
    """Return the ties of a merge by the name that is the second one, over base and models."""
    pairs: dict[str, tuple[str, bool]] = {}
    for name, stored in _all_weights(base, models):
        if pair := _pair(name, stored, base, models, pairs):
            pairs[name] = pair
    return {
        name: _tie(name, original, in_base, base, models, pairs)
        for name, (original, in_base) in pairs.items()
    }


def same_bits(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    """Whether two stored tensors agree in dtype, shape and every bit; reads until they differ."""
    numel = prod(first.tensors[name].shape)
    pair = (first, name, second, other)
    return _same_sample(*pair) and all(
        _same_stretch(*pair, start, min(start + _STEP, numel)) for start in range(0, numel, _STEP)
    )


def same_values(first: Checkpoint, second: Checkpoint, names: Sequence[tuple[str, str]]) -> bool:
    """Whether all pairs of tensors of two checkpoints agree in every bit.

    A short stretch of each is compared first: two versions of a model differ in one of those, so
    that whole models are only read where they are the same.
    """
    return all(_same_sample(first, a, second, b) for a, b in names) and all(
        same_bits(first, a, second, b) for a, b in names
    )


def _same_sample(first: Checkpoint, name: str, second: Checkpoint, other: str) -> bool:
    a, b = first.tensors[name], second.tensors[other]
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    middle = prod(a.shape) // 2
    stop = min(middle + _SAMPLE, prod(a.shape))
    return _same_stretch(first, name, second, other, middle, stop)


def _same_stretch(
    first: Checkpoint, name: str, second: Checkpoint, other: str, start: int, stop: int
) -> bool:
    x, y = first.read_flat(name, start, stop), second.read_flat(other, start, stop)
    return torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def _all_weights(base: Named, models: Sequence[Named]) -> Iterator[tuple[str, StoredTensor]]:
    seen: dict[str, StoredTensor] = {}
    for named in (base, *models):
        for name, stored in named.weights.items():
            seen.setdefault(name, stored)
    return iter(seen.items())


def _pair(
    name: str,
    stored: StoredTensor,
    base: Named,
    models: Sequence[Named],
    known: Mapping[str, tuple[str, bool]],
) -> tuple[str, bool] | None:
    """Return the original that ``name`` is tied to and whether the base ties them, or None."""
    candidates = _candidates(name, stored, base, known)
    head = OUTPUT.search(name) is not None
    if not candidates:
        return None
    if name not in base.weights:
        if head:
            return (candidates[0], True) if base.flag is not False else None
        owners = [model for model in models if name in model.weights]
        copies = (c for c in candidates if all(c in m.weights and m.same(name, c) for m in owners))
        original = next(copies, None)
        return (original, True) if original else None
    if not head or base.flag is not False:
        for other in candidates:
            if base.same(name, other):
                return other, True
    if head and any(named.flag for named in (base, *models)):
        return candidates[0], False
    return None


def _candidates(
    name: str, stored: StoredTensor, base: Named, known: Mapping[str, tuple[str, bool]]
) -> list[str]:
    """Return the base's weights that ``name`` may be a second name for."""
    if name.endswith(".decoder.bias"):  # BERT's and RoBERTa's heads hold their bias twice
        sibling = name.removesuffix("decoder.bias") + "bias"
        return [sibling] if sibling in base.weights else []
    is_input = INPUT.search(name) is not None
    if not is_input and OUTPUT.search(name) is None:
        return []
    found = []
    for other, tensor in base.weights.items():
        if is_input and other == name:  # of two embeddings, the first stored is the original
            break
        if other not in known and INPUT.search(other) and tensor.shape == stored.shape:
            found.append(other)
    return found


def _tie(
    name: str,
    original: str,
    in_base: bool,
    base: Named,
    models: Sequence[Named],
    pairs: Mapping[str, tuple[str, bool]],
) -> Tie:
    family = [original, *(n for n, (o, tied) in pairs.items() if o == original and tied)]
    own = not in_base
    sources: list[str | None] = []
    original_sources: list[str | None] = []
    for model in models:
        first = next((n for n in family if n in model.weights), None)
        mine = name if name in model.weights else first
        own = own or (first is not None and mine == name and not model.same(name, first))
        sources.append(model.weights[mine].name if mine else None)
        original_sources.append(model.weights[first].name if first else None)
    head = OUTPUT.search(name) is not None
    return Tie(name, original, head, in_base, own, tuple(sources), tuple(original_sources))


def ties_in_words(base: Named, models: Sequence[Named], ties: Mapping[str, Tie]) -> list[str]:
    """Return a warning for every tie that does not hold in all checkpoints."""
    warnings: list[str] = []
    for tie in ties.values():
        if tie.in_base and tie.own:
            apart = [repr(m.checkpoint.label) for m in models if _differ(m, tie)]
            result = (
                f"the output has its own {tie.name} and says tie_word_embeddings false"
                if tie.head
                else "they are merged apart"
            )
            warnings.append(
                f"{tie.name} and {tie.original} are one tensor in the base but not in "
                f"{', '.join(apart)}: {result}"
            )
        elif tie.own:
            for named in (base, *models):
                if named.flag and tie.name not in named.weights:
                    warnings.append(
                        f"{named.checkpoint.label!r} has no {tie.name} and ties it to "
                        f"{tie.original}, which is merged in its place"
                    )
                elif named.flag and _differ(named, tie):
                    warnings.append(
                        f"the config of {named.checkpoint.label!r} ties {tie.name} to "
                        f"{tie.original}, but their values differ: they are merged as two tensors"
                    )
    return warnings


def _differ(named: Named, tie: Tie) -> bool:
    """Whether a checkpoint holds both tensors of a tie with other values."""
    both = tie.name in named.weights and tie.original in named.weights
    return both and not named.same(tie.name, tie.original)
