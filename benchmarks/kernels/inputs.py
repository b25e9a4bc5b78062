"""Matrices to measure on, each with its exact Iso-C from a float64 SVD of the float32 input."""

from __future__ import annotations

from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mergekit_iso.kernels.spectrum import null_rtol

from .real_deltas import SMOKE, Run, kind_of, real_deltas

RESOLVED = 1e-5  # float32 itself blurs the directions with σ below this share of σ₁


@dataclass(frozen=True)
class Case:
    """What one measurement runs on: a synthetic matrix, or a group of the real ones.

    ``shape`` is "1024x4096" or a group of real matrices; ``spectrum`` one of gaussian, powerN
    (σᵢ ∝ i^−p to condition 10^N), low_rank_noise, rank_half, or real.
    """

    shape: str
    spectrum: str
    seed: int = 0

    @property
    def key(self) -> str:
        """The name of this case in files and filters."""
        return f"{self.shape}-{self.spectrum}"

    @property
    def size(self) -> float:
        """The cost by which cases are ordered: m·n·min(m, n)."""
        if self.spectrum == "real":
            return 512.0**3
        m, n = dimensions(self.shape)
        return float(m * n * min(m, n))


@dataclass(frozen=True)
class Problem:
    """A matrix A (m, n) float32 with its float64 SVD.

    U (r, r): the singular vectors of the smaller side.
    sigma (r,): the singular values, float64, descending.
    factor (m, n): U Vᵀ without the null directions, those with σ ≤ 16 eps·σ₁ of float32.
    """

    A: Tensor
    U: Tensor
    sigma: Tensor
    factor: Tensor

    @property
    def kept(self) -> Tensor:
        """Which directions are not null."""
        return self.sigma > null_rtol(torch.float32) * self.sigma[0]

    @property
    def scale(self) -> float:
        """The mean singular value, null ones being zero."""
        return float((self.sigma * self.kept).mean())


def dimensions(shape: str) -> tuple[int, int]:
    """Return (m, n) of "MxN"."""
    m, n = shape.split("x")
    return int(m), int(n)


def problems(case: Case, cache: Path, *, smoke: bool = False) -> list[Problem]:
    """Return the matrices of a case; references are computed once and kept in ``cache``."""
    if case.spectrum == "real":
        deltas = real_deltas(SMOKE if smoke else Run(seed=case.seed), cache)
        named = {name: A for name, A in deltas.items() if kind_of(name) == case.shape}
    else:
        named = {"": synthetic(case)}
    prefix = f"reference-{'smoke-' if smoke else ''}{case.key}-seed{case.seed}"
    return [_problem(A, cache / f"{prefix}-{i}.safetensors") for i, A in enumerate(named.values())]


def synthetic(case: Case) -> Tensor:
    """Return the float32 matrix of a synthetic case, generated in float64 from its seed."""
    m, n = dimensions(case.shape)
    r = min(m, n)
    generator = torch.Generator().manual_seed(case.seed)

    def gaussian(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if case.spectrum == "gaussian":
        A = gaussian(m, n)
    elif case.spectrum == "rank_half":
        A = gaussian(m, r // 2) @ gaussian(r // 2, n)
    elif case.spectrum == "low_rank_noise":
        k = max(1, r // 20)
        noise = m**0.5 + n**0.5  # about the largest σ of an m × n Gaussian
        strong = torch.linspace(50 * noise, 5 * noise, k, dtype=torch.float64)
        A = (orthonormal(gaussian(m, k)) * strong) @ orthonormal(gaussian(n, k)).T + gaussian(m, n)
    elif case.spectrum.startswith("power"):
        condition = 10.0 ** float(case.spectrum.removeprefix("power"))
        i = torch.arange(1, r + 1, dtype=torch.float64)
        sigma = i ** (-log(condition) / log(r))
        A = (orthonormal(gaussian(m, r)) * sigma) @ orthonormal(gaussian(n, r)).T
    else:
        raise ValueError(f"there is no spectrum {case.spectrum!r}")
    return A.float()


def orthonormal(A: Tensor) -> Tensor:
    """Return an orthonormal basis (m, n) of the columns of A, m ≥ n."""
    Q: Tensor = torch.linalg.qr(A).Q
    return Q


def _problem(A: Tensor, file: Path) -> Problem:
    if not file.exists():
        U, sigma, Vh = torch.linalg.svd(_wide(A.double()), full_matrices=False)
        kept = sigma > null_rtol(torch.float32) * sigma[0]
        factor = (U * kept) @ Vh
        if A.shape[0] > A.shape[1]:
            factor = factor.T
        file.parent.mkdir(parents=True, exist_ok=True)
        stored = {"A": A, "U": U.float(), "sigma": sigma, "factor": factor.float()}
        part = file.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, part)
        part.replace(file)
    return Problem(**load_file(file))


def _wide(A: Tensor) -> Tensor:
    return A.T if A.shape[0] > A.shape[1] else A


def describe(inputs: list[Problem]) -> dict[str, Any]:
    """Return count, conditions, σ₁/‖A‖_F and RMS/mean σ of the matrices, as plain data."""
    sigmas = [p.sigma for p in inputs]
    return {
        "count": len(inputs),
        "shapes": sorted({"x".join(map(str, p.A.shape)) for p in inputs}),
        "conditions": [float(s[0] / s[-1]) for s in sigmas],
        "null_directions": [int((~p.kept).sum()) for p in inputs],
        "sigma1_over_norm": [float(s[0] / s.norm()) for s in sigmas],
        "rms_over_mean": [float(s.square().mean().sqrt() / s.mean()) for s in sigmas],
    }


def errors(problem: Problem, out: Tensor, scale: float) -> dict[str, float]:
    """Return the Iso-C errors of ``out`` (m, n) and ``scale``, all relative.

    error: ‖out − exact‖_F / ‖exact‖_F.
    in_range: the same within the directions that are not null.
    resolved: the same within those above 1e-5·σ₁, which is all of them up to condition 1e5.
    leak: what out has in null directions, over ‖exact‖_F.
    scale_error: of the mean singular value alone.
    """
    exact = problem.factor.double() * problem.scale
    by_direction = problem.U.double().T @ _wide(out.double() - exact)
    rows = by_direction.square().sum(1)
    norm = float(exact.norm())
    sigma = problem.sigma

    def relative(chosen: Tensor) -> float:
        return float(rows[chosen].sum().sqrt()) / norm

    return {
        "error": relative(sigma >= 0),
        "in_range": relative(problem.kept),
        "resolved": relative(sigma > RESOLVED * sigma[0]),
        "leak": relative(~problem.kept),
        "scale_error": abs(scale - problem.scale) / problem.scale,
    }
