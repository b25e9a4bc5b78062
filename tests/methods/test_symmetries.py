"""The symmetries that methods declare, over random shapes, and those that they do not have."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergekit_iso.errors import MergeWarning
from mergekit_iso.methods import MergeMethod, get_method, list_methods
from mergekit_iso.testing import symmetry_error
from tests.kernels.matrices import gaussian
from tests.methods.models import W, deltas_of, merged_weight, singular_values, total

ALL = {"permutation", "scale", "odd", "rotation", "transpose", "idempotent", "identity"}

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((entry.name, {}) for entry in list_methods()),
    ("ties", {"scope": "tensor"}),
    ("ties", {"aggregate": "max", "sign": "frequency"}),
    ("dare", {"rescale": False}),
    ("dare_ties", {"density": 1.0}),
    ("tsv", {"rank_fraction": 0.5}),
    ("tsv", {"rank_tolerance": 0.3}),
    ("tsv", {"min_rank": 1}),
    ("iso_c", {"norm": "frobenius"}),
    ("iso_c", {"power": 0.5}),
    ("iso_c", {"rank_tolerance": 0.3}),
    ("iso_c", {"polar": {"name": "newton_schulz", "preset": "muon5"}}),
    ("iso_cts", {"common_fraction": 0.5}),
    ("iso_cts", {"power": 0.5, "norm": "frobenius"}),
]
METHODS = [get_method(name, **options) for name, options in VARIANTS]

DECLARED = [
    pytest.param(method, symmetry, id=f"{name}-{options}-{symmetry}")
    for (name, options), method in zip(VARIANTS, METHODS, strict=True)
    for symmetry in sorted(method.symmetries)
]


@st.composite
def models(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Draw 1 to 4 deltas of a matrix and a vector whose sum is well conditioned."""
    tasks = draw(st.integers(1, 4))
    rows, columns = draw(st.integers(4, 12)), draw(st.integers(4, 12))
    deltas = deltas_of(tasks, rows, columns, seed=draw(st.integers(0, 10**6)))
    sigma = singular_values(total(deltas))
    assume(float(sigma[-1]) > 1e-2 * float(sigma[0]))
    return [d | {"layer.bias": d[W][0] + 1} for d in deltas]


@pytest.mark.parametrize(("method", "symmetry"), DECLARED)
@settings(max_examples=12)
@given(deltas=models())
def test_declared_symmetries_hold(
    method: MergeMethod, symmetry: str, deltas: list[dict[str, Tensor]]
) -> None:
    assert symmetry in ALL
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MergeWarning)
        assert symmetry_error(method, symmetry, deltas) < 1e-6


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_method_scales(method: MergeMethod) -> None:
    assert "scale" in method.symmetries


ABSENT: list[tuple[str, str]] = [
    ("ties", "rotation"),
    ("ties", "identity"),
    ("ties", "idempotent"),
    ("dare", "permutation"),
    ("dare", "rotation"),
    ("dare", "identity"),
    ("dare_ties", "permutation"),
    ("iso_c", "identity"),
    ("iso_c_ns", "identity"),
    ("iso_cts", "transpose"),
    ("iso_cts", "identity"),
]


@pytest.mark.parametrize(("name", "symmetry"), ABSENT)
def test_symmetries_that_methods_do_not_have(name: str, symmetry: str) -> None:
    method = get_method(name)
    assert symmetry not in method.symmetries
    tasks = 1 if symmetry == "identity" else 3
    assert symmetry_error(method, symmetry, deltas_of(tasks, 16, 20)) > 1e-3


def test_tsv_loses_directions_that_a_second_merge_would_need() -> None:
    method = get_method("tsv")
    first = merged_weight(deltas_of(3, 8, 9), method)
    again = merged_weight([{W: first}, {W: first}], method)
    assert float((again - first).norm() / first.norm()) > 1e-2


def test_ties_is_odd_but_for_votes_that_sum_to_zero() -> None:
    method = get_method("ties", density=1.0)
    assert "odd" not in method.symmetries
    assert symmetry_error(method, "odd", deltas_of(3, 8, 9)) < 1e-12
    one, other = torch.tensor([[1.0, 2.0]]), torch.tensor([[-1.0, 1.0]])
    plain = merged_weight([{W: one}, {W: other}], method)
    negated = merged_weight([{W: -one}, {W: -other}], method)
    assert plain.tolist() == [[1, 1.5]]  # a tie takes the majority sign, here +
    assert negated.tolist() == [[-1, -1.5]]
    alone, opposite = torch.tensor([[1.0]]), torch.tensor([[-1.0]])
    for tied in ([{W: alone}, {W: opposite}], [{W: -alone}, {W: -opposite}]):
        assert merged_weight(tied, method).tolist() == [[-1]]  # without a majority it takes −


def test_duplicates_are_no_idempotence() -> None:
    """T copies of one delta: means and Iso-C's direction stay, TSV keeps 1/T of the rank."""
    A = gaussian(6, 8)
    twice = [{W: A}, {W: A}]
    assert torch.equal(merged_weight(twice, "average"), A)
    assert torch.allclose(merged_weight(twice, "iso_c"), 2 * merged_weight([{W: A}], "iso_c"))
    duplicated = singular_values(merged_weight(twice, "tsv"))
    assert int((duplicated > 1e-9).sum()) == 3
