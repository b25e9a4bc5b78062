"""Opening and reading checkpoints that are in order."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mergekit_iso.checkpoints.checkpoint import open_checkpoint
from mergekit_iso.errors import CheckpointError
from tests.checkpoints.small import config, raw_file, weights, write

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_reads_back_whole_and_in_parts(tmp_path: Path, shards: int) -> None:
    tensors = weights()
    checkpoint = open_checkpoint(write(tmp_path / "m", tensors, shards=shards))
    assert set(checkpoint.tensors) == set(tensors)
    assert len(checkpoint.weight_files) == shards
    assert checkpoint.config == config()
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.read(name), expected)
        flat = expected.reshape(-1)
        for start, stop in ((0, 0), (1, 3), (2, flat.numel()), (flat.numel(), flat.numel())):
            assert torch.equal(checkpoint.read_flat(name, start, stop), flat[start:stop])


def test_every_dtype_and_odd_shape_keeps_its_bits(tmp_path: Path) -> None:
    tensors = {f"t{i}": (torch.arange(6) % 2).to(d).reshape(2, 3) for i, d in enumerate(DTYPES)}
    tensors |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "nan": torch.tensor([torch.nan]),
    }
    checkpoint = open_checkpoint(write(tmp_path, tensors))
    for name, expected in tensors.items():
        found = checkpoint.read(name)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(
            found.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)
        )


def test_data_that_begins_at_an_odd_byte_is_read(tmp_path: Path) -> None:
    value = torch.tensor([1.5, -2.0])
    header = {
        "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    raw_file(tmp_path / "model.safetensors", header, b"\1" + value.numpy().tobytes())
    assert torch.equal(open_checkpoint(tmp_path).read("w"), value)


def test_what_is_read_is_the_callers_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, weights()))
    checkpoint.read("model.norm.weight").zero_()
    assert torch.equal(checkpoint.read("model.norm.weight"), weights()["model.norm.weight"])


def test_a_range_outside_the_tensor_is_a_programming_error(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, weights()))
    with pytest.raises(ValueError, match="outside"):
        checkpoint.read_flat("model.norm.weight", 0, 5)


def test_a_checkpoint_can_be_sent_to_another_process(tmp_path: Path) -> None:
    checkpoint = pickle.loads(pickle.dumps(open_checkpoint(write(tmp_path, weights()))))
    assert torch.equal(checkpoint.read("model.norm.weight"), weights()["model.norm.weight"])


def test_tensors_come_in_file_order(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, weights(), shards=2))
    places = [(t.file, t.begin) for t in checkpoint.tensors.values()]
    assert places == sorted(places)


def test_strays_beside_an_index_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, weights(), shards=2)
    save_file({"stray": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    save_file({"stray": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == set(weights())


def test_strays_beside_model_safetensors_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, weights())
    (tmp_path / "model-old.safetensors").write_bytes(b"not a checkpoint")
    assert open_checkpoint(tmp_path).weight_files == ("model.safetensors",)


def test_an_only_file_of_another_name_counts(tmp_path: Path) -> None:
    write(tmp_path, weights())
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    assert open_checkpoint(tmp_path).weight_files == ("weights.safetensors",)


def test_a_single_file_is_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    write(tmp_path, weights())
    checkpoint = open_checkpoint(tmp_path / "model.safetensors")
    assert checkpoint.single_file
    assert checkpoint.config == {}
    assert set(checkpoint.tensors) == set(weights())


def test_a_folder_of_links_is_read_like_a_hub_snapshot(tmp_path: Path) -> None:
    blobs = write(tmp_path / "blobs", weights(), shards=2)
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(os.path.relpath(file, snapshot))
    assert set(open_checkpoint(snapshot).tensors) == set(weights())


@pytest.mark.parametrize("metadata", [{}, None])
def test_metadata_may_be_empty_or_absent(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    header = {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "__metadata__": metadata}
    raw_file(tmp_path / "model.safetensors", header, bytes(4))
    assert list(open_checkpoint(tmp_path).tensors) == ["w"]


def test_the_label_is_what_was_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "m", weights())
    monkeypatch.chdir(tmp_path)
    assert open_checkpoint("./m/").label == "./m/"


@pytest.mark.parametrize("old_format", [False, True])
def test_a_pickle_is_read_only_when_allowed(tmp_path: Path, old_format: bool) -> None:
    tensors = {"w": torch.randn(3, 4).T, "n": torch.tensor([1, 2])}
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path, _use_new_zipfile_serialization=not old_format)
    with pytest.raises(CheckpointError, match=r"pickle \(pytorch_model.bin\)") as refusal:
        open_checkpoint(tmp_path)
    assert "--allow-pickle" in str(refusal.value.hint)
    checkpoint = open_checkpoint(tmp_path, allow_pickle=True)
    assert checkpoint.tensors["w"].shape == (4, 3)
    assert torch.equal(checkpoint.read("w"), tensors["w"])
    assert torch.equal(checkpoint.read_flat("w", 2, 5), tensors["w"].reshape(-1)[2:5])


def test_safetensors_go_before_a_pickle(tmp_path: Path) -> None:
    write(tmp_path, weights())
    (tmp_path / "pytorch_model.bin").write_bytes(b"never looked at")
    assert open_checkpoint(tmp_path, allow_pickle=True).weight_files == ("model.safetensors",)


class _Payload:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_an_allowed_pickle_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"w": _Payload()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="weights only"):
        open_checkpoint(tmp_path, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_pickle_must_be_a_flat_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.zeros(1)}}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="plain mapping"):
        open_checkpoint(tmp_path, allow_pickle=True)
