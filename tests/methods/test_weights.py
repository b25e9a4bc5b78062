"""Weights: in sums any finite number, in means a share, and a zero takes part in nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from mergekit_iso.errors import MergeWarning, MethodError
from mergekit_iso.methods import list_methods
from tests.kernels.matrices import gaussian
from tests.methods.models import B, W, deltas_of, merged, merged_weight, total

NAMES = [entry.name for entry in list_methods()]
SUMS = ["task_arithmetic", "ties", "dare", "dare_ties"]
MEANS = ["average", "iso_c", "iso_c_ns", "iso_c_fast", "iso_cts", "tsv"]


def models(tasks: int) -> list[dict[str, Tensor]]:
    deltas = deltas_of(tasks, 10, 12)
    return [d | {B: gaussian(5, seed=t)} for t, d in enumerate(deltas)]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[k], other[k]) for k in one)


def test_every_method_is_in_one_of_the_lists() -> None:
    assert sorted(SUMS + MEANS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_ways_to_give_weights(name: str) -> None:
    deltas = models(4)
    assert equal(merged(deltas, name), merged(deltas, name, weights=[1.0] * 4))
    assert equal(merged(deltas, name, weights="mean"), merged(deltas, name, weights=[0.25] * 4))
    assert equal(merged(deltas, name, weights=0.5), merged(deltas, name, weights=[0.5] * 4))
    assert equal(merged(deltas, name, weights=2), merged(deltas, name, weights=(2, 2, 2, 2)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 1.0, 1.0], [], [1.0, float("nan")], [1.0, float("inf")], "median"]
)
def test_weights_that_do_not_fit_are_refused(name: str, weights: Any) -> None:
    with pytest.raises(MethodError, match="weight"):
        merged(models(2), name, weights=weights)


@pytest.mark.parametrize("weights", [["a", "b"], [None, 1.0]])
def test_weights_that_are_no_numbers_are_refused(weights: Any) -> None:
    with pytest.raises(MethodError, match="weight"):
        merged(models(2), "average", weights=weights)


@pytest.mark.parametrize("name", sorted(set(NAMES) - {"dare", "dare_ties"}))
def test_a_zero_takes_part_in_nothing(name: str) -> None:
    deltas = models(3)
    got = merged(deltas, name, weights=[1.0, 0.0, 2.0])
    assert equal(got, merged([deltas[0], deltas[2]], name, weights=[1.0, 2.0]))


@pytest.mark.parametrize("name", SUMS)
def test_only_zeros_leave_the_base_where_the_method_is_a_sum(name: str) -> None:
    got = merged(models(2), name, weights=[0.0, 0.0])
    assert all(v.count_nonzero() == 0 for v in got.values())


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize("weights", [[0.0, 0.0], [1.0, -1.0], [-1.0, -1.0]])
def test_a_mean_over_no_positive_weight_is_refused(name: str, weights: list[float]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MergeWarning)
        with pytest.raises(MethodError, match=r"weights.*layer") as raised:
            merged(models(2), name, weights=weights)
    assert raised.value.hint


@pytest.mark.parametrize("name", sorted(set(MEANS) - {"average"}))
def test_matrices_are_sums_to_spectral_methods(name: str) -> None:
    deltas = deltas_of(2, 10, 12)
    assert merged_weight(deltas, name, weights=[0.0, 0.0]).count_nonzero() == 0
    assert merged_weight(deltas, name, weights=[1.0, -1.0]).count_nonzero() > 0


@pytest.mark.parametrize("name", ["task_arithmetic", "average"])
def test_linear_methods(name: str) -> None:
    deltas = models(3)
    weights = [2.0, -0.5, 0.25]
    weighted = [{k: v * w for k, v in d.items()} for d, w in zip(deltas, weights, strict=True)]
    share = sum(weights) if name == "average" else 1.0
    got = merged(deltas, name, weights=weights)
    for key in (W, B):
        assert torch.allclose(got[key], total(weighted, key) / share, rtol=1e-12)


def test_weights_that_sum_to_one_make_iso_c_the_mean_form() -> None:
    deltas = models(4)
    sums, means = merged(deltas, "iso_c"), merged(deltas, "iso_c", weights="mean")
    assert torch.allclose(means[W], sums[W] / 4, rtol=1e-9)
    assert torch.allclose(means[B], sums[B], rtol=1e-12)


@pytest.mark.parametrize("name", ["iso_c", "iso_cts", "tsv"])
def test_means_of_vectors_are_weighted(name: str) -> None:
    deltas = models(2)
    got = merged(deltas, name, weights=[3.0, 1.0])[B]
    assert torch.allclose(got, 0.75 * deltas[0][B] + 0.25 * deltas[1][B], rtol=1e-12)
