"""TIES against a literal computation in NumPy, on numbers whose sums are exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergekit_iso import merge
from mergekit_iso.errors import MethodError
from mergekit_iso.methods import TIES
from mergekit_iso.methods.base import Context
from mergekit_iso.tensors import TensorInfo
from tests.kernels.matrices import gaussian
from tests.methods.models import B, W, deltas_of, merged, merged_weight

Array = np.ndarray[Any, np.dtype[np.float64]]


def reference(
    vectors: list[Array], weights: list[float], density: float, sign: str, aggregate: str
) -> Array:
    """Merge whole-model vectors: trim Δ, elect on wΔ, average wΔ over the w that agree."""
    d = len(vectors[0])
    trimmed = []
    for v in vectors:
        k = d - int(d * density)
        threshold = np.sort(np.abs(v))[k - 1] if density < 1 else 0.0
        trimmed.append(np.where((np.abs(v) >= threshold) & (density > 0), v, 0.0))
    weighted = [w * v for w, v in zip(weights, trimmed, strict=True)]
    votes = sum(np.sign(v) if sign == "frequency" else v for v in weighted)
    elected = np.sign(votes)
    elected[elected == 0] = np.sign(elected.sum())
    result = np.zeros(d)
    for i in range(d):
        agree = [
            (v[i], w)
            for v, w in zip(weighted, weights, strict=True)
            if (v[i] > 0 if elected[i] > 0 else v[i] < 0)
        ]
        if agree and aggregate == "max":
            result[i] = max((v for v, _ in agree), key=abs)
        elif agree:
            share = sum(w for _, w in agree) if aggregate == "mean" else 1.0
            result[i] = sum(v for v, _ in agree) / share
    return result


@st.composite
def eighths(draw: st.DrawFn) -> list[dict[str, Tensor]]:
    """Draw 1 to 4 deltas of two tensors with entries in {−4/8 … 4/8}: many ties, many zeros."""
    rows, columns, bias = (draw(st.integers(1, 5)) for _ in range(3))
    entry = st.integers(-4, 4).map(lambda i: i / 8)
    deltas = []
    for _ in range(draw(st.integers(1, 4))):
        size = rows * columns + bias
        flat = torch.tensor(draw(st.lists(entry, min_size=size, max_size=size))).double()
        deltas.append({W: flat[: rows * columns].view(rows, columns), B: flat[rows * columns :]})
    return deltas


def flat(model: dict[str, Tensor]) -> Array:
    return np.concatenate([model[k].numpy().reshape(-1) for k in sorted(model)])


@settings(max_examples=150)
@given(
    deltas=eighths(),
    density=st.sampled_from((0.0, 1e-9, 0.2, 0.5, 0.75, 1.0)),
    sign=st.sampled_from(("total", "frequency")),
    aggregate=st.sampled_from(("mean", "sum", "max")),
    data=st.data(),
)
def test_is_the_literal_computation(
    deltas: list[dict[str, Tensor]], density: float, sign: str, aggregate: str, data: st.DataObject
) -> None:
    weights = [data.draw(st.sampled_from((0.25, 0.5, 1.0, 2.0))) for _ in deltas]
    expected = reference([flat(d) for d in deltas], weights, density, sign, aggregate)
    options = {"density": density, "sign": sign, "aggregate": aggregate}
    got = flat(merged(deltas, "ties", weights=weights, **options))
    assert np.allclose(got, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("mean", [3, -1, 1.5, 0]), ("sum", [3, -2, 3, 0]), ("max", [3, -1, 2, 0])],
)
def test_four_entries_by_hand(aggregate: str, expected: list[float]) -> None:
    deltas = [{W: torch.tensor([3.0, -1, 2, 0])}, {W: torch.tensor([-2.0, -1, 1, 0])}]
    assert merged_weight(deltas, "ties", density=1.0, aggregate=aggregate).tolist() == expected


def test_weights_count_at_the_election_and_not_at_the_trim() -> None:
    deltas = [{W: torch.tensor([4.0, 3.0, 0.5, 0.25])}, {W: torch.tensor([-2.0, 1.0, 4.0, 0.5])}]
    # Trimmed to (4, 3, 0.5, 0) and (−2, 1, 4, 0): k = 2, and three entries reach the threshold.
    got = merged_weight(deltas, "ties", density=0.5, weights=[1.0, 3.0])
    assert got.tolist() == [-2, (3 + 3) / 4, (0.5 + 12) / 4, 0]


def test_equal_weights_cancel_in_the_mean() -> None:
    deltas = deltas_of(3, 6, 8)
    plain = merged_weight(deltas, "ties")
    assert torch.allclose(merged_weight(deltas, "ties", weights="mean"), plain)
    assert torch.allclose(merged_weight(deltas, "ties", weights=3.0), plain)


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_density_0_is_the_base(scope: str) -> None:
    assert merged_weight(deltas_of(3, 6, 8), "ties", density=0.0, scope=scope).count_nonzero() == 0


@pytest.mark.parametrize("scope", ["model", "tensor"])
def test_density_1_trims_nothing(scope: str) -> None:
    deltas = deltas_of(1, 6, 8)
    got = merged_weight(deltas, "ties", density=1.0, scope=scope)
    assert torch.equal(got, deltas[0][W])


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("density", [1e-9, 0.1, 0.2, 0.5, 0.99])
def test_counts_that_are_kept(size: int, density: float) -> None:
    delta = [{W: gaussian(size)}]
    whole = merged_weight(delta, "ties", density=density)
    within = merged_weight(delta, "ties", density=density, scope="tensor")
    assert int(whole.count_nonzero()) == int(size * density) + 1
    assert int(within.count_nonzero()) == int(size * density)


def test_the_scope_of_the_trim() -> None:
    delta = [{W: torch.tensor([[1.0, 2.0], [3.0, 4.0]]), B: torch.tensor([10.0, 20, 30, 40])}]
    whole = merged(delta, "ties", density=0.25)
    assert whole[W].tolist() == [[0, 0], [0, 0]]
    assert whole[B].tolist() == [0, 20, 30, 40]
    within = merged(delta, "ties", density=0.25, scope="tensor")
    assert within[W].tolist() == [[0, 0], [0, 4]]
    assert within[B].tolist() == [0, 0, 0, 40]


def test_tied_entries() -> None:
    delta = [{W: torch.tensor([1.0, -1.0, 1.0, 1.0, 2.0])}]
    assert merged_weight(delta, "ties", density=0.2).tolist() == [1, -1, 1, 1, 2]
    within = merged_weight(delta, "ties", density=0.6, scope="tensor")
    assert within.tolist() == [1, -1, 0, 0, 2]


@pytest.mark.parametrize(
    ("rest", "expected"), [([1.0, 1.0], 2.0), ([-1.0, -1.0], -2.0), ([1.0, -1.0], -2.0)]
)
def test_an_entry_without_majority_takes_the_model_s(rest: list[float], expected: float) -> None:
    one = {W: torch.tensor([2.0]), B: torch.tensor(rest)}
    other = {W: torch.tensor([-2.0]), B: torch.tensor([0.0, 0.0])}
    assert merged([one, other], "ties", density=1.0)[W].tolist() == [expected]


def test_within_tensors_an_entry_without_majority_is_positive() -> None:
    deltas = [{W: torch.tensor([2.0, -1, -1])}, {W: torch.tensor([-2.0, -1, -1])}]
    got = merged_weight(deltas, "ties", density=1.0, scope="tensor")
    assert got.tolist() == [2, -1, -1]


def test_the_majority_ignores_tensors_that_are_not_merged() -> None:
    base = {W: torch.zeros(1), B: torch.zeros(2), "steps": torch.tensor([5])}
    deltas = [{W: torch.tensor([2.0])}, {W: torch.tensor([-2.0])}]
    result = merge(base, deltas, "ties", density=1.0)
    assert result[W].tolist() == [-2]
    assert torch.equal(result[B], base[B])


def test_a_mean_without_positive_weight_is_refused() -> None:
    deltas = deltas_of(2, 3, 4)
    with pytest.raises(MethodError, match=f"weights.*{W}") as raised:
        merged_weight(deltas, "ties", density=1.0, weights=[-1.0, -1.0])
    assert "aggregate=sum" in raised.value.hint
    total = merged_weight(deltas, "ties", density=1.0, weights=[-1.0, -1.0], aggregate="sum")
    assert total.count_nonzero() == 12


def test_a_negative_weight_turns_a_delta_round() -> None:
    deltas = [{W: torch.tensor([1.0, 2.0])}, {W: torch.tensor([-3.0, 1.0])}]
    got = merged_weight(deltas, "ties", density=1.0, weights=[3.0, -1.0], aggregate="sum")
    assert got.tolist() == [6, 6]
    mean = merged_weight(deltas, "ties", density=1.0, weights=[3.0, -1.0])
    assert mean.tolist() == [3, 2]


def test_float64_thresholds_are_float64() -> None:
    close = torch.tensor([1.0, 1.0 + 1e-12, 1.0 + 2e-12], dtype=torch.float64)
    got = merged_weight([{W: close}], "ties", density=0.34)
    assert got.count_nonzero() == 2


def test_mixed_dtypes_share_one_threshold() -> None:
    delta = [{W: torch.tensor([1.0, 3.0]), B: torch.tensor([2.0, 3.0 - 1e-12]).double()}]
    got = merged(delta, "ties", density=0.25)
    assert got[W].tolist() == [0, 3]
    assert got[B].tolist() == [0, float(delta[0][B][1])]


class NoElection(TIES):
    def partial(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> int:
        raise AssertionError("the whole model was asked for its majority")


def test_the_model_s_majority_is_gathered_only_where_votes_cancel() -> None:
    deltas = deltas_of(3, 6, 8)
    assert torch.equal(merged_weight(deltas, NoElection()), merged_weight(deltas, "ties"))
    deltas[1][W] = -deltas[0][W]
    with pytest.raises(AssertionError, match="majority"):
        merged_weight(deltas[:2], NoElection())
