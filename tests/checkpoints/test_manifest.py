"""The manifest and the model card: what they say, and what they must not."""

from __future__ import annotations

import hashlib
import json
import shlex
import zlib
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from mergekit_iso.checkpoints.card import model_card
from mergekit_iso.checkpoints.checkpoint import open_checkpoint
from mergekit_iso.checkpoints.manifest import (
    MANIFEST_NAME,
    describe_input,
    public_name,
    read_manifest,
)
from mergekit_iso.checkpoints.writer import tensor_bytes
from mergekit_iso.errors import CheckpointError
from mergekit_iso.execute import merge_checkpoints
from mergekit_iso.methods import get_method
from mergekit_iso.plan import Plan
from mergekit_iso.plan import plan as make_plan

COMMIT = "0123456789abcdef"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    base = {"a.weight": torch.randn(6, 4), "b": torch.randn(5), "steps": torch.tensor(3)}
    for name in ("base", "m0", "m1"):
        (tmp_path / name).mkdir()
        model = {
            n: t + 0.02 * torch.randn(t.shape) if t.is_floating_point() else t.clone()
            for n, t in base.items()
        }
        save_file(model, tmp_path / name / "model.safetensors")
    return tmp_path


def merge(folder: Path, out: str = "out", **keywords: object) -> Path:
    models = [folder / "m0", folder / "m1"]
    return merge_checkpoints(folder / "base", models, "ties", folder / out, **keywords).out  # type: ignore[arg-type]


def hub_plan(folder: Path) -> Plan:
    """A plan whose base and first model came from the hub."""
    base, first, second = (open_checkpoint(folder / n) for n in ("base", "m0", "m1"))
    base = replace(base, label="org/base@main", commit=COMMIT)
    first = replace(first, label="org/math", commit=COMMIT)
    return make_plan(base, [first, second], get_method("ties", density=0.5), scale=0.5, seed=7)


def test_every_checksum_is_that_of_the_bytes(folder: Path) -> None:
    manifest = read_manifest(merge(folder))
    output = load_file(folder / "out" / "model.safetensors")
    for record in manifest.tensors:
        tensor = output[record.name]
        assert record.crc32 == f"{zlib.crc32(tensor_bytes(tensor)):08x}"
        assert (record.shape, f"torch.{record.dtype}") == (tuple(tensor.shape), str(tensor.dtype))
        assert record.action == ("copy" if record.name == "steps" else "merge")
    for source, name in zip(manifest.inputs, ("base", "m0", "m1"), strict=True):
        path = folder / name / "model.safetensors"
        stored = load_file(path)
        assert source.crc32.keys() == (stored.keys() if name == "base" else {"a.weight", "b"})
        for tensor_name, crc in source.crc32.items():
            assert crc == f"{zlib.crc32(tensor_bytes(stored[tensor_name])):08x}"
        data = path.read_bytes()
        header = data[8 : 8 + int.from_bytes(data[:8], "little")]
        assert source.files[0].bytes == len(data)
        assert source.files[0].header_sha256 == hashlib.sha256(header).hexdigest()
        assert source.files[0].sha256 is None


def test_whole_files_are_hashed_on_request(folder: Path) -> None:
    manifest = read_manifest(merge(folder, hash_inputs=True))
    data = (folder / "m1" / "model.safetensors").read_bytes()
    assert manifest.inputs[2].files[0].sha256 == hashlib.sha256(data).hexdigest()


def test_the_recipe_is_resolved(folder: Path) -> None:
    recipe = read_manifest(merge(folder, weights="mean", scale=0.5, seed=4, keep_base=["b"])).recipe
    assert (recipe.method, recipe.options["density"]) == ("ties", 0.2)
    assert [(m.name, m.weight) for m in recipe.models] == [("m0", 0.5), ("m1", 0.5)]
    assert (recipe.base, recipe.scale, recipe.seed, recipe.keep_base) == ("base", 0.5, 4, ("b",))
    assert (recipe.dtype, recipe.out_dtype) == ("float32", None)


def test_no_file_holds_the_path_of_an_input(folder: Path) -> None:
    save_file(
        load_file(folder / "m1" / "model.safetensors") | {"a.weight": torch.randn(6, 4)},
        folder / "m1" / "model.safetensors",
    )
    out = merge(folder)
    assert "'m1' is probably no fine-tune of 'base'" in read_manifest(out).warnings[0]
    for path in out.iterdir():
        assert str(folder).encode() not in path.read_bytes()


def test_a_hub_model_is_named_by_id_and_commit(folder: Path) -> None:
    plan = hub_plan(folder)
    assert public_name(plan.base) == f"org/base@{COMMIT}"
    assert public_name(plan.models[0]) == f"org/math@{COMMIT}"
    assert public_name(plan.models[1]) == "m1"
    assert describe_input(plan.base, {}, hash_files=False).commit == COMMIT


@pytest.mark.parametrize(
    ("text", "what"),
    [("{", "whole file"), ('{"format_version": 1}', "recipe"), ("[]", "whole file")],
)
def test_a_damaged_manifest_is_refused_by_name(folder: Path, text: str, what: str) -> None:
    out = merge(folder)
    (out / MANIFEST_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME} is damaged \({what}"):
        read_manifest(out)


def test_the_card_has_front_matter_for_the_hub(folder: Path) -> None:
    card = model_card(hub_plan(folder))
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "base_model": ["org/base", "org/math"],
        "library_name": "transformers",
        "tags": ["merge", "mergekit-iso"],
    }
    assert "https://arxiv.org/abs/2306.01708" in card
    assert f"| `org/math@{COMMIT}` | 1 |" in card
    assert "| density | `0.5` |" in card


def test_the_cards_command_names_all_that_is_not_default(folder: Path) -> None:
    card = model_card(hub_plan(folder))
    command = shlex.split(next(line for line in card.splitlines() if "mergekit-iso merge" in line))
    pairs = set(pairwise(command))
    assert {
        ("--method", "ties"),
        ("--set", "density=0.5"),
        ("--scale", "0.5"),
        ("--seed", "7"),
    } <= pairs
    assert f"org/base@{COMMIT}" in command
    assert "--weight" not in command


def test_a_local_card_names_no_base_on_the_hub(folder: Path) -> None:
    card = (merge(folder) / "README.md").read_text()
    assert "base_model" not in yaml.safe_load(card.split("---\n")[1])


def test_a_method_that_nobody_registered_has_a_card_too(folder: Path) -> None:
    plan = hub_plan(folder)
    method = type("Own", (type(plan.method),), {"name": ""})()
    assert "# Own of 2 models" in model_card(replace(plan, method=method))


def test_the_manifest_is_plain_json(folder: Path) -> None:
    out = merge(folder)
    assert json.loads((out / MANIFEST_NAME).read_bytes())["format_version"] == 1
    assert read_manifest(out).to_bytes() == (out / MANIFEST_NAME).read_bytes()
