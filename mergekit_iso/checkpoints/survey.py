"""What the deltas look like while they stream by, and what the user should be told of it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from math import sqrt
from statistics import median

import torch
from torch import Tensor

from ..methods.base import MergeMethod
from ..tensors import TensorInfo

# A fine-tune moves its matrices by a few per cent; unrelated models differ by more than 100 %.
_UNRELATED = 0.5
# Below this multiple of the rounding noise most of a delta is that noise.
_NOISE_MULTIPLE = 2.0
# RMS of uniform rounding errors over the RMS of the values, in units of eps/√12.
_MANTISSA_FACTOR = 0.75


@dataclass
class _Seen:
    moved: bool = False
    delta: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # ‖Δ‖² by tensor
    eps: dict[str, float] = field(default_factory=dict)  # of tensors stored in half precision


class DeltaSurvey:
    """Norms of every model's deltas, gathered chunk by chunk in float64."""

    def __init__(self, labels: Sequence[str], base: str, method: MergeMethod) -> None:
        self._labels = labels
        self._base_label = base
        self._method = method
        self._seen = [_Seen() for _ in labels]
        self._base_squares: dict[str, float] = defaultdict(float)  # ‖base‖² by tensor

    def add_base(self, info: TensorInfo, base: Tensor) -> None:
        """Take in a chunk of the base."""
        if info.spectral:
            self._base_squares[info.name] += _square_norm(base)

    def add(self, model: int, info: TensorInfo, delta: Tensor, stored: torch.dtype) -> None:
        """Take in a chunk of one model's deltas; ``stored`` is the dtype that its file holds."""
        seen = self._seen[model]
        seen.moved = seen.moved or bool(delta.any())
        if not info.spectral:
            return
        seen.delta[info.name] += _square_norm(delta)
        if stored in (torch.float16, torch.bfloat16):
            seen.eps[info.name] = torch.finfo(stored).eps

    def warnings(self, models: Sequence[int]) -> list[str]:
        """Return the sentences that apply to ``models``, in order."""
        return [s for m in models if (s := self._warning(self._labels[m], self._seen[m]))]

    def _warning(self, label: str, seen: _Seen) -> str | None:
        if not seen.moved:
            return f"{label!r} is identical to the base in all that is merged, yet counts as a task"
        moves = {
            name: sqrt(square / self._base_squares[name])
            for name, square in seen.delta.items()
            if self._base_squares[name] > 0
        }
        if moves and median(moves.values()) > _UNRELATED:
            return (
                f"{label!r} is probably no fine-tune of {self._base_label!r} "
                f"(median |Δ|/|base| = {median(moves.values()):.2f})"
            )
        noise = [
            move / (seen.eps[name] / sqrt(12) * _MANTISSA_FACTOR)
            for name, move in moves.items()
            if name in seen.eps and move > 0
        ]
        spectral = self._method.requires.unit == "matrix"
        if spectral and noise and median(noise) < _NOISE_MULTIPLE:
            options = {f.name for f in fields(self._method)}
            advice = "; set rank_tolerance to drop it" if "rank_tolerance" in options else ""
            return (
                f"most of the delta of {label!r} is rounding noise of its half-precision weights "
                f"(median |Δ| = {median(noise):.1f} times the noise), which a spectral method "
                f"raises to full weight{advice}"
            )
        return None


def _square_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
