"""The table of a run, and which goals it met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Record = Mapping[str, Any]

GOAL_MS = 60.0
GOAL_ERROR = 2e-2
GOAL_SVD_RATIO = 100.0
GOAL_PRODUCT_RATIO = 1.3


def table(result: Record) -> str:
    """Return the run as text. Times that mean nothing are ``not measured``."""
    return "\n".join([*_head(result), *_checks(result), *_times(result), *_goals(result)]) + "\n"


def _head(result: Record) -> Iterator[str]:
    yield f"device: {result['device']}"
    yield "versions: " + ", ".join(f"{k} {v}" for k, v in result["versions"].items())
    if not result["measured"]:
        yield "smoke run: the code path on tiny shapes; no time is measured"


def _checks(result: Record) -> Iterator[str]:
    failed = [check for check in result["checks"] if not check["passed"]]
    yield f"\nchecks: {len(result['checks']) - len(failed)} of {len(result['checks'])} passed"
    for check in failed:
        error = check["failure"] or f"error {check['error']:.1e}"
        yield f"  FAILED {check['name']}: {error} (bound {check['bound']:.0e})"
    worst = sorted(
        (c for c in result["checks"] if c["error"] and c["bound"]),
        key=lambda c: c["error"] / c["bound"],
    )
    for check in worst[-5:]:
        yield f"  {check['name']}: {check['error']:.1e} of {check['bound']:.0e}"


def _times(result: Record) -> Iterator[str]:
    measured = result["measured"]
    yield "\nfloat16 X Xᵀ, by halves against torch.bmm (operations actually done per second)"
    for record in result["products"]:
        name = "×".join(map(str, record["shape"]))
        if not measured:
            yield f"  {name:16} not measured"
            continue
        seconds = dict(record["seconds"])
        plain, symmetric = seconds.pop("plain"), seconds.pop("symmetric")
        yield (
            f"  {name:16} {record['ratio']:5.2f} ×  {1e3 * symmetric:8.3f} ms"
            f" {record['tflops']:6.0f} TFLOP/s; plain {record['plain_tflops']:6.0f} TFLOP/s"
        )
        tiles = (f"{tile} {plain / taken:.2f} ×" for tile, taken in seconds.items())
        yield f"  {'':16} by tile: {', '.join(tiles)}"
    for record in result["sets"]:
        yield f"\nIso-C of {record['model']}: {record['matrices']} matrices"
        if record["scaled_by"] != 1:
            yield f"  timed on {record['timed_layers']} layers, times {record['scaled_by']:g}"
        yield from _set(record) if measured else ["  not measured"]
        for name, error in record["errors"].items():
            yield f"  error of float16 symmetric, {name}: {error:.1e}"
    for record in result["drops"]:
        yield f"\nDARE drop and rescale, {record['numel']} float32 elements"
        for name, ns in record["ns_per_element"].items():
            yield f"  {name:8} {f'{ns:.4f} ns per element' if measured else 'not measured'}"
    yield from (f"skipped for time: {what}" for what in result["skipped"])


def _set(record: Record) -> Iterator[str]:
    fastest = record["seconds"]["float16 symmetric"]
    for name, seconds in record["seconds"].items():
        rate = f"  {record['tflops']:.0f} TFLOP/s" if name == "float16 symmetric" else ""
        yield f"  {name:32} {1e3 * seconds:12.1f} ms  {seconds / fastest:8.2f} ×{rate}"


def _goals(result: Record) -> Iterator[str]:
    yield "\ngoals"
    for text, value, met in _goal_values(result):
        outcome = "not measured" if value is None else f"{value} ({'met' if met else 'NOT met'})"
        yield f"  {text}: {outcome}"


def _goal_values(result: Record) -> Iterator[tuple[str, str | None, bool]]:
    measured = result["measured"]
    products = [p for p in result["products"] if p["shape"][0] > 1] if measured else []
    first = result["sets"][0] if measured and result["sets"] else {"seconds": {}, "errors": {}}

    ratio = min((p["ratio"] for p in products), default=None)
    text = f"symmetric product at least {GOAL_PRODUCT_RATIO} × the plain, batched (lowest)"
    yield text, ratio and f"{ratio:.2f} ×", bool(ratio and ratio >= GOAL_PRODUCT_RATIO)

    own = [s for name, s in first["seconds"].items() if name.startswith("float16 symmetric")]
    best = 1e3 * min(own) if own else None
    text = f"a Llama-1B's 112 matrices in at most {GOAL_MS:g} ms"
    yield text, best and f"{best:.1f} ms", bool(best and best <= GOAL_MS)

    error = max(first["errors"].values(), default=None)
    text = f"at an Iso-C error of at most {GOAL_ERROR:g}"
    yield text, error and f"{error:.1e}", bool(error and error <= GOAL_ERROR)

    svd = first["seconds"].get("torch.linalg.svd")
    gain = 1e3 * svd / best if svd and best else None
    text = f"at least {GOAL_SVD_RATIO:g} × torch.linalg.svd"
    yield text, gain and f"{gain:.0f} ×", bool(gain and gain >= GOAL_SVD_RATIO)
