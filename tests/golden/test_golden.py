"""The methods against outputs of their authors' code; data/README.md describes the files."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mergekit_iso import NewtonSchulz, merge
from mergekit_iso.kernels.polar import mean_singular_value, newton_schulz, polar_factor

DATA = Path(__file__).parent / "data"
MANIFEST = json.loads((DATA / "manifest.json").read_text())

# A `default` entry is run with nothing but these; the others of its options are the defaults.
ESSENTIAL = {"density", "drop", "masks", "common_fraction"}
ITERATION = ("coefficients", "norm_safety", "norm_eps")
NAMES = {"drop": "drop_rate"}
NORMS = {"inner": "nuclear", "rms": "frobenius"}

ENTRIES = [
    pytest.param(case, entry, alpha, id=f"{case['id']}-{entry['id']}@{alpha}")
    for case in MANIFEST["cases"]
    for entry in case["entries"]
    if entry["role"] in ("default", "option")
    for alpha in entry["alphas"]
]
ITEMS = MANIFEST["matrices"]["items"]


class Case(NamedTuple):
    base: dict[str, Tensor]
    deltas: list[dict[str, Tensor]]
    masks: dict[str, list[dict[str, Tensor]]]
    merged: dict[str, dict[str, Tensor]]


@cache
def read_case(file: str, tasks: int) -> Case:
    case = Case({}, [{} for _ in range(tasks)], {}, {})
    for name, tensor in load_file(DATA / file).items():
        kind, rest = name.split("/", 1)
        if kind == "base":
            case.base[rest] = tensor
        elif kind == "delta":
            task, key = rest.split("/", 1)
            case.deltas[int(task)][key] = tensor
        elif kind == "mask":
            tag, task, key = rest.split("/", 2)
            masks = case.masks.setdefault(tag, [{} for _ in range(tasks)])
            masks[int(task)][key] = tensor.bool()
        else:
            entry, key = rest.split("/", 1)
            case.merged.setdefault(entry, {})[key] = tensor
    return case


def library_call(entry: dict[str, Any], masks: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    options = dict(entry["options"])
    if entry["role"] == "default":
        options = {k: v for k, v in options.items() if k in ESSENTIAL}
    if "masks" in options:
        options["masks"] = masks[options["masks"]]
    if options.pop("reduce", "sum") == "mean":
        options["weights"] = "mean"
    if entry["method"] == "iso_c_ns":
        polar = NewtonSchulz(**{k: options.pop(k) for k in ITERATION})
        return "iso_c", options | {"polar": polar, "norm": NORMS[options.pop("scale")]}
    return entry["method"], {NAMES.get(k, k): v for k, v in options.items()}


@pytest.mark.parametrize(("case", "entry", "alpha"), ENTRIES)
def test_entry(case: dict[str, Any], entry: dict[str, Any], alpha: float) -> None:
    data = read_case(case["file"], case["tasks"])
    before = [{k: v.clone() for k, v in m.items()} for m in (data.base, *data.deltas)]
    method, options = library_call(entry, data.masks)

    got = merge(data.base, data.deltas, method, scale=alpha, **options)

    for old, new in zip(before, (data.base, *data.deltas), strict=True):
        assert all(torch.equal(old[k], new[k]) for k in old), "an input was modified"
    assert got.keys() == data.base.keys()
    expected = data.merged[f"{entry['id']}@{alpha}"]
    for key, base in data.base.items():
        assert (got[key].shape, got[key].dtype) == (base.shape, base.dtype)
        if key in data.deltas[0]:
            total = sum(d[key].double() for d in data.deltas)
            assert_matches(got[key], expected[key], base, total, entry)
        else:
            assert torch.equal(got[key], base)


def assert_matches(
    got: Tensor, expected: Tensor, base: Tensor, total: Tensor, entry: dict[str, Any]
) -> None:
    assert torch.isfinite(got).all()
    if entry["compare"] == "finite":
        return
    error, update = got.double() - expected, expected - base.double()
    magnitude = base.double().abs() + expected.abs()
    unit = torch.finfo(base.dtype).eps / 2
    if entry["compare"] == "range" and base.dim() == 2:
        left, right = projectors(total)
        error, update = left @ error @ right, left @ update @ right
        rounding = 8 * unit * magnitude.max()  # a projection spreads it over all entries
    elif base.dtype.itemsize < 4:
        rounding = 1.02 * unit * expected.abs()  # computed in float32 and rounded once
    else:
        rounding = 4 * unit * magnitude
    assert (error.abs() <= entry["rtol"] * update.abs().max() + rounding).all()


def projectors(total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the projectors onto column space and row space of a matrix."""
    U, sigma, Vh = torch.linalg.svd(total, full_matrices=False)
    rank = int((sigma > 1e-6 * sigma[0]).sum())
    return U[:, :rank] @ U[:, :rank].T, Vh[:rank].T @ Vh[:rank]


@cache
def matrices() -> dict[str, Tensor]:
    return load_file(DATA / MANIFEST["matrices"]["file"])


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).abs().max() / expected.abs().max())


def single_precision(A: Tensor) -> float:
    return 1e-9 if A.dtype == torch.float64 else 1e-5


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["id"])
def test_polar_factor(item: dict[str, Any]) -> None:
    A = matrices()[f"input/{item['id']}"]
    error = relative_error(polar_factor(A), matrices()[f"polar/{item['id']}"])
    assert error <= single_precision(A) * item["condition"]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["id"])
def test_mean_singular_value(item: dict[str, Any]) -> None:
    A = matrices()[f"input/{item['id']}"]
    expected = item["mean_singular_value"]
    assert float(mean_singular_value(A)) == pytest.approx(expected, rel=single_precision(A))


@pytest.mark.parametrize(
    ("item", "variant"),
    [
        pytest.param(item, variant, id=f"{item['id']}-{variant}")
        for item in ITEMS
        for variant, spec in item["newton_schulz"].items()
        if spec["compute_dtype"] != "bfloat16"
    ],
)
def test_newton_schulz(item: dict[str, Any], variant: str) -> None:
    spec = item["newton_schulz"][variant]
    A = matrices()[f"input/{item['id']}"]
    got = newton_schulz(
        A, spec["coefficients"], norm_safety=spec["norm_safety"], norm_eps=spec["norm_eps"]
    )
    assert relative_error(got, matrices()[f"ns/{variant}/{item['id']}"]) <= spec["rtol"]
