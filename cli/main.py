"""The entry point: what must be in place before anything that takes time is imported."""

from __future__ import annotations

import sys

from .signals import exit_at_once
from .streams import prepare_streams


def main() -> None:
    """Run the program with the process's arguments and exit."""
    exit_at_once()
    prepare_streams()
    from .program import run

    sys.exit(run(sys.argv[1:]))
