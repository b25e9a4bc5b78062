"""DARE: what is dropped, what is kept, and what the masks depend on."""

from __future__ import annotations

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from mergekit_iso import merge
from mergekit_iso.errors import MethodError
from tests.kernels.matrices import gaussian
from tests.methods.models import B, W, deltas_of, merged, merged_weight

ONES = [{W: torch.ones(64, 64)}]


def mask(**arguments: Any) -> Tensor:
    """Return which entries of a delta of ones are kept."""
    name = arguments.pop("name", W)
    return merged([{name: ONES[0][W]}], "dare", drop_rate=0.5, **arguments)[name] != 0


@pytest.mark.parametrize("drop_rate", [0.1, 0.25, 0.5, 0.9])
def test_kept_entries_are_divided_exactly(drop_rate: float) -> None:
    deltas = deltas_of(1, 64, 64, dtype=torch.float32)
    got = merged_weight(deltas, "dare", drop_rate=drop_rate)
    kept = got != 0
    assert torch.equal(got[kept], deltas[0][W][kept] / (1 - drop_rate))
    rate = float(kept.double().mean())
    assert abs(rate - (1 - drop_rate)) < 4.5 * sqrt(drop_rate * (1 - drop_rate) / 4096)
    plain = merged_weight(deltas, "dare", drop_rate=drop_rate, rescale=False)
    assert torch.equal(plain, torch.where(kept, deltas[0][W], 0.0))


def test_the_mean_over_seeds_is_the_sum_of_the_deltas() -> None:
    deltas = deltas_of(2, 64, 64)
    seeds, drop_rate = 200, 0.75
    runs = torch.stack(
        [merged_weight(deltas, "dare", drop_rate=drop_rate, seed=s) for s in range(seeds)]
    )
    squares = sum(d[W].square() for d in deltas)
    standard_error = (squares * drop_rate / (1 - drop_rate) / seeds).sqrt()
    z = (runs.mean(0) - deltas[0][W] - deltas[1][W]) / standard_error
    assert abs(float(z.mean())) < 4.5 / 64
    assert float(z.square().mean()) == pytest.approx(1, abs=0.1)


def test_the_two_ends_of_the_rate() -> None:
    deltas = deltas_of(3, 6, 8)
    assert torch.equal(
        merged_weight(deltas, "dare", drop_rate=0.0), merged_weight(deltas, "task_arithmetic")
    )
    for rescale in (True, False):
        nothing = merged_weight(deltas, "dare", drop_rate=1.0, rescale=rescale)
        assert nothing.count_nonzero() == 0
        nothing = merged_weight(deltas, "dare_ties", drop_rate=1.0, rescale=rescale)
        assert nothing.count_nonzero() == 0


def test_without_dropping_dare_ties_is_ties() -> None:
    deltas = deltas_of(3, 6, 8)
    for options in ({}, {"density": 1.0}, {"scope": "tensor"}):
        assert torch.equal(
            merged_weight(deltas, "dare_ties", drop_rate=0.0, **options),
            merged_weight(deltas, "ties", **options),
        )


def test_dare_ties_is_ties_of_what_is_kept() -> None:
    deltas = deltas_of(3, 6, 8)
    keep = [{W: gaussian(6, 8, seed=10 + t) > 0} for t in range(3)]
    dropped = [{W: torch.where(k[W], d[W], 0.0) / 0.5} for d, k in zip(deltas, keep, strict=True)]
    for scope in ("model", "tensor"):
        got = merged_weight(deltas, "dare_ties", drop_rate=0.5, masks=keep, scope=scope)
        assert torch.equal(got, merged_weight(dropped, "ties", scope=scope))


def test_masks_depend_on_seed_round_worker_and_name() -> None:
    first = mask()
    assert torch.equal(first, mask(seed=0, round=0))
    others = [mask(seed=1), mask(round=1), mask(name="other.weight")]
    two = [{W: torch.ones(64, 64)}, {W: torch.ones(64, 64) * 4}]
    second = (merged_weight(two, "dare", drop_rate=0.5) / 8).floor() == 1
    for other in (*others, second):
        agreement = float((first == other).double().mean())
        assert abs(agreement - 0.5) < 4.5 * 0.5 / 64


def test_masks_depend_on_nothing_else() -> None:
    deltas = [{"a": gaussian(8, 8), W: gaussian(8, 8, seed=1), "z": gaussian(8)}]
    reordered = [dict(reversed(deltas[0].items()))]
    alone = [{W: deltas[0][W]}]
    torch.manual_seed(123)
    expected = merged(deltas, "dare", drop_rate=0.5)
    assert torch.equal(merged(alone, "dare", drop_rate=0.5)[W], expected[W])
    got = merged(reordered, "dare", drop_rate=0.5)
    assert all(torch.equal(got[k], expected[k]) for k in expected)
    halves = merged([{W: deltas[0][W].half()}], "dare", drop_rate=0.5)[W]
    assert torch.equal(halves != 0, expected[W] != 0)


def test_swapping_the_deltas_leaves_the_masks_where_they_were() -> None:
    a, b = deltas_of(2, 16, 16)
    keep = [
        {W: merged_weight(pair, "dare", drop_rate=0.5) != 0}
        for pair in ([a, {W: torch.zeros(16, 16).double()}], [{W: torch.zeros(16, 16).double()}, a])
    ]
    got = merged_weight([b, a], "dare", drop_rate=0.5)
    assert torch.equal(got, merged_weight([b, a], "dare", drop_rate=0.5, masks=keep))
    assert not torch.equal(got, merged_weight([a, b], "dare", drop_rate=0.5))


def test_a_worker_without_weight_keeps_its_number() -> None:
    deltas = deltas_of(3, 16, 16)
    got = merged_weight(deltas, "dare", drop_rate=0.5, weights=[1.0, 0.0, 1.0])
    zero = {W: torch.zeros(16, 16, dtype=torch.float64)}
    assert torch.equal(got, merged_weight([deltas[0], zero, deltas[2]], "dare", drop_rate=0.5))


def test_explicit_masks() -> None:
    deltas = [{W: torch.tensor([1.0, 2.0, 3.0]), B: torch.ones(2)}]
    masks = [{W: torch.tensor([True, False, True]), B: torch.tensor([False, True])}]
    got = merged(deltas, "dare", drop_rate=0.75, masks=masks)
    assert got[W].tolist() == [4, 0, 12]
    assert got[B].tolist() == [0, 4]
    drawn = merged(deltas, "dare", drop_rate=0.75)
    partly = merged(deltas, "dare", drop_rate=0.75, masks=[{W: masks[0][W]}])
    assert partly[W].tolist() == [4, 0, 12]
    assert torch.equal(partly[B], drawn[B])


@pytest.mark.parametrize(
    ("masks", "message"),
    [
        ([], "0 sets of masks"),
        ([{W: torch.ones(2, 2)}], W),
        ([{W: torch.ones(4, dtype=torch.bool)}], W),
    ],
)
def test_masks_that_do_not_fit_are_refused(masks: list[dict[str, Tensor]], message: str) -> None:
    with pytest.raises(MethodError, match=message):
        merge({W: torch.zeros(2, 2)}, [{W: torch.ones(2, 2)}], "dare", masks=masks)
