"""What a running merge tells its caller, through the ``on_event`` callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Started:
    """The checks are passed and work begins: that many output tensors and bytes."""

    tensors: int
    bytes: int


@dataclass(frozen=True)
class Progress:
    """An output tensor has been written; ``bytes`` is its own size."""

    tensor: str
    bytes: int


@dataclass(frozen=True)
class Warned:
    """A sentence that the user should read; the merge goes on."""

    message: str


@dataclass(frozen=True)
class Finished:
    """The output folder is complete and has its final name."""

    out: Path
    tensors: int
    bytes: int
    seconds: float


Event = Started | Progress | Warned | Finished
OnEvent = Callable[[Event], None]
