"""The Triton kernels behind :mod:`triton_ops`; importing this needs triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def symmetric_product_kernel(
    X, Y, D, C,
    r, n, tiles, alpha, beta, gamma,
    HAS_D: tl.constexpr, PRECISION: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """C = alpha·X Yᵀ + beta·D + gamma·I of contiguous (batch, r, n) matrices, C and D symmetric.

    One program makes one tile of the lower triangle and stores it twice: as it is and mirrored.
    """
    program = tl.program_id(0)
    batch = (program // tiles).to(tl.int64)
    tile = program % tiles

    # Tiles count row by row: i(i + 1)/2 ≤ tile < (i + 1)(i + 2)/2; the root may be off by one.
    i = ((tl.sqrt(8.0 * tile + 1.0) - 1.0) / 2.0).to(tl.int32)
    i += ((i + 1) * (i + 2) // 2 <= tile).to(tl.int32)
    i -= (i * (i + 1) // 2 > tile).to(tl.int32)
    j = tile - i * (i + 1) // 2

    row = i * BLOCK + tl.arange(0, BLOCK)
    column = j * BLOCK + tl.arange(0, BLOCK)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end wrap around to real ones: loads need no mask, and no one stores them.
    x_at = X + batch * r * n + (row % r).to(tl.int64)[:, None] * n + k[None, :]
    y_at = Y + batch * r * n + (column % r).to(tl.int64)[:, None] * n + k[None, :]
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for start in range(0, n, BLOCK_K):
        inside = (start + k < n)[None, :]
        x = tl.load(x_at + start, mask=inside, other=0.0)
        y = tl.load(y_at + start, mask=inside, other=0.0)
        total = tl.dot(x, tl.trans(y), total, input_precision=PRECISION)

    here = batch * r * r + (row.to(tl.int64) * r)[:, None] + column[None, :]
    inside = (row < r)[:, None] & (column < r)[None, :]
    total = alpha * total
    if HAS_D:
        total += beta * tl.load(D + here, mask=inside, other=0.0).to(tl.float32)
    if i == j:
        on_and_below = tl.arange(0, BLOCK)[:, None] - tl.arange(0, BLOCK)[None, :]
        total += tl.where(on_and_below == 0, gamma, 0.0)
        # The upper half of the tile may differ from the lower in the last bit.
        total = tl.where(on_and_below >= 0, total, tl.trans(total))
    result = total.to(C.dtype.element_ty)
    tl.store(C + here, result, mask=inside)
    if i != j:
        mirrored = batch * r * r + (column.to(tl.int64) * r)[:, None] + row[None, :]
        tl.store(C + mirrored, tl.trans(result), mask=tl.trans(inside))


@triton.jit
def mix(h):
    """The 32-bit finaliser of :mod:`random`, on unsigned integers."""
    h ^= h >> 16
    h *= 0x7FEB352D
    h ^= h >> 15
    h *= 0x846CA68B
    return h ^ (h >> 16)


@triton.jit(do_not_specialize=["start", "k0", "k1", "keep_below"])
def drop_kernel(X, Y, numel, start, k0, k1, keep_below, divisor, BLOCK: tl.constexpr):
    """Y = X / divisor where hash(start + i) < keep_below, else 0; 32-bit counter and threshold.

    ``start``, the keys and the threshold are signed integers with the bits of unsigned ones.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < numel
    counter = (i + start).to(tl.uint32)
    h = mix(counter ^ k0.to(tl.uint32, bitcast=True)) + k1.to(tl.uint32, bitcast=True)
    keep = mix(h) < keep_below.to(tl.uint32, bitcast=True)
    x = tl.load(X + i, mask=inside, other=0.0).to(tl.float32)
    y = tl.div_rn(tl.where(keep, x, 0.0), tl.zeros_like(x) + divisor)
    tl.store(Y + i, y.to(Y.dtype.element_ty), mask=inside)


#: Whether the kernels run in Triton's interpreter, on the CPU.
INTERPRETED = not isinstance(symmetric_product_kernel, triton.JITFunction)
