"""Every kernel and policy against float64, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor

from mergekit_iso.kernels import triton_ops
from mergekit_iso.kernels.newton_schulz import SCHEDULES
from mergekit_iso.kernels.polar import POLICIES, decompose
from mergekit_iso.kernels.random import keep_mask

from .inputs import Problem, gaussian, gaussian_problem, power_law_problem, rank_half_problem


class Key(TypedDict):
    """What a DARE mask is drawn by."""

    seed: int
    round: int
    worker: int
    name: str


# Largest error of Iso-C; others aim at a residual of 1e-3. Fixed steps leave squares unfinished.
POLICY_BOUNDS = {"exact": 1e-4, "newton_schulz": 2e-2}
KEY: Key = {"seed": 1, "round": 2, "worker": 3, "name": "model.layers.0.mlp.up_proj.weight"}


@dataclass(frozen=True)
class Check:
    """One result: ``error`` must be at most ``bound``; ``failure`` says why there is none."""

    name: str
    bound: float
    error: float | None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Whether there is an error and it is within its bound."""
        return self.error is not None and self.error <= self.bound


Schedule = Sequence[Sequence[float]]
Case = tuple[str, float, Callable[[], float]]


def run_checks(device: str, smoke: bool) -> Iterator[Check]:
    """Yield one check after the other; one that raises is a failed check."""
    for name, bound, measure in _cases(device, smoke):
        try:
            yield Check(name, bound, measure())
        except Exception as error:
            yield Check(name, bound, None, f"{type(error).__name__}: {str(error)[:300]}")


def _cases(device: str, smoke: bool) -> Iterator[Case]:
    yield from _products(device, smoke)
    yield from _iterations(device, smoke)
    yield from _policies(device, smoke)
    yield from _masks(device, smoke)
    if device == "cuda":
        yield from _graphs(device)


def _products(device: str, smoke: bool) -> Iterator[Case]:
    shapes = [(3, 65, 33), (2, 70, 70)] if smoke else [(1, 1), (3, 65, 33), (2, 500, 1001)]
    shapes += [] if smoke else [(2048, 2048), (64, 512, 2048), (2, 4096, 1000)]
    # Tensor cores cut sums off instead of rounding them, which long sums of squares feel.
    kinds = [
        (torch.float32, "ieee", 5e-6),
        (torch.float32, "tf32x3", 2e-5),
        (torch.float16, "tf32x3", 2e-5),
        (torch.bfloat16, "tf32x3", 2e-5),
    ]
    for shape in shapes:
        for dtype, precision, bound in kinds:
            X = gaussian(*shape, device=device).to(dtype)
            name = f"X Xᵀ {_label(dtype)} {precision if dtype == torch.float32 else ''} {shape}"
            yield name, bound, partial(_product_error, X, precision)
    G = gaussian(2, 100, 300, device=device) / 30
    G = G @ G.mT
    yield "aI + bG + cG² float32", 2e-5, partial(_polynomial_error, G)


def _product_error(X: Tensor, precision: str) -> float:
    D = gaussian(*X.shape[:-1], X.shape[-2], device=X.device.type, seed=1)
    D = D + D.mT
    C = triton_ops.symmetric_product(
        X, D=D, alpha=0.5, beta=2.0, gamma=3.0, precision=precision, out_dtype=torch.float32
    )
    if not torch.equal(C, C.mT):
        raise ArithmeticError("the product is not symmetric to the bit")
    E = X.double()
    identity = torch.eye(X.shape[-2], dtype=torch.float64, device=X.device)
    return _relative(C, 0.5 * E @ E.mT + 2 * D.double() + 3 * identity)


def _polynomial_error(G: Tensor) -> float:
    E = G.double()
    expected = 3.9 * torch.eye(len(E[0])).to(E) - 2.8 * E + 0.5 * E @ E
    return _relative(triton_ops.symmetric_polynomial(G, 3.9, -2.8, 0.5), expected)


