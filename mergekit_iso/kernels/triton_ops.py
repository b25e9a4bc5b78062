"""Symmetric products, Newton–Schulz on them, and the DARE mask, as Triton kernels.

X Xᵀ and every polynomial of it is symmetric, so half of its tiles are enough: a Newton–Schulz
step with α = n / r costs (3α + 1)·r³ operations instead of (4α + 2)·r³. The functions never
wait for the device and have no shape that depends on data, so they can be captured in a CUDA
graph, and the kernels are operators that torch.compile keeps whole. The same code runs on the
CPU in Triton's interpreter (TRITON_INTERPRET=1 before the first import).

Importing this module needs no triton; :data:`AVAILABLE` says whether it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import MethodError
from .minimax import minimax_quintics
from .random import _CHUNK, _key, _signed

try:
    from . import triton_kernels
except ImportError:
    AVAILABLE = False
    _INTERPRETED = False
else:
    AVAILABLE = True
    _INTERPRETED = triton_kernels.INTERPRETED

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PRECISIONS = ("ieee", "tf32x3", "tf32")
_DROP_BLOCK = 4096
# Square deltas are far worse conditioned than wide ones, and gain nothing from the Gram form.
_SQUARE = minimax_quintics(1e-5, 9)
_WIDE = minimax_quintics(1e-3, 6)


class Tile(NamedTuple):
    """How the product is cut: side × side tiles of C, depth columns of X at a time.

    ``warps`` of 32 threads make a tile, ``stages`` slices of X are on their way at once. The
    defaults compile for compute capability 9.0 without spilling a register.
    """

    side: int
    depth: int
    warps: int
    stages: int


def symmetric_product(
    X: Tensor,
    Y: Tensor | None = None,
    D: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    gamma: float = 0.0,
    precision: str = "tf32x3",
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return alpha·X Yᵀ + beta·D + gamma·I (…, r, r), exactly symmetric, by its lower half.

    X, Y (…, r, n): float32, float16 or bfloat16, one dtype; Y defaults to X. Another Y must make
    the product symmetric, as polynomials of one matrix do: the upper half is never computed.
    D (…, r, r): symmetric, any of the three dtypes; only its lower triangle is read.
    The sum is in float32; the result has ``out_dtype``, by default that of X. ``precision`` of
    float32 products: ``ieee``, ``tf32x3`` (three tensor-core products, about as exact) or
    ``tf32``. Allocates the result, and copies of inputs that are not contiguous. Raises
    MethodError where triton is missing or a shape, dtype or precision is none of these.
    """
    _require()
    Y = X if Y is None else Y
    r = X.shape[-2]
    if X.dtype not in _DTYPES or Y.dtype != X.dtype:
        raise MethodError(f"no symmetric product of {X.dtype} with {Y.dtype}")
    if Y.shape != X.shape or (D is not None and D.shape != (*X.shape[:-1], r)):
        shapes = [tuple(T.shape) for T in (X, Y, D) if T is not None]
        raise MethodError(f"no symmetric product of the shapes {shapes}")
    if precision not in _PRECISIONS:
        raise MethodError(
            f"there is no precision {precision!r}", hint=f"valid: {', '.join(_PRECISIONS)}"
        )
    product: Tensor = _symmetric_product(
        X, Y, D, alpha, beta, gamma, precision, out_dtype or X.dtype
    )
    return product


def symmetric_polynomial(
    G: Tensor, a: float, b: float, c: float, *, precision: str = "tf32x3"
) -> Tensor:
    """Return a·I + b·G + c·G² (…, r, r) of symmetric G; dtypes and errors as the product's."""
    return symmetric_product(G, D=G, alpha=c, beta=b, gamma=a, precision=precision)


