"""The compiled kernels return the bits of what they replace; only where numba is installed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mergekit_iso.kernels import compiled, random, sparsify
from mergekit_iso.kernels.signs import disjoint_merge, vote
from mergekit_iso.methods import get_method
from tests.kernels.matrices import gaussian
from tests.methods.models import W, merged

KEY = {"seed": 3, "round": 1, "worker": 2, "name": "layer.weight"}
SIZE = (1 << 16) + 77


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Return what switches the compiled kernels off and on."""
    pytest.importorskip("numba")
    with monkeypatch.context() as patch:
        patch.setattr(compiled, "_WORTHWHILE", 1 << 62)
        yield patch


def test_small_tensors_do_without() -> None:
    assert not compiled.worthwhile(torch.ones(1000))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 12345, 2**32 - 40_000])
def test_drop(plain: pytest.MonkeyPatch, dtype: torch.dtype, offset: int) -> None:
    x = gaussian(SIZE, dtype=dtype)
    for drop_rate in (0.1, 0.5, 1.0):
        expected = random.drop(x, drop_rate, **KEY, offset=offset)
        with plain.context() as patch:
            patch.setattr(compiled, "_WORTHWHILE", 1)
            assert torch.equal(random.drop(x, drop_rate, **KEY, offset=offset), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (0.1, 0.7, 2.0, 1 / 3)])
def test_elect_and_merge(
    plain: pytest.MonkeyPatch, dtype: torch.dtype, weights: tuple[float, ...]
) -> None:
    deltas = [
        torch.nn.functional.hardshrink(gaussian(SIZE, seed=t, dtype=dtype), 0.8) * w
        for t, w in enumerate(weights)
    ]
    expected, _ = disjoint_merge(deltas, weights, vote(deltas))
    got = torch.empty_like(deltas[0])
    assert not compiled.elect_and_merge(deltas, weights, got)
    assert torch.equal(got, expected)
    opposed = [deltas[0], -deltas[0]]
    assert compiled.elect_and_merge(opposed, (1.0, 1.0), got)


def test_within(plain: pytest.MonkeyPatch) -> None:
    for dtype in (torch.float32, torch.float64):
        x = gaussian(SIZE, dtype=dtype)
        within = sparsify._Within(0.5, 0.6, dtype)
        below, inside = within.on_cpu(x)
        with plain.context() as patch:
            patch.setattr(compiled, "_WORTHWHILE", 1)
            same_below, same_inside = within.on_cpu(x)
        assert same_below == below
        assert same_inside.tolist() == inside.tolist()


@pytest.mark.parametrize("method", ["ties", "dare", "dare_ties"])
@pytest.mark.parametrize("opposed", [False, True])
def test_merges(plain: pytest.MonkeyPatch, method: str, opposed: bool) -> None:
    stack = [gaussian(300, 1000, seed=t, dtype=torch.float32) for t in range(3)]
    if opposed:  # votes that cancel
        stack = [stack[0], -stack[0], stack[0].round()]
    deltas = [{W: x} for x in stack]
    expected = merged(deltas, get_method(method))
    with plain.context() as patch:
        patch.setattr(compiled, "_WORTHWHILE", 1)
        got = merged(deltas, get_method(method))
    assert torch.equal(got[W], expected[W])
