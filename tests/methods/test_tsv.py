"""TSV-Merge against a literal, zero-padded computation in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mergekit_iso.errors import MergeWarning
from mergekit_iso.methods import TSV
from tests.kernels.matrices import gaussian, relative, with_spectrum
from tests.methods.models import W, deltas_of, merged_weight

Array = np.ndarray[Any, np.dtype[np.float64]]


def polar(A: Array) -> Array:
    U, _, Vh = np.linalg.svd(A, full_matrices=False)
    return U @ Vh


def reference(deltas: list[Array]) -> Array:
    """Compute TSV-Merge as its authors do: r columns, those after T·k zero."""
    (m, n), tasks = deltas[0].shape, len(deltas)
    r = min(m, n)
    k = int(r * (1 / tasks))
    left, sigma, right = np.zeros((m, r)), np.zeros(r), np.zeros((r, n))
    for t, D in enumerate(deltas):
        U, s, Vh = np.linalg.svd(D, full_matrices=False)
        own = slice(t * k, (t + 1) * k)
        left[:, own], sigma[own], right[own] = U[:, :k], s[:k], Vh[:k]
    return polar(left) @ np.diag(sigma) @ polar(right)


@settings(max_examples=60)
@given(
    tasks=st.integers(1, 4),
    rows=st.integers(4, 14),
    columns=st.integers(4, 14),
    seed=st.integers(0, 10**6),
)
def test_is_the_literal_computation(tasks: int, rows: int, columns: int, seed: int) -> None:
    deltas = deltas_of(tasks, rows, columns, seed=seed)
    expected = torch.from_numpy(reference([d[W].numpy() for d in deltas]))
    assert relative(merged_weight(deltas, "tsv"), expected) < 1e-6


def test_one_task_is_given_back() -> None:
    deltas = deltas_of(1, 6, 9)
    assert relative(merged_weight(deltas, "tsv"), deltas[0][W]) < 1e-12


def test_singular_values_of_orthogonal_tasks_are_kept() -> None:
    A = with_spectrum(torch.tensor([8.0, 6.0, 4.0, 2.0], dtype=torch.float64), 6, 5)
    U, s, Vh = torch.linalg.svd(A, full_matrices=False)
    deltas = [{W: (U[:, own] * s[own]) @ Vh[own]} for own in ([0, 2], [1, 3])]
    assert relative(merged_weight(deltas, "tsv"), A) < 1e-12


@pytest.mark.parametrize(
    ("options", "r", "tasks", "k"),
    [
        ({}, 8, 3, 2),
        ({}, 49 * 4, 49, 4 - 1),
        ({}, 3, 4, 0),
        ({"min_rank": 1}, 3, 4, 1),
        ({"min_rank": 9}, 3, 4, 3),
        ({"rank_fraction": 1.0}, 8, 3, 8),
        ({"rank_fraction": 1e-9}, 8, 3, 0),
        ({"rank_fraction": 0.5}, 8, 1, 4),
    ],
)
def test_rank(options: dict[str, Any], r: int, tasks: int, k: int) -> None:
    assert TSV(**options).rank(r, tasks) == k


def test_more_tasks_than_directions_leave_the_base_and_say_so() -> None:
    deltas = deltas_of(4, 3, 9)
    with pytest.warns(MergeWarning, match=f"{W}.*min_rank=1"):
        got = merged_weight(deltas, "tsv")
    assert got.count_nonzero() == 0
    assert torch.linalg.matrix_rank(merged_weight(deltas, "tsv", min_rank=1)) == 3


def test_the_warning_about_a_small_rank_fraction_does_not_blame_the_shape() -> None:
    with pytest.warns(MergeWarning, match=W) as caught:
        got = merged_weight(deltas_of(2, 6, 8), "tsv", rank_fraction=1e-9)
    assert got.count_nonzero() == 0
    assert "fewer than 2 rows" not in str(caught[0].message)


def test_a_zero_delta_takes_no_direction_from_the_others() -> None:
    deltas = [*deltas_of(2, 9, 12), {W: torch.zeros(9, 12, dtype=torch.float64)}]
    expected = merged_weight(deltas[:2], "tsv", rank_fraction=1 / 3)
    assert relative(merged_weight(deltas, "tsv"), expected) < 1e-12


def test_null_directions_of_a_task_are_dropped() -> None:
    low = with_spectrum(torch.tensor([2.0, 1.0], dtype=torch.float64), 9, 12)
    deltas = [{W: low}, {W: gaussian(9, 12)}]
    assert torch.linalg.matrix_rank(merged_weight(deltas, "tsv")) == 2 + 4


def test_a_rank_tolerance_drops_more_than_the_default_and_never_less() -> None:
    """Rounding noise of a low-rank delta never becomes a direction."""
    low = with_spectrum(torch.tensor([2.0, 1.0], dtype=torch.float64), 9, 12)
    deltas = [{W: low}, {W: gaussian(9, 12)}]
    for method in ("tsv", "iso_c", "iso_cts"):
        default, zero = (merged_weight(deltas, method, rank_tolerance=t) for t in (None, 0.0))
        assert relative(zero, default) < 1e-9


def test_rank_tolerance_drops_weak_directions() -> None:
    weak = with_spectrum(torch.tensor([2.0, 1.0, 0.01, 0.01], dtype=torch.float64), 9, 12)
    got = merged_weight([{W: weak}], "tsv", rank_tolerance=0.1)
    assert torch.allclose(torch.linalg.svdvals(got)[:2], torch.tensor([2.0, 1.0]).double())
    assert torch.linalg.matrix_rank(got) == 2


def test_weights_multiply_the_deltas_first() -> None:
    deltas = deltas_of(2, 8, 10)
    weighted = [{W: d[W] * w} for d, w in zip(deltas, (0.5, -3.0), strict=True)]
    got = merged_weight(deltas, "tsv", weights=[0.5, -3.0])
    assert relative(got, merged_weight(weighted, "tsv")) < 1e-12


@pytest.mark.parametrize("polar", ["fast", {"name": "newton_schulz", "tolerance": 1e-9}])
def test_other_policies_orthogonalise_too(polar: Any) -> None:
    deltas = deltas_of(3, 12, 16)
    expected = merged_weight(deltas, "tsv")
    assert relative(merged_weight(deltas, "tsv", polar=polar), expected) < 1e-3
