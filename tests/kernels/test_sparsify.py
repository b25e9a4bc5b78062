"""Exact selection by magnitude, whatever the chunks, and trimming."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from mergekit_iso.kernels import sparsify
from mergekit_iso.kernels.sparsify import Threshold, kth_magnitude, largest_threshold, trim
from tests.kernels.matrices import gaussian

DTYPES = {32: torch.float32, 64: torch.float64}


@st.composite
def vectors(draw: st.DrawFn) -> Tensor:
    """Draw finite vectors: any bit pattern, or few distinct values, so that many are tied."""
    width = draw(st.sampled_from((32, 64)))
    anything = st.floats(width=width, allow_nan=False, allow_infinity=False)
    tied = st.sampled_from((0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 1e-40, -1e-40))
    elements = draw(st.sampled_from((anything, tied)))
    array = draw(hnp.arrays(f"float{width}", st.integers(1, 40), elements=elements))
    return torch.from_numpy(array.copy())


@st.composite
def vectors_and_count(draw: st.DrawFn) -> tuple[Tensor, int]:
    x = draw(vectors())
    return x, draw(st.integers(1, len(x)))


def reference_kept(x: Tensor, keep: int) -> Tensor:
    """Return the mask of the largest entries, the first ones of those tied."""
    order = np.argsort(-np.abs(x.numpy()), kind="stable")
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[torch.from_numpy(order[:keep].copy())] = True
    return mask


@given(vectors_and_count())
def test_kth_magnitude_is_that_of_a_sort(drawn: tuple[Tensor, int]) -> None:
    x, k = drawn
    got = kth_magnitude([x], k, dtype=x.dtype)
    assert got == np.sort(np.abs(x.numpy()))[k - 1]
    assert got == float(torch.kthvalue(x.abs(), k).values)


@given(vectors_and_count(), st.integers(1, 41))
def test_kth_magnitude_does_not_depend_on_chunks(drawn: tuple[Tensor, int], size: int) -> None:
    x, k = drawn
    chunks = list(x.split(size))
    assert kth_magnitude(chunks, k, dtype=x.dtype) == kth_magnitude([x], k, dtype=x.dtype)


def test_chunks_of_any_shape_and_narrower_dtype() -> None:
    chunks = [torch.tensor([[3.0, -1.0], [0.5, 2.0]]).bfloat16(), torch.tensor(4.0), torch.ones(0)]
    for dtype in DTYPES.values():
        assert [kth_magnitude(chunks, k, dtype=dtype) for k in range(1, 6)] == [0.5, 1, 2, 3, 4]


@pytest.mark.parametrize("k", [0, 4])
def test_a_count_outside_the_entries_is_refused(k: int) -> None:
    with pytest.raises(ValueError, match=f"{k}-th"):
        kth_magnitude([torch.ones(3)], k)


@given(vectors_and_count(), st.integers(1, 41))
def test_exactly_the_largest_are_kept(drawn: tuple[Tensor, int], size: int) -> None:
    x, keep = drawn
    threshold = largest_threshold(list(x.split(size)), keep, len(x), dtype=x.dtype)
    kept = trim(x, threshold)
    expected = torch.where(reference_kept(x, keep), x, 0.0)
    assert torch.equal(kept, expected)


@given(vectors_and_count(), st.integers(1, 41), st.booleans())
def test_trimming_in_chunks_is_trimming_at_once(
    drawn: tuple[Tensor, int], size: int, ties: bool
) -> None:
    x, keep = drawn
    if ties:
        threshold = largest_threshold([x], keep, len(x), dtype=x.dtype)
    else:
        threshold = Threshold(kth_magnitude([x], keep, dtype=x.dtype))
    pieces = [trim(x[i : i + size], threshold, offset=i) for i in range(0, len(x), size)]
    assert torch.equal(torch.cat(pieces), trim(x, threshold))


def test_of_tied_entries_the_first_are_kept() -> None:
    x = torch.tensor([1.0, -2.0, 1.0, -1.0, 3.0, 1.0])
    threshold = largest_threshold([x[:2], x[2:]], 4, 6)
    assert threshold == Threshold(1.0, last_tied=2)
    assert trim(x, threshold).tolist() == [1, -2, 1, 0, 3, 0]


def test_without_a_last_one_all_tied_entries_are_kept() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, -1.0]])
    assert trim(x, Threshold(1.0)).tolist() == [[1, -2], [0, -1]]
    assert trim(x, Threshold(float("inf"))).count_nonzero() == 0
    assert x.tolist() == [[1, -2], [0.5, -1]]


def test_a_threshold_between_two_float32_values_keeps_the_upper() -> None:
    below, above = 1.0, float(torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))
    x = torch.tensor([below, above, -above])
    assert trim(x, Threshold((below + above) / 2)).tolist() == [0, above, -above]


def test_more_entries_than_two_to_the_24() -> None:
    n = 2**24 + 1
    x = (torch.arange(n, dtype=torch.int32) * 7919 % n).float() - 2**23
    threshold = largest_threshold(x.split(2**22), n // 5, n)
    assert int(trim(x, threshold).count_nonzero()) == n // 5


class Counted:
    """Chunks that count how often they are iterated."""

    def __init__(self, x: Tensor, size: int = 1 << 18) -> None:
        self.pieces = torch.split(x, size)
        self.passes = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        return iter(self.pieces)


MILLION = 1_000_003


def many(kind: str) -> Tensor:
    """Return more entries than a first sample holds, in an order that suits it or does not."""
    x = gaussian(MILLION, dtype=torch.float32)
    if kind == "bfloat16":
        return x.bfloat16()
    if kind == "float64":
        return gaussian(MILLION)
    if kind == "mostly zero":
        return torch.where(torch.arange(MILLION) % 5 == 0, x, 0.0)
    if kind == "constant":
        return torch.full_like(x, -3.0)
    if kind == "sorted":
        return x.sort().values
    if kind == "scales":
        return x * 2.0 ** (torch.arange(MILLION) // 50_000 - 10)
    if kind == "unlike its sample":
        return torch.where(torch.arange(MILLION) % 9 == 0, x * 1e-6, x)
    if kind == "sample of one value":
        return torch.where(torch.arange(MILLION) % 9 == 0, 100.0, x)
    return x


KINDS = ["gaussian", "bfloat16", "float64", "mostly zero", "constant", "sorted", "scales"]
HOSTILE = ["unlike its sample", "sample of one value"]


@pytest.mark.parametrize("kind", KINDS + HOSTILE)
def test_kth_magnitude_of_many_entries(kind: str) -> None:
    x = many(kind)
    dtype = torch.float64 if kind == "float64" else torch.float32
    ordered = np.sort(np.abs(x.to(dtype).numpy()))
    for k in (1, 2, MILLION // 10, MILLION // 2, MILLION - MILLION // 5, MILLION - 1, MILLION):
        chunks = Counted(x)
        assert kth_magnitude(chunks, k, dtype=dtype) == ordered[k - 1]
        assert chunks.passes <= (2 if kind in KINDS else 6)


@pytest.mark.parametrize("kind", KINDS + HOSTILE)
def test_the_largest_of_many_entries(kind: str) -> None:
    x = many(kind)
    x = x if kind == "float64" else x.float()
    keep = MILLION // 5
    threshold = largest_threshold(Counted(x, 100_000), keep, MILLION, dtype=x.dtype)
    kept = trim(x, threshold)
    magnitude = x.abs()
    assert torch.equal(kept[kept != 0], x[kept != 0])
    if threshold.value > 0:
        assert int(kept.count_nonzero()) == keep
    assert float(magnitude[kept == 0].max()) <= threshold.value
    if threshold.last_tied is not None:
        tied = (magnitude == threshold.value).nonzero().reshape(-1)
        expected = keep - int((magnitude > threshold.value).sum())
        assert int((tied <= threshold.last_tied).sum()) == expected


@pytest.mark.parametrize("kind", ["gaussian", "sorted", "bfloat16", *HOSTILE])
def test_more_entries_in_question_than_can_be_held(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparsify, "_SAMPLED", 200)
    monkeypatch.setattr(sparsify, "_HELD", 1000)
    x = many(kind)
    ordered = np.sort(np.abs(x.float().numpy()))
    for k in (1, MILLION // 2, MILLION - MILLION // 5, MILLION):
        assert kth_magnitude(Counted(x), k) == ordered[k - 1]


def test_the_two_ways_to_look_within_two_values_agree() -> None:
    x = gaussian(100_000, dtype=torch.float32)
    left, right = float(x[0].abs()), float(x[0].abs()) * 1.25
    within = sparsify._Within(left, right, x.dtype)
    below, inside = within.elsewhere(x)
    assert below == int((x.abs() < left).sum())
    assert inside.min() == np.float32(left)
    same_below, same_inside = within.on_cpu(x)
    assert (same_below, same_inside.tolist()) == (below, inside.tolist())
