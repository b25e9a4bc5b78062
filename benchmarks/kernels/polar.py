"""Error and time of every way to compute Iso-C, on every shape and spectrum.

    python -m benchmarks.kernels.polar --out DIR [--smoke] [--threads 1|2] [--only GLOB] …

One JSON file per shape, spectrum and number of threads; a cell (one candidate in it) that is
there is not measured again, so an interrupted run goes on where it was. The time of a candidate
is its ratio to torch.linalg.svd of the same matrices, taken in turn, median over rounds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from math import isfinite, isnan
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch

import mergekit_iso.kernels

from ..machine import digest, machine, product_rates
from . import inputs
from .candidates import BASELINE, Candidate, candidates, failing
from .inputs import Case, Problem
from .timing import clock_of, ratio, rounds

SHAPES = (
    "512x512",
    "128x2048",
    "1024x1024",
    "768x2048",
    "1024x2688",
    "1024x4096",
    "2048x2048",
    "2048x5632",
)
SPECTRA = ("gaussian", "power3", "power5", "low_rank_noise", "rank_half")
REAL = ("attention", "mlp", "embedding")
SWEEP = tuple(f"power{x / 2:g}" for x in range(1, 15))  # condition 10^½ to 10^7
_KERNELS = Path(mergekit_iso.kernels.__file__).parent


def cases(*, smoke: bool = False) -> list[Case]:
    """Return the cases with times, the cheapest first, then those of the sweep of conditions."""
    if smoke:
        return [Case("64x64", "gaussian"), Case("48x128", "power3"), Case("attention", "real")]
    timed = [Case(shape, spectrum) for shape in SHAPES for spectrum in SPECTRA]
    timed += [Case(group, "real") for group in REAL]
    return sorted(timed, key=lambda case: case.size)


def sweep(*, smoke: bool = False) -> list[Case]:
    """Return the cases of one shape and growing condition, of which only errors are taken."""
    if smoke:
        return [Case("64x64", "power1"), Case("64x64", "power6")]
    return [Case("512x512", spectrum) for spectrum in SWEEP]


def measure(
    inputs_of_case: list[Problem],
    chosen: Mapping[str, Candidate],
    *,
    threads: int,
    budget: float | None,
    fewest: int = 3,
) -> dict[str, dict[str, Any]]:
    """Return errors and, with a ``budget`` in seconds, times of each candidate as plain data."""
    code = digest(*sorted(_KERNELS.glob("*.py")))
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    results: dict[str, dict[str, Any]] = {}
    for label, candidate in chosen.items():
        done = [candidate(problem.A) for problem in inputs_of_case]
        per_matrix = [
            inputs.errors(problem, result.out, result.scale)
            for problem, result in zip(inputs_of_case, done, strict=True)
        ]
        worst = {key: _worst([e[key] for e in per_matrix]) for key in per_matrix[0]}
        residuals = [result.residual for result in done if result.residual is not None]
        results[label] = {
            **worst,
            "median_error": _finite(median(e["error"] for e in per_matrix)),
            "residual": _worst(residuals) if residuals else None,
            "notes": [result.notes for result in done if result.notes],
            "residuals": [_finite(r) for r in residuals],
            "errors": [_finite(e["error"]) for e in per_matrix],
            "kernels": code,
            "measured": stamp,
        }
    if budget is None:
        return results
    _, clock = clock_of(threads)
    work = {BASELINE: _over(candidates()[BASELINE], inputs_of_case)}
    work |= {label: _over(candidate, inputs_of_case) for label, candidate in chosen.items()}
    seconds = rounds(work, clock=clock, budget=budget, fewest=fewest)
    for label in chosen:
        results[label] |= {
            "seconds": seconds[label],
            "baseline_seconds": seconds[BASELINE],
            "ratio": ratio(seconds[BASELINE], seconds[label]),
        }
    return results


def _worst(values: list[float]) -> float | None:
    return None if any(isnan(v) for v in values) else _finite(max(values))


def _finite(value: float) -> float | None:
    # JSON has no NaN: null is a candidate that diverged.
    return value if isfinite(value) else None


def _over(candidate: Candidate, inputs_of_case: list[Problem]) -> Any:
    def run() -> None:
        for problem in inputs_of_case:
            candidate(problem.A)

    return run


def _groups(*, smoke: bool, with_failing: bool) -> Iterator[tuple[Case, str, dict[str, Candidate]]]:
    for case in cases(smoke=smoke):
        shown = with_failing and case.shape in ("1024x1024", *REAL)
        yield case, "timed", candidates() | (failing() if shown else {})
    if with_failing:
        for case in sweep(smoke=smoke):
            yield case, "sweep", candidates() | failing()


def _selected(
    case: Case, chosen: dict[str, Candidate], only: tuple[str, ...]
) -> dict[str, Candidate]:
    if not only:
        return chosen
    return {
        label: candidate
        for label, candidate in chosen.items()
        if any(fnmatchcase(f"{case.key}/{label}", pattern) for pattern in only)
    }


def _finished(file: Path) -> dict[str, Any]:
    finished: dict[str, Any] = json.loads(file.read_text())["results"] if file.exists() else {}
    return finished


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/kernels"))
@click.option("--threads", type=click.IntRange(1, 64), default=1, show_default=True)
@click.option("--budget", type=float, default=20.0, show_default=True, help="Seconds of a case.")
@click.option("--least", type=click.IntRange(1), default=3, show_default=True, help="Rounds.")
@click.option("--only", multiple=True, help="Glob on SHAPE-SPECTRUM/CANDIDATE; may be repeated.")
@click.option("--again", is_flag=True, help="Measure the chosen cells even if they are there.")
@click.option("--smoke", is_flag=True, help="Tiny shapes, in seconds.")
def main(
    out: Path,
    threads: int,
    budget: float,
    least: int,
    only: tuple[str, ...],
    again: bool,
    smoke: bool,
) -> None:
    """Measure the cells that are missing in OUT."""
    torch.set_num_threads(threads)
    clock, _ = clock_of(threads)
    rates = product_rates(256 if smoke else 1024)
    for case, kind, all_candidates in _groups(smoke=smoke, with_failing=threads == 1):
        file = out / f"{kind}-{case.key}-{threads}t.json"
        chosen = _selected(case, all_candidates, only)
        if not again:
            done = _finished(file)
            chosen = {label: c for label, c in chosen.items() if label not in done}
        if not chosen:
            continue
        given = inputs.problems(case, out / "cache", smoke=smoke)
        results = measure(
            given,
            chosen,
            threads=threads,
            budget=None if kind == "sweep" else min(budget, 0.2) if smoke else budget,
            fewest=2 if smoke else least,
        )
        record = {
            "benchmark": f"polar-{kind}",
            "case": {"shape": case.shape, "spectrum": case.spectrum, "seed": case.seed},
            "matrices": inputs.describe(given),
            "threads": threads,
            "clock": clock,
            "machine": machine() | {"gflops": rates},
            # Read again: another process may have finished other candidates meanwhile.
            "results": _finished(file) | results,
        }
        part = file.with_suffix(".part")
        part.write_text(json.dumps(record, indent=1) + "\n")
        part.replace(file)
        for label, result in results.items():
            speed = f"{result['ratio']:6.2f}×" if "ratio" in result else ""
            error = "diverged" if result["error"] is None else f"{result['error']:.1e}"
            click.echo(f"{case.key:<28}{label:<20}error {error}  {speed}")


if __name__ == "__main__":
    main()
