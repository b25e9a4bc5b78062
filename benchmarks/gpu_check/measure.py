"""What is timed: symmetric products, the matrix sets of models, and the DARE mask."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mergekit_iso.kernels import triton_ops
from mergekit_iso.kernels.newton_schulz import SCHEDULES, newton_schulz
from mergekit_iso.kernels.random import keep_mask
from mergekit_iso.kernels.triton_ops import Tile

from .checks import KEY
from .inputs import (
    MODELS,
    SMOKE_MODELS,
    Group,
    Model,
    gaussian,
    gaussian_problem,
    power_law_problem,
)
from .timing import Budget, interleaved, seconds_of

Record = dict[str, Any]
Factor = Callable[[Tensor], Tensor]

TILES = [Tile(128, 64, 4, 3), Tile(128, 64, 8, 3), Tile(128, 64, 8, 4), Tile(64, 64, 4, 4)]


def products(device: str, smoke: bool, budget: Budget) -> Iterator[Record]:
    """Yield the float16 product X Xᵀ by halves against torch.bmm, per shape, and every tile."""
    shapes = [(2, 24, 56)] if smoke else [
        (32, 512, 2048), (32, 2048, 2048), (16, 2048, 8192), (8, 4096, 4096), (1, 2048, 2048),
        (1, 4096, 14336),
    ]  # fmt: skip
    for shape in shapes:
        if not budget.allows(f"product {shape}"):
            continue
        X = gaussian(*shape, device=device).half()
        work: dict[str, Callable[[], object]] = {
            "plain": partial(torch.bmm, X, X.mT),
            "symmetric": partial(triton_ops.symmetric_product, X),
        }
        for tile in TILES:
            work[str(tuple(tile))] = partial(_product, X, tile)
        seconds = interleaved(work, device, rounds=3 if smoke else 21)
        batch, r, n = shape
        operations = batch * r * (r + 1) * n
        yield {
            "shape": shape,
            "seconds": seconds,
            "ratio": seconds["plain"] / seconds["symmetric"],
            "tflops": operations / seconds["symmetric"] / 1e12,
            "plain_tflops": 2 * batch * r * r * n / seconds["plain"] / 1e12,
        }


def _product(X: Tensor, tile: Tile) -> Tensor:
    return triton_ops.multiply(X, X, None, 1.0, 1.0, 0.0, "ieee", X.dtype, tile)


def iso_c(A: Tensor, factor: Factor) -> Tensor:
    """Return Iso-C of every matrix of A (…, m, n) from a polar factor: ⟨P, A⟩/r · P."""
    P = factor(A)
    scale = torch.linalg.vecdot(P.flatten(-2), A.flatten(-2)) / min(A.shape[-2:])
    isotropic: Tensor = P * scale[..., None, None]
    return isotropic


def sets(device: str, smoke: bool, budget: Budget) -> Iterator[Record]:
    """Yield per model the seconds of Iso-C over its matrices, by every way of the factor."""
    for model in SMOKE_MODELS if smoke else MODELS:
        if budget.allows(model.name):
            yield _one_set(model, device, smoke, budget)
            if device == "cuda":
                torch.cuda.empty_cache()


def _one_set(model: Model, device: str, smoke: bool, budget: Budget) -> Record:
    groups = model.groups(model.timed_layers)
    scale = model.layers / model.timed_layers
    matrices = [
        gaussian(g.count, g.rows, g.columns, device=device, seed=i) for i, g in enumerate(groups)
    ]
    ways: dict[str, Factor] = {
        "float16 symmetric": triton_ops.polar_factor_half,
        "float16 plain, 9 steps": partial(_plain, dtype=torch.float16, steps=9),
        "bfloat16 plain, 5 steps": partial(_plain, dtype=torch.bfloat16, steps=5),
        "float32 symmetric, 8 steps": _symmetric_float32,
        "float32 plain, 8 steps": partial(newton_schulz, coefficients=SCHEDULES["polar_express8"]),
    }
    work: dict[str, Callable[[], object]] = {
        name: partial(_all, matrices, partial(iso_c, factor=way)) for name, way in ways.items()
    }
    if device == "cuda":
        step = partial(iso_c, factor=triton_ops.polar_factor_half)
        replays = [triton_ops.capture(step, A) for A in matrices]
        work["float16 symmetric, CUDA graph"] = lambda: [
            replay(A) for replay, A in zip(replays, matrices, strict=True)
        ]
    seconds = interleaved(work, device, rounds=1 if smoke else 5, warm_up=1)
    work.clear()
    if (svd := _svd_seconds(matrices, groups, device, budget, model.name)) is not None:
        seconds["torch.linalg.svd"] = svd
    seconds = {name: scale * value for name, value in seconds.items()}
    return {
        "model": model.name,
        "matrices": model.matrices,
        "timed_layers": model.timed_layers,
        "scaled_by": scale,
        "seconds": seconds,
        "tflops": scale * half_work(groups) / seconds["float16 symmetric"] / 1e12,
        "errors": _errors(groups, device),
    }


def _all(matrices: Sequence[Tensor], step: Factor) -> None:
    for A in matrices:
        step(A)


def _svd_seconds(
    matrices: Sequence[Tensor], groups: Sequence[Group], device: str, budget: Budget, name: str
) -> float | None:
    """Return the seconds of one SVD per shape times the count of that shape."""
    torch.linalg.svd(matrices[0][0, :8, :8])  # what the first call loads is no part of it
    total = 0.0
    for A, group in zip(matrices, groups, strict=True):
        if not budget.allows(f"torch.linalg.svd of {group.rows}×{group.columns} ({name})"):
            return None
        svd = partial(torch.linalg.svd, A[0], full_matrices=False)
        total += group.count * seconds_of(svd, device)
    return total


def _plain(A: Tensor, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the usual half-precision Newton–Schulz on full products, for any orientation."""
    X = A.mT if A.shape[-2] > A.shape[-1] else A
    X = (X / torch.linalg.matrix_norm(X)[..., None, None]).to(dtype).contiguous()
    schedule = SCHEDULES["polar_express5" if steps == 5 else "polar_express8"]
    for a, b, c in (*schedule, *schedule[-1:] * steps)[:steps]:
        G = torch.bmm(X, X.mT)
        X = torch.baddbmm(X, torch.baddbmm(G, G, G, beta=b, alpha=c), X, beta=a)
    P = X.to(A.dtype)
    return P.mT if A.shape[-2] > A.shape[-1] else P


