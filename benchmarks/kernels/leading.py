"""Leading singular triplets, and the methods made of them, against the full SVD.

    python -m benchmarks.kernels.leading --out DIR [--only TEXT] [--smoke]

The triplets that TSV keeps of each of 4 and 8 tasks (r/4, r/8), beside the full SVD in
float32; then TSV and Iso-CTS by ``merge``, beside the same as their authors write it: an SVD of
every delta, and of the two concatenations. One thread; errors of U_k Σ_k V_kᵀ and of the merged
delta are against float64, the latter up to r = 1024.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

from mergekit_iso import merge
from mergekit_iso.kernels.leading import leading
from mergekit_iso.kernels.spectrum import svd
from mergekit_iso.methods import TSV, IsoCTS

from ..machine import machine
from .inputs import Case, dimensions, synthetic
from .timing import ratio, rounds

NAME = "layer.weight"
SHAPES = ("512x512", "1024x1024", "2048x2048", "1024x2688", "2048x5632")
SPECTRA = ("gaussian", "power5", "low_rank_noise")
MERGED_SHAPES = ("1024x1024", "1024x2688", "2048x5632")
LARGEST_CHECKED = 1024


class Line(NamedTuple):
    """One measurement: CPU seconds of the baseline and of the library, and both errors."""

    what: str
    matrix: str
    tasks: int
    baseline_seconds: float
    seconds: float
    ratio: float
    baseline_error: float | None
    error: float | None


def triplets(A: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ``rank`` leading triplets of A (m, n) from its whole SVD."""
    U, sigma, Vh = svd(A)
    return U[:, :rank], sigma[:rank], Vh[:rank]


def product(U: Tensor, sigma: Tensor, Vh: Tensor) -> Tensor:
    """Return U diag(sigma) Vh in float64."""
    return (U.double() * sigma.double()) @ Vh.double()


def tsv(deltas: Sequence[Tensor]) -> Tensor:
    """TSV-Merge of deltas (m, n) by SVDs alone."""
    rank = TSV().rank(min(deltas[0].shape), len(deltas))
    U, sigma, Vh = zip(*(triplets(D, rank) for D in deltas), strict=True)
    return (_polar(torch.cat(U, 1)) * torch.cat(sigma)) @ _polar(torch.cat(Vh))


def iso_cts(deltas: Sequence[Tensor]) -> Tensor:
    """Iso-CTS of deltas (m, n) by SVDs alone."""
    common, own = IsoCTS().split(min(deltas[0].shape), len(deltas))
    C, sigma, Ch = triplets(torch.stack(list(deltas)).sum(0), common)
    U, s, Vh = zip(*(triplets(D - C @ (C.T @ D), own) for D in deltas), strict=True)
    mean = torch.cat([sigma, *s]).mean()
    return mean * _polar(torch.cat([C, *U], 1)) @ _polar(torch.cat([Ch, *Vh]))


METHODS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {"tsv": tsv, "iso_cts": iso_cts}


def of_triplets(shapes: Sequence[str], budget: float) -> Iterator[Line]:
    """Measure the triplets of one delta of 4 and of 8 tasks."""
    for case in (Case(shape, spectrum) for shape in shapes for spectrum in SPECTRA):
        A = synthetic(case)
        exact = torch.linalg.svd(A.double(), full_matrices=False)
        for tasks in (4, 8):
            rank = min(A.shape) // tasks
            truth = product(*(exact[0][:, :rank], exact[1][:rank], exact[2][:rank]))
            ways = {"svd": partial(triplets, A, rank), "leading": partial(leading, A, rank)}
            errors = [relative(product(*way()), truth) for way in ways.values()]
            yield _line("triplets", case.key, tasks, ways, errors, budget)


def of_merges(shapes: Sequence[str], budget: float) -> Iterator[Line]:
    """Measure whole merges of 4 and of 8 Gaussian deltas."""
    for shape in shapes:
        for tasks in (4, 8):
            deltas = [synthetic(Case(shape, "gaussian", seed)) for seed in range(tasks)]
            base = {NAME: torch.zeros(dimensions(shape))}
            models = [{NAME: D} for D in deltas]
            for method, literal in METHODS.items():
                ways: dict[str, Callable[[], Any]] = {
                    "svd": partial(literal, deltas),
                    "merge": partial(merge, base, models, method),
                }
                errors: list[float] = []
                if min(dimensions(shape)) <= LARGEST_CHECKED:
                    truth = literal([D.double() for D in deltas])
                    merged = merge(base, models, method)[NAME]
                    errors = [relative(literal(deltas), truth), relative(merged, truth)]
                yield _line(method, f"{shape}-gaussian", tasks, ways, errors, budget)


def relative(got: Tensor, truth: Tensor) -> float:
    """Return ‖got − truth‖_F / ‖truth‖_F."""
    return float((got.double() - truth).norm() / truth.norm())


def table(lines: Sequence[Line]) -> str:
    """Return the lines as Markdown."""
    head = "| what | matrix | tasks | by SVDs, s | s | times faster | error by SVDs | error |"
    rows = [head, "|---|---|" + "--:|" * 6]
    for line in lines:
        errors = ["–" if e is None else f"{e:.1e}" for e in (line.baseline_error, line.error)]
        rows.append(
            f"| {line.what} | {line.matrix} | {line.tasks} | {line.baseline_seconds:.2f} | "
            f"{line.seconds:.2f} | {line.ratio:.2f} | {errors[0]} | {errors[1]} |"
        )
    return "\n".join(rows)


def _line(
    what: str,
    matrix: str,
    tasks: int,
    ways: dict[str, Callable[[], Any]],
    errors: Sequence[float],
    budget: float,
) -> Line:
    seconds = rounds(ways, clock=process_time, budget=budget, fewest=1, most=5)
    baseline, own = seconds.values()
    of_svd, of_own = errors or (None, None)
    return Line(what, matrix, tasks, min(baseline), min(own), ratio(baseline, own), of_svd, of_own)


def _polar(A: Tensor) -> Tensor:
    U, _, Vh = svd(A)
    return U @ Vh


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/kernels"))
@click.option("--only", default="", help="Shapes that contain this text.")
@click.option("--smoke", is_flag=True, help="Tiny matrices, to see that it runs.")
def main(out: Path, only: str, smoke: bool) -> None:
    """Measure, print a table, and write leading.json to OUT."""
    torch.set_num_threads(1)
    shapes, merged = (("64x64",), ("64x96",)) if smoke else (SHAPES, MERGED_SHAPES)
    budget = 0.0 if smoke else 5.0
    lines = [
        *of_triplets([s for s in shapes if only in s], budget),
        *of_merges([s for s in merged if only in s], budget),
    ]
    click.echo(table(lines))
    out.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": "leading",
        "machine": machine(),
        "clock": "process CPU time, one thread",
        "lines": [line._asdict() for line in lines],
    }
    (out / f"leading-{only or 'all'}.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
