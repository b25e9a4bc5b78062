"""``verify``: whether a merged checkpoint still is what its manifest says."""

from __future__ import annotations

from pathlib import Path

import click

from .options import complete_paths, output_folder, output_options
from .output import Output


@click.command(short_help="Check a merged checkpoint against its manifest.")
@click.argument("out", callback=output_folder, shell_complete=complete_paths)
@output_options
@click.pass_obj
def verify(output: Output, out: Path) -> int:
    """Check the files of OUT against its manifest, and its config against its tensors.

    Exit code 0 if all is well, 1 if there are problems, which are listed.
    """
    from ..checkpoints.verify import verify as check

    report = check(out)
    output.data("\n".join(report.problems) or f"{out}: no problems", report.to_json())
    return 0 if report.ok else 1
