"""Merged folders of real architectures load in transformers as if it had saved them itself."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast

from mergekit_iso import merge, merge_checkpoints, task_vector
from tests.checkpoints_factory import ARCHITECTURES, Architecture, make_family

METHODS = ("average", "ties", "dare", "tsv", "iso_c", "iso_cts")
TIED = {"qwen2", "gpt2", "bert"}


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """What transformers logs as a warning or worse."""
    log = _Log()
    logger = logging.getLogger("transformers")
    logger.addHandler(log)
    yield log.messages
    logger.removeHandler(log)


def load(folder: Path, arch: Architecture) -> torch.nn.Module:
    auto = AutoModelForMaskedLM if arch == "bert" else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for f in sorted(folder.glob("*.safetensors")) for k, v in load_file(f).items()}


def merged_in_memory(base: Path, models: list[Path], method: str) -> dict[str, torch.Tensor]:
    start = stored(base)
    return merge(start, [task_vector(start, stored(m)) for m in models], method)


def assert_same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def tied(model: torch.nn.Module) -> bool:
    return model.get_input_embeddings().weight is model.get_output_embeddings().weight


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_merge_loads_without_a_warning_and_equals_the_merge_in_memory(
    tmp_path: Path, warned: list[str], arch: Architecture, method: str
) -> None:
    base, models = make_family(tmp_path, arch)
    out = tmp_path / "out"
    merge_checkpoints(base, models, method, out)

    model = load(out, arch)
    assert warned == []
    assert tied(model) == (arch in TIED)
    assert_same_bits(stored(out), merged_in_memory(base, models, method))
    assert not torch.equal(
        model.get_input_embeddings().weight, load(base, arch).get_input_embeddings().weight
    )


@pytest.mark.parametrize("arch", ["llama", "qwen2", "mixtral"])
def test_a_sharded_bfloat16_merge_is_sharded_loads_and_has_the_same_bits(
    tmp_path: Path, warned: list[str], arch: Architecture
) -> None:
    base, models = make_family(tmp_path, arch, dtype=torch.bfloat16, shard_size="40KB")
    assert len(list(base.glob("*.safetensors"))) > 1
    out = tmp_path / "out"
    merge_checkpoints(base, models, "iso_c", out, max_shard_size="20KB")

    shards = list(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(shards) > len(list(base.glob("*.safetensors")))
    assert set(index["weight_map"].values()) == {shard.name for shard in shards}
    assert load(out, arch).dtype == torch.bfloat16
    assert warned == []
    assert_same_bits(stored(out), merged_in_memory(base, models, "iso_c"))


@pytest.mark.parametrize("arch", [a for a in ARCHITECTURES if a != "bert"])
def test_a_merge_generates_text(tmp_path: Path, warned: list[str], arch: Architecture) -> None:
    base, models = make_family(tmp_path, arch)
    out = tmp_path / "out"
    merge_checkpoints(base, models, "task_arithmetic", out)

    # AutoTokenizer would build Qwen2's own tokenizer, which this vocabulary does not fit.
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    prompt = tokenizer("word1 word2 word3", return_tensors="pt")
    model = load(out, arch)
    written = model.generate(**prompt, min_new_tokens=5, max_new_tokens=5, do_sample=False)
    assert written.shape == (1, prompt["input_ids"].shape[1] + 5)
    assert tokenizer.decode(written[0]).startswith("<s> word1 word2 word3 ")
    assert warned == []


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_untied_head_stays_untied_and_a_tied_one_tied(
    tmp_path: Path, warned: list[str], arch: Architecture
) -> None:
    unusual = arch not in TIED
    base, models = make_family(tmp_path, arch, tie=unusual)
    out = tmp_path / "out"
    merge_checkpoints(base, models, "ties", out)

    model = load(out, arch)
    assert tied(model) == unusual
    assert model.config.tie_word_embeddings == unusual
    assert ("lm_head.weight" in stored(out)) == (not unusual)
    assert warned == []
