"""Methods by name, their options, and what is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import yaml

from mergekit_iso import merge
from mergekit_iso.errors import MethodError
from mergekit_iso.kernels import polar
from mergekit_iso.methods import (
    DARE,
    DARETIES,
    TIES,
    TSV,
    Average,
    IsoC,
    IsoCTS,
    MergeMethod,
    TaskArithmetic,
    get_method,
    list_methods,
    method_entry,
    register,
)
from tests.methods.models import W, deltas_of, merged_weight

CLASSES = [Average, TaskArithmetic, TIES, DARE, DARETIES, TSV, IsoC, IsoCTS]
NAMES = [
    "average",
    "dare",
    "dare_ties",
    "iso_c",
    "iso_c_fast",
    "iso_c_ns",
    "iso_cts",
    "task_arithmetic",
    "ties",
    "tsv",
]
INSTANCES: list[MergeMethod] = [
    *(get_method(name) for name in NAMES),
    TIES(density=0.5, scope="tensor", sign="frequency", aggregate="max"),
    DARETIES(drop_rate=0.9, rescale=False, density=1.0),
    TSV(rank_fraction=0.25, min_rank=2, polar=polar.Fast(tolerance=0.01), rank_tolerance=1e-3),
    IsoC(polar=polar.NewtonSchulz(coefficients=[[2.0, -1.5, 0.5]], steps=9), norm="frobenius"),
    IsoC(polar=polar.Exact(null_rtol=1e-3), power=0.5),
    IsoCTS(common_fraction=1.0, power=1.0),
]
each_instance = pytest.mark.parametrize("method", INSTANCES, ids=repr)


def test_the_names() -> None:
    assert [entry.name for entry in list_methods()] == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_entries_say_what_a_method_is(name: str) -> None:
    entry = method_entry(name)
    assert entry.cls in CLASSES
    assert entry.paper.startswith("arXiv:")
    assert entry.summary.endswith(".")
    assert "\n" not in entry.summary
    assert entry.formula
    assert entry.cost
    assert entry.cls(**entry.defaults) == get_method(name)


@each_instance
def test_options_survive_yaml(method: MergeMethod) -> None:
    text = yaml.safe_dump(method.options())
    assert get_method(method.name, **yaml.safe_load(text)) == method


@each_instance
def test_repr_evaluates_to_the_method(method: MergeMethod) -> None:
    names = {cls.__name__: cls for cls in (*CLASSES, polar.Exact, polar.Fast, polar.NewtonSchulz)}
    assert eval(repr(method), names) == method


@each_instance
def test_methods_are_values(method: MergeMethod) -> None:
    assert hash(method) == hash(get_method(method.name, **method.options()))
    with pytest.raises(AttributeError):
        method.anything = 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("iso-c", "iso_c"), ("tie", "ties"), ("daretis", "dare_ties"), ("averge", "average")],
)
def test_an_unknown_method_is_answered_with_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(MethodError, match=name) as raised:
        merge({}, [{}], name)
    assert f"did you mean {nearest!r}?" in raised.value.hint
    assert all(valid in raised.value.hint for valid in NAMES)


@pytest.mark.parametrize(
    ("name", "option", "nearest"),
    [
        ("ties", "densty", "density"),
        ("iso_c_ns", "pola", "polar"),
        ("dare", "droprate", "drop_rate"),
    ],
)
def test_an_unknown_option_is_answered_with_the_nearest(
    name: str, option: str, nearest: str
) -> None:
    with pytest.raises(MethodError, match=f"{name}.*{option}") as raised:
        merge({}, [{}], name, **{option: 0.5})
    assert f"did you mean {nearest!r}?" in raised.value.hint


def test_a_method_without_options_says_so() -> None:
    with pytest.raises(MethodError, match="density") as raised:
        get_method("average", density=0.5)
    assert "no options" in raised.value.hint


def test_an_object_and_a_name_are_the_same_method() -> None:
    deltas = deltas_of(3, 6, 8)
    by_name = merged_weight(deltas, "ties", density=0.5, scope="tensor")
    by_object = merged_weight(deltas, TIES(density=0.5, scope="tensor"))
    assert torch.equal(by_name, by_object)


def test_options_beside_an_object_are_refused() -> None:
    with pytest.raises(MethodError, match="density") as raised:
        merge({}, [{}], TIES(), density=0.5)
    assert "TIES(density=" in raised.value.hint


@pytest.mark.parametrize("method", [TIES, None, 3, object()])
def test_what_is_no_method_is_refused(method: Any) -> None:
    with pytest.raises(MethodError, match="MergeMethod"):
        merge({}, [{}], method)


NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("ties", "density", [-0.1, 1.1, NAN, True, "0.2", None, [0.2]]),
        ("ties", "scope", ["layer", 1, None, True]),
        ("ties", "sign", ["mass", 0]),
        ("ties", "aggregate", ["median", ""]),
        ("dare", "drop_rate", [-1e-9, 1.0000001, NAN, False, "0.1"]),
        ("dare", "rescale", [1, "true", None]),
        ("dare_ties", "density", [2, True]),
        ("tsv", "rank_fraction", [0, -0.5, 1.5, NAN, True, "1"]),
        ("tsv", "min_rank", [-1, 1.0, 1.5, True, "1", None]),
        ("tsv", "rank_tolerance", [-0.1, 1.0, NAN, True]),
        ("iso_c", "norm", ["spectral", None]),
        ("iso_c", "power", [-0.1, 1.1, NAN, True]),
        ("iso_c", "polar", [3, None, ["fast"], "svd", polar.Exact, {"name": "svd"}]),
        ("iso_cts", "common_fraction", [-0.1, 1.1, NAN, True, "0.8"]),
    ],
)
def test_values_that_do_not_fit_are_refused(name: str, option: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(MethodError, match="polar" if option == "polar" else option):
            get_method(name, **{option: value})


@pytest.mark.parametrize(
    ("name", "option", "values"),
    [
        ("ties", "density", [0, 0.0, 1e-9, 0.5, 1, 1.0]),
        ("dare", "drop_rate", [0, 1e-9, 0.5, 1]),
        ("tsv", "rank_fraction", [None, 0.2, 0.5, 1]),
        ("iso_c", "power", [0, 1e-9, 0.5, 1]),
        ("iso_cts", "common_fraction", [1e-9, 0.5, 1]),
    ],
)
def test_fractions_work_at_their_ends(name: str, option: str, values: list[Any]) -> None:
    for value in values:
        method = get_method(name, **{option: value})
        assert merged_weight(deltas_of(2, 6, 8), method).isfinite().all()
        assert type(method.options()[option]) in (float, type(None))


@pytest.mark.parametrize("name", NAMES)
def test_a_taken_name_is_refused(name: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Another(MergeMethod):
        """Another."""

    with pytest.raises(MethodError, match=name):
        register(name)(Another)
    assert method_entry(name).cls is not Another


def test_errors_are_one_line() -> None:
    with pytest.raises(MethodError) as raised:
        get_method("ties", density=7)
    assert "\n" not in str(raised.value)
    assert "density" in str(raised.value)
    assert "7" in str(raised.value)
    with pytest.raises(MethodError, match="nothing to merge"):
        merge({W: torch.ones(2)}, [], "ties")
