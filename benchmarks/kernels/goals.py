"""The figures the kernels aim at, each beside what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

Record = dict[str, Any]

SQUARE = ("512x512", "1024x1024", "2048x2048")
WIDE = ("768x2048", "1024x4096", "2048x5632")
MILD = ("gaussian", "power3")
EXACT_AIMS: tuple[tuple[tuple[str, ...], float], ...] = (
    ((), 0.95),
    (("1024x1024",), 1.5),
    (("1024x4096", "2048x5632"), 3.0),
)
TO_1E5 = ("gaussian", "power3", "power5", "low_rank_noise")


@dataclass(frozen=True)
class Goal:
    """One figure: what it is about, the aim, the worst that was measured, whether it is met."""

    text: str
    aim: str
    measured: str
    met: bool


def goals(records: Sequence[Record]) -> list[Goal]:
    """Return every figure for which something was measured."""
    found: list[Goal | None] = []
    for label, spectra, bound, square, wide in (
        ("fast(0.001)", TO_1E5, 1e-3, 2.5, 5.0),
        ("fast(0.02)", MILD, 2e-2, 4.0, 7.5),
    ):
        cells = _cells(records, label, SQUARE + WIDE, spectra)
        found.append(_error(f"`{label}` error, condition to {_limit(spectra)}", cells, bound))
        for shapes, aim in ((SQUARE, square), (WIDE, wide)):
            cells = _cells(records, label, shapes, spectra)
            found.append(_speed(f"`{label}` at {', '.join(shapes)}", cells, aim))
    real = _cells(records, "fast(0.001)", ("attention", "mlp", "embedding"), ("real",))
    found.append(_error("`fast(0.001)` error, real set", real, 2e-3))
    found.append(_exact_error(records))
    for where, aim in EXACT_AIMS:
        text = f"`exact` at {', '.join(where) or 'every shape'}"
        found.append(_speed(text, _cells(records, "exact", where), aim))
    found += [
        _pool(f"two workers, {r['set']}, `{label}`", float(v["ratio"]), r["workers"])
        for r in records
        if r["benchmark"] == "pool"
        for label, v in r["results"].items()
        if label in ("exact", "fast(0.001)")
    ]
    return [goal for goal in found if goal]


def _pool(text: str, ratio: float, workers: int) -> Goal:
    # More than the number of workers is what other processes took from the single one.
    busy = ratio > workers
    measured = f"{ratio:.2f} ×{', disturbed' if busy else ''}"
    return Goal(text, "1.8 ×", measured, ratio >= 1.8 and not busy)


def _limit(spectra: tuple[str, ...]) -> str:
    return "1e3" if spectra == MILD else "1e5"


def _cells(
    records: Iterable[Record],
    label: str,
    shapes: tuple[str, ...] = (),
    spectra: tuple[str, ...] = (),
) -> list[tuple[str, Record]]:
    return [
        (f"{r['case']['shape']} {r['case']['spectrum']}", r["results"][label])
        for r in records
        if r["benchmark"] == "polar-timed"
        and r["threads"] == 1
        and label in r["results"]
        and (not shapes or r["case"]["shape"] in shapes)
        and (not spectra or r["case"]["spectrum"] in spectra)
    ]


def _speed(text: str, cells: list[tuple[str, Record]], aim: float) -> Goal | None:
    if not cells:
        return None
    where, worst = min(cells, key=lambda cell: float(cell[1]["ratio"]))
    best = max(float(result["ratio"]) for _, result in cells)
    measured = f"{worst['ratio']:.2f} × ({where}) to {best:.2f} ×"
    return Goal(text, f"{aim:g} ×", measured, worst["ratio"] >= aim)


def _error(text: str, cells: list[tuple[str, Record]], bound: float) -> Goal | None:
    if not cells:
        return None
    where, worst = max(
        ((where, inf if r["in_range"] is None else r["in_range"]) for where, r in cells),
        key=lambda cell: float(cell[1]),
    )
    return Goal(text, f"≤ {bound:g}", f"{worst:.1e} ({where})", worst <= bound)


def _exact_error(records: Sequence[Record]) -> Goal | None:
    # Null directions aside: there the SVD has arbitrary ones, and Exact none.
    svd = dict(_cells(records, "svd"))
    ratios = [
        (where, result["in_range"] / svd[where]["in_range"])
        for where, result in _cells(records, "exact")
        if where in svd
    ]
    if not ratios:
        return None
    where, worst = max(ratios, key=lambda pair: float(pair[1]))
    # Both are rounding, so that a tenth more is the same.
    return Goal("`exact` error / SVD's", "≤ 1", f"at most {worst:.2f} ({where})", worst <= 1.1)
