"""Matrices of stated spectra on any device, their exact Iso-C, and the matrix sets of models."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Group:
    """``count`` matrices of one shape, rows × columns as the model stores them."""

    rows: int
    columns: int
    count: int

    @property
    def sides(self) -> tuple[int, int]:
        """The shorter and the longer side."""
        return min(self.rows, self.columns), max(self.rows, self.columns)

    @property
    def work(self) -> float:
        """Operations of one product X Xᵀ over the group."""
        r, n = self.sides
        return 2.0 * r * r * n * self.count


@dataclass(frozen=True)
class Model:
    """The matrices of a Llama-style model: attention q, k, v, o and a gated feed-forward."""

    name: str
    layers: int
    hidden: int
    feed_forward: int
    key_value: int
    timed_layers: int

    def groups(self, layers: int) -> list[Group]:
        """Return the matrices of so many layers, by shape."""
        h, f, kv = self.hidden, self.feed_forward, self.key_value
        wanted = [(h, h, 2), (kv, h, 2), (f, h, 2), (h, f, 1)]
        counts: dict[tuple[int, int], int] = {}
        for rows, columns, count in wanted:
            counts[rows, columns] = counts.get((rows, columns), 0) + count * layers
        return [Group(*shape, count) for shape, count in counts.items()]

    @property
    def matrices(self) -> int:
        """How many matrices the whole model has."""
        return sum(group.count for group in self.groups(self.layers))


MODELS = [
    Model("Llama-1B, ffn 8192, kv 512", 16, 2048, 8192, 512, timed_layers=16),
    Model("Llama-1B, ffn 5632, kv 2048", 16, 2048, 5632, 2048, timed_layers=16),
    Model("Llama-8B, ffn 14336, kv 1024", 32, 4096, 14336, 1024, timed_layers=4),
]
SMOKE_MODELS = [Model("tiny", 2, 24, 56, 8, timed_layers=1)]


@dataclass(frozen=True)
class Problem:
    """Matrices A (…, m, n) float32 and their exact Iso-C in float64."""

    A: Tensor
    exact: Tensor

    def error(self, factor: Tensor) -> float:
        """Return ‖⟨P, A⟩/r · P − exact‖_F / ‖exact‖_F, the largest over the batch."""
        P, A = factor.double(), self.A.double()
        scale = (P * A).sum(dim=(-2, -1), keepdim=True) / min(A.shape[-2:])
        norm = torch.linalg.matrix_norm
        return float((norm(scale * P - self.exact) / norm(self.exact)).max())


def gaussian(*shape: int, device: str, seed: int = 0) -> Tensor:
    """Return a float32 tensor of standard normal entries."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=device)


def gaussian_problem(
    rows: int, columns: int, *, device: str, batch: tuple[int, ...] = ()
) -> Problem:
    """Return Gaussian matrices; exact by the eigenvectors of the float64 Gram matrix."""
    A = gaussian(*batch, rows, columns, device=device)
    wide = (A.mT if rows > columns else A).double()
    squares, U = torch.linalg.eigh(wide @ wide.mT)
    sigma = squares.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
    factor = U @ ((U.mT @ wide) / sigma[..., None])
    exact = sigma.mean(-1)[..., None, None] * factor
    return Problem(A, exact.mT if rows > columns else exact)


def power_law_problem(rows: int, columns: int, condition: float, *, device: str) -> Problem:
    """Return a matrix with σᵢ ∝ i^(−p) down to 1 / condition, known by construction."""
    r = min(rows, columns)
    index = torch.arange(1, r + 1, dtype=torch.float64, device=device)
    return _constructed(condition ** -(index.log() / index[-1].log()), rows, columns, device)


def rank_half_problem(rows: int, columns: int, *, device: str) -> Problem:
    """Return a matrix of which half the directions are null; these are no part of the exact."""
    r = min(rows, columns)
    sigma = torch.linspace(1, 0.1, r // 2, dtype=torch.float64, device=device)
    return _constructed(sigma, rows, columns, device)


def _constructed(sigma: Tensor, rows: int, columns: int, device: str) -> Problem:
    U, V = (
        torch.linalg.qr(gaussian(side, len(sigma), device=device, seed=seed).double()).Q
        for seed, side in enumerate((rows, columns), start=1)
    )
    exact = sigma.sum() / min(rows, columns) * U @ V.mT
    return Problem(((U * sigma) @ V.mT).float(), exact)
