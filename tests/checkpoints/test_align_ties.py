"""Heads and embeddings that are one tensor under two names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergekit_iso.checkpoints.align import Alignment, align
from mergekit_iso.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergekit_iso.checkpoints.ties import tie_flag, untied_config
from mergekit_iso.errors import IncompatibleError
from tests.checkpoints.small import ROWS, WIDTH, config, weights, write

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def doubled(seed: int) -> dict[str, Tensor]:
    """Weights whose head is a stored copy of the embedding."""
    tensors = weights(seed, head=False)
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def opened(path: Path, tensors: dict[str, Tensor], flag: bool | None) -> Checkpoint:
    settings = config(tie_word_embeddings=flag)
    if flag is None:
        del settings["tie_word_embeddings"]
    return open_checkpoint(write(path, tensors, settings))


def aligned(tmp_path: Path, *stored: tuple[dict[str, Tensor], bool | None]) -> Alignment:
    """Align checkpoints given as (tensors, flag), the base first."""
    base, *models = (opened(tmp_path / f"c{i}", *pair) for i, pair in enumerate(stored))
    return align(base, models)


def sources(found: Alignment, name: str) -> tuple[str, ...]:
    return next(m.model_sources for m in found.matches if m.name == name)


@pytest.mark.parametrize("flag", [True, None])
def test_all_tied_without_a_head_stays_so(tmp_path: Path, flag: bool | None) -> None:
    stored = ((weights(i, head=False), flag) for i in range(3))
    found = aligned(tmp_path, *stored)
    assert HEAD not in {m.name for m in found.matches}
    assert found.warnings == ()
    assert not found.untied


@pytest.mark.parametrize("flag", [True, None])
def test_a_models_copy_of_the_embedding_is_left_out(tmp_path: Path, flag: bool | None) -> None:
    found = aligned(tmp_path, (weights(0, head=False), flag), (doubled(1), flag))
    assert HEAD not in {m.name for m in found.matches}
    assert found.warnings == ()


@pytest.mark.parametrize("flag", [True, None])
def test_a_stored_copy_in_the_base_is_merged_once(tmp_path: Path, flag: bool | None) -> None:
    found = aligned(
        tmp_path, (doubled(0), flag), (weights(1, head=False), flag), (doubled(2), flag)
    )
    same_as = {m.name: m.same_as for m in found.matches}
    assert same_as[HEAD] == EMBEDDING
    assert same_as[EMBEDDING] is None
    assert found.warnings == ()
    assert not found.untied


@pytest.mark.parametrize("base_head", [False, True])
@pytest.mark.parametrize("flag", [True, None])
def test_one_head_of_its_own_unties_the_output(
    tmp_path: Path, base_head: bool, flag: bool | None
) -> None:
    base = doubled(0) if base_head else weights(0, head=False)
    found = aligned(tmp_path, (base, flag), (weights(1, head=False), True), (weights(2), False))
    head = next(m for m in found.matches if m.name == HEAD)
    assert head.stored.name == (HEAD if base_head else EMBEDDING)
    assert head.model_sources == (EMBEDDING, HEAD)
    assert head.same_as is None
    assert sources(found, EMBEDDING) == (EMBEDDING, EMBEDDING)
    assert found.untied
    (warning,) = found.warnings
    assert "tie_word_embeddings false" in warning
    assert str(tmp_path / "c2") in warning


def test_an_untied_base_takes_a_tied_models_embedding_as_its_head(tmp_path: Path) -> None:
    found = aligned(
        tmp_path, (weights(0), False), (weights(1, head=False), True), (weights(2), False)
    )
    assert sources(found, HEAD) == (EMBEDDING, HEAD)
    assert not found.untied
    (warning,) = found.warnings
    assert str(tmp_path / "c1") in warning


def test_a_flag_that_the_values_contradict_gives_way(tmp_path: Path) -> None:
    found = aligned(tmp_path, (weights(0), True), (weights(1), True))
    assert sources(found, HEAD) == (HEAD,)
    assert found.untied
    assert len(found.warnings) == 2
    assert all("values differ" in warning for warning in found.warnings)


def test_equal_values_are_no_tie_where_the_config_says_so(tmp_path: Path) -> None:
    found = aligned(tmp_path, (doubled(0), False), (doubled(1), False), (weights(2), False))
    assert all(m.same_as is None for m in found.matches)
    assert sources(found, HEAD) == (HEAD, HEAD)
    assert found.warnings == ()


@pytest.mark.parametrize("base", [weights(0), doubled(0)], ids=["own", "copy"])
def test_a_missing_head_is_missing_where_nothing_ties_it(
    tmp_path: Path, base: dict[str, Tensor]
) -> None:
    with pytest.raises(IncompatibleError, match=r"lacks the tensor lm_head\.weight"):
        aligned(tmp_path, (base, None), (weights(1, head=False), False))


def test_a_new_head_on_an_untied_base_is_extra(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match=r"lm_head\.weight, which the base lacks"):
        aligned(tmp_path, (weights(0, head=False), False), (weights(1), False))


def shared(seed: int, *names: str) -> dict[str, Tensor]:
    """An encoder-decoder's embedding under several names, and a norm."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(ROWS, WIDTH, generator=generator)
    return {n: table.clone() for n in names} | {"norm.weight": torch.randn(3, generator=generator)}


