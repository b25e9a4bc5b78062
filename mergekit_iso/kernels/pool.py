"""Many matrices at a time: a pool of one-thread workers on a CPU, stacks elsewhere.

A product of one matrix scales worse over threads than matrices do over workers, so every worker
has one thread and its own matrix. torch releases the interpreter's lock while it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from .newton_schulz import upcast
from .polar import Exact, PolarPolicy, PolarResult, decompose, polar_policy
from .products import quick_float32_products

Result = TypeVar("Result")

#: Elements of a stack: 1 GiB in float32, where an iteration holds a few such.
_LARGEST_STACK = 2**28


def decompose_many(
    matrices: Sequence[Tensor],
    polar: PolarPolicy | str | dict[str, Any] = Exact(),
    *,
    threads: int,
) -> list[PolarResult]:
    """Return the polar decomposition of every matrix (…, m, n), in order.

    On the CPU by ``threads`` workers, each result as :func:`decompose` gives it on one thread,
    bit by bit. Matrices elsewhere are worked on in stacks of equal ones, where ``threads`` says
    nothing; a policy that falls back to another kernel does so for a whole stack.
    Raises ValueError unless ``threads`` is positive.
    """
    policy = polar_policy(polar)
    if all(A.device.type == "cpu" for A in matrices):
        return map_matrices(lambda A: decompose(A, policy), matrices, threads)
    stacked = map_stacks(lambda A: decompose(A, policy), [upcast(A) for A in matrices])
    return [PolarResult(*parts) for parts in stacked]


def map_matrices(
    function: Callable[[Tensor], Result], matrices: Sequence[Tensor], threads: int
) -> list[Result]:
    """Return ``function`` of every matrix in order, computed by ``threads`` workers.

    Each worker has one intra-op thread, so that a result does not depend on how many workers
    there are. The costliest matrices, by m·n·min(m, n), come first. Products in float32 are
    those of :func:`quick_float32_products` throughout. The caller's number of threads stays as
    it is. Raises ValueError unless ``threads`` is positive, and what ``function`` raises: the
    first error in the matrices' order, when those already running are done.
    """
    if threads < 1:
        raise ValueError(f"a pool of {threads} threads cannot work: give at least 1")
    if not matrices:
        return []
    own = torch.get_num_threads()
    workers = min(threads, len(matrices))
    pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
    try:
        with quick_float32_products():
            order = sorted(range(len(matrices)), key=lambda i: -_cost(matrices[i]))
            started = {i: pool.submit(function, matrices[i]) for i in order}
            return [started[i].result() for i in range(len(matrices))]
    finally:
        pool.shutdown(cancel_futures=True)
        # The number is each thread's own, but threads born later take the one set last.
        torch.set_num_threads(own)


def map_stacks(
    function: Callable[[Tensor], Sequence[Tensor]], matrices: Sequence[Tensor]
) -> list[tuple[Tensor, ...]]:
    """Return ``function`` of every matrix in order, computed on stacks (count, …, m, n).

    Matrices of the same shape, dtype and device share a stack of up to 2²⁸ elements.
    ``function`` returns tensors with the stack's first dimension; a matrix gets its part of each.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, A in enumerate(matrices):
        groups.setdefault((A.shape, A.dtype, A.device), []).append(i)
    results: dict[int, tuple[Tensor, ...]] = {}
    for alike in groups.values():
        most = max(1, _LARGEST_STACK // max(1, matrices[alike[0]].numel()))
        for start in range(0, len(alike), most):
            chosen = alike[start : start + most]
            parts = function(torch.stack([matrices[i] for i in chosen]))
            results.update(zip(chosen, zip(*parts, strict=True), strict=True))
    return [results[i] for i in range(len(matrices))]


def _cost(A: Tensor) -> int:
    return prod(A.shape) * min(A.shape[-2:])
