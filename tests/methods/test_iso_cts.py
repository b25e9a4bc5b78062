"""Iso-CTS against a literal computation in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mergekit_iso.errors import MethodError
from mergekit_iso.methods import IsoCTS
from tests.kernels.matrices import gaussian, relative
from tests.methods.models import B, W, deltas_of, merged, merged_weight

Array = np.ndarray[Any, np.dtype[np.float64]]


def polar(A: Array) -> Array:
    U, _, Vh = np.linalg.svd(A, full_matrices=False)
    return U @ Vh


def reference(deltas: list[Array], fraction: float) -> Array:
    """Compute Iso-CTS step by step at full rank, task blocks before the common one."""
    r, tasks = min(deltas[0].shape), len(deltas)
    A = sum(deltas)
    c = int(r * fraction)
    n = round((r - c) / tasks)
    c = r - n * tasks
    U, s, Vh = np.linalg.svd(A, full_matrices=False)
    common = U[:, :c], s[:c], Vh[:c]
    blocks = []
    for D in deltas:
        rest = D - common[0] @ (common[0].T @ D)
        Ut, st_, Vht = np.linalg.svd(rest, full_matrices=False)
        blocks.append((Ut[:, :n], st_[:n], Vht[:n]))
    blocks.append(common)
    left = np.concatenate([b[0] for b in blocks], axis=1)
    sigma = np.concatenate([b[1] for b in blocks])
    right = np.concatenate([b[2] for b in blocks], axis=0)
    return sigma.mean() * polar(left) @ polar(right)


@settings(max_examples=60)
@given(
    tasks=st.integers(1, 4),
    rows=st.integers(2, 14),
    columns=st.integers(2, 14),
    fraction=st.sampled_from((0.5, 0.7, 0.8, 0.9, 1.0)),
    seed=st.integers(0, 10**6),
)
def test_is_the_literal_computation(
    tasks: int, rows: int, columns: int, fraction: float, seed: int
) -> None:
    deltas = deltas_of(tasks, rows, columns, seed=seed)
    method = IsoCTS(common_fraction=fraction)
    if method.split(min(rows, columns), tasks)[0] < 0:
        with pytest.raises(MethodError, match=W):
            merged_weight(deltas, method)
        return
    expected = torch.from_numpy(reference([d[W].numpy() for d in deltas], fraction))
    assert relative(merged_weight(deltas, method), expected) < 1e-6


@pytest.mark.parametrize(
    ("r", "tasks", "expected"),
    [
        (768, 8, (616, 19)),
        (768, 14, (614, 11)),
        (768, 20, (608, 8)),
        (5, 8, (5, 0)),
        (4, 1, (3, 1)),
    ],
)
def test_dimensions_of_the_authors(r: int, tasks: int, expected: tuple[int, int]) -> None:
    assert IsoCTS().split(r, tasks) == expected


def test_a_float_product_and_rounding_half_to_even() -> None:
    assert IsoCTS(common_fraction=0.7).split(90, 1) == (62, 28)
    assert IsoCTS(common_fraction=0.5).split(10, 2) == (6, 2)
    assert IsoCTS(common_fraction=0.7).split(10, 2) == (6, 2)


def test_one_task_is_iso_c_of_it() -> None:
    deltas = deltas_of(1, 10, 14)
    assert relative(merged_weight(deltas, "iso_cts"), merged_weight(deltas, "iso_c")) < 1e-9


@pytest.mark.parametrize(
    "options", [{}, {"norm": "frobenius"}, {"power": 0.5}, {"rank_tolerance": 0.3}], ids=repr
)
def test_without_own_directions_it_is_iso_c(options: dict[str, Any]) -> None:
    deltas = deltas_of(4, 6, 9)
    expected = merged_weight(deltas, "iso_c", **options)
    for method in (IsoCTS(**options), IsoCTS(common_fraction=1.0, **options)):
        assert method.split(6, 4)[1] == 0
        assert relative(merged_weight(deltas, method), expected) < 1e-9


@pytest.mark.parametrize("fraction", [0.0, 0.1])
def test_more_own_directions_than_there_are_is_refused(fraction: float) -> None:
    deltas = deltas_of(8, 5, 9)
    with pytest.raises(MethodError, match=W) as raised:
        merged_weight(deltas, "iso_cts", common_fraction=fraction)
    assert "common_fraction" in raised.value.hint
    assert merged_weight(deltas, "iso_cts", common_fraction=fraction, exclude=[W]).isfinite().all()


def test_tasks_without_weight_do_not_count_for_the_split() -> None:
    deltas = deltas_of(8, 5, 9)
    weights = [1.0, 1.0] + [0.0] * 6
    got = merged_weight(deltas, "iso_cts", common_fraction=0.1, weights=weights)
    assert torch.equal(got, merged_weight(deltas[:2], "iso_cts", common_fraction=0.1))


def test_weights_multiply_the_deltas_first() -> None:
    deltas = deltas_of(2, 10, 12)
    weighted = [{W: d[W] * w} for d, w in zip(deltas, (0.5, 3.0), strict=True)]
    got = merged_weight(deltas, "iso_cts", weights=[0.5, 3.0])
    assert relative(got, merged_weight(weighted, "iso_cts")) < 1e-12


def test_tensors_that_are_no_matrices_are_averaged() -> None:
    deltas = [d | {B: gaussian(5, seed=t)} for t, d in enumerate(deltas_of(3, 10, 12))]
    mean: Tensor = torch.stack([d[B] for d in deltas]).mean(0)
    for method in ("iso_c", "iso_c_ns", "iso_c_fast", "iso_cts", "tsv"):
        assert relative(merged(deltas, method)[B], mean) < 1e-14


def test_a_zero_delta_takes_no_direction_from_the_others() -> None:
    deltas = deltas_of(2, 10, 12)
    got = merged_weight(
        [*deltas, {W: torch.zeros(10, 12).double()}], "iso_cts", common_fraction=0.4
    )
    assert got.isfinite().all()
    sigma = torch.linalg.svdvals(got)
    assert int((sigma > 1e-9 * sigma[0]).sum()) == 8  # c = 4, n = 2 of each of two tasks
