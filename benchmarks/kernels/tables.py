"""The tables of the results, in Markdown, each by a name under which a document may include it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from .goals import goals

Record = dict[str, Any]
Result = dict[str, Any]
Cell = Callable[[Record, Result], str]

_FAILING = ("eigh32", "bf16_gram", "row_preconditioned", "rms_scale")
_OURS = ("exact", "fast(0.001)", "fast(0.02)", "halley")
_THEIRS = ("polar_express8", "polar_express5", "quintic5", "muon5")
_ORDER = ("svd", "eigh64", *_OURS, *_THEIRS, *_FAILING)
_NAMES = {
    "gaussian": "Gaussian",
    "power3": "power law to 1e3",
    "power5": "power law to 1e5",
    "low_rank_noise": "low rank + noise",
    "rank_half": "rank r/2",
}


def all_tables(records: Sequence[Record]) -> dict[str, str]:
    """Return every table for which something was measured, by name, in reading order."""
    single = _timed(records, 1)
    square = [r for r in single if r["case"]["shape"] in ("1024x1024", "attention", "mlp")]
    tables = {
        "machine": _machine(records),
        "goals": _goals(records),
        "accuracy": _cross(square, _spectrum, error_of, without=_FAILING),
        "scale": _cross(square, _spectrum, _scale, without=("exact",)),
        "residual": _cross(square, _spectrum, _residual, without=_FAILING),
        "failing": _cross(square, _spectrum, error_of, without=(*_OURS, *_THEIRS)),
        "real": _real(single),
        "pool": _pool(records),
    }
    for threads in sorted({r["threads"] for r in records if r["benchmark"] == "polar-timed"}):
        cases = _timed(records, threads)
        for spectrum in dict.fromkeys(r["case"]["spectrum"] for r in cases):
            chosen = [r for r in cases if r["case"]["spectrum"] == spectrum]
            tables[f"speed-{spectrum}-{threads}t"] = _cross(chosen, _shape, _speed, _FAILING)
            if threads == 1:
                tables[f"error-{spectrum}"] = _cross(chosen, _shape, error_of, _FAILING)
    return {name: table for name, table in tables.items() if table}


def error_of(record: Record, result: Result) -> str:
    """Return the error that counts for this spectrum, as a table's cell.

    Where there are null directions it is that in the others, plus what leaks into the null ones.
    """
    if any(record["matrices"]["null_directions"]):
        return f"{_number(result['in_range'])} + {_number(result['leak'])}"
    return _number(result["error"])


def _scale(_: Record, result: Result) -> str:
    return _number(result["scale_error"])


def _residual(_: Record, result: Result) -> str:
    return "–" if result["residual"] is None else _number(result["residual"])


def _speed(_: Record, result: Result) -> str:
    return f"{result['ratio']:.2f}"


def _number(value: float | None) -> str:
    if value is None:
        return "diverged"
    return "0" if value == 0 else f"{value:.1e}"


def _shape(record: Record) -> str:
    return str(record["case"]["shape"]).replace("x", "×")


def _spectrum(record: Record) -> str:
    spectrum = str(record["case"]["spectrum"])
    real = {"attention": "real, attention", "mlp": "real, MLP"}
    return real.get(record["case"]["shape"]) or _NAMES.get(spectrum, spectrum)


def _timed(records: Iterable[Record], threads: int) -> list[Record]:
    """Return the records with times at this number of threads, the smallest matrices first."""
    chosen = [r for r in records if r["benchmark"] == "polar-timed" and r["threads"] == threads]
    spectra = [*_NAMES, "real"]
    return sorted(chosen, key=lambda r: (spectra.index(r["case"]["spectrum"]), _size(r)))


def _size(record: Record) -> int:
    m, n = map(int, record["matrices"]["shapes"][0].split("x"))
    return m * n * min(m, n)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] + ["--:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _cross(
    records: Sequence[Record],
    column: Callable[[Record], str],
    cell: Cell,
    without: Sequence[str] = (),
) -> str:
    """Return a table of candidates by ``column``; a cell that was not measured is a dash."""
    columns = list(dict.fromkeys(column(r) for r in records))
    measured = {label for r in records for label in r["results"]}
    labels = [label for label in _ORDER if label in measured]
    labels += sorted(measured - set(labels))
    rows = []
    for label in labels:
        if label not in without:
            by_column = {
                column(r): cell(r, r["results"][label]) for r in records if label in r["results"]
            }
            rows.append([f"`{label}`", *(by_column.get(c, "–") for c in columns)])
    return _table(["", *columns], rows)


def _machine(records: Sequence[Record]) -> str:
    if not records:
        return ""
    m = max(records, key=lambda r: "gflops" in r["machine"])["machine"]
    rates = ", ".join(f"{kind} {rate:g}" for kind, rate in m.get("gflops", {}).items())
    return (
        f"{m['processor']}; {m['cores']} cores; Python {m['python']}, torch {m['torch']}"
        f"{' with MKL' if m['mkl'] else ''}; one-minute load while measuring "
        f"{min(r['machine']['load_1min'] for r in records):.1f} to "
        f"{max(r['machine']['load_1min'] for r in records):.1f}. "
        f"GFLOP/s of a product on one thread: {rates or 'not measured'}.\n"
    )


def _goals(records: Sequence[Record]) -> str:
    rows = [[g.text, g.aim, g.measured, "yes" if g.met else "**no**"] for g in goals(records)]
    return _table(["figure", "aim", "measured", "met"], rows)


def _real(records: Sequence[Record]) -> str:
    rows = []
    for record in records:
        if record["case"]["spectrum"] == "real":
            m = record["matrices"]
            rows.append(
                [
                    record["case"]["shape"],
                    ", ".join(m["shapes"]).replace("x", "×"),
                    str(m["count"]),
                    _span(m["conditions"], ".0e"),
                    _span(m["sigma1_over_norm"], ".2f"),
                    _span(m["rms_over_mean"], ".1f"),
                    str(sum(m["null_directions"])),
                ]
            )
    head = ["matrices", "shapes", "count", "condition", "σ₁/‖A‖_F", "RMS/mean σ", "null directions"]
    return _table(head, rows)


def _span(values: Sequence[float], form: str) -> str:
    return f"{min(values):{form}} – {max(values):{form}}"


def _pool(records: Sequence[Record]) -> str:
    rows = [
        [
            record["set"].replace("x", "×"),
            f"`{label}`",
            f"{min(result['wall_seconds']['1']):.2f} s",
            f"{result['ratio']:.2f} ×",
            f"{result['cpu_growth']:.2f} ×",
        ]
        for record in records
        if record["benchmark"] == "pool"
        for label, result in record["results"].items()
    ]
    return _table(["set", "", "one worker", "two workers faster by", "CPU time grows by"], rows)