def newton_schulz_symmetric(
    X: Tensor,
    coefficients: Sequence[Sequence[float]],
    *,
    dtype: torch.dtype | None = None,
    steps_per_leg: int = 1,
    renormalise: bool = False,
    precision: str = "tf32x3",
) -> Tensor:
    """Return the iteration X ← (aI + bG + cG²) X with G = X Xᵀ, over every (a, b, c).

    X (…, r, n), r ≤ n, float32 or half precision, singular values at most 1. The iteration is
    in ``dtype`` (default X's; sums are always in float32) and the result in X's. float32
    products with X itself follow torch's own setting for TF32.

    ``steps_per_leg`` above 1 takes that many steps on r × r matrices before X is multiplied (the
    Gram form, cheaper from n ≥ 2r on). Forming G squares the condition, so keep legs at 2 steps
    in float16, 3 in float32, and 1 in bfloat16. ``renormalise`` first divides by ‖G²‖_F^¼, a
    bound on σ₁ that is up to √r closer than ‖X‖_F: a step less for the same accuracy; X may then
    have any norm that float16 holds. Allocates at most two copies of X and four of G.
    Raises MethodError as :func:`symmetric_product` does.
    Source: the step of Jordan et al. 2024 ("Muon"); the Gram form with restarts of Dao-AILab's
    Gram Newton–Schulz.
    """
    *batch, r, n = X.shape
    Z = X.to(dtype or X.dtype).reshape(prod(batch), r, n).contiguous()
    for first in range(0, len(coefficients), steps_per_leg):
        G = symmetric_product(Z, precision=precision)
        if renormalise and first == 0:
            Z, G = _renormalised(Z, G, precision)
        leg = coefficients[first : first + steps_per_leg]
        Z = torch.bmm(_gram_steps(G, leg, precision), Z)
    return Z.reshape(X.shape).to(X.dtype)


def polar_factor_half(A: Tensor) -> Tensor:
    """Return an approximate polar factor of every matrix of A (…, m, n) from float16 products.

    For loose tolerances: Iso-C's relative error is at most 2e-2 for condition numbers up to 1e3
    and 256 rows or more; σ below about 1e-4·σ₁ drown in float16's rounding. Any scale; a zero
    matrix gives zero. The result has the dtype of A. Allocates a float16 copy of A besides what
    :func:`newton_schulz_symmetric` does. Raises MethodError where triton is missing.
    """
    wide = A.mT if A.shape[-2] > A.shape[-1] else A
    r, n = wide.shape[-2:]
    # ‖X‖_F = √r gives G a mean diagonal of 1, clear of float16's subnormal numbers. In float64,
    # since squares of A's entries may leave the range of float32.
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True, dtype=torch.float64)
    scale = torch.where(norm == 0, 1.0, sqrt(r) / norm).clamp(max=torch.finfo(torch.float32).max)
    X = torch.empty(wide.shape, dtype=torch.float16, device=A.device)
    torch.mul(wide, scale.float(), out=X)
    schedule, leg = (_WIDE, 2) if n >= 2 * r else (_SQUARE, 1)
    P = newton_schulz_symmetric(X, schedule, steps_per_leg=leg, renormalise=True).to(A.dtype)
    return P if wide is A else P.mT


def drop_and_rescale(
    x: Tensor,
    drop_rate: float,
    *,
    seed: int,
    round: int,
    worker: int,
    name: str,
    offset: int = 0,
    divisor: float = 1.0,
) -> Tensor:
    """Return x / divisor where :func:`~mergekit_iso.kernels.random.keep_mask` keeps, else 0.

    x: any shape, float32 or half precision, elements ``offset …`` of the unsharded tensor; the
    result is like x, computed in float32, with the bits that mask and division in torch give on
    the CPU. Allocates the result alone. Raises MethodError where triton is missing or for
    another dtype.
    """
    _require()
    if x.dtype not in _DTYPES:
        raise MethodError(f"no drop kernel for {x.dtype}")
    if _INTERPRETED and x.dtype == torch.bfloat16:  # to which it truncates
        key = {"seed": seed, "round": round, "worker": worker}
        wide = drop_and_rescale(
            x.float(), drop_rate, **key, name=name, offset=offset, divisor=divisor
        )
        return wide.to(x.dtype)
    # 2³² itself, for a rate of 0, has no 32-bit form; but then nothing is dropped at all.
    keep_below = int((1.0 - drop_rate) * 2**32)
    if keep_below >= 2**32:
        return x / divisor
    x = x.contiguous()
    y = torch.empty_like(x)
    source, target = x.view(-1), y.view(-1)
    start = 0
    while start < x.numel():
        high, low = divmod(offset + start, _CHUNK)
        stop = min(x.numel(), start + _CHUNK - low)
        k0, k1 = _key(seed, round, worker, name, high)
        words = [_signed(word) for word in (low, k0, k1, keep_below)]
        _drop(source[start:stop], target[start:stop], words, divisor)
        start = stop
    return y


