"""Draw the demo's table: ``mergekit-iso demo --json > demo.json``, then this with both paths.

python benchmarks/figures/demo.py docs/figures/demo.json docs/figures/demo.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"base": "#9aa0a6", "expert": "#9aa0a6", "merge": "#3b6fb6"}


def draw(report: dict, target: Path) -> None:
    """Write horizontal bars of the mean test accuracy, ordered within base, experts, merges."""
    order = {"base": 0, "expert": 1, "merge": 2}
    rows = sorted(report["rows"], key=lambda row: (order[row["kind"]], row["mean"]))
    plt.rcParams |= {"font.family": "DejaVu Sans", "svg.hashsalt": "mergekit-iso"}
    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    names = [row["name"].replace("expert-", "expert: ") for row in rows]
    values = [100 * row["mean"] for row in rows]
    colours = ["#d1622b" if "iso" in r["name"] else COLOURS[r["kind"]] for r in rows]
    bars = axes.barh(names, values, color=colours)
    axes.bar_label(bars, [f"{v:.1f}" for v in values], padding=3, fontsize=8)
    axes.set_xlim(0, 100)
    axes.set_xlabel("mean test accuracy over four tasks, %")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)
