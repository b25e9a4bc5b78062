"""A model's matrices by one worker against a pool of two, each worker on one thread.

    python -m benchmarks.kernels.pool --out DIR [--workers 2] [--smoke]

Wall time, one and two workers in turn, median of ratios. The process CPU time of both is kept
too: where it does not grow with the second worker, what is missing from a factor of two is the
rest of the machine's load and the last matrix's tail, not contention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import click
import torch
from torch import Tensor

from mergekit_iso.kernels.pool import map_matrices

from ..machine import machine
from .candidates import candidates
from .inputs import Case, synthetic
from .real_deltas import SMOKE, Run, real_deltas


def measure(
    matrices: Sequence[Tensor], function: Callable[[Tensor], object], workers: int, times: int
) -> dict[str, Any]:
    """Return wall and CPU seconds of one worker and of several, in turn, and their ratios."""
    wall: dict[int, list[float]] = {1: [], workers: []}
    cpu: dict[int, list[float]] = {1: [], workers: []}
    map_matrices(function, matrices[:workers], workers)
    for _ in range(times):
        for count in wall:
            start = perf_counter(), process_time()
            map_matrices(function, matrices, count)
            wall[count].append(perf_counter() - start[0])
            cpu[count].append(process_time() - start[1])
    wall_pairs = zip(wall[1], wall[workers], strict=True)
    cpu_pairs = zip(cpu[1], cpu[workers], strict=True)
    return {
        "wall_seconds": {str(k): v for k, v in wall.items()},
        "cpu_seconds": {str(k): v for k, v in cpu.items()},
        "ratio": median(one / many for one, many in wall_pairs),
        "cpu_growth": median(many / one for one, many in cpu_pairs),
    }


def sets(cache: Path, *, smoke: bool = False) -> dict[str, list[Tensor]]:
    """Return the sets of matrices by name: a batch of equal squares, and the real ones."""
    shape, count = ("64x64", 4) if smoke else ("1024x1024", 24)
    batch = [synthetic(Case(shape, "gaussian", seed)) for seed in range(count)]
    real = real_deltas(SMOKE if smoke else Run(), cache)
    return {f"{count}x{shape}-gaussian": batch, "real": list(real.values())}


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/kernels"))
@click.option("--workers", type=click.IntRange(2, 64), default=2, show_default=True)
@click.option("--times", type=click.IntRange(1), default=3, show_default=True)
@click.option("--only", multiple=True, help="Label of a candidate; default svd, exact, fast.")
@click.option("--smoke", is_flag=True, help="A few tiny matrices.")
def main(out: Path, workers: int, times: int, only: tuple[str, ...], smoke: bool) -> None:
    """Measure both sets with each candidate and write one JSON per set."""
    torch.set_num_threads(1)
    labels = only or ("svd", "exact", "fast(0.001)", "fast(0.02)")
    for name, matrices in sets(out / "cache", smoke=smoke).items():
        file = out / f"pool-{name}-{workers}w.json"
        record = json.loads(file.read_text()) if file.exists() else {"results": {}}
        results = record["results"]
        for label in labels:
            result = measure(matrices, candidates()[label], workers, 1 if smoke else times)
            stamp = datetime.now(UTC).isoformat(timespec="seconds")
            results[label] = {**result, "measured": stamp}
            click.echo(
                f"{name:<24}{label:<14}{result['ratio']:.2f}× wall, "
                f"CPU time ×{result['cpu_growth']:.2f}"
            )
        record = {
            "benchmark": "pool",
            "set": name,
            "matrices": len(matrices),
            "workers": workers,
            "machine": machine(),
            "results": results,
        }
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
