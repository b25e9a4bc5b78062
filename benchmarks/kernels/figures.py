"""Two figures: error against time by spectrum, and error against condition with the real set's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("svg")
mpl.rcParams["svg.hashsalt"] = "kernels"  # the same results give the same file

import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402
from matplotlib.ticker import NullFormatter  # noqa: E402

Record = dict[str, Any]

#: Colour, marker and name of every candidate drawn; the library's own are filled and large.
STYLES: dict[str, tuple[str, str, str]] = {
    "svd": ("#444444", "s", "torch SVD, float32"),
    "eigh64": ("#8c6d1f", "D", "eigh of the float64 Gram"),
    "exact": ("#0b6e4f", "*", "Exact()"),
    "halley": ("#b5179e", "s", "Halley()"),
    "fast(0.001)": ("#c1121f", "o", "Fast(1e-3)"),
    "fast(0.02)": ("#f3722c", "o", "Fast(2e-2)"),
    "polar_express8": ("#1d4ed8", "^", "Polar Express, 10 steps"),
    "polar_express5": ("#5b8def", "v", "Polar Express, 5 steps"),
    "quintic5": ("#3aa6b9", "<", "quintic, 5 steps"),
    "muon5": ("#8fb8de", ">", "Muon, 5 steps"),
    "eigh32": ("#999999", "x", "eigh of the float32 Gram"),
    "bf16_gram": ("#bc8a5f", "+", "Polar Express on the bf16 Gram"),
    "row_preconditioned": ("#777777", "1", "row preconditioning"),
}
PANELS = (
    ("1024x1024", "gaussian", "Gaussian, 1024²"),
    ("1024x1024", "power3", "power law to condition 1e3, 1024²"),
    ("1024x1024", "power5", "power law to condition 1e5, 1024²"),
    ("1024x4096", "power5", "power law to condition 1e5, 1024 × 4096"),
    ("attention", "real", "real pseudo-gradients, attention 512²"),
    ("mlp", "real", "real pseudo-gradients, MLP 512 × 1408"),
)
_RINGS = {"halley": 10, "fast(0.02)": 14}
_OWN = {"exact", "halley", "fast(0.001)", "fast(0.02)"}


def draw(records: Sequence[Record], folder: Path) -> list[Path]:
    """Write both figures as SVG into the folder and return their files."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        drawn = [
            (error_time(records), folder / "kernels-error-time.svg"),
            (condition(records), folder / "kernels-condition.svg"),
        ]
        for figure, file in drawn:
            figure.savefig(file, metadata={"Date": None})
            plt.close(figure)
    return [file for _, file in drawn]


def error_time(records: Sequence[Record]) -> Any:
    """Return the figure of Iso-C error over time relative to the SVD, one panel per spectrum."""
    figure, panels = plt.subplots(2, 3, figsize=(12, 8.2), sharex=True, sharey=True)
    shown: set[str] = set()
    for axes, (shape, spectrum, title) in zip(panels.flat, PANELS, strict=True):
        for label, result in _results(records, shape, spectrum).items():
            if label in STYLES and result.get("ratio") and result["in_range"]:
                _point(axes, label, 1 / result["ratio"], result["in_range"])
                shown.add(label)
        axes.set_title(title, fontsize=11)
        axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
        axes.set_axisbelow(True)
    for axes in panels[-1]:
        axes.set_xlabel("time / time of torch's SVD")
    for axes in panels[:, 0]:
        axes.set_ylabel("Iso-C error")
    axes.set_xscale("log")
    axes.set_yscale("log")
    low, high = panels[0, 0].get_xlim()
    ticks = [t for t in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if low <= t <= high]
    panels[0, 0].set_xticks(ticks, [f"{t:g}" for t in ticks])
    panels[0, 0].xaxis.set_minor_formatter(NullFormatter())
    _legend(figure, shown, columns=4)
    figure.tight_layout(rect=(0, 0.15, 1, 1))
    return figure


def condition(records: Sequence[Record]) -> Any:
    """Return the figure of the error over the condition, with where the real matrices lie."""
    figure, (axes, rug) = plt.subplots(2, 1, figsize=(9, 7.6), sharex=True, height_ratios=(4, 1.1))
    sweep = [r for r in records if r["benchmark"] == "polar-sweep"]
    sweep.sort(key=_condition)
    shown: set[str] = set()
    for label in STYLES:
        points = [
            (_condition(r), r["results"][label]["resolved"]) for r in sweep if label in r["results"]
        ]
        if line := [(x, y) for x, y in points if y]:
            xs, ys = zip(*line, strict=True)
            width = 2 if label in _OWN else 1
            axes.plot(xs, ys, **_marker(label) | {"linestyle": "-", "linewidth": width})
            shown.add(label)
    axes.set_yscale("log")
    axes.set_ylabel("Iso-C error in directions with σ > 1e-5 σ₁")
    axes.set_title("Power laws, 512 × 512", fontsize=11)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    groups = ("attention", "mlp", "embedding")
    for height, group in enumerate(groups):
        for record in records:
            case = record.get("case", {})
            if (case.get("shape"), case.get("spectrum")) == (group, "real"):
                values = record["matrices"]["conditions"]
                rug.plot(values, [height] * len(values), "|", color="#c1121f", markersize=16)
    rug.set_yticks(range(len(groups)), ["attention", "MLP", "embedding, head"])
    rug.set_ylim(-0.6, len(groups) - 0.4)
    rug.set_xscale("log")
    rug.set_xlabel("condition σ₁/σ_r")
    rug.set_title("Real pseudo-gradients", fontsize=11)
    rug.grid(True, axis="x", color="#dddddd", linewidth=0.7)
    _legend(figure, shown, columns=3)
    figure.tight_layout(rect=(0, 0.16, 1, 1))
    return figure


def _results(records: Sequence[Record], shape: str, spectrum: str) -> dict[str, Any]:
    for record in records:
        if record["benchmark"] != "polar-timed" or record["threads"] != 1:
            continue
        if (record["case"]["shape"], record["case"]["spectrum"]) == (shape, spectrum):
            results: dict[str, Any] = record["results"]
            return results
    return {}


def _condition(record: Record) -> float:
    return float(record["matrices"]["conditions"][0])


def _point(axes: Axes, label: str, x: float, y: float) -> None:
    axes.plot(x, y, zorder=3 if label in _OWN else 2, **_marker(label))


def _marker(label: str) -> dict[str, Any]:
    # Policies that took the same path land on the same point: rings let what is below show.
    color, marker, _ = STYLES[label]
    size = {"*": 13, "o": 8}.get(marker, 7)
    style = {"color": color, "marker": marker, "linestyle": "", "markersize": size}
    if label in _RINGS:
        return style | {"markersize": _RINGS[label], "fillstyle": "none", "markeredgewidth": 1.6}
    return style if marker in "x+1" else style | {"markeredgecolor": "white"}


def _legend(figure: Any, shown: set[str], columns: int) -> None:
    handles = [
        Line2D([], [], label=name, **_marker(label))
        for label, (_, _, name) in STYLES.items()
        if label in shown
    ]
    figure.legend(handles=handles, loc="lower center", ncols=columns, frameon=False, fontsize=10)
