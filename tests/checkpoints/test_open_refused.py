"""Checkpoints that are refused, each in one sentence that names what is wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from mergekit_iso.checkpoints.checkpoint import open_checkpoint
from mergekit_iso.errors import CheckpointError
from tests.checkpoints.small import config, raw_file, weights, write, write_index


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def entry(begin: int, end: int, shape: Any = None, dtype: Any = "F32") -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "reference",
    [
        "/no/such/folder",
        "./missing",
        "~/no-such-folder-here",
        "a/b/c",
        "org/name/",
        "x/y.safetensors",
        "missing",
        "",
    ],
)
def test_a_missing_path_never_goes_to_the_hub(reference: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(reference)
    assert repr(reference) in str(caught.value)
    assert "folder" in str(caught.value.hint)


def test_a_name_without_its_owner_is_explained() -> None:
    with pytest.raises(CheckpointError, match="hub id of the form org/name") as caught:
        open_checkpoint("gpt2")
    assert "openai-community/gpt2" in str(caught.value.hint)


def test_a_pipe_and_a_device_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        assert "is not a folder or a .safetensors file" in refusal(path)


def test_a_path_object_never_goes_to_the_hub() -> None:
    assert "'org/name' does not exist" in refusal(Path("org/name"))


def test_a_folder_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert "has no weights" in refusal(tmp_path)


def test_missing_shards_are_named(tmp_path: Path) -> None:
    write(tmp_path, weights(), shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "lacks model-00002-of-00003.safetensors" in refusal(tmp_path)


def test_shards_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, weights(), shards=3)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert "model.safetensors.index.json" in refusal(tmp_path)
    for number in (2, 3):
        (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
    assert "model.safetensors.index.json" in refusal(tmp_path)


def test_one_shard_given_as_a_file(tmp_path: Path) -> None:
    write(tmp_path, weights(), shards=3)
    assert "one shard" in refusal(tmp_path / "model-00001-of-00003.safetensors")


def test_the_index_names_a_tensor_that_its_shard_lacks(tmp_path: Path) -> None:
    write(tmp_path, weights())
    write_index(tmp_path, dict.fromkeys([*weights(), "model.extra"], "model.safetensors"))
    message = refusal(tmp_path)
    assert "model.extra" in message
    assert "model.safetensors" in message


def test_the_index_omits_a_tensor(tmp_path: Path) -> None:
    write(tmp_path, weights())
    write_index(tmp_path, {n: "model.safetensors" for n in weights() if n != "model.norm.weight"})
    assert "holds model.norm.weight, which its index omits" in refusal(tmp_path)


def test_the_index_places_a_tensor_in_another_shard(tmp_path: Path) -> None:
    write(tmp_path, weights(), shards=2)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    name, file = next(iter(index.items()))
    other = next(f for f in index.values() if f != file)
    write_index(tmp_path, index | {name: other})
    assert name in refusal(tmp_path)


@pytest.mark.parametrize(
    "file", ["../x.safetensors", "/etc/passwd", "a/../../x", "C:\\x", "", "x\0", "x\ny"]
)
def test_an_index_never_points_outside_the_folder(tmp_path: Path, file: str) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "x.safetensors")
    folder = tmp_path / "m"
    folder.mkdir()
    write_index(folder, {"w": file})
    assert "points outside its folder" in refusal(folder)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"w": 1}}', '{"weight_map": {}}']
)
def test_a_broken_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    assert "model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize("content", ["", "{'a': 1}", "[1]", "[" * 100_000, "\udcff"])
def test_a_broken_config(tmp_path: Path, content: str) -> None:
    write(tmp_path, weights())
    (tmp_path / "config.json").write_bytes(content.encode(errors="surrogateescape"))
    assert "config.json" in refusal(tmp_path)


def test_a_git_lfs_pointer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    message = refusal(tmp_path)
    assert "model.safetensors" in message
    assert "Git LFS pointer" in message


@pytest.mark.parametrize("content", [b"", b"abc", b"<!DOCTYPE html><html></html>", b"\xff" * 64])
def test_a_file_that_is_no_checkpoint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert "no complete safetensors file" in refusal(tmp_path)


@pytest.mark.parametrize("length", [1 << 62, 100_000_001, 1000])
def test_a_header_that_claims_too_much(tmp_path: Path, length: int) -> None:
    raw_file(tmp_path / "model.safetensors", {}, length=length)
    assert str(length) in refusal(tmp_path)


@pytest.mark.parametrize(("cut", "word"), [(-3, "truncated"), (5, "longer")])
def test_a_file_of_another_length_than_its_header_says(tmp_path: Path, cut: int, word: str) -> None:
    path = write(tmp_path, weights()) / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut < 0 else data + bytes(cut))
    assert word in refusal(tmp_path)


@pytest.mark.parametrize(
    ("header", "word"),
    [
        ({"a": entry(0, 4), "b": entry(0, 4)}, "overlaps"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, "overlaps"),
        ({"a": entry(0, 4), "b": entry(6, 10)}, "unclaimed"),
        ({"a": entry(0, 4, [2])}, "takes 8"),
        ({"a": entry(4, 0)}, "corrupt header entry for 'a'"),
        ({"a": entry(0, 4, [-1])}, "corrupt header entry for 'a'"),
        ({"a": entry(0, 4, [True])}, "corrupt header entry for 'a'"),
        ({"a": entry(0, 4, [1 << 70])}, "takes"),
        ({"a": entry(0, 4, dtype=7)}, "corrupt header entry for 'a'"),
        ({"a": entry(0, 4, dtype="Q9")}, "unknown dtype Q9"),
        ({"a": {"dtype": "F32"}}, "corrupt header entry for 'a'"),
        ({"a\nb": entry(0, 4)}, "corrupt header entry for 'a\\nb'"),
        ({"a": 3}, "corrupt header entry for 'a'"),
        ([1], "not an object"),
        (b"{]", "corrupt header"),
        (b"\xff\xfe", "corrupt header"),
        (b"[" * 200_000, "corrupt header"),
        (b'{"a": {}, "a": {}}', "twice"),
    ],
)
def test_a_corrupt_header(tmp_path: Path, header: Any, word: str) -> None:
    raw_file(tmp_path / "model.safetensors", header, bytes(4))
    assert word in refusal(tmp_path)


@given(st.binary(max_size=80))
def test_no_bytes_raise_anything_but_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "model.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data)
    with pytest.raises(CheckpointError):
        open_checkpoint(path)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, weights()))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    last = list(checkpoint.tensors)[-1]
    with pytest.raises(CheckpointError, match="it has changed"):
        checkpoint.read(last)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
    ],
)
def test_a_config_that_says_quantised(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path, weights(), config(**settings))
    message = refusal(tmp_path)
    assert "quantised" in message
    assert "quantized" in message


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("l.q_proj.qweight", torch.zeros(2, 2, dtype=torch.int32)),
        ("l.q_proj.qzeros", torch.zeros(2, 2, dtype=torch.int32)),
        ("l.q_proj.weight.absmax", torch.zeros(2)),
        ("l.q_proj.weight.quant_state.bitsandbytes__nf4", torch.zeros(2, dtype=torch.uint8)),
        ("l.q_proj.weight_scale_inv", torch.zeros(2)),
        ("l.q_proj.weight", torch.zeros(2, 2, dtype=torch.uint8)),
        ("l.q_proj.weight", torch.zeros(2, 2).to(torch.float8_e4m3fn)),
        ("l.q_proj.weight", torch.zeros(2, 2).to(torch.float8_e5m2)),
    ],
)
def test_tensors_that_are_quantised(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    write(tmp_path, {name: tensor})
    message = refusal(tmp_path)
    assert "quantised" in message
    assert name in message


def test_an_adapter_folder(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    save_file({"w": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    assert "is a LoRA adapter (PEFT)" in refusal(tmp_path)


def test_an_adapter_file(tmp_path: Path) -> None:
    path = tmp_path / "adapter_model.safetensors"
    save_file({"base_model.model.q_proj.lora_A.weight": torch.zeros(1, 2)}, path)
    assert "is a LoRA adapter (PEFT)" in refusal(path)
