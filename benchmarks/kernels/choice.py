"""Every kernel's time on both sides of each bound of mergekit_iso.kernels.choice.

    python -m benchmarks.kernels.choice [--out DIR] [--device cpu] [--times 3] [--smoke]

One thread, Gaussian matrices and a power law to a condition of 1e3, ``Fast(kernel=…)`` in turn,
medians. A kernel that has to fall back counts with what it falls back to. ``chosen`` is the one
the table takes, and ``lost`` what it costs over the quickest.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click
import torch
from torch import Tensor

from mergekit_iso.kernels.choice import FAST, QUICK, choose
from mergekit_iso.kernels.polar import Fast, decompose

from ..machine import machine
from .inputs import Case, synthetic

SHAPES = ("384x384", "512x512", "1024x1024", "512x704", "512x832", "512x1376", "512x2560",
          "512x3584", "1024x5120", "1024x7168")  # fmt: skip
SPECTRA = ("gaussian", "power3")


def measure(A: Tensor, times: int) -> dict[str, float]:
    """Return every kernel's median seconds on a matrix."""
    seconds: dict[str, list[float]] = {kernel: [] for kernel in QUICK}
    for _ in range(times + 1):
        for kernel, found in seconds.items():
            start = perf_counter()
            decompose(A, Fast(kernel=kernel))  # type: ignore[arg-type]
            if A.is_cuda:
                torch.cuda.synchronize()
            found.append(perf_counter() - start)
    return {kernel: median(found[1:]) for kernel, found in seconds.items()}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/kernels"))
@click.option("--device", default="cpu", show_default=True)
@click.option("--times", type=click.IntRange(1), default=3, show_default=True)
@click.option("--smoke", is_flag=True, help="Two tiny matrices.")
def main(out: Path, device: str, times: int, smoke: bool) -> None:
    """Measure, print a line per matrix, and write one JSON."""
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for shape in ("64x64", "64x128") if smoke else SHAPES:
        for spectrum in SPECTRA:
            A = synthetic(Case(shape, spectrum, 0)).to(device)
            seconds = measure(A, 1 if smoke else times)
            (chosen,) = choose(A, FAST)
            lost = seconds[chosen] / min(seconds.values())
            rows.append({"shape": shape, "spectrum": spectrum, "chosen": chosen, "lost": lost,
                         "seconds": seconds})  # fmt: skip
            times_of = " ".join(f"{kernel} {s * 1e3:.0f}" for kernel, s in seconds.items())
            click.echo(f"{shape:<12}{spectrum:<10}ms: {times_of}; chosen {chosen}, {lost:.2f} ×")
    record = {"benchmark": "choice", "device": device, "machine": machine(), "rows": rows}
    out.mkdir(parents=True, exist_ok=True)
    (out / f"choice-{device.partition(':')[0]}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