T5 = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


def test_a_shared_embedding_is_merged_once_whatever_is_stored(tmp_path: Path) -> None:
    stored = ((shared(0, *T5), True), (shared(1, *T5[:1]), True), (shared(2, *T5), True))
    found = aligned(tmp_path, *stored)
    originals = [m for m in found.matches if m.name in T5 and m.same_as is None]
    (original,) = originals
    assert original.model_sources[0] == "shared.weight"
    assert sum(m.same_as == original.name for m in found.matches) == 2
    assert found.warnings == ()


def test_further_copies_in_a_model_are_left_out(tmp_path: Path) -> None:
    found = aligned(tmp_path, (shared(0, *T5[:1]), True), (shared(1, *T5), True))
    assert {m.name for m in found.matches} == {"shared.weight", "norm.weight"}


def test_embeddings_that_one_model_tells_apart_are_merged_apart(tmp_path: Path) -> None:
    model = shared(1, *T5[:2])
    model[T5[1]] += 1
    found = aligned(tmp_path, (shared(0, *T5[:2]), True), (model, True))
    assert all(m.same_as is None for m in found.matches)
    assert not found.untied
    (warning,) = found.warnings
    assert "merged apart" in warning


def test_equal_position_tables_are_no_ties(tmp_path: Path) -> None:
    names = ("a.position_embeddings.weight", "b.position_embeddings.weight")
    found = aligned(tmp_path, (shared(0, *names), True), (shared(1, *names), True))
    assert all(m.same_as is None for m in found.matches)


def test_a_head_that_holds_its_bias_twice(tmp_path: Path) -> None:
    def bert(seed: int, *biases: str) -> dict[str, Tensor]:
        tensors = shared(
            seed, "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
        )
        bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(seed))
        return tensors | {f"cls.predictions.{b}": bias.clone() for b in biases}

    found = aligned(tmp_path, (bert(0, "bias", "decoder.bias"), None), (bert(1, "bias"), None))
    same_as = {m.name: m.same_as for m in found.matches}
    assert same_as["cls.predictions.decoder.bias"] == "cls.predictions.bias"
    assert same_as["cls.predictions.decoder.weight"] == "bert.embeddings.word_embeddings.weight"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}),
        (
            {"text_config": {"tie_word_embeddings": True}},
            {"text_config": {"tie_word_embeddings": False}},
        ),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": True}},
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": False}},
        ),
        ({"text_config": {}}, {"text_config": {}, "tie_word_embeddings": False}),
    ],
)
def test_the_flag_is_written_where_the_config_has_it(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    assert untied_config(before) == after
    assert tie_flag(after) is False
    assert tie_flag(before) is not False
