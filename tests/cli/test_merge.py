from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mergekit_iso import merge, task_vector

KEPT = "position_ids"


def merged(family, method: str, **arguments) -> dict[str, torch.Tensor]:
    base = family.tensors["base"]
    deltas = [task_vector(base, family.tensors[name]) for name in "ab"]
    return merge(base, deltas, method, **arguments)


def assert_same(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    written = load_file(folder / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, tensor in written.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize(
    ("options", "method", "arguments"),
    [
        ([], "task_arithmetic", {}),
        (
            ["--scale", "0.5", "--weight", "2", "--weight", "-1"],
            "task_arithmetic",
            {"scale": 0.5, "weights": [2.0, -1.0]},
        ),
        (
            ["--weight", "mean", "--set", "polar=newton_schulz", "--set", "polar.steps=5"],
            "iso_c",
            {"weights": "mean", "polar": {"name": "newton_schulz", "steps": 5}},
        ),
        (
            ["--set", "polar.norm_eps=1e-3"],
            "iso_c_ns",
            {"polar": {"name": "newton_schulz", "norm_eps": 1e-3}},
        ),
        (["--exclude", "layers.*"], "iso_c", {"exclude": ["layers.*"]}),
        (["--no-exclude"], "iso_c", {"exclude": []}),
        (
            ["--seed", "7", "--round", "2", "--set", "rescale=false", "--set", "drop_rate=0.5"],
            "dare",
            {"seed": 7, "round": 2, "rescale": False, "drop_rate": 0.5},
        ),
    ],
)
def test_options_mean_what_they_mean_in_the_library(
    run, family, options: list[str], method: str, arguments: dict
) -> None:
    result = run("merge", "base", "a", "b", "--method", method, "-o", "out", *options)
    assert result.returncode == 0, result.stderr
    assert_same(family.folder / "out", merged(family, method, **arguments))


def test_the_result_goes_to_stdout_and_the_summary_to_stderr(run, family) -> None:
    result = run("merge", "base", "a", "b", "--method", "average", "-o", "out")
    assert Path(result.stdout.rstrip("\n")).resolve() == family.folder / "out"
    assert "4 tensors" in result.stderr.splitlines()[-1]
    assert "\x1b" not in result.stderr
    assert "\r" not in result.stderr


def test_quiet_and_json(run, family) -> None:
    result = run("merge", "base", "a", "b", "--method", "average", "-o", "out", "-q", "--json")
    assert result.stderr == ""
    document = json.loads(result.stdout)
    assert (document["tensors"], document["method"]) == (4, "average")


def test_the_summary_degrades_to_ascii(run, family) -> None:
    arguments = ("merge", "base", "a", "b", "--method", "average", "-o", "out")
    result = run(*arguments, PYTHONIOENCODING="ascii")
    assert result.returncode == 0
    assert result.stderr.splitlines()[-1].startswith("done: ")


def test_keep_base_and_out_dtype(run, family) -> None:
    result = run(
        "merge",
        "base",
        "a",
        "b",
        "--method",
        "average",
        "-o",
        "out",
        "--keep-base",
        "*.bias",
        "--out-dtype",
        "bfloat16",
    )
    assert result.returncode == 0, result.stderr
    expected = merged(family, "average")
    written = load_file(family.folder / "out" / "model.safetensors")
    bias = "layers.0.bias"
    assert torch.equal(written[bias], family.tensors["base"][bias].bfloat16())
    weight = "layers.0.weight"
    assert torch.equal(written[weight], expected[weight].bfloat16())


def test_an_existing_output_needs_force(run, family) -> None:
    out = ("merge", "base", "a", "b", "--method", "average", "-o", "out")
    assert run(*out, "--scale", "0.5").returncode == 0
    before = (family.folder / "out" / "model.safetensors").read_bytes()
    assert run(*out).returncode == 2
    assert run(*out, "--dry-run").returncode == 2
    assert (family.folder / "out" / "model.safetensors").read_bytes() == before
    assert run(*out, "--force").returncode == 0
    assert_same(family.folder / "out", merged(family, "average"))


def test_dry_run_prints_what_plan_prints_and_writes_nothing(run, family) -> None:
    inputs = ("base", "a", "b", "--method", "iso_c", "--weight", "mean")
    dry = run("merge", *inputs, "-o", "out", "--dry-run")
    planned = run("plan", *inputs)
    assert (dry.returncode, planned.returncode) == (0, 0)
    assert dry.stdout == planned.stdout
    assert "weight 0.5" in planned.stdout
    assert not (family.folder / "out").exists()


@pytest.mark.parametrize(
    ("options", "first"),
    [
        (["iso_c"], "iso_c, scale 1"),
        (["iso_c_ns", "--set", "polar.steps=8"], "iso_c_ns, polar.steps=8, scale 1"),
        (
            ["iso_c", "--set", "polar=newton_schulz", "--set", "polar.steps=8"],
            "iso_c, polar=newton_schulz, polar.steps=8, scale 1",
        ),
        (
            ["dare", "--set", "rescale=false", "--scale", "0.5"],
            "dare, rescale=false, scale 0.5",
        ),
    ],
)
def test_plan_shows_the_method_as_it_is_typed(run, family, options: list[str], first: str) -> None:
    text = run("plan", "base", "a", "b", "--method", *options).stdout
    assert text.splitlines()[0] == first


def test_a_tilde_in_the_output_is_the_home_folder(run, family, tmp_path: Path) -> None:
    home = str(tmp_path / "home")
    merge = run("merge", "base", "a", "--method", "average", "-o", "~/out", HOME=home)
    assert merge.returncode == 0, merge.stderr
    assert (tmp_path / "home" / "out" / "model.safetensors").exists()
    assert run("verify", "~/out", HOME=home).returncode == 0


def test_plan_as_json(run, family) -> None:
    document = json.loads(run("plan", "base", "a", "b", "--method", "iso_c", "--json").stdout)
    assert document["method"] == "iso_c"
    assert [m["model"] for m in document["models"]] == ["a", "b"]
    tensors = {t["name"]: t for t in document["tensors"]}
    assert tensors.keys() == family.tensors["base"].keys()
    assert tensors["layers.0.weight"]["shape"] == [6, 4]
    assert tensors["text_projection.weight"]["excluded"] is True
    assert tensors[KEPT]["action"] == "copy"
    assert [f["file"] for f in document["files"]] == ["model.safetensors"]


def test_verbose_plan_lists_every_tensor(run, family) -> None:
    text = run("plan", "base", "a", "b", "--method", "iso_c", "-v").stdout
    assert all(name in text for name in family.tensors["base"])


def test_warnings_are_labelled_and_shown_once(run, family) -> None:
    result = run("merge", "base", "a", "a", "--method", "average", "--scale", "1e-9", "-o", "out")
    warnings = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
    assert len(warnings) == len(set(warnings))


def test_verify_answers_by_exit_code(run, family) -> None:
    run("merge", "base", "a", "b", "--method", "average", "-o", "out")
    assert run("verify", "out").returncode == 0
    weights = family.folder / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    broken = run("verify", "out")
    assert broken.returncode == 1
    assert "model.safetensors" in broken.stdout
    document = json.loads(run("verify", "out", "--json").stdout)
    assert document["problems"]
    assert run("verify", "absent").returncode == 3
