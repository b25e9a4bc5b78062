"""Matching tensors by name: wrappers, buffers, and what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mergekit_iso.checkpoints.align import Alignment, align, bare_name
from mergekit_iso.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergekit_iso.errors import CheckpointError, IncompatibleError
from tests.checkpoints.small import WIDTH, config, weights, write


def opened(path: Path, tensors: dict[str, Tensor], **settings: Any) -> Checkpoint:
    return open_checkpoint(write(path, tensors, config(**settings)))


def aligned(tmp_path: Path, base: dict[str, Tensor], *models: dict[str, Tensor]) -> Alignment:
    others = [opened(tmp_path / f"m{i}", model) for i, model in enumerate(models)]
    return align(opened(tmp_path / "base", base), others)


def refusal(tmp_path: Path, base: dict[str, Tensor], *models: dict[str, Tensor]) -> str:
    with pytest.raises(IncompatibleError) as caught:
        aligned(tmp_path, base, *models)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_equal_names_match_in_the_bases_order(tmp_path: Path) -> None:
    found = aligned(tmp_path, weights(0), weights(1), dict(reversed(weights(2).items())))
    assert [m.name for m in found.matches] == list(open_checkpoint(tmp_path / "base").tensors)
    assert all(m.model_sources == (m.name, m.name) and m.same_as is None for m in found.matches)
    assert found.warnings == ()
    assert not found.untied


@pytest.mark.parametrize(
    ("name", "bare"),
    [
        ("module.a.weight", "a.weight"),
        ("_orig_mod.module._orig_mod.a.weight", "a.weight"),
        ("a.0._orig_mod.b.module.c.bias", "a.0.b.c.bias"),
        ("a.module", "a.module"),
        ("a.my_module.b", "a.my_module.b"),
    ],
)
def test_wrappers_are_stripped_as_whole_components(name: str, bare: str) -> None:
    assert bare_name(name) == bare


def test_wrapped_models_fit_a_bare_base(tmp_path: Path) -> None:
    wrapped = {f"module._orig_mod.{n}": t for n, t in weights(1).items()}
    found = aligned(tmp_path, weights(0), wrapped)
    assert {m.name for m in found.matches} == set(weights())
    assert all(m.model_sources == (f"module._orig_mod.{m.name}",) for m in found.matches)
    (warning,) = found.warnings
    assert "_orig_mod." in warning
    assert str(tmp_path / "m0") in warning


def test_a_wrapped_base_gives_bare_output_names(tmp_path: Path) -> None:
    wrapped = {f"module.{n.replace('mlp', '_orig_mod.mlp')}": t for n, t in weights(0).items()}
    found = aligned(tmp_path, wrapped, weights(1))
    assert {m.name for m in found.matches} == set(weights())
    assert {m.stored.name for m in found.matches} == set(wrapped)
    (warning,) = found.warnings
    assert "the base" in warning


def test_an_architectures_own_module_stays(tmp_path: Path) -> None:
    name = "vision.module.proj.weight"
    base, model = ({**weights(i), name: torch.full((2, 2), float(i))} for i in (0, 1))
    found = aligned(tmp_path, base, model)
    assert name in {m.name for m in found.matches}
    assert found.warnings == ()


def test_names_that_differ_in_wrappers_only_collide(tmp_path: Path) -> None:
    twice = {**weights(1), "module.model.norm.weight": torch.zeros(WIDTH)}
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight twice"):
        aligned(tmp_path, weights(0), twice)


def test_a_missing_tensor_is_named_with_its_model(tmp_path: Path) -> None:
    model = weights(1)
    del model["model.norm.weight"]
    message = refusal(tmp_path, weights(0), weights(2), model)
    assert "lacks the tensor model.norm.weight" in message
    assert str(tmp_path / "m1") in message


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    message = refusal(tmp_path, weights(0), {"model.norm.weight": torch.zeros(WIDTH)})
    assert "lacks the 4 tensors" in message
    assert "and 1 more" in message


def test_an_extra_tensor_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, weights(0), {**weights(1), "v_head.weight": torch.zeros(1, WIDTH)})
    assert "has the tensor v_head.weight, which the base lacks" in message


def test_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    model = weights(1)
    model["model.embed_tokens.weight"] = torch.zeros(13, WIDTH)
    message = refusal(tmp_path, weights(0), model)
    for part in ("model.embed_tokens.weight", "(13, 4)", "(12, 4)", str(tmp_path / "m0")):
        assert part in message


@pytest.mark.parametrize(
    ("ours", "theirs"), [("", "language_model."), ("model.", "model.language_model.")]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_another_prefix_is_recognised(
    tmp_path: Path, ours: str, theirs: str, swapped: bool
) -> None:
    plain = weights(0, head=False)
    moved = {theirs + n.removeprefix(ours): t for n, t in weights(1, head=False).items()}
    pair = (moved, plain) if swapped else (plain, moved)
    base = opened(tmp_path / "b", pair[0], architectures=["TextModel"])
    model = opened(tmp_path / "m", pair[1], architectures=["WrapperModel"])
    with pytest.raises(IncompatibleError) as caught:
        align(base, [model])
    for part in ("prefix", "TextModel", "WrapperModel", "language_model."):
        assert part in str(caught.value)


@pytest.mark.parametrize("stacked_base", [False, True])
def test_other_layouts_of_experts_are_recognised(tmp_path: Path, stacked_base: bool) -> None:
    listed = {f"l.mlp.experts.{i}.up_proj.weight": torch.ones(2, 3) for i in range(2)}
    stacked = {"l.mlp.experts.up_proj": torch.ones(2, 2, 3)}
    pair = (stacked, listed) if stacked_base else (listed, stacked)
    assert "layouts of the experts" in refusal(tmp_path, *pair)


def test_buffers_are_neither_missed_nor_extra(tmp_path: Path) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    counter = {"model.position_ids": torch.arange(4)}
    found = aligned(tmp_path, {**weights(0), **old}, {**weights(1), **counter})
    sources = {m.name: m.model_sources for m in found.matches}
    assert sources[next(iter(old))] == ()
    assert "model.position_ids" not in sources
    assert found.warnings == ()


def test_integers_that_differ_are_warned_of(tmp_path: Path) -> None:
    base, same, other = (
        {**weights(i), "steps": torch.tensor(n), "flags": torch.tensor([True, False])}
        for i, n in enumerate((3, 3, 5))
    )
    found = aligned(tmp_path, base, same, other)
    (warning,) = found.warnings
    assert "steps" in warning
    assert "flags" not in warning
    assert str(tmp_path / "m1") in warning


@pytest.mark.parametrize("shards", [1, 2])
def test_the_base_is_no_model(tmp_path: Path, shards: int) -> None:
    base = open_checkpoint(write(tmp_path / "base", weights()))
    copy = open_checkpoint(write(tmp_path / "copy", weights(), shards=shards))
    for model in (base, copy, open_checkpoint(tmp_path / "base" / ".." / "base")):
        with pytest.raises(IncompatibleError, match="is the base itself"):
            align(base, [model])


def test_one_changed_bit_makes_another_model(tmp_path: Path) -> None:
    model = weights()
    model["model.layers.0.mlp.up_proj.weight"][0, 0] += 1
    assert len(aligned(tmp_path, weights(), model).matches) == len(model)


def test_two_files_of_one_folder_are_two_models(tmp_path: Path) -> None:
    write(tmp_path / "x", weights(0))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "a.safetensors")
    write(tmp_path / "x", weights(1))
    (tmp_path / "x" / "model.safetensors").rename(tmp_path / "b.safetensors")
    base, model = (open_checkpoint(tmp_path / f"{n}.safetensors") for n in "ab")
    assert len(align(base, [model]).matches) == len(weights())


def test_the_same_model_twice_is_warned_of(tmp_path: Path) -> None:
    found = aligned(tmp_path, weights(0), weights(1), weights(2), weights(1))
    (warning,) = found.warnings
    assert "the same model" in warning
    assert str(tmp_path / "m0") in warning
    assert str(tmp_path / "m2") in warning
