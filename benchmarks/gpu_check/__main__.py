"""``python -m benchmarks.gpu_check``: check every GPU kernel against float64, then time it.

Takes under 8 minutes on one H200-class GPU. Exit code 0 if every check passed, else 1; 2
without a CUDA device, unless ``--smoke`` runs the same code on tiny shapes wherever it is.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

BUDGET = 7 * 60.0


def main() -> int:
    """Run, print the table and, with ``--out``, write gpu_check.json and gpu_check.txt."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for gpu_check.json and gpu_check.txt")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU if need be")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.smoke:
        parser.error("no CUDA device here; --smoke runs the same code on the CPU, untimed")
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

    result = run(device, arguments.smoke)
    from .report import table

    text = table(result)
    sys.stdout.write(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n")
        (arguments.out / "gpu_check.txt").write_text(text)
    return 0 if all(check["passed"] for check in result["checks"]) else 1


def run(device: str, smoke: bool) -> dict[str, Any]:
    """Return device, versions, checks and measurements as plain data."""
    from . import measure
    from .checks import run_checks
    from .timing import Budget

    budget = Budget(BUDGET)
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted",
        "versions": _versions(),
        "smoke": smoke,
        "measured": device == "cuda" and not smoke,
    }
    checks = []
    for check in run_checks(device, smoke):
        checks.append(asdict(check) | {"passed": check.passed})
        if not budget.allows("the remaining checks"):
            break
    result["checks"] = checks
    for part, records in (
        ("products", measure.products),
        ("drops", measure.drops),
        ("sets", measure.sets),
    ):
        result[part] = []
        for record in records(device, smoke, budget):
            result[part].append(record if result["measured"] else _without_times(record))
            sys.stderr.write(f"{part}: {len(result[part])} done\n")
    result["skipped"] = budget.skipped
    return result


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    timed = ("seconds", "ratio", "tflops", "plain_tflops", "ns_per_element")
    return {
        key: dict.fromkeys(value) if key in timed and isinstance(value, dict) else value
        for key, value in record.items()
        if key not in timed or isinstance(value, dict)
    }


def _versions() -> dict[str, str]:
    import triton

    import mergekit_iso

    versions = {"torch": torch.__version__, "triton": triton.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions | {"mergekit_iso": mergekit_iso.__version__}


if __name__ == "__main__":
    sys.exit(main())