def capture(function: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
    """Return ``function`` as one CUDA graph, for inputs of the shape and dtype of ``like``.

    ``like`` is a CUDA tensor and is run three times to warm up. The result of the returned
    function is the same memory at every call: the next call overwrites it.
    """
    held = like.clone()
    stream = torch.cuda.Stream(like.device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(like.device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(held)
    torch.cuda.current_stream(like.device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        result = function(held)

    def replay(X: Tensor) -> Tensor:
        held.copy_(X)
        graph.replay()
        return result

    return replay


def _require() -> None:
    if not AVAILABLE:
        raise MethodError("the GPU kernels need triton", hint="pip install triton")


def _renormalised(X: Tensor, G: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    # In float32, since squares of float16's largest numbers are out of its range.
    squared = symmetric_product(G, precision=precision, out_dtype=torch.float32)
    bound = torch.linalg.matrix_norm(squared)[:, None, None].sqrt()  # on σ₁²
    factor = torch.where(bound == 0, 1.0, bound).rsqrt().to(X.dtype)
    return X * factor, (G * factor.float().square()).to(G.dtype)


def _gram_steps(G: Tensor, coefficients: Sequence[Sequence[float]], precision: str) -> Tensor:
    # Every step's Z is a polynomial of the first G, so all of them commute: X ← Z…Z X needs only
    # their product Q, the next G is Z G Z, and each of these is symmetric.
    Q: Tensor | None = None
    for step, (a, b, c) in enumerate(coefficients, start=1):
        Z = symmetric_polynomial(G, a, b, c, precision=precision)
        Q = Z if Q is None else symmetric_product(Z, Q, precision=precision)
        if step < len(coefficients):
            ZG = symmetric_product(Z, G, precision=precision)
            G = symmetric_product(ZG, Z, precision=precision)
    assert Q is not None
    return Q


@torch.library.custom_op("mergekit_iso::symmetric_product", mutates_args=())
def _symmetric_product(
    X: Tensor,
    Y: Tensor,
    D: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    precision: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return multiply(X, Y, D, alpha, beta, gamma, precision, out_dtype)


@_symmetric_product.register_fake
def _(
    X: Tensor,
    Y: Tensor,
    D: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    precision: str,
    out_dtype: torch.dtype,
) -> Tensor:
    return X.new_empty((*X.shape[:-1], X.shape[-2]), dtype=out_dtype)


def multiply(
    X: Tensor,
    Y: Tensor,
    D: Tensor | None,
    alpha: float,
    beta: float,
    gamma: float,
    precision: str,
    out_dtype: torch.dtype,
    tile: Tile | None = None,
) -> Tensor:
    """Return what :func:`symmetric_product` does, unchecked, with a given tile."""
    *batch, r, n = X.shape
    if _INTERPRETED and torch.bfloat16 in (X.dtype, out_dtype):  # which it computes wrongly
        X, Y = X.float(), Y.float()
        wide = multiply(X, Y, D, alpha, beta, gamma, precision, torch.float32, tile)
        return wide.to(out_dtype)
    X, Y = X.contiguous(), Y.contiguous()
    D = None if D is None else D.contiguous()
    C = X.new_empty((*batch, r, r), dtype=out_dtype)
    if C.numel() == 0:
        return C
    tile = tile or tile_for(X.dtype, r, prod(batch), precision)
    blocks = -(-r // tile.side)
    tiles = blocks * (blocks + 1) // 2
    with torch.cuda.device_of(X):  # type: ignore[no-untyped-call]
        triton_kernels.symmetric_product_kernel[(tiles * prod(batch),)](
            X, Y, D, C, r, n, tiles, alpha, beta, gamma,
            HAS_D=D is not None, PRECISION=precision, BLOCK=tile.side, BLOCK_K=tile.depth,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return C


def tile_for(dtype: torch.dtype, r: int, batch: int, precision: str) -> Tile:
    """Return the tile for a batch of products with r rows, by these alone."""
    if dtype == torch.float32 and precision == "ieee":
        return Tile(64, 16, 4, 3)  # without tensor cores the registers are the limit
    depth = 32 if dtype == torch.float32 else 64
    blocks = -(-r // 128)
    # Large tiles read X least often; small ones keep a large GPU busy where there is little work.
    if batch * blocks * (blocks + 1) // 2 < 128:
        return Tile(64, depth, 4, 3)
    return Tile(128, depth, 8 if dtype == torch.float32 else 4, 3)


@torch.library.custom_op("mergekit_iso::drop", mutates_args=("y",))
def _drop(x: Tensor, y: Tensor, words: list[int], divisor: float) -> None:
    n = x.numel()
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        triton_kernels.drop_kernel[(-(-n // _DROP_BLOCK),)](
            x, y, n, *words, divisor, BLOCK=_DROP_BLOCK, num_warps=8
        )
