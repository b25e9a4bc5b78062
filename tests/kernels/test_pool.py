"""Many matrices at a time: the same bits in the same order, and nothing left behind."""

from __future__ import annotations

from threading import Barrier, get_ident

import pytest
import torch
from torch import Tensor

from mergekit_iso.kernels import pool
from mergekit_iso.kernels.polar import decompose
from mergekit_iso.kernels.pool import decompose_many, map_matrices, map_stacks
from mergekit_iso.kernels.products import quick_float32_products
from tests.kernels.matrices import gaussian

SHAPES = [(8, 12), (30, 20), (300, 520), (8, 12), (3, 6, 5)]


def matrices() -> list[Tensor]:
    return [gaussian(*s, seed=i, dtype=torch.float32) for i, s in enumerate(SHAPES)]


@pytest.mark.parametrize("polar", ["exact", "fast", "newton_schulz"])
def test_results_are_the_serial_ones_in_order(polar: str) -> None:
    one, many = (decompose_many(matrices(), polar, threads=t) for t in (1, 3))
    for A, a, b in zip(matrices(), one, many, strict=True):
        assert a.factor.shape == A.shape
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        assert torch.allclose(a.factor, decompose(A, polar).factor, atol=1e-4)


def test_a_result_is_that_of_decompose_on_one_thread() -> None:
    own = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        expected = [decompose(A) for A in matrices()]
    finally:
        torch.set_num_threads(own)
    for a, b in zip(expected, decompose_many(matrices(), threads=2), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_workers_run_side_by_side_on_one_thread_each() -> None:
    together = Barrier(2, timeout=30)

    def where(A: Tensor) -> tuple[int, int]:
        together.wait()
        return get_ident(), torch.get_num_threads()

    found = map_matrices(where, [torch.ones(2, 2)] * 4, threads=2)
    assert len({worker for worker, _ in found}) == 2
    assert {threads for _, threads in found} == {1}


def test_the_callers_threads_and_products_stay_as_they_were() -> None:
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
        map_matrices(torch.clone, matrices(), threads=2)
        assert torch.get_num_threads() == 2
        assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
        assert map_matrices(lambda _: torch.get_num_threads(), [torch.ones(1, 1)], 1) == [1]
    finally:
        torch.set_num_threads(own)


def test_the_costliest_matrix_comes_first() -> None:
    seen: list[tuple[int, ...]] = []
    map_matrices(lambda A: seen.append(tuple(A.shape)), matrices(), threads=1)
    assert seen == [(300, 520), (30, 20), (8, 12), (8, 12), (3, 6, 5)]


def test_products_are_the_same_whatever_the_number_of_workers() -> None:
    squares = [gaussian(300, 300, seed=i, dtype=torch.float32) for i in range(4)]
    one, two = (map_matrices(lambda A: A @ A, squares, t) for t in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    with quick_float32_products():
        assert torch.allclose(squares[0] @ squares[0], one[0], atol=1e-3)


def test_an_error_reaches_the_caller() -> None:
    def fail(A: Tensor) -> Tensor:
        raise ArithmeticError(str(len(A)))

    with pytest.raises(ArithmeticError, match="8"):
        map_matrices(fail, matrices(), threads=2)


def test_no_matrix_and_no_worker() -> None:
    assert decompose_many([], threads=2) == []
    with pytest.raises(ValueError, match="0 threads"):
        decompose_many(matrices(), threads=0)


def test_stacks_are_of_equal_matrices_and_parts_come_back_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool, "_LARGEST_STACK", 2 * 8 * 12)
    shapes: list[tuple[int, ...]] = []

    def function(stack: Tensor) -> tuple[Tensor, Tensor]:
        shapes.append(tuple(stack.shape))
        return stack + 1, stack.sum(dim=(-2, -1))

    ones = [*matrices(), *matrices()]
    found = map_stacks(function, ones)
    assert shapes.count((2, 8, 12)) == 2
    assert len(shapes) == 2 + 2 + 2 + 1
    for A, (more, total) in zip(ones, found, strict=True):
        assert torch.equal(more, A + 1)
        assert torch.allclose(total, A.sum(dim=(-2, -1)))


def test_stacked_decompositions_are_those_of_each_matrix() -> None:
    stacked = map_stacks(decompose, matrices())
    for A, parts in zip(matrices(), stacked, strict=True):
        assert torch.allclose(parts[0], decompose(A).factor, atol=1e-5)
        assert parts[1].shape == A.shape[:-2]
