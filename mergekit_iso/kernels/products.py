"""Matrix products that know their result is symmetric, and a positive definite inverse from them.

On a CPU a symmetric result is computed by blocks of its lower triangle and mirrored (0.6 to 0.8
of a full product); elsewhere as one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

_BLOCKS = 4
_SMALLEST_BLOCKED = 512
_LEAF = 192

_users = 0
_users_lock = Lock()


@contextmanager
def quick_float32_products() -> Iterator[None]:
    """Let torch multiply float32 matrices on the CPU by oneDNN while the context lasts.

    torch's default, MKL, reaches about half of oneDNN's rate on AMD processors. The switch that
    routes products there permits bfloat16, which oneDNN uses only with AMX units; it is set only
    where a probe shows float32 accuracy. torch's switch is one for the whole process, so
    contexts are counted across threads and the last one restores it.
    """
    global _users
    if not _onednn_is_accurate():
        yield
        return
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    with _users_lock:
        _users += 1
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        with _users_lock:
            _users -= 1
            if _users == 0:
                matmul.fp32_precision = "none"


@cache
def _onednn_is_accurate() -> bool:
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    available = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or getattr(matmul, "fp32_precision", "") != "none":
        return False
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(256, 256, generator=generator)
    exact = A.double() @ A.double()
    try:
        matmul.fp32_precision = "bf16"
        product = A @ A
    finally:
        matmul.fp32_precision = "none"
    return bool((product - exact).norm() < 2e-6 * exact.norm())


def gram(X: Tensor) -> Tensor:
    """Return X Xᵀ of X (…, r, n): (…, r, r)."""
    return _symmetric(X, X.mT)


def commuting_product(A: Tensor, B: Tensor) -> Tensor:
    """Return A B of symmetric A and B (…, r, r) that commute, so that A B is symmetric too."""
    return _symmetric(A, B)


def _symmetric(left: Tensor, right: Tensor) -> Tensor:
    r = left.shape[-2]
    if left.dim() > 2 or left.device.type != "cpu" or r < _SMALLEST_BLOCKED:
        return left @ right
    size = -(-r // _BLOCKS)
    product = left.new_empty(r, r)
    for row in range(0, r, size):
        rows = slice(row, row + size)
        product[rows, : row + size] = left[rows] @ right[:, : row + size]
        product[:row, rows] = product[rows, :row].T
    return product


def symmetric_times(Z: Tensor, X: Tensor) -> Tensor:
    """Return Z X of symmetric Z (…, r, r), laid out in memory as X (…, r, n) is."""
    return Z @ X if X.is_contiguous() else (X.mT @ Z).mT


def positive_inverse(A: Tensor) -> Tensor:
    """Return the inverse of a symmetric positive definite A (…, r, r), symmetric.

    By halves and the Schur complement, so that nearly all of it is matrix products: about one
    product's time where LAPACK's Cholesky factor and inverse take two.
    Raises torch.linalg.LinAlgError if A is not positive definite.
    """
    r = A.shape[-1]
    if r <= _LEAF or A.dim() > 2 or A.device.type != "cpu":
        return torch.cholesky_inverse(torch.linalg.cholesky(A))
    h = r // 2
    upper = positive_inverse(A[:h, :h])
    W = A[h:, :h] @ upper
    lower = positive_inverse(A[h:, h:] - _symmetric(W, A[h:, :h].T))
    corner = lower @ W
    inverse = torch.empty_like(A)
    inverse[:h, :h] = upper + _symmetric(W.T, corner)
    inverse[h:, :h] = -corner
    inverse[:h, h:] = -corner.T
    inverse[h:, h:] = lower
    return inverse