def _symmetric_float32(A: Tensor) -> Tensor:
    X = A.mT if A.shape[-2] > A.shape[-1] else A
    X = X / torch.linalg.matrix_norm(X)[..., None, None]
    P = triton_ops.newton_schulz_symmetric(X, SCHEDULES["polar_express8"])
    return P if A.shape[-2] <= A.shape[-1] else P.mT


def half_work(groups: Sequence[Group]) -> float:
    """Return the operations of polar_factor_half, symmetric products counted by their half.

    In units of r³ a product of two r × r matrices is 2, its half 1. Square: 9 steps of XXᵀ,
    polynomial and multiplication; wide: 3 legs of two steps; one r × r square for the norm.
    """
    total = 0.0
    for group in groups:
        r, n = group.sides
        alpha = n / r
        steps = 3 * (3 * alpha + 5) if n >= 2 * r else 9 * (3 * alpha + 1)
        total += group.count * float(r) ** 3 * (steps + 1)
    return total


def _errors(groups: Sequence[Group], device: str) -> dict[str, float]:
    errors = {}
    for group in groups:
        r, n = group.sides
        for name, problem in (
            ("gaussian", gaussian_problem(r, n, device=device)),
            ("power law 1e3", power_law_problem(r, n, 1e3, device=device)),
        ):
            errors[f"{name} {r}×{n}"] = problem.error(triton_ops.polar_factor_half(problem.A))
    return errors


def drops(device: str, smoke: bool, budget: Budget) -> Iterator[Record]:
    """Yield the time per element of DARE's drop and rescale, fused and in torch operations."""
    numel = 5000 if smoke else 100_000_000
    if not budget.allows("DARE"):
        return
    x = gaussian(numel, device=device)
    divide = partial(triton_ops.drop_and_rescale, x, 0.9, divisor=0.1, **KEY)
    seconds = interleaved(
        {
            "fused": divide,
            "torch": lambda: torch.where(keep_mask(numel, 0.9, device=device, **KEY), x, 0.0) / 0.1,
            "copy": x.clone,
        },
        device,
        rounds=3 if smoke else 11,
    )
    yield {"numel": numel, "ns_per_element": {k: v / numel * 1e9 for k, v in seconds.items()}}
