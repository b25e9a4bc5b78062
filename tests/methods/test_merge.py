"""The runner: which tensors are merged, in what precision, and what it refuses."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from mergekit_iso import merge, task_vector
from mergekit_iso.errors import IncompatibleError, MethodError, NonFiniteError
from mergekit_iso.methods import list_methods
from mergekit_iso.testing import random_models
from tests.kernels.matrices import gaussian
from tests.methods.models import B, W, deltas_of

NAMES = [entry.name for entry in list_methods()]
each_name = pytest.mark.parametrize("name", NAMES)
HALVES = [torch.bfloat16, torch.float16]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


@each_name
def test_what_no_delta_has_and_what_is_not_floating_stays(name: str) -> None:
    base = {
        W: gaussian(6, 8, dtype=torch.float32),
        "frozen.weight": gaussian(3, 3, dtype=torch.bfloat16),
        "position_ids": torch.arange(7),
        "mask": torch.tensor([True, False]),
        "bytes": torch.tensor([0, 255], dtype=torch.uint8),
        "rotation": torch.ones(2, dtype=torch.complex64),
        "nothing": torch.zeros(0, 4),
    }
    delta = {W: gaussian(6, 8, seed=1, dtype=torch.float32), "position_ids": torch.ones(7).long()}
    result = merge(base, [delta | {"nothing": torch.zeros(0, 4)}] * 2, name)
    assert list(result) == list(base)
    for key in base.keys() - {W}:
        assert result[key].dtype == base[key].dtype
        assert torch.equal(result[key], base[key])
        assert result[key].data_ptr() != base[key].data_ptr() or not base[key].numel()
    assert not torch.equal(result[W], base[W])


@each_name
def test_buffers_stay_the_base_s(name: str) -> None:
    """Tensors with the role of a buffer are recomputed or constant, also where they float."""
    buffers = {
        "model.rotary_emb.inv_freq": gaussian(4),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.0.attn.bias": torch.ones(1, 1, 4, 4),
    }
    base = {W: gaussian(6, 8), **buffers}
    result = merge(base, [{k: v + 1 for k, v in base.items()}] * 2, name)
    assert all(torch.equal(result[k], base[k]) for k in buffers)


@each_name
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALVES], ids=str)
def test_zero_deltas_leave_the_base_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    base = {W: gaussian(6, 8).to(dtype), B: torch.tensor([-0.0, 0.0, -1.5]).to(dtype)}
    base[W][0] = -0.0
    for zero in (0.0, -0.0):
        deltas = [{k: torch.full_like(v, zero) for k, v in base.items()}] * 3
        result = merge(base, deltas, name, scale=0.7)
        assert all(torch.equal(bits(result[k]), bits(base[k])) for k in base)


@each_name
def test_a_scale_of_zero_is_the_base(name: str) -> None:
    base = {W: gaussian(6, 8, seed=5), B: torch.tensor([-0.0, 1.0])}
    deltas = [d | {B: torch.ones(2)} for d in deltas_of(2, 6, 8)]
    result = merge(base, deltas, name, scale=0.0)
    assert all(torch.equal(bits(result[k]), bits(base[k])) for k in base)


@pytest.mark.parametrize("scale", [1.0, 0.3, -1.0, -2.5, 1e-30])
@each_name
def test_the_scale_multiplies_the_merged_delta(name: str, scale: float) -> None:
    base = {W: gaussian(6, 8, seed=5)}
    deltas = deltas_of(2, 6, 8)
    zeros = {W: torch.zeros(6, 8, dtype=torch.float64)}
    tau = merge(zeros, deltas, name)[W]
    assert torch.equal(merge(base, deltas, name, scale=scale)[W], base[W] + scale * tau)


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "2", None])
def test_a_scale_that_is_no_finite_number_is_refused(scale: Any) -> None:
    with pytest.raises(MethodError, match="scale"):
        merge({W: torch.ones(2)}, [{W: torch.ones(2)}], "average", scale=scale)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    base = {W: gaussian(64, 64).to(dtype)}
    deltas = [{W: (gaussian(64, 64, seed=t) * 0.01).to(dtype)} for t in (1, 2, 3)]
    total = sum(d[W].float() for d in deltas)
    result = merge(base, deltas, "task_arithmetic", scale=0.3)[W]
    assert torch.equal(result, (base[W].float() + total * 0.3).to(dtype))
    in_steps = base[W] + (deltas[0][W] + deltas[1][W] + deltas[2][W]) * 0.3
    assert not torch.equal(result, in_steps)


def test_float64_is_kept() -> None:
    base, delta = torch.ones(2, 2, dtype=torch.float64), torch.full((2, 2), 1e-12).double()
    assert torch.equal(merge({W: base}, [{W: delta}] * 2, "task_arithmetic")[W], base + 2e-12)
    got = merge({W: base.float()}, [{W: delta}] * 2, "task_arithmetic")[W]
    assert got.dtype == torch.float32
    wide = merge({W: base}, [{W: delta.float()}], "task_arithmetic")[W]
    assert torch.equal(wide, base + delta.float().double())


def test_one_float64_delta_makes_the_sum_float64() -> None:
    base = {W: torch.zeros(1)}
    deltas = [{W: torch.tensor([1.0])}, {W: torch.tensor([2**-30]).double()}, {W: -torch.ones(1)}]
    assert merge(base, deltas, "task_arithmetic")[W].tolist() == [2**-30]


def test_parameters_give_plain_tensors() -> None:
    base, tuned = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    deltas = [task_vector(dict(base.named_parameters()), dict(tuned.named_parameters()))]
    result = merge(dict(base.named_parameters()), deltas, "iso_c")
    for model in (deltas[0], result):
        assert all(type(v) is Tensor and not v.requires_grad for v in model.values())


@each_name
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_named(name: str, bad: float) -> None:
    base, deltas = {W: torch.ones(2, 3)}, [{W: torch.ones(2, 3)}, {W: torch.ones(2, 3)}]
    deltas[1][W][0, 1] = bad
    with pytest.raises(NonFiniteError, match=f"1 of 6 .*{W} of delta 1"):
        merge(base, deltas, name)
    with pytest.raises(NonFiniteError, match=f"1 of 6 .*{W} of the base"):
        merge(deltas[1], [base, base], name)


def test_an_overflow_is_no_result() -> None:
    base = {W: torch.full((2,), 60000.0, dtype=torch.float16)}
    with pytest.raises(NonFiniteError, match=f"2 of 2 .*{W}"):
        merge(base, [base], "task_arithmetic")


@each_name
def test_models_that_do_not_fit_are_named(name: str) -> None:
    base = {W: torch.ones(2, 3), B: torch.ones(2)}
    with pytest.raises(IncompatibleError, match=f"delta 1 .*{B}"):
        merge(base, [base, {W: torch.ones(2, 3)}], name)
    with pytest.raises(IncompatibleError, match=f"delta 0 .*{B}"):
        merge(base, [{W: torch.ones(2, 3)}, base], name)
    with pytest.raises(IncompatibleError, match=r"extra.*base"):
        merge(base, [base | {"extra": torch.ones(1)}], name)
    with pytest.raises(IncompatibleError, match=rf"{W}.*\(3, 2\) in delta 1.*\(2, 3\)"):
        merge(base, [base, base | {W: torch.ones(3, 2)}], name)


def test_task_vectors() -> None:
    base = {W: torch.ones(2).bfloat16(), "f64": torch.ones(1).double(), "ids": torch.arange(3)}
    tuned = {W: torch.full((2,), 1.5), "f64": torch.tensor([1.25]), "ids": torch.arange(3) + 1}
    vector = task_vector(base, tuned)
    assert vector.keys() == {W, "f64"}
    assert (vector[W].dtype, vector[W].tolist()) == (torch.float32, [0.5, 0.5])
    assert (vector["f64"].dtype, vector["f64"].tolist()) == (torch.float64, [0.25])
    with pytest.raises(IncompatibleError, match=r"the base .*extra"):
        task_vector(base, tuned | {"extra": torch.ones(1)})
    with pytest.raises(IncompatibleError, match=f"fine-tuned model .*{W}"):
        task_vector(base, {k: v for k, v in tuned.items() if k != W})
    with pytest.raises(IncompatibleError, match=rf"{W}.*\(3,\).*\(2,\)"):
        task_vector(base, tuned | {W: torch.ones(3)})


@pytest.mark.parametrize(
    ("exclude", "excluded"),
    [
        ((), []),
        (["head"], ["model.lm_head.weight"]),
        (["model.*.q_proj.weight"], ["model.layers.0.q_proj.weight"]),
        (["*.0.*"], ["model.layers.0.q_proj.weight"]),
        (["q_proj.*"], []),
        (["role:embedding"], ["model.embed_tokens.weight"]),
        (["role:head", "role:matrix"], ["model.lm_head.weight", "model.layers.0.q_proj.weight"]),
        ("lm_head", ["model.lm_head.weight"]),
    ],
)
@pytest.mark.parametrize("name", ["iso_c", "iso_c_ns", "iso_cts", "tsv"])
def test_excluded_matrices_are_averaged(name: str, exclude: Any, excluded: list[str]) -> None:
    keys = ["model.embed_tokens.weight", "model.layers.0.q_proj.weight", "model.lm_head.weight"]
    deltas = [{k: gaussian(10, 12, seed=10 * t + i) for i, k in enumerate(keys)} for t in range(2)]
    base = {k: torch.zeros(10, 12, dtype=torch.float64) for k in keys}
    result = merge(base, deltas, name, exclude=exclude)
    averaged = [k for k in keys if torch.allclose(result[k], (deltas[0][k] + deltas[1][k]) / 2)]
    assert sorted(averaged) == sorted(excluded)


def test_text_projections_are_excluded_unless_told_otherwise() -> None:
    key = "model.text_projection.weight"
    base, deltas = {key: torch.zeros(6, 8).double()}, deltas_of(2, 6, 8, name=key)
    mean = (deltas[0][key] + deltas[1][key]) / 2
    assert torch.equal(merge(base, deltas, "iso_c")[key], mean)
    assert not torch.allclose(merge(base, deltas, "iso_c", exclude=[])[key], mean)


@pytest.mark.parametrize("name", ["average", "task_arithmetic", "ties", "dare", "dare_ties"])
def test_other_methods_know_no_exclusion(name: str) -> None:
    base, deltas = {W: torch.zeros(6, 8).double()}, deltas_of(2, 6, 8)
    assert torch.equal(
        merge(base, deltas, name, exclude=[W])[W], merge(base, deltas, name, exclude=[])[W]
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
@each_name
def test_results_do_not_depend_on_chunks(
    name: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, deltas = random_models()
    masks = [{W: gaussian(6, 8, seed=t) > 0} for t in range(3)]
    for t, model in enumerate((base, *deltas)):
        model[W] = gaussian(6, 8, seed=20 + t, dtype=torch.float32).mT.contiguous().mT
    arguments = {"weights": [0.5, 2.0, 1.0], "masks": masks, "scale": 0.3}
    options = {"min_rank": 1} if name == "tsv" else {}
    expected = merge(base, deltas, name, **arguments, **options)
    monkeypatch.setattr(import_module("mergekit_iso.merge"), "_CHUNK", size)
    got = merge(base, deltas, name, **arguments, **options)
    assert all(torch.equal(got[k], expected[k]) for k in base)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"deltas": {"a": torch.ones(2)}}, "list of mappings"),
        ({"deltas": [torch.nn.Linear(2, 2)]}, "map names to tensors"),
        ({"deltas": [{"a": [1.0, 2.0]}]}, "to a list, not a tensor"),
        ({"deltas": [{"a": torch.ones(2, device="meta")}]}, "no plain values"),
        ({"masks": [{"b": torch.ones(2, dtype=torch.bool)}]}, "mask of b"),
        ({"seed": 1.5}, "seed"),
        ({"round": None}, "round"),
        ({"exclude": ["role:x"]}, "no such role"),
        ({"exclude": ""}, "exclude"),
        ({"scale": 10**400}, "scale"),
    ],
    ids=str,
)
def test_what_is_no_input_is_refused_in_a_sentence(arguments: dict, message: str) -> None:
    keywords = {"base": {"a": torch.ones(2)}, "deltas": [{"a": torch.ones(2)}]} | arguments
    with pytest.raises(MethodError, match=message) as raised:
        merge(method="average", **keywords)
    assert "\n" not in str(raised.value)


def test_deltas_that_are_not_floating_are_refused() -> None:
    for delta in (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.complex64)):
        with pytest.raises(IncompatibleError, match=str(delta.dtype)):
            merge({"a": torch.ones(2)}, [{"a": delta}], "average")


def test_one_pattern_may_stand_alone() -> None:
    base = {"w.weight": torch.zeros(3, 4)}
    deltas = [{"w.weight": torch.randn(3, 4)} for _ in range(2)]
    alone, listed = (merge(base, deltas, "iso_c", exclude=e) for e in ("w.w", ["w.w"]))
    assert torch.equal(alone["w.weight"], listed["w.weight"])
    assert torch.equal(alone["w.weight"], merge(base, deltas, "average")["w.weight"])
