"""TSV and Iso-CTS where matrices are large enough for the ways around the SVD."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mergekit_iso.kernels.spectrum import svd
from tests.kernels.matrices import relative
from tests.methods.models import W, deltas_of, merged_weight

TASKS = 8


def triplets(A: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    U, sigma, Vh = svd(A)
    return U[:, :rank], sigma[:rank], Vh[:rank]


def tsv(deltas: list[Tensor], rank: int) -> Tensor:
    U, sigma, Vh = zip(*(triplets(D, rank) for D in deltas), strict=True)
    return (_polar(torch.cat(U, 1)) * torch.cat(sigma)) @ _polar(torch.cat(Vh))


def iso_cts(deltas: list[Tensor], common: int, own: int) -> Tensor:
    C, sigma, Ch = triplets(sum(deltas, torch.zeros(())), common)
    U, s, Vh = zip(*(triplets(D - C @ (C.T @ D), own) for D in deltas), strict=True)
    mean = torch.cat([sigma, *s]).mean()
    return mean * _polar(torch.cat([C, *U], 1)) @ _polar(torch.cat([Ch, *Vh]))


def _polar(A: Tensor) -> Tensor:
    U, _, Vh = svd(A)
    return U @ Vh


@pytest.mark.parametrize("shape", [(512, 520), (540, 512)], ids=str)
def test_as_near_to_float64_as_float32_svds_are(shape: tuple[int, int]) -> None:
    # With seed 0 a direction of [U₁ … U_T] happens to be null.
    deltas = [d[W] for d in deltas_of(TASKS, *shape, seed=1, dtype=torch.float32)]
    wide = [D.double() for D in deltas]
    models = [{W: D} for D in deltas]
    k = 512 // TASKS
    exact = tsv(wide, k)
    usual = relative(tsv(deltas, k), exact)
    assert relative(merged_weight(models, "tsv"), exact) < 1.5 * max(usual, 1e-6)
    c, n = 408, 13
    exact = iso_cts(wide, c, n)
    usual = relative(iso_cts(deltas, c, n), exact)
    assert relative(merged_weight(models, "iso_cts"), exact) < 1.5 * max(usual, 1e-6)
