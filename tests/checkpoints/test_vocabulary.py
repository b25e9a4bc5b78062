"""Row i of the embeddings must mean the same token everywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mergekit_iso.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergekit_iso.checkpoints.vocabulary import check_rows, check_tokenizers
from mergekit_iso.errors import CheckpointError, IncompatibleError
from tests.checkpoints.small import ROWS, config, weights, write

WORDS = ["<s>", "</s>", "a", "b", "c"]


def model(folder: Path, files: dict[str, Any] | None = None, **settings: Any) -> Checkpoint:
    write(folder, weights(), config(**settings))
    for name, content in (files or {}).items():
        data = content if isinstance(content, str) else json.dumps(content)
        (folder / name).write_text(data)
    return open_checkpoint(folder)


def bpe(words: list[str], added: dict[str, int] | None = None) -> dict[str, Any]:
    tokens = [{"id": i, "content": w} for w, i in (added or {}).items()]
    vocabulary = {w: i for i, w in enumerate(words)}
    return {
        "tokenizer.json": {"model": {"type": "BPE", "vocab": vocabulary}, "added_tokens": tokens}
    }


def unigram(words: list[str]) -> dict[str, Any]:
    return {"tokenizer.json": {"model": {"type": "Unigram", "vocab": [[w, -1.0] for w in words]}}}


def slow(words: list[str]) -> dict[str, Any]:
    return {"vocab.json": {w: i for i, w in enumerate(words)}}


def lines(words: list[str]) -> dict[str, Any]:
    return {"vocab.txt": "".join(f"{w}\n" for w in words)}


@pytest.mark.parametrize("kind", [bpe, unigram, slow, lines])
@pytest.mark.parametrize("other", [bpe, unigram, slow, lines])
def test_the_same_words_fit_in_any_format(tmp_path: Path, kind: Any, other: Any) -> None:
    base, second = model(tmp_path / "b", kind(WORDS)), model(tmp_path / "m", other(WORDS))
    assert check_tokenizers(base, [second]) == []


@pytest.mark.parametrize("kind", [bpe, unigram, slow, lines])
def test_other_words_are_counted_and_refused(tmp_path: Path, kind: Any) -> None:
    base = model(tmp_path / "b", kind(WORDS))
    other = model(tmp_path / "m", kind(["<s>", "</s>", "b", "a", "c"]))
    with pytest.raises(IncompatibleError, match="tokenizer") as caught:
        check_tokenizers(base, [base, other])
    assert "in 2 ids" in str(caught.value)
    assert str(tmp_path / "m") in str(caught.value)


def test_a_word_that_moved_into_padding_is_refused(tmp_path: Path) -> None:
    base = model(tmp_path / "b", bpe(WORDS))
    other = model(tmp_path / "m", bpe(WORDS[:-1], {"c": 7}))
    with pytest.raises(IncompatibleError, match="in 1 id"):
        check_tokenizers(base, [other])


@pytest.mark.parametrize("added_to_base", [False, True])
def test_a_token_that_only_one_has_is_warned_of(tmp_path: Path, added_to_base: bool) -> None:
    pair = [bpe(WORDS), bpe(WORDS, {"<chat>": 5})]
    base, other = (
        model(tmp_path / n, files)
        for n, files in zip("bm", reversed(pair) if added_to_base else pair, strict=True)
    )
    (warning,) = check_tokenizers(base, [other])
    assert "tokenizer" in warning
    assert str(tmp_path / "m") in warning


def test_added_tokens_count_beside_a_slow_vocabulary(tmp_path: Path) -> None:
    base = model(tmp_path / "b", {**slow(WORDS), "added_tokens.json": {"<x>": 5}})
    other = model(tmp_path / "m", {**slow(WORDS), "added_tokens.json": {"<y>": 5}})
    with pytest.raises(IncompatibleError, match="in 1 id"):
        check_tokenizers(base, [other])


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model", "sentencepiece.bpe.model"])
def test_sentencepiece_models_are_compared_by_their_bytes(tmp_path: Path, name: str) -> None:
    base, same = (model(tmp_path / n, {name: "x"}) for n in "bs")
    assert check_tokenizers(base, [same]) == []
    with pytest.raises(IncompatibleError, match=name):
        check_tokenizers(base, [model(tmp_path / "m", {name: "y"})])


def test_where_only_one_has_a_tokenizer_there_is_nothing_to_compare(tmp_path: Path) -> None:
    base, bare = model(tmp_path / "b", bpe(WORDS)), model(tmp_path / "m")
    assert check_tokenizers(base, [bare]) == []
    assert check_tokenizers(bare, [base]) == []


def test_a_single_file_has_no_tokenizer(tmp_path: Path) -> None:
    base = model(tmp_path / "b", bpe(WORDS))
    model(tmp_path / "m", bpe(WORDS[::-1]))
    lone = open_checkpoint(tmp_path / "m" / "model.safetensors")
    assert check_tokenizers(base, [lone]) == []


@pytest.mark.parametrize(
    "document",
    [
        {"added_tokens": 7, "model": {"vocab": {"a": 0}}},
        {"added_tokens": [7, {}, {"id": "x"}], "model": {"vocab": {"a": 0}}},
        {"model": {"vocab": [["a", 0.5], [], 7]}},
    ],
)
def test_a_tokenizer_of_the_wrong_types_is_read_as_far_as_it_goes(
    tmp_path: Path, document: dict[str, Any]
) -> None:
    base = model(tmp_path / "base", {"tokenizer.json": document})
    same = model(tmp_path / "same", bpe(["a"]))
    other = model(tmp_path / "other", bpe(["b"]))
    assert check_tokenizers(base, [same]) == []
    with pytest.raises(IncompatibleError, match="0 means 'b', in the base 'a'"):
        check_tokenizers(base, [other])


def test_a_broken_tokenizer_is_named(tmp_path: Path) -> None:
    base = model(tmp_path / "b", bpe(WORDS))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        check_tokenizers(base, [model(tmp_path / "m", {"tokenizer.json": "{"})])


@pytest.mark.parametrize("place", ["top", "text_config"])
def test_fewer_rows_than_the_config_says(tmp_path: Path, place: str) -> None:
    size = {"vocab_size": ROWS + 8}
    settings = size if place == "top" else {"vocab_size": None, "text_config": size}
    with pytest.raises(IncompatibleError, match="vocab_size 20") as caught:
        check_rows(model(tmp_path, **settings))
    assert f"{ROWS} rows" in str(caught.value)


def test_other_matrices_have_no_rows_for_tokens(tmp_path: Path) -> None:
    inner = {
        "layers.0.attention.output.weight": torch.zeros(4, 4),
        "mlp.0.shared.weight": torch.zeros(4, 4),
    }
    write(tmp_path, {**weights(), **inner}, config())
    assert check_rows(open_checkpoint(tmp_path)) == []


def test_equal_rows_are_fine_and_more_are_warned_of(tmp_path: Path) -> None:
    assert check_rows(model(tmp_path / "a")) == []
    assert check_rows(model(tmp_path / "b", vocab_size=None)) == []
    found = check_rows(model(tmp_path / "c", vocab_size=ROWS - 2))
    assert found
    assert all("vocab_size 10" in warning for warning in found)
