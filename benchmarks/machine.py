"""What a measurement was made on: processor, threads, versions, load."""

from __future__ import annotations

import os
import platform
import sys
from hashlib import blake2b
from pathlib import Path
from time import process_time
from typing import Any

import torch
from torch import Tensor

import mergekit_iso
from mergekit_iso.kernels.products import quick_float32_products


def machine() -> dict[str, Any]:
    """Return processor, cores, load average and versions, as plain data."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.machine()}",
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "mkl": torch._C.has_mkl,
        "mergekit_iso": mergekit_iso.__version__,
    }


def digest(*files: Path) -> str:
    """Return a short hash of the files, which tells whether a result is of this code."""
    hashed = blake2b(digest_size=6)
    for file in files:
        hashed.update(file.read_bytes())
    return hashed.hexdigest()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    fields: dict[str, str] = {}
    if info.exists():
        lines = (line.partition(":") for line in info.read_text().splitlines())
        fields = {key.strip(): value.strip() for key, _, value in reversed(list(lines))}
    name = fields.get("model name") or platform.processor() or "unknown"
    family, model = fields.get("cpu family"), fields.get("model")
    name = f"{name} (family {family}, model {model})" if family and model else name
    flags = fields.get("flags", "").split()
    present = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f in flags]
    return f"{name}; {', '.join(present)}" if present else name


def product_rates(size: int = 1024) -> dict[str, float]:
    """Return GFLOP/s of one square product on one thread, by kind, best of five by CPU time.

    ``float32 quick`` is within the library's switch to oneDNN.
    """
    A = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    rates = {}
    for kind, X in (("float64", A.double()), ("float32", A), ("bfloat16", A.bfloat16())):
        rates[kind] = _rate(X)
    with quick_float32_products():
        rates["float32 quick"] = _rate(A)
    return rates


def _rate(X: Tensor) -> float:
    seconds = []
    for _ in range(5):
        start = process_time()
        X @ X
        seconds.append(process_time() - start)
    return round(2 * len(X) ** 3 / min(seconds) / 1e9)
