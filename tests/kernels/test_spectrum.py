"""Singular triplets of whole matrices, and flattened spectra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mergekit_iso.kernels.spectrum import flatten, rms_singular_value, svd
from tests.kernels.matrices import gaussian, relative

SIGMA = torch.tensor([8.0, 4.0, 2.0, 1.0], dtype=torch.float64)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (1, 3), (3, 1)], ids=str)
def test_svd_gives_the_matrix_back_at_every_size(shape: tuple[int, int], size: float) -> None:
    A = gaussian(*shape, dtype=torch.float32) * size
    U, sigma, Vh = svd(A)
    assert relative(((U * (sigma / size)) @ Vh), A / size) < 1e-6
    assert bool((sigma[:-1] >= sigma[1:]).all())


@pytest.mark.parametrize(("norm", "value"), [("nuclear", 15 / 4), ("frobenius", (85 / 4) ** 0.5)])
def test_power_0_is_one_value(norm: str, value: float) -> None:
    assert flatten(SIGMA, 4, norm).tolist() == pytest.approx([value] * 4, rel=1e-14)


def test_means_are_over_the_null_directions_too() -> None:
    assert flatten(SIGMA, 10).tolist() == pytest.approx([1.5] * 4, rel=1e-14)
    assert flatten(SIGMA, 10, "frobenius").tolist() == pytest.approx([8.5**0.5] * 4, rel=1e-14)


@given(power=st.floats(0, 1), sigma=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8))
def test_every_power_keeps_the_norm_and_the_order(power: float, sigma: list[float]) -> None:
    s = torch.tensor(sorted(sigma, reverse=True), dtype=torch.float64)
    nuclear = flatten(s, len(s), "nuclear", power)
    frobenius = flatten(s, len(s), "frobenius", power)
    assert float(nuclear.sum()) == pytest.approx(float(s.sum()), rel=1e-9)
    assert float(frobenius.norm()) == pytest.approx(float(s.norm()), rel=1e-9)
    for flat in (nuclear, frobenius):
        assert torch.allclose(flat / flat[0], (s / s[0]) ** power, rtol=1e-9)


@pytest.mark.parametrize("norm", ["nuclear", "frobenius"])
def test_power_1_is_the_spectrum_itself(norm: str) -> None:
    assert torch.allclose(flatten(SIGMA, 4, norm, 1.0), SIGMA, rtol=1e-14)


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_flattening_at_every_size(size: float) -> None:
    s = SIGMA.float() * size
    for norm in ("nuclear", "frobenius"):
        for power in (0.0, 0.5):
            expected = flatten(SIGMA, 6, norm, power)
            assert torch.allclose(flatten(s, 6, norm, power).double() / size, expected, rtol=1e-5)


def test_no_singular_value_is_nothing_to_flatten() -> None:
    assert flatten(torch.zeros(0), 4).shape == (0,)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_root_mean_square(size: float) -> None:
    stack = gaussian(3, 5, 4, dtype=torch.float32)
    stack[1] = 0
    expected: Tensor = torch.linalg.svdvals(stack.double()).square().mean(-1).sqrt()
    got = rms_singular_value(stack * size)
    assert got.shape == (3,)
    assert torch.allclose(got.double() / size, expected, rtol=1e-5)
