"""What a plan says before any work."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from mergekit_iso.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mergekit_iso.errors import CheckpointError, IncompatibleError, MethodError
from mergekit_iso.methods.base import MergeMethod
from mergekit_iso.plan import Plan, parse_size
from mergekit_iso.plan import plan as make_plan
from mergekit_iso.tensors import TensorInfo
from tests.checkpoints.small import ROWS, config, weights, write

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Sum(MergeMethod):
    """The weighted sum."""

    name: ClassVar[str] = "sum"

    def check(self, infos: Any, weights: Any) -> list[str]:
        return [f"{len(infos)} tensors, weights {weights}"]


def pair(
    tmp_path: Path,
    base: dict[str, Tensor] | None = None,
    model: dict[str, Tensor] | None = None,
    **settings: Any,
) -> tuple[Checkpoint, list[Checkpoint]]:
    first = write(tmp_path / "base", weights(0) if base is None else base, config(**settings))
    second = write(tmp_path / "model", weights(1) if model is None else model, config(**settings))
    return open_checkpoint(first), [open_checkpoint(second)]


def planned(tmp_path: Path, **options: Any) -> Plan:
    return make_plan(*pair(tmp_path), Sum(), **options)


def infos(plan: Plan) -> dict[str, TensorInfo]:
    return {step.info.name: step.info for step in plan.tensors}


def test_a_plain_merge(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert [s.info.name for s in plan.tensors] == list(plan.base.tensors)
    for step in plan.tensors:
        assert step.action == "merge"
        assert step.base_source == step.info.name
        assert step.model_sources == (step.info.name,)
        assert step.info.dtype == step.compute == torch.float32
    assert plan.shards == (("model.safetensors", tuple(plan.base.tensors)),)
    assert plan.weights == (1.0,)
    assert plan.config is None
    assert plan.carried == ("config.json",)
    assert plan.warnings == ("5 tensors, weights (1.0,)",)


def test_nothing_to_merge(tmp_path: Path) -> None:
    base, _ = pair(tmp_path)
    with pytest.raises(MethodError, match="no models"):
        make_plan(base, [], Sum())
    for patterns in ("*", ["embed", "mlp", "norm", "head"]):
        with pytest.raises(MethodError, match="keep_base leaves no tensor"):
            planned(tmp_path, keep_base=patterns)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"weights": [1.0, 2.0]}, "2 weights"),
        ({"scale": float("nan")}, "scale"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"out_dtype": "bfloat"}, "bfloat"),
        ({"max_shard_size": "lots"}, "lots"),
        ({"exclude": ["role:heads"]}, "role:heads"),
        ({"keep_base": "role:heads"}, "role:heads"),
        ({"exclude": ""}, "exclude cannot be ''"),
        ({"keep_base": ["norm", ""]}, "keep_base cannot be ''"),
        ({"seed": "x"}, "seed cannot be 'x'"),
        ({"round": 1.5}, "round cannot be 1.5"),
        ({"seed": True}, "seed cannot be True"),
    ],
)
def test_options_out_of_range(tmp_path: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(MethodError, match=word):
        planned(tmp_path, **options)


@pytest.mark.parametrize(("option", "valid"), [("dtype", "float64"), ("out_dtype", "bfloat16")])
def test_a_wrong_dtype_lists_the_valid_ones(tmp_path: Path, option: str, valid: str) -> None:
    with pytest.raises(MethodError) as caught:
        planned(tmp_path, **{option: "int8"})
    assert valid in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("10B", 10),
        ("2KB", 2000),
        ("200MB", 200_000_000),
        ("1.5 gb", 1_500_000_000),
        ("5GB", 5_000_000_000),
        ("1TB", 10**12),
        ("1KiB", 1024),
        ("3MiB", 3 << 20),
        ("1GiB", 1 << 30),
    ],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", [0, -1, "", "0", "GB", "5 G", "5XB", "-5GB", "1e9", "five"])
def test_no_sizes(text: int | str) -> None:
    with pytest.raises(MethodError) as caught:
        parse_size(text)
    assert "GiB" in str(caught.value.hint)


@pytest.mark.parametrize("size", ["9" * 400, 10**400, 1 << 63, "8388608TiB"])
def test_sizes_beyond_all_disks(size: int | str) -> None:
    with pytest.raises(MethodError, match=r"less than 2\^63 bytes"):
        parse_size(size)


@pytest.mark.parametrize("limit", [1, 64, 100, 192, 300, 10_000])
def test_shards_keep_order_and_limit(tmp_path: Path, limit: int) -> None:
    plan = planned(tmp_path, max_shard_size=limit)
    sizes = {name: info.nbytes for name, info in infos(plan).items()}
    assert [n for _, names in plan.shards for n in names] == list(sizes)
    for _, names in plan.shards:
        assert len(names) == 1 or sum(sizes[n] for n in names) <= limit
    if len(plan.shards) > 1:
        count = len(plan.shards)
        assert plan.shards[0][0] == f"model-00001-of-{count:05d}.safetensors"
        assert plan.shards[-1][0] == f"model-{count:05d}-of-{count:05d}.safetensors"


def test_shards_are_filled(tmp_path: Path) -> None:
    sizes = [info.nbytes for info in infos(planned(tmp_path)).values()]
    plan = planned(tmp_path, max_shard_size=sum(sizes[:2]))
    assert len(plan.shards[0][1]) == 2


def test_each_tensor_keeps_the_bases_dtype(tmp_path: Path) -> None:
    base, model = weights(0, dtype=torch.bfloat16), weights(1, dtype=torch.float16)
    base["model.norm.weight"] = base["model.norm.weight"].float()
    plan = make_plan(*pair(tmp_path, base, model), Sum())
    assert {n: i.dtype for n, i in infos(plan).items()} == {n: t.dtype for n, t in base.items()}


def test_float64_inputs_are_computed_in_float64(tmp_path: Path) -> None:
    model = weights(1)
    model[HEAD] = model[HEAD].double()
    plan = make_plan(*pair(tmp_path, None, model), Sum())
    wide = {s.info.name for s in plan.tensors if s.compute == torch.float64}
    assert wide == {HEAD}
    plan = planned(tmp_path, dtype="float64")
    assert {s.compute for s in plan.tensors} == {torch.float64}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"dtype": None, "torch_dtype": "float32"}, {"dtype": None, "torch_dtype": "bfloat16"}),
        (
            {"dtype": None, "text_config": {"dtype": "float32"}},
            {"dtype": None, "text_config": {"dtype": "bfloat16"}},
        ),
    ],
)
def test_out_dtype_reaches_tensors_and_config(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    buffers = {"rope.inv_freq": torch.ones(2), "steps": torch.tensor(3)}
    base, model = {**weights(0), **buffers}, {**weights(1), **buffers}
    plan = make_plan(
        *pair(tmp_path, base, model, **before), Sum(), out_dtype="bfloat16", keep_base=[HEAD]
    )
    dtypes = {n: i.dtype for n, i in infos(plan).items()}
    assert {dtypes[n] for n in weights()} == {torch.bfloat16}
    assert dtypes["rope.inv_freq"] == torch.float32
    assert dtypes["steps"] == torch.int64
    assert plan.config == config(**after)
    assert "config.json" not in plan.carried


def test_an_out_dtype_that_the_config_has_changes_nothing(tmp_path: Path) -> None:
    assert planned(tmp_path, out_dtype="float32").config is None


def test_kept_tensors_and_buffers_are_copied(tmp_path: Path) -> None:
    buffers = {"rope.inv_freq": torch.ones(2)}
    base, model = {**weights(0), **buffers}, weights(1)
    plan = make_plan(*pair(tmp_path, base, model), Sum(), keep_base=["*.mlp.*", "norm"])
    copied = {s.info.name for s in plan.tensors if s.action == "copy"}
    assert copied == {n for n in base if "mlp" in n or "norm" in n or "rope" in n}
    assert all(s.model_sources == () for s in plan.tensors if s.action == "copy")
    assert plan.warnings == ("2 tensors, weights (1.0,)",)


def test_a_pattern_may_stand_alone(tmp_path: Path) -> None:
    plan = planned(tmp_path, keep_base="norm", exclude="mlp")
    assert [s.info.name for s in plan.tensors if s.action == "copy"] == ["model.norm.weight"]
    assert all(info.excluded == ("mlp" in name) for name, info in infos(plan).items())
    assert (plan.keep_base, plan.exclude) == (("norm",), ("mlp",))


def test_roles_are_kept_too(tmp_path: Path) -> None:
    plan = planned(tmp_path, keep_base=["role:embedding", "role:head", "role:fused"])
    assert {s.info.name for s in plan.tensors if s.action == "copy"} == {EMBEDDING, HEAD}
    assert plan.warnings[0] == "the keep_base pattern 'role:fused' matches no tensor"


def test_a_single_model_is_no_list(tmp_path: Path) -> None:
    base, (model,) = pair(tmp_path)
    for single in (model, model.folder, str(model.folder)):
        with pytest.raises(MethodError, match="models must be a list"):
            make_plan(base, single, Sum())  # type: ignore[arg-type]


def test_patterns_that_match_nothing_are_warned_of(tmp_path: Path) -> None:
    plan = planned(
        tmp_path, keep_base=["nothing"], exclude=["text_projection", "norm", "role:fused"]
    )
    assert plan.warnings[:2] == (
        "the keep_base pattern 'nothing' matches no tensor",
        "the exclude pattern 'role:fused' matches no tensor",
    )
    assert infos(plan)["model.norm.weight"].excluded


def tied(seed: int) -> dict[str, Tensor]:
    tensors = weights(seed, head=False)
    return {**tensors, HEAD: tensors[EMBEDDING].clone()}


def test_a_tied_duplicate_is_merged_once(tmp_path: Path) -> None:
    plan = make_plan(*pair(tmp_path, tied(0), tied(1), tie_word_embeddings=True), Sum())
    assert {s.info.name: s.same_as for s in plan.tensors if s.same_as} == {HEAD: EMBEDDING}
    assert plan.warnings == ("4 tensors, weights (1.0,)",)
    assert plan.config is None


@pytest.mark.parametrize("pattern", [EMBEDDING, HEAD])
def test_tied_tensors_are_kept_together(tmp_path: Path, pattern: str) -> None:
    models = pair(tmp_path, tied(0), tied(1), tie_word_embeddings=True)
    plan = make_plan(*models, Sum(), keep_base=[pattern])
    assert {s.info.name for s in plan.tensors if s.action == "copy"} == {EMBEDDING, HEAD}
    assert all(s.same_as is None for s in plan.tensors)


def test_an_untied_head_is_planned_and_said_in_the_config(tmp_path: Path) -> None:
    base = write(tmp_path / "b", weights(0, head=False), config(tie_word_embeddings=True))
    model = write(tmp_path / "m", weights(1), config())
    plan = make_plan(open_checkpoint(base), [open_checkpoint(model)], Sum())
    head = plan.tensors[-1]
    assert (head.info.name, head.info.role) == (HEAD, "head")
    assert (head.base_source, head.model_sources) == (EMBEDDING, (HEAD,))
    assert plan.shards[0][1][-1] == HEAD
    assert plan.config == config(tie_word_embeddings=False)


def test_a_stale_vocab_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="vocab_size"):
        make_plan(*pair(tmp_path, vocab_size=ROWS + 1), Sum())


def test_a_base_without_a_config_gets_none(tmp_path: Path) -> None:
    base, models = pair(tmp_path)
    (base.folder / "config.json").unlink()
    plan = make_plan(open_checkpoint(base.folder), models, Sum(), out_dtype="float16")
    assert plan.config is None
    assert plan.carried == ()


def test_a_carried_file_whose_name_is_not_text_is_named(tmp_path: Path) -> None:
    base, models = pair(tmp_path)
    (base.folder / os.fsdecode(b"caf\xe9.txt")).write_text("mine")
    with pytest.raises(CheckpointError, match=r"not UTF-8: 'caf\\udce9\.txt'"):
        make_plan(base, models, Sum())


def test_a_single_file_carries_nothing(tmp_path: Path) -> None:
    base, models = pair(tmp_path)
    (base.folder / "notes.txt").write_text("mine")
    plan = make_plan(open_checkpoint(base.folder / "model.safetensors"), models, Sum())
    assert plan.carried == ()
