"""The test bench finds what is wrong with a method, and says so as an AssertionError."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mergekit_iso.methods import Context, MergeMethod, Requires
from mergekit_iso.tensors import TensorInfo
from mergekit_iso.testing import check_method


@dataclass(frozen=True, kw_only=True)
class ModifiesItsInput(MergeMethod):
    """Scales the worker's own tensor."""

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return delta.mul_(2.0)


@dataclass(frozen=True, kw_only=True)
class ModifiesAllInputs(MergeMethod):
    """Adds up in the first worker's tensor."""

    requires = Requires(workers="each")

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        for delta in deltas[1:]:
            deltas[0].add_(delta)
        return deltas[0]


@dataclass(frozen=True, kw_only=True)
class ChangesTheDtype(MergeMethod):
    """Gives bfloat16 whatever it is given."""

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total.bfloat16()


@dataclass(frozen=True, kw_only=True)
class WidensTheDtype(MergeMethod):
    """Gives float64 whatever it is given."""

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total.double()


@dataclass(frozen=True, kw_only=True)
class ChangesTheShape(MergeMethod):
    """Gives matrices back flat."""

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total.reshape(-1)


@dataclass(frozen=True, kw_only=True)
class DependsOnTheChunk(MergeMethod):
    """Centres each piece, though it says that pieces may be cut anywhere."""

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total - total.mean()


@dataclass(frozen=True, kw_only=True)
class ForgetsTheOffset(MergeMethod):
    """Keeps the first three entries of each piece."""

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        index = torch.arange(delta.numel()).view(delta.shape)
        return torch.where(index < 3, delta, 0.0)


@dataclass(frozen=True, kw_only=True)
class IsNotOdd(MergeMethod):
    """Cuts negative entries off and claims to be odd."""

    symmetries = frozenset({"scale", "odd"})

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total.clamp(min=0)


@dataclass(frozen=True, kw_only=True)
class DoesNotScale(MergeMethod):
    """Trims at a fixed size and claims to be homogeneous."""

    symmetries = frozenset({"scale"})

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return torch.where(total.abs() > 1e-3, total, 0.0)


@dataclass(frozen=True, kw_only=True)
class PrefersTheFirst(MergeMethod):
    """Halves every further worker and claims that their order does not matter."""

    requires = Requires(workers="each")
    symmetries = frozenset({"permutation"})

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        return torch.stack([d * 0.5**t for t, d in enumerate(deltas)]).sum(0)


@dataclass(frozen=True, kw_only=True)
class CombinesInVain(MergeMethod):
    """Combines, though it says that the sum is enough."""

    requires = Requires(workers="sum")

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        return torch.stack(list(deltas)).amax(0)


@dataclass(frozen=True, kw_only=True)
class DrawsInSecret(MergeMethod):
    """Uses the seed, though it says that nothing is random."""

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        generator = torch.Generator().manual_seed(ctx.seed)
        return delta * (torch.rand(delta.shape, generator=generator) > 0.5)


class IsMutable(MergeMethod):
    """Not a frozen dataclass of its own: anything may be set on it."""


@dataclass(frozen=True, kw_only=True)
class MovesTheBase(MergeMethod):
    """Gives ones for zeros."""

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return torch.where(total == 0, 1.0, total)


@dataclass(frozen=True, kw_only=True)
class DividesByZero(MergeMethod):
    """Normalises without a thought for a delta of zeros."""

    requires = Requires(unit="matrix")

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        return total / total.norm() if info.spectral else total


FAULTS = [
    ModifiesItsInput,
    ModifiesAllInputs,
    ChangesTheDtype,
    WidensTheDtype,
    ChangesTheShape,
    DependsOnTheChunk,
    ForgetsTheOffset,
    IsNotOdd,
    DoesNotScale,
    PrefersTheFirst,
    CombinesInVain,
    DrawsInSecret,
    IsMutable,
    MovesTheBase,
    DividesByZero,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda cls: cls.__name__)
def test_a_fault_is_found(fault: type[MergeMethod]) -> None:
    with pytest.raises(AssertionError):
        check_method(fault())
