"""Sign election and disjoint merge, by hand."""

from __future__ import annotations

import pytest
import torch

from mergekit_iso.kernels.signs import disjoint_merge, vote

D1 = torch.tensor([3.0, -1.0, 2.0, 0.0])
D2 = torch.tensor([-2.0, -1.0, 1.0, 0.0])


def test_the_larger_total_elects() -> None:
    assert vote([D1, D2]).sign().tolist() == [1, -1, 1, 0]


def test_by_frequency_every_delta_has_one_vote() -> None:
    assert vote([D1, D2], by="frequency").sign().tolist() == [0, -1, 1, 0]
    big, small = torch.tensor([5.0]), torch.tensor([-1.0])
    assert vote([big, small, small]).sign().tolist() == [1]
    assert vote([big, small, small], by="frequency").sign().tolist() == [-1]


@pytest.mark.parametrize(
    ("aggregate", "expected"),
    [("mean", [3, -1, 1.5, 0]), ("sum", [3, -2, 3, 0]), ("max", [3, -1, 2, 0])],
)
def test_only_deltas_of_the_elected_sign_are_merged(aggregate: str, expected: list[float]) -> None:
    elected = torch.tensor([1.0, -1.0, 0.0, 1.0])
    merged, share = disjoint_merge([D1, D2], [1.0, 1.0], elected, aggregate=aggregate)
    assert merged.tolist() == expected
    assert share.tolist() == [1, 2, 2, 0]


def test_the_mean_is_over_the_weights_that_take_part() -> None:
    weights = [0.5, 2.0]
    deltas = [D1 * 0.5, D2 * 2.0]
    elected = torch.tensor([-1.0, -1.0, 1.0, -1.0])
    merged, share = disjoint_merge(deltas, weights, elected)
    assert merged.tolist() == pytest.approx([-2, -1, (1 + 2) / 2.5, 0])
    assert share.tolist() == [2, 2.5, 2.5, 0]


def test_the_deltas_are_left_alone() -> None:
    before = D1.clone(), D2.clone()
    vote([D1, D2])
    disjoint_merge([D1, D2], [1.0, 1.0], D1)
    assert torch.equal(D1, before[0])
    assert torch.equal(D2, before[1])
