"""Which files of the base come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from mergekit_iso.checkpoints.files import carried_files

CARRIED = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
    "preprocessor_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "modeling_custom.py",
    "LICENSE",
    ".gitattributes",
    "1_Pooling/config.json",
    "docs/README.md",
    "scheduler_config.json",
    "images/plot.png",
)
LEFT = (
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "model.pt",
    "consolidated.00.pth",
    "last.ckpt",
    "model.ckpt.index",
    "model.ckpt.data-00000-of-00001",
    "tf_model.h5",
    "flax_model.msgpack",
    "rust_model.ot",
    "model-Q4_K_M.gguf",
    "onnx/model.onnx",
    "onnx/model.onnx_data",
    "openvino/openvino_model.xml",
    "openvino/openvino_model.bin",
    "2_Dense/model.safetensors",
    "trainer_state.json",
    "training_args.bin",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "rng_state_0.pth",
    "runs/Jan01/events.out.tfevents.1.host",
    "runs/notes.txt",
    ".cache/huggingface/download/tokenizer.json.metadata",
    ".git/config",
    "checkpoint-500/tokenizer.json",
    "global_step500/state.json",
    "wandb/run.json",
    "__pycache__/modeling.pyc",
    ".lock",
    "tokenizer.json.lock",
    "README.md",
    "config.json",
    "mergekit_iso.json",
)


def touch(folder: Path, name: str) -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)


def test_everything_but_weights_and_left_overs_is_carried(tmp_path: Path) -> None:
    for name in (*CARRIED, *LEFT):
        touch(tmp_path, name)
    assert carried_files(tmp_path) == tuple(sorted(CARRIED))


@pytest.mark.parametrize("name", ["MODEL.SAFETENSORS", "Model.BIN"])
def test_the_case_of_a_suffix_does_not_matter(tmp_path: Path, name: str) -> None:
    touch(tmp_path, name)
    assert carried_files(tmp_path) == ()


def test_links_to_files_are_carried_and_broken_ones_are_not(tmp_path: Path) -> None:
    touch(tmp_path, "blobs/abc")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "tokenizer.json").symlink_to("../blobs/abc")
    (snapshot / "gone.json").symlink_to("../blobs/none")
    assert carried_files(snapshot) == ("tokenizer.json",)
