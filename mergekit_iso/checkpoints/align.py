"""Which tensor of each model belongs to which of the base.

The base's names and shapes are the contract; there is no table of architectures. Wrapper
prefixes are stripped, buffers left aside, tied tensors recognised, everything else that does
not fit is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NoReturn

from ..errors import CheckpointError, IncompatibleError
from ..tensors import classify
from .checkpoint import Checkpoint, StoredTensor, listed
from .mismatch import refuse_names
from .ties import Named, Tie, find_ties, same_bits, same_values, ties_in_words
from .vocabulary import INPUT, OUTPUT

_WRAPPERS = ("_orig_mod", "module")


@dataclass(frozen=True)
class Match:
    """One output tensor and where its values come from.

    ``name`` is the output's, ``stored`` the tensor of the base that has its shape, dtype and
    base values, ``model_sources`` the names in each model's files (empty for a buffer), and
    ``same_as`` the output name of the tensor of which this is a tied duplicate.
    """

    name: str
    stored: StoredTensor
    model_sources: tuple[str, ...]
    same_as: str | None = None


@dataclass(frozen=True)
class Alignment:
    """All output tensors in the base's file order (a head that only a model stores comes last).

    ``untied`` says that the output has a head of its own where the base has none.
    """

    matches: tuple[Match, ...]
    untied: bool
    warnings: tuple[str, ...]


def align(base: Checkpoint, models: Sequence[Checkpoint]) -> Alignment:
    """Match every model's tensors with the base's, from headers and a few comparisons.

    Values are read only where names or shapes leave a question: of tied tensors, of integer
    and boolean ones, and as far as needed to see that a model is not the base.

    Raises:
        IncompatibleError: a tensor is missing, extra or of another shape, or a model is the base.
        CheckpointError: two names of one checkpoint differ only in wrapper prefixes.
    """
    for model in models:
        _refuse_same_files(base, model)
    ours, theirs = _named(base), [_named(model) for model in models]
    ties = find_ties(ours, theirs)
    for other in theirs:
        _compare_names(ours, other, ties)
    matches = _matches(ours, theirs, ties)
    for number, model in enumerate(models):
        _compare_shapes(base, model, number, matches)
    for number, model in enumerate(models):
        merged = [(m.stored.name, m.model_sources[number]) for m in matches if m.model_sources]
        if same_values(base, model, merged):
            _refuse_base(model)
    warnings = [
        *_stripped_prefixes(ours, theirs),
        *ties_in_words(ours, theirs, ties),
        *_differing_buffers(ours, theirs),
        *_repeated(models, matches),
    ]
    untied = any(tie.head and tie.own and (tie.in_base or ours.flag) for tie in ties.values())
    return Alignment(tuple(matches), untied, tuple(warnings))


def bare_name(name: str) -> str:
    """Return a name without the components that torch.compile and DDP put into it."""
    *path, last = name.split(".")
    return ".".join([part for part in path if part not in _WRAPPERS] + [last])


def _named(checkpoint: Checkpoint) -> Named:
    weights: dict[str, StoredTensor] = {}
    buffers: dict[str, StoredTensor] = {}
    for name, stored in checkpoint.tensors.items():
        bare = bare_name(name)
        if bare in weights or bare in buffers:
            raise CheckpointError(
                f"{checkpoint.label!r} holds {bare} twice, with and without a wrapper's prefix "
                f"({name})",
                hint="save the unwrapped model",
            )
        is_buffer = classify(bare, stored.shape, stored.dtype) == "buffer"
        (buffers if is_buffer else weights)[bare] = stored
    return Named(checkpoint, weights, buffers)


def _output_names(base: Checkpoint) -> dict[str, str]:
    """Return the output's name of each of the base's, without wrappers around the whole model.

    An inner ``module`` stays: it may be the architecture's own.
    """
    parts = {name: [p for p in name.split(".") if p != "_orig_mod"] for name in base.tensors}
    while all(len(path) > 1 and path[0] == "module" for path in parts.values()):
        parts = {name: path[1:] for name, path in parts.items()}
    return {name: ".".join(path) for name, path in parts.items()}


def _matches(base: Named, models: Sequence[Named], ties: Mapping[str, Tie]) -> list[Match]:
    names = _output_names(base.checkpoint)
    bare_of = {s.name: bare for group in (base.weights, base.buffers) for bare, s in group.items()}
    original_sources = {tie.original: tie.original_sources for tie in ties.values() if tie.in_base}

    def sources(bare: str) -> tuple[str, ...]:
        if bare in ties:
            found = ties[bare].sources
        elif bare in original_sources:
            found = original_sources[bare]
        else:
            found = tuple(model.weights[bare].name for model in models)
        return tuple(name for name in found if name is not None)

    matches: list[Match] = []
    for name, stored in base.checkpoint.tensors.items():
        bare, same_as = bare_of[name], None
        if bare in ties and not ties[bare].own:
            same_as = names[base.weights[ties[bare].original].name]
        found = () if bare in base.buffers else sources(bare)
        matches.append(Match(names[name], stored, found, same_as))
    matches += [
        Match(tie.name, base.weights[tie.original], sources(tie.name))
        for tie in ties.values()
        if tie.own and tie.name not in base.weights
    ]
    return matches


def _compare_names(base: Named, model: Named, ties: Mapping[str, Tie]) -> None:
    doubled = {tie.original for tie in ties.values() if tie.in_base and tie.name in model.weights}
    missing = [
        name
        for name in base.weights
        if name not in model.weights
        and name not in doubled
        and not (name in ties and ties[name].may_lack(model))
    ]
    known = base.weights.keys() | base.buffers.keys() | ties.keys()
    extra = [name for name in model.weights if name not in known]
    if missing or extra:
        refuse_names(base.checkpoint, model.checkpoint, missing, extra, model.weights.keys())


def _compare_shapes(
    base: Checkpoint, model: Checkpoint, number: int, matches: Sequence[Match]
) -> None:
    differing = [
        (match, model.tensors[match.model_sources[number]].shape)
        for match in matches
        if match.model_sources
        and model.tensors[match.model_sources[number]].shape != match.stored.shape
    ]
    if not differing:
        return
    match, shape = differing[0]
    rest = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
    rows_only = match.stored.shape[1:] == shape[1:] and (
        INPUT.search(match.name) or OUTPUT.search(match.name)
    )
    raise IncompatibleError(
        f"{match.name} has the shape {shape} in model {model.label!r}, but {match.stored.shape} in "
        f"the base {base.label!r}{rest}",
        hint="tokens were added to one of them: cut its embeddings to the base's rows first"
        if rows_only
        else "merge models of one architecture and size",
    )


def _refuse_same_files(base: Checkpoint, model: Checkpoint) -> None:
    if base.weight_files == model.weight_files and base.folder.resolve() == model.folder.resolve():
        _refuse_base(model)


def _refuse_base(model: Checkpoint) -> NoReturn:
    raise IncompatibleError(
        f"model {model.label!r} is the base itself: it has no update to merge",
        hint="list only the fine-tuned models, not the base",
    )


def _stripped_prefixes(base: Named, models: Sequence[Named]) -> list[str]:
    warnings = []
    names = _output_names(base.checkpoint)
    for named in (base, *models):
        who = "the base" if named is base else f"model {named.checkpoint.label!r}"
        renamed = []
        for bare, stored in named.weights.items():
            ours = base.weights.get(bare)
            if stored.name != (names[ours.name] if ours else bare):
                renamed.append(stored.name)
        if renamed:
            parts = {part for name in renamed for part in name.split(".")}
            prefixes = " and ".join(f"{w}." for w in _WRAPPERS if w in parts)
            warnings.append(
                f"the prefix {prefixes} was stripped from {len(renamed)} names of {who}, such as "
                f"{renamed[0]}"
            )
    return warnings


def _differing_buffers(base: Named, models: Sequence[Named]) -> list[str]:
    warnings = []
    for model in models:
        differing = [
            bare
            for bare, stored in model.buffers.items()
            if bare in base.buffers
            and not stored.dtype.is_floating_point
            and not same_bits(
                base.checkpoint, base.buffers[bare].name, model.checkpoint, stored.name
            )
        ]
        if differing:
            warnings.append(
                f"{listed(differing)} of model {model.checkpoint.label!r} "
                f"{'differs' if len(differing) == 1 else 'differ'} from the base's: integer and "
                "boolean tensors are not merged, the output has the base's"
            )
    return warnings


def _repeated(models: Sequence[Checkpoint], matches: Sequence[Match]) -> list[str]:
    return [
        f"models {models[i].label!r} and {models[j].label!r} are the same model: it counts twice"
        for i, j in combinations(range(len(models)), 2)
        if same_values(
            models[i],
            models[j],
            [(m.model_sources[i], m.model_sources[j]) for m in matches if m.model_sources],
        )
    ]
