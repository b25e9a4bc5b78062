"""The streaming writer, read back with safetensors' own reader."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from mergekit_iso.checkpoints.output import os_errors
from mergekit_iso.checkpoints.writer import (
    DTYPE_NAMES,
    INDEX_NAME,
    CheckpointWriter,
    ShardWriter,
    tensor_bytes,
)
from mergekit_iso.errors import CheckpointError
from mergekit_iso.tensors import TensorInfo, describe


def infos(tensors: dict[str, Tensor]) -> dict[str, TensorInfo]:
    return {name: describe(name, t.shape, t.dtype) for name, t in tensors.items()}


def write_all(path: Path, tensors: dict[str, Tensor]) -> ShardWriter:
    writer = ShardWriter(path, list(infos(tensors).values()))
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.finish()
    return writer


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype
        assert got[name].shape == tensor.shape
        assert tensor_bytes(got[name]) == tensor_bytes(tensor), name


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (0, 4), (2, 3, 5)])
def test_every_dtype_and_shape_reads_back(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensors = {"x": (torch.rand(shape) * 100).to(dtype), "y": torch.ones(3)}
    write_all(tmp_path / "x.safetensors", tensors)
    assert_same(load_file(tmp_path / "x.safetensors"), tensors)


def test_any_layout_is_packed_and_shared_storage_is_copied(tmp_path: Path) -> None:
    t = torch.randn(4, 6)
    tensors = {"t": t, "transposed": t.T, "strided": t[::2, 1::3], "expanded": t[:1].expand(3, 6)}
    write_all(tmp_path / "x.safetensors", tensors)
    assert_same(load_file(tmp_path / "x.safetensors"), tensors)


def test_format_is_pt_and_every_tensor_is_aligned(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.tensor([True, False, True]),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "wide": torch.ones(2, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    write_all(path, tensors)
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    for name, tensor in tensors.items():
        begin = 8 + length + header[name]["data_offsets"][0]
        assert begin % tensor.dtype.itemsize == 0


def test_chunks_may_interleave_and_the_crc_is_that_of_the_whole(tmp_path: Path) -> None:
    a, b = torch.randn(10), torch.randn(4, 5).bfloat16()
    writer = ShardWriter(tmp_path / "x.safetensors", list(infos({"a": a, "b": b}).values()))
    writer.write("b", b[:1])
    writer.write("a", a[:7])
    writer.write("b", b[1:])
    writer.write("a", a[7:])
    writer.finish()
    assert_same(load_file(tmp_path / "x.safetensors"), {"a": a, "b": b})
    assert writer.crc32 == {n: zlib.crc32(tensor_bytes(t)) for n, t in {"a": a, "b": b}.items()}


def test_a_short_tensor_cannot_be_finished(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x.safetensors", [describe("a", (4,), torch.float32)])
    writer.write("a", torch.ones(3))
    with pytest.raises(ValueError, match="a is short"):
        writer.finish()
    writer.close()


def test_too_many_values_and_another_dtype_are_refused(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "x.safetensors", [describe("a", (4,), torch.float32)])
    with pytest.raises(ValueError, match="a takes 16 bytes, not 20"):
        writer.write("a", torch.ones(5))
    with pytest.raises(ValueError, match=r"float32, not torch\.float64"):
        writer.write("a", torch.ones(2, dtype=torch.float64))
    writer.close()


def test_shards_get_an_index_in_bytes_and_one_file_gets_none(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(5).bfloat16(), "b": torch.randn(3), "c": torch.empty(0)}
    for folder, shards in (
        ("one", [("model.safetensors", ["a", "b", "c"])]),
        ("two", [("model-1.safetensors", ["a"]), ("model-2.safetensors", ["b", "c"])]),
    ):
        (tmp_path / folder).mkdir()
        with CheckpointWriter(tmp_path / folder, shards, infos(tensors)) as writer:
            for name, tensor in tensors.items():
                writer.write(name, tensor)
            writer.finish()
    assert not (tmp_path / "one" / INDEX_NAME).exists()
    index = json.loads((tmp_path / "two" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 5 * 2 + 3 * 4
    assert index["weight_map"] == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
        "c": "model-2.safetensors",
    }
    got = load_file(tmp_path / "two/model-1.safetensors")
    assert_same(got | load_file(tmp_path / "two/model-2.safetensors"), tensors)


def test_a_repeated_tensor_has_the_bytes_of_its_source(tmp_path: Path) -> None:
    tied = torch.randn(6, 2)
    tensors = {"head": tied, "middle": torch.randn(2), "embedding": tied}
    shards = [("a.safetensors", ["head", "middle"]), ("b.safetensors", ["embedding"])]
    with CheckpointWriter(tmp_path, shards, infos(tensors)) as writer:
        writer.write("middle", tensors["middle"])
        writer.write("embedding", tied)
        writer.repeat("head", "embedding")
        writer.finish()
    got = load_file(tmp_path / "a.safetensors") | load_file(tmp_path / "b.safetensors")
    assert_same(got, tensors)
    assert writer.crc32["head"] == writer.crc32["embedding"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_sentence_with_the_bytes_needed(tmp_path: Path) -> None:
    with (
        pytest.raises(
            CheckpointError, match=r"model could not be written: the disk is full.*1,234"
        ),
        os_errors(tmp_path / "model", needed=1234),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        full.write(b"x")
