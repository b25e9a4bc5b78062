"""Every kind of damage to an output is found and named; a sound one has no problem."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mergekit_iso.checkpoints.verify import verify
from mergekit_iso.errors import CheckpointError
from mergekit_iso.execute import merge_checkpoints

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def family(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    base = {EMBEDDING: torch.randn(12, 4), "lm_head.weight": torch.randn(12, 4)}
    base["model.norm.weight"] = torch.randn(4)
    for name in ("base", "m0"):
        (tmp_path / name).mkdir()
        model = {n: t + 0.02 * torch.randn(t.shape) for n, t in base.items()}
        save_file(model, tmp_path / name / "model.safetensors")
        write_config(tmp_path / name)
        (tmp_path / name / "generation_config.json").write_text("{}")
    return tmp_path


def write_config(folder: Path, **changes: object) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 12,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))


@pytest.fixture
def out(family: Path) -> Path:
    """A merge in three shards."""
    return merge_checkpoints(
        family / "base", [family / "m0"], "average", family / "out", max_shard_size=200
    ).out


def shard_with(out: Path, tensor: str) -> Path:
    index = json.loads((out / "model.safetensors.index.json").read_text())
    return out / str(index["weight_map"][tensor])


def test_a_sound_output_has_no_problem(out: Path) -> None:
    report = verify(out)
    assert report.ok
    assert (report.tensors, report.bytes) == (3, (12 * 4 * 2 + 4) * 4)
    assert json.loads(json.dumps(report.to_json()))["problems"] == []


def flip_a_bit(out: Path) -> None:
    path = shard_with(out, EMBEDDING)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def truncate(out: Path) -> None:
    path = shard_with(out, EMBEDDING)
    path.write_bytes(path.read_bytes()[:-1])


def remove_a_shard(out: Path) -> None:
    shard_with(out, EMBEDDING).unlink()


def add_a_stray(out: Path) -> None:
    (out / "old").mkdir()
    save_file({"x": torch.ones(1)}, out / "old" / "model-00009.safetensors")


def change_a_carried_file(out: Path) -> None:
    (out / "generation_config.json").write_text("{} ")


def remove_a_carried_file(out: Path) -> None:
    (out / "generation_config.json").unlink()


def rename_in_a_shard(out: Path) -> None:
    path = shard_with(out, "model.norm.weight")
    save_file({"other": load_file(path)["model.norm.weight"]}, path)


def change_a_dtype(out: Path) -> None:
    path = shard_with(out, "model.norm.weight")
    save_file({n: t.double() for n, t in load_file(path).items()}, path)


def misplace_in_the_index(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["lm_head.weight"] = "elsewhere.safetensors"
    path.write_text(json.dumps(index))


def count_tensors_in_the_index(out: Path) -> None:
    path = out / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] = 3
    path.write_text(json.dumps(index))


def remove_the_index(out: Path) -> None:
    (out / "model.safetensors.index.json").unlink()


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (flip_a_bit, f"{EMBEDDING} in .* changed or damaged"),
        (truncate, "model-.*truncated"),
        (remove_a_shard, "model-.* is missing"),
        (add_a_stray, "old/model-00009.safetensors is a weight file"),
        (change_a_carried_file, "generation_config.json has been changed"),
        (remove_a_carried_file, "generation_config.json is missing"),
        (rename_in_a_shard, "holds other"),
        (rename_in_a_shard, "lacks model.norm.weight"),
        (change_a_dtype, "model.norm.weight .* float64 .* float32"),
        (misplace_in_the_index, "index.json does not place"),
        (count_tensors_in_the_index, "total_size 3"),
        (remove_the_index, "index.json is missing"),
    ],
)
def test_damage_is_named(out: Path, damage: Callable[[Path], None], expected: str) -> None:
    damage(out)
    report = verify(out)
    assert not report.ok
    assert len(report.problems) <= 2
    assert re.search(expected, "\n".join(report.problems))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"vocab_size": 13}, "vocab_size 13, and model.embed_tokens.weight has 12 rows"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings true, and lm_head.weight differs"),
    ],
)
def test_a_config_that_does_not_fit_the_tensors_is_named(
    out: Path, changes: dict[str, object], expected: str
) -> None:
    write_config(out, **changes)
    assert any(expected in problem for problem in verify(out).problems)


@pytest.mark.parametrize("value", [7, "x", None, [7, None], {"a": 1}, True, 1.5])
@pytest.mark.parametrize(
    "key", ["architectures", "vocab_size", "tie_word_embeddings", "text_config"]
)
def test_a_config_of_the_wrong_types_is_no_bug(out: Path, key: str, value: object) -> None:
    write_config(out, **{key: value})
    problems = verify(out).problems
    assert "config.json has been changed: its SHA-256 is not the manifest's" in problems


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"\xff", b'{"a": ' * 100_000])
def test_a_config_that_is_no_object_is_named(out: Path, content: bytes) -> None:
    (out / "config.json").write_bytes(content)
    assert "config.json is no JSON object" in verify(out).problems


def values(document: object, where: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Yield the place of every value in a JSON document."""
    yield where
    items = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document if isinstance(document, list) else ())
    )
    for key, value in items:
        yield from values(value, (*where, key))


@pytest.mark.parametrize("value", [7, "x", "..", None, [], {"a": 1}, "\0"])
def test_a_manifest_of_the_wrong_types_is_no_bug(out: Path, value: object) -> None:
    path = out / "mergekit_iso.json"
    sound = path.read_bytes()
    for where in values(json.loads(sound)):
        document = [json.loads(sound)]
        place: Any = document
        for key in (0, *where)[:-1]:
            place = place[key]
        place[(0, *where)[-1]] = value
        path.write_text(json.dumps(document[0]))
        with suppress(CheckpointError):
            assert isinstance(verify(out).problems, tuple)


@pytest.mark.parametrize("content", [b"", b"[]", b"7", b"\xff", b'{"a": ' * 10_000])
def test_a_damaged_manifest_is_refused(out: Path, content: bytes) -> None:
    (out / "mergekit_iso.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mergekit_iso\.json is damaged") as caught:
        verify(out)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_manifest_is_refused(family: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no mergekit_iso\.json"):
        verify(family / "base")
    with pytest.raises(CheckpointError, match=r"has no mergekit_iso\.json"):
        verify(family / "nowhere")
