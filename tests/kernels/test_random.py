"""The mask generator: its rate, its keys, its independence, its bits."""

from __future__ import annotations

from hashlib import blake2b
from itertools import combinations, pairwise
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mergekit_iso.kernels.random import drop, keep_mask

KEY: dict[str, Any] = {"seed": 0, "round": 0, "worker": 0, "name": "model.layers.0.weight"}
OTHER_KEYS: list[dict[str, Any]] = [
    KEY,
    KEY | {"seed": 1},
    KEY | {"round": 1},
    KEY | {"worker": 1},
    KEY | {"name": "model.layers.1.weight"},
    KEY | {"seed": -1},
    KEY | {"seed": 2**40},
]


def uint32_reference(
    numel: int, drop_rate: float, *, seed: int, round: int, worker: int, name: str, offset: int = 0
) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Compute the mask in unsigned NumPy arithmetic, element by element of the counter."""
    keep = np.empty(numel, dtype=bool)
    index = offset + np.arange(numel, dtype=np.uint64)
    for high in np.unique(index >> np.uint64(32)):
        text = f"{seed}\0{round}\0{worker}\0{high}\0{name}".encode()
        k0, k1 = np.frombuffer(blake2b(text, digest_size=8).digest(), dtype="<u4")
        here = (index >> np.uint64(32)) == high
        h = finalised(finalised((index[here] & np.uint64(2**32 - 1)).astype(np.uint32) ^ k0) + k1)
        keep[here] = h.astype(np.uint64) < int((1 - drop_rate) * 2**32)
    return keep


def finalised(h: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    h = h ^ (h >> np.uint32(16))
    h = h * np.uint32(0x7FEB352D)
    h = h ^ (h >> np.uint32(15))
    h = h * np.uint32(0x846CA68B)
    return h ^ (h >> np.uint32(16))


@pytest.mark.parametrize("drop_rate", [0.1, 0.5, 0.9, 1e-9, 1 - 1e-9])
@pytest.mark.parametrize("offset", [0, 12345, 2**31 - 50, 2**32 - 50, 3 * 2**32 - 1])
def test_bits_are_those_of_unsigned_arithmetic(drop_rate: float, offset: int) -> None:
    for key in OTHER_KEYS:
        got = keep_mask(1000, drop_rate, **key, offset=offset)
        assert np.array_equal(got.numpy(), uint32_reference(1000, drop_rate, **key, offset=offset))


@given(
    numel=st.integers(0, 200),
    offset=st.sampled_from((0, 7, 2**32 - 100, 2**33 - 60)),
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_chunks_are_pieces_of_the_whole(numel: int, offset: int, cuts: list[int]) -> None:
    whole = keep_mask(numel, 0.5, **KEY, offset=offset)
    edges = sorted({0, numel, *(c for c in cuts if c < numel)})
    pieces = [
        keep_mask(stop - start, 0.5, **KEY, offset=offset + start)
        for start, stop in pairwise(edges)
    ]
    assert torch.equal(torch.cat([whole[:0], *pieces]), whole)


def test_the_two_ends_of_the_rate() -> None:
    assert bool(keep_mask(1000, 0.0, **KEY).all())
    assert not bool(keep_mask(1000, 1.0, **KEY).any())


def bits(key: dict[str, Any], numel: int = 1 << 20, drop_rate: float = 0.5) -> Tensor:
    return keep_mask(numel, drop_rate, **key)


def correlation_z(a: Tensor, b: Tensor) -> float:
    """Return how many standard deviations fair coins a and b are from agreeing half the time."""
    return (2 * float((a == b).double().mean()) - 1) * sqrt(len(a))


@pytest.mark.parametrize("drop_rate", [0.01, 0.1, 0.5, 0.8, 0.99])
def test_the_rate_is_met(drop_rate: float) -> None:
    for key in OTHER_KEYS:
        kept = bits(key, drop_rate=drop_rate)
        z = (float(kept.double().mean()) - (1 - drop_rate)) / sqrt(
            drop_rate * (1 - drop_rate) / len(kept)
        )
        assert abs(z) < 4.5


def test_masks_of_different_keys_are_uncorrelated() -> None:
    masks = [bits(key) for key in OTHER_KEYS]
    assert all(abs(correlation_z(a, b)) < 4.5 for a, b in combinations(masks, 2))


def test_a_mask_is_uncorrelated_with_itself_shifted() -> None:
    mask = bits(KEY)
    for lag in (1, 2, 3, 7, 8, 64, 768, 1024, 4096):
        assert abs(correlation_z(mask[lag:], mask[:-lag])) < 4.5, lag


def test_no_mask_is_another_one_shifted() -> None:
    # A generator that adds its key to the counter would give shifted copies.
    pattern = bits(KEY, 1 << 16).double() * 2 - 1
    other = bits(KEY | {"name": "model.layers.1.weight"}, 1 << 16).double() * 2 - 1
    spectrum = torch.fft.rfft(pattern) * torch.fft.rfft(other).conj()
    at_every_lag = torch.fft.irfft(spectrum).abs() / sqrt(len(pattern))
    assert float(at_every_lag.max()) < 6


def test_bytes_of_bits_are_uniform() -> None:
    for key in OTHER_KEYS:
        counts = np.bincount(np.packbits(bits(key).numpy()), minlength=256)
        expected = counts.sum() / 256
        chi_square = float(((counts - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 4.5 * sqrt(2 * 255)


def test_names_cannot_be_mistaken_for_numbers() -> None:
    a = keep_mask(1000, 0.5, seed=1, round=11, worker=0, name="w")
    b = keep_mask(1000, 0.5, seed=11, round=1, worker=0, name="w")
    c = keep_mask(1000, 0.5, seed=1, round=1, worker=0, name="1w")
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)


def test_the_global_generator_is_not_touched() -> None:
    state = torch.get_rng_state()
    keep_mask(1000, 0.5, **KEY)
    assert torch.equal(torch.get_rng_state(), state)


NEIGHBOURS: list[dict[str, Any]] = [
    {"seed": seed, "round": round, "worker": worker, "name": f"model.layers.{layer}.weight"}
    for seed in (0, 1)
    for round in (0, 1, 2)
    for worker in (0, 1, 2)
    for layer in (0, 1, 2)
]


def is_standard_normal(z: Tensor) -> bool:
    """Whether independent scores have mean 0 and variance 1, within 4.5 standard errors."""
    n = len(z)
    return abs(float(z.mean())) < 4.5 / sqrt(n) and (
        abs(float(z.square().mean()) - 1) < 4.5 * sqrt(2 / n)
    )


@pytest.mark.parametrize("drop_rate", [0.1, 0.5, 0.9])
def test_rates_scatter_over_keys_as_independent_draws_do(drop_rate: float) -> None:
    numel = 1 << 16
    kept = torch.stack([bits(key, numel, drop_rate).double().mean() for key in NEIGHBOURS])
    z = (kept - (1 - drop_rate)) / sqrt(drop_rate * (1 - drop_rate) / numel)
    assert is_standard_normal(z)
    assert float(z.abs().max()) < 4.5


def test_correlations_of_neighbouring_keys_scatter_as_independent_draws_do() -> None:
    signs = torch.stack([bits(key, 1 << 15).double() * 2 - 1 for key in NEIGHBOURS])
    z = (signs @ signs.mT / sqrt(signs.shape[1]))[*torch.triu_indices(*signs.shape[:1] * 2, 1)]
    assert is_standard_normal(z)
    assert float(z.abs().max()) < 5.5


def test_correlations_at_every_lag_scatter_as_independent_draws_do() -> None:
    signs = bits(KEY, 1 << 18).double() * 2 - 1
    at_lag = torch.fft.irfft(torch.fft.rfft(signs).abs().square())[1 : len(signs) // 2]
    z = at_lag / sqrt(len(signs))
    assert is_standard_normal(z)
    assert float(z.abs().max()) < 6


def test_kept_runs_have_geometric_lengths() -> None:
    drop_rate = 0.3
    kept = bits(KEY, 1 << 20, drop_rate).numpy()
    ends = np.flatnonzero(~kept)
    runs = np.diff(ends) - 1
    counts = np.bincount(np.minimum(runs, 12), minlength=13)
    expected = len(runs) * drop_rate * (1 - drop_rate) ** np.arange(13)
    expected[12] /= drop_rate
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi_square - 12) < 4.5 * sqrt(2 * 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0, 2**32 - 50])
def test_dropping_is_selecting_by_the_mask(dtype: torch.dtype, offset: int) -> None:
    x = torch.linspace(-1, 1, 300_000, dtype=dtype).view(3, -1)
    x[0, 0] = -0.0
    for drop_rate in (0.0, 0.1, 0.9, 1.0):
        got = drop(x, drop_rate, **KEY, offset=offset)
        mask = keep_mask(x.numel(), drop_rate, **KEY, offset=offset).view(x.shape)
        expected = torch.where(mask, x, 0.0)
        assert torch.equal(got, expected)
        assert torch.equal(got.signbit(), expected.signbit())
    assert float(x[0, 1]) < 0
    assert bool(x[0, 0].signbit())