def _iterations(device: str, smoke: bool) -> Iterator[Case]:
    r, n = (24, 60) if smoke else (512, 1408)
    A = power_law_problem(r, n, 100, device=device).A
    schedule = SCHEDULES["polar_express8"]
    exact = A.double() / torch.linalg.matrix_norm(A.double())
    for a, b, c in schedule:
        G = exact @ exact.mT
        exact = a * exact + (b * G + c * (G @ G)) @ exact
    X = A / torch.linalg.matrix_norm(A)
    for leg, bound in ((1, 1e-4), (2, 1e-3), (3, 2e-3)):
        yield (
            f"Newton–Schulz float32, legs of {leg}",
            bound,
            partial(_iteration_error, X, schedule, leg, exact),
        )
    for name, problem in _problems(device, smoke).items():
        yield (
            f"polar_factor_half, {name}",
            # Small matrices feel the rounding of their entries more.
            6e-2 if smoke else 2e-2,
            partial(_half_error, problem),
        )


def _iteration_error(X: Tensor, schedule: Schedule, leg: int, exact: Tensor) -> float:
    return _relative(triton_ops.newton_schulz_symmetric(X, schedule, steps_per_leg=leg), exact)


def _half_error(problem: Problem) -> float:
    return problem.error(triton_ops.polar_factor_half(problem.A))


def _problems(device: str, smoke: bool) -> dict[str, Problem]:
    small, large = (24, 56) if smoke else (1024, 2816)
    return {
        f"gaussian {small}×{small}": gaussian_problem(small, small, device=device),
        f"gaussian {large}×{small}": gaussian_problem(large, small, device=device),
        f"gaussian 3×{small}×{large}": gaussian_problem(small, large, device=device, batch=(3,)),
        f"power law 1e3 {small}×{large}": power_law_problem(small, large, 1e3, device=device),
    }


def _policies(device: str, smoke: bool) -> Iterator[Case]:
    problems = _problems(device, smoke)
    side = 24 if smoke else 1024
    for policy in POLICIES:
        bound = POLICY_BOUNDS.get(policy, 2e-3)
        for name, problem in problems.items():
            yield (
                f"policy {policy}, {name}",
                bound,
                partial(_policy_error, problem, policy),
            )
    half = rank_half_problem(side, 2 * side, device=device)
    yield "policy exact, half the rank", 1e-4, partial(_policy_error, half, "exact")


def _policy_error(problem: Problem, policy: str) -> float:
    return problem.error(decompose(problem.A, policy).factor)


def _masks(device: str, smoke: bool) -> Iterator[Case]:
    numel = 1001 if smoke else 1_000_003
    for offset in (0, 12345, 2**31 - 500, 2**32 - 500, 3 * 2**32 + 1):
        for rate in (0.1, 0.9):
            name = f"DARE mask, rate {rate}, from element {offset}"
            yield name, 0.0, partial(_mask_differences, numel, rate, offset, device)


def _mask_differences(numel: int, rate: float, offset: int, device: str) -> float:
    """Return how many elements differ from what torch gives on the CPU, by both paths."""
    x = gaussian(numel, device="cpu")
    keep = keep_mask(numel, rate, offset=offset, **KEY)
    expected = torch.where(keep, x, 0.0) / (1 - rate)
    got = triton_ops.drop_and_rescale(
        x.to(device), rate, offset=offset, divisor=1 - rate, **KEY
    ).cpu()
    mask = keep_mask(numel, rate, offset=offset, device=device, **KEY).cpu()
    return float((got != expected).sum() + (mask != keep).sum())


def _graphs(device: str) -> Iterator[Case]:
    A = gaussian(4, 512, 512, device=device)
    other = gaussian(4, 512, 512, device=device, seed=1)
    half = triton_ops.polar_factor_half

    def captured() -> float:
        replay = triton_ops.capture(half, A)
        return max(float((replay(X) != half(X)).sum()) for X in (A, other))

    yield "CUDA graph, elements that differ from eager", 0.0, captured
    compiled = torch.compile(half, fullgraph=True, dynamic=False)
    yield "torch.compile against eager", 2e-3, lambda: _relative(compiled(A), half(A).double())


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
