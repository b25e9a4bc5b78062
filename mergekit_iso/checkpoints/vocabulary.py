"""Whether row i of the embeddings means the same token in every model."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

from ..errors import IncompatibleError
from .checkpoint import Checkpoint, read_json

#: Embeddings with a row for each token (position and type embeddings, for instance, are not).
INPUT = re.compile(
    r"((^|\.)(embed_tokens|tok_embeddings|word_embeddings|wte|embed_in|token_embeddings?)"
    r"|^(\w+\.)?shared)\.weight$"
)
#: Heads with a row for each token.
OUTPUT = re.compile(
    r"((^|\.)(lm_head|lm_head\.decoder|predictions\.decoder|embed_out|vocab_projector"
    r"|generator_lm_head)|^output)\.weight$"
)
_SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
_TEXT_SECTIONS = ("text_config", "language_config", "llm_config")


def text_sections(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the config itself and its sections that describe a language model."""
    nested = (config.get(name) for name in _TEXT_SECTIONS)
    return [config, *(section for section in nested if isinstance(section, dict))]


def vocab_size(config: Mapping[str, Any]) -> int | None:
    """Return the config's ``vocab_size``, at its top or in its text section; None without one."""
    sizes = (section.get("vocab_size") for section in text_sections(config))
    return next((size for size in sizes if type(size) is int), None)


def check_rows(checkpoint: Checkpoint) -> list[str]:
    """Compare the rows of the vocabulary's embedding and head with the config's ``vocab_size``.

    Where a model has several embeddings (of other vocabularies), the largest counts. More rows
    than ``vocab_size`` give a warning.

    Raises:
        IncompatibleError: there are fewer rows than the config says.
    """
    size = vocab_size(checkpoint.config)
    warnings: list[str] = []
    for pattern in (INPUT, OUTPUT):
        rows = {
            name: stored.shape[0]
            for name, stored in checkpoint.tensors.items()
            if len(stored.shape) == 2 and pattern.search(name)
        }
        if size is None or not rows:
            continue
        name = max(rows, key=lambda name: rows[name])
        says = (
            f"config.json of {checkpoint.label!r} says vocab_size {size}, but {name} has "
            f"{rows[name]} rows"
        )
        if rows[name] < size:
            raise IncompatibleError(
                says, hint="correct vocab_size, or take the tensors and the config from one save"
            )
        if rows[name] > size:
            warnings.append(f"{says}: most models do not load so")
    return warnings


def check_tokenizers(base: Checkpoint, models: Iterable[Checkpoint]) -> list[str]:
    """Compare every model's tokenizer with the base's, where both have one.

    Tokens that only one of them has (in rows that are padding to the other) give a warning.

    Raises:
        IncompatibleError: an id means another token in a model than in the base.
    """
    warnings: list[str] = []
    for model in models:
        if base.single_file or model.single_file or _same_files(base.folder, model.folder):
            continue
        ours, theirs = _tokens(base), _tokens(model)
        if ours is not None and theirs is not None:
            warnings += _compare(ours, theirs, model.label)
        elif ours is None and theirs is None:
            _compare_sentencepiece(base.folder, model.folder, model.label)
    return warnings


def _compare(ours: Mapping[int, str], theirs: Mapping[int, str], label: str) -> list[str]:
    ids = {token: i for i, token in ours.items()}
    other = {i for i in ours.keys() & theirs.keys() if ours[i] != theirs[i]}
    moved = {i for i, token in theirs.items() if ids.get(token, i) != i and ours.get(i) != token}
    if differing := sorted(other | moved):
        first, count = differing[0], len(differing)
        raise IncompatibleError(
            f"the tokenizer of model {label!r} differs from the base's in {count} "
            f"{'id' if count == 1 else 'ids'}: {first} means {theirs.get(first)!r}, "
            f"in the base {ours.get(first)!r}",
            hint="merge models that share one vocabulary",
        )
    added, left_out = len(theirs.keys() - ours.keys()), len(ours.keys() - theirs.keys())
    return [
        f"the tokenizer of model {label!r} {what}; the output has the base's tokenizer"
        for what in (
            f"has {added} tokens that the base's lacks" if added else "",
            f"lacks {left_out} tokens of the base's" if left_out else "",
        )
        if what
    ]


def _compare_sentencepiece(base: Path, model: Path, label: str) -> None:
    for name in _SENTENCEPIECE:
        if (base / name).is_file() and (model / name).is_file():
            if not cmp(base / name, model / name, shallow=False):
                raise IncompatibleError(
                    f"the tokenizer of model {label!r} differs from the base's: their {name} files "
                    "are not the same",
                    hint="merge models that share one vocabulary",
                )
            return


def _same_files(base: Path, model: Path) -> bool:
    both = (base / "tokenizer.json", model / "tokenizer.json")
    return all(path.is_file() for path in both) and cmp(*both, shallow=False)


def _tokens(checkpoint: Checkpoint) -> dict[int, str] | None:
    """Return the token of every id, or None where no file tells."""
    folder = checkpoint.folder

    def content(name: str) -> dict[str, Any]:
        path = folder / name
        return read_json(path, f"{name} of {checkpoint.label!r}") if path.is_file() else {}

    if document := content("tokenizer.json"):
        model = document.get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        tokens = _inverted(vocabulary)
        extra = document.get("added_tokens")
        for added in extra if isinstance(extra, list) else ():
            if isinstance(added, dict) and type(added.get("id")) is int:
                tokens[added["id"]] = str(added.get("content"))
        return tokens or None
    tokens = _inverted(content("vocab.json"))
    lines = folder / "vocab.txt"
    if not tokens and lines.is_file():
        text = lines.read_text(encoding="utf-8", errors="replace")
        tokens = dict(enumerate(text.removesuffix("\n").split("\n")))
    return tokens | _inverted(content("added_tokens.json")) if tokens else None


def _inverted(vocabulary: Any) -> dict[int, str]:
    """Return id → token of a token → id map or of a list of (token, score); else nothing."""
    if isinstance(vocabulary, list):
        pairs = enumerate(vocabulary)
        return {i: str(item[0]) for i, item in pairs if isinstance(item, list) and item}
    if not isinstance(vocabulary, dict):
        return {}
    return {i: token for token, i in vocabulary.items() if type(i) is int}
