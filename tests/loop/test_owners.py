"""Who owns what, and what travels together: nothing is lost, and the work is balanced."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

import torch
from hypothesis import given
from hypothesis import strategies as st

from mergekit_iso.loop.owners import assign, buckets, cost
from mergekit_iso.methods import get_method
from mergekit_iso.tensors import describe

COSTS = st.lists(st.floats(1, 1e6) | st.integers(1, 5).map(float), max_size=40)
RANKS = st.integers(1, 9)


def loads(costs: Sequence[float], owners: Sequence[int], ranks: int) -> list[float]:
    return [sum(c for c, o in zip(costs, owners, strict=True) if o == r) for r in range(ranks)]


@given(st.lists(st.floats(1, 100), min_size=1, max_size=7), st.integers(2, 3))
def test_the_load_is_within_the_bound_of_the_best(costs: list[float], ranks: int) -> None:
    """Dearest first is within 4/3 − 1/(3R) of the best (Graham, SIAM J. Appl. Math. 17, 1969)."""
    best = min(max(loads(costs, o, ranks)) for o in product(range(ranks), repeat=len(costs)))
    got = max(loads(costs, assign(costs, ranks), ranks))
    assert got <= best * (4 / 3 - 1 / (3 * ranks)) * (1 + 1e-9)


@given(COSTS, RANKS)
def test_the_load_exceeds_the_mean_by_one_item_at_most(costs: list[float], ranks: int) -> None:
    """Whatever was put on the fullest rank last was put there because it was the emptiest."""
    owners = assign(costs, ranks)
    assert len(owners) == len(costs)
    assert set(owners) <= set(range(ranks))
    fullest = max(range(ranks), key=lambda r: loads(costs, owners, ranks)[r])
    last = min((c for c, o in zip(costs, owners, strict=True) if o == fullest), default=0.0)
    at_most = sum(costs) / ranks + (1 - 1 / ranks) * last
    assert max(loads(costs, owners, ranks)) <= at_most * (1 + 1e-9)


@given(COSTS, RANKS)
def test_no_rank_is_idle_while_another_has_two(costs: list[float], ranks: int) -> None:
    owners = assign(costs, ranks)
    counts = [owners.count(r) for r in range(ranks)]
    assert min(counts) >= 1 or max(counts) <= 1


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(0, 4)), max_size=60),
    st.integers(1, 200),
)
def test_buckets_hold_everything_once(items: list[tuple[int, int]], limit: int) -> None:
    sizes, owners = [s for s, _ in items], [o for _, o in items]
    groups = buckets(sizes, owners, limit)
    assert sorted(i for group in groups for i in group) == list(range(len(items)))
    assert all(groups)
    for group in groups:
        total = sum(sizes[i] for i in group)
        # One that is larger than a bucket travels with nothing but empty ones.
        assert total <= limit or sum(sizes[i] > 0 for i in group) == 1
    for owner in set(owners):
        own = [i for group in groups for i in group if owners[i] == owner]
        assert own == sorted(own)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(20, 200))
def test_neighbouring_buckets_would_not_fit_into_one(sizes: list[int], limit: int) -> None:
    groups = buckets(sizes, [i % 3 for i in range(len(sizes))], limit)
    filled = [sum(sizes[i] for i in group) for group in groups]
    assert all(a + b > limit for a, b in pairwise(filled))


def test_what_an_operator_costs() -> None:
    """A matrix costs a spectral method more than its elements, once per worker if each is used."""
    matrix = describe("w", (64, 32), torch.float32)
    experts = describe("experts.w", (5, 64, 32), torch.float32)
    vector = describe("b", (2048,), torch.float32)
    mean, iso_c, tsv = (get_method(n).requires for n in ("average", "iso_c", "tsv"))
    assert cost(matrix, mean, 4) == cost(vector, mean, 4) == cost(vector, iso_c, 4)
    assert cost(matrix, mean, 4) < cost(matrix, iso_c, 4) < cost(matrix, tsv, 4)
    assert cost(experts, iso_c, 4) == 5 * cost(matrix, iso_c, 4)
    assert cost(describe("w", (32, 64), torch.float32), iso_c, 4) == cost(matrix, iso_c, 4)
