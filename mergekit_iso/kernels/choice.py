"""Which kernels decompose a matrix, by device and shape.

Measured by ``python -m benchmarks.kernels.choice``, which shows every kernel's time on both sides
of each bound; numbers are in docs/benchmarks.md. ``Fast(kernel=…)`` overrides the choice.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from torch import Tensor

#: What takes a matrix to a measured tolerance; ``svd`` stands for what ``Exact`` does.
Quick = Literal["svd", "halley", "halley_steep", "gram", "newton_schulz"]
QUICK: tuple[str, ...] = get_args(Quick)


class Rule(NamedTuple):
    """Kernels to try in turn, from ``short`` and from the ratio ``long / short`` of the sides on.

    ``device`` is a torch device's type, ``*`` any.
    """

    device: str
    short: int
    ratio: float
    kernels: tuple[str, ...]


FAST: tuple[Rule, ...] = (
    Rule("cpu", 512, 6.0, ("gram",)),
    Rule("cpu", 512, 1.5, ("halley",)),
    Rule("cpu", 512, 1.0, ("halley_steep",)),
    Rule("cpu", 0, 1.0, ("svd",)),
    Rule("*", 0, 1.0, ("newton_schulz",)),
)
#: For float32 matrices; ``gram`` and ``svd`` always succeed.
EXACT: tuple[Rule, ...] = (
    Rule("*", 256, 2.0, ("halley_mild", "gram")),
    Rule("*", 768, 1.5, ("halley_mild", "halley_mixed", "svd")),
    Rule("*", 256, 1.5, ("halley_mild", "svd")),
    Rule("*", 768, 1.0, ("halley_mixed", "svd")),
    Rule("*", 0, 2.0, ("gram",)),
    Rule("*", 0, 1.0, ("svd",)),
)


def choose(A: Tensor, rules: tuple[Rule, ...]) -> tuple[str, ...]:
    """Return the kernels of the first rule that fits a matrix, or a stack of such (…, m, n)."""
    short, long = sorted(A.shape[-2:])
    return next(
        rule.kernels
        for rule in rules
        if rule.device in ("*", A.device.type)
        and short >= rule.short
        and long >= rule.ratio * short
    )
