"""The most memory a piece of work takes beyond what the process held before."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

_STATUS = Path("/proc/self/status")


def peak_above(work: Callable[[], object]) -> int:
    """Return the high-water mark of resident bytes while ``work`` runs, above those before.

    Freed memory that the allocator keeps is given back first, so that its reuse counts. Linux
    with glibc only.
    """
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark to what is resident
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) << 10
    raise OSError(f"{_STATUS} has no {field}")
