"""Markdown tables, and figures where matplotlib is there, of the results in a folder.

``python -m benchmarks.kernels.report DIR [--figures docs/figures] [--fill FILE.md]``

``--fill`` renews the tables of a document: what stands between the comments
``<!-- kernels: NAME -->`` and ``<!-- end -->`` becomes the table of that name in report.md.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from .tables import all_tables

_BLOCK = re.compile(r"(<!-- kernels: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def load(folder: Path) -> list[dict[str, Any]]:
    """Return the records in the folder that the benchmarks of polar factors and pools wrote."""
    records = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    return [r for r in records if str(r.get("benchmark", "")).startswith(("polar", "pool"))]


def fill(text: str, tables: dict[str, str]) -> str:
    """Return the document with its tables renewed; one that was not measured stays as it is."""

    def renewed(block: re.Match[str]) -> str:
        table = tables.get(block[2])
        return block[0] if table is None else f"{block[1]}{table}{block[3]}"

    return _BLOCK.sub(renewed, text)


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--figures", type=click.Path(path_type=Path), help="Folder for the figures.")
@click.option(
    "--fill",
    "documents",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Document whose tables are renewed; may be repeated.",
)
def main(folder: Path, figures: Path | None, documents: tuple[Path, ...]) -> None:
    """Write FOLDER/report.md and the figures."""
    records = load(folder)
    tables = all_tables(records)
    parts = [f"## {name}\n\n{table}" for name, table in tables.items()]
    (folder / "report.md").write_text("\n".join(["# Polar factors\n", *parts]))
    click.echo(f"{folder / 'report.md'}: {len(records)} runs")
    for document in documents:
        document.write_text(fill(document.read_text(), tables))
        click.echo(f"{document}")
    if find_spec("matplotlib") is None:
        click.echo("figures skipped: matplotlib is not installed")
        return
    from .figures import draw

    for file in draw(records, figures or folder):
        click.echo(f"{file}")


if __name__ == "__main__":
    main()
