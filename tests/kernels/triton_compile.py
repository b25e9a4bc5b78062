"""Compile the kernels for a GPU that need not be there, and look for tensor-core instructions."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mergekit_iso.kernels import triton_kernels
from mergekit_iso.kernels.triton_ops import tile_for

TARGET = GPUTarget("cuda", 90, 32)


def product(name: str, dtype: torch.dtype) -> str:
    """Return the PTX of the symmetric product with tiles for large inputs."""
    tile = tile_for(dtype, 2048, 8, "tf32x3")
    constants = {
        "HAS_D": True, "PRECISION": "tf32x3", "BLOCK": tile.side, "BLOCK_K": tile.depth
    }  # fmt: skip
    signature = {
        **dict.fromkeys("XYDC", f"*{name}"),
        **dict.fromkeys(("r", "n", "tiles"), "i32"),
        **dict.fromkeys(("alpha", "beta", "gamma"), "fp32"),
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(triton_kernels.symmetric_product_kernel, signature, constants)
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    compiled = triton.compile(source, target=TARGET, options=options)
    return str(compiled.asm["ptx"])


def main() -> None:
    assert "wgmma.mma" in product("fp16", torch.float16)
    assert "wgmma.mma" in product("fp32", torch.float32)
    words = dict.fromkeys(("numel", "start", "k0", "k1", "keep_below"), "i32")
    signature = {"X": "*fp32", "Y": "*fp32", **words, "divisor": "fp32", "BLOCK": "constexpr"}
    source = ASTSource(triton_kernels.drop_kernel, signature, {"BLOCK": 4096})
    triton.compile(source, target=TARGET)


if __name__ == "__main__":
    main()
