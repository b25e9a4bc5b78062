"""The contract between an operator and the engines that run it.

An operator says what it needs (:class:`Requires`) and overrides at most a few pure tensor
functions. Engines call only these and never look at a method's name, so one object serves
``merge()``, the file engine and the training loop alike.

    measure  one worker's statistic, from a scan of its deltas       (TIES: the trim threshold)
    local    one worker's delta, before any communication            (DARE: drop, TIES: trim)
    combine  all workers' deltas of one unit into one                (default: the weighted sum)
    partial  one unit's share of a statistic of the merged model     (TIES: net vote)
    elect    the statistic itself, from all partials                 (TIES: majority sign)
    finalize the combined delta into the merged one                  (Iso-C: flatten the spectrum)

Deltas are always θ_t − θ_base. Tensors handed in are never modified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import isfinite
from numbers import Real
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from ..errors import MethodError
from ..options import Options
from ..tensors import TensorInfo

Stat = Literal["worker_tensor", "worker_model", "merged_model"]
Symmetry = Literal[
    "permutation",  # the order of the workers does not matter
    "scale",  # M(c D) = c M(D) for c > 0
    "odd",  # M(-D) = -M(D)
    "rotation",  # M(Q D R) = Q M(D) R for orthogonal Q, R
    "transpose",  # M(D^T) = M(D)^T
    "idempotent",  # M(M(D)) = M(D)
    "identity",  # M of a single delta is that delta
]


#: The symmetries of a weighted sum.
LINEAR: frozenset[Symmetry] = frozenset(
    {"permutation", "scale", "odd", "rotation", "transpose", "idempotent", "identity"}
)

#: Those that every spectral method has.
SPECTRAL: frozenset[Symmetry] = frozenset({"permutation", "scale", "odd", "rotation"})
#: Those of a spectral method that treats rows and columns alike.
TRANSPOSABLE: frozenset[Symmetry] = SPECTRAL | {"transpose"}


@dataclass(frozen=True, kw_only=True)
class Requires:
    """What an operator needs, from which each engine derives its cheapest plan.

    workers: ``sum`` if the weighted sum of the ``local`` deltas is enough (engines then hold
        two deltas, or reduce), ``each`` if ``combine`` must see all of them at once.
    unit: ``element`` if any flat chunk can be worked on alone, ``matrix`` if spectral tensors
        must be whole (their other tensors may still be chunked).
    stats: statistics to gather first: per worker and tensor, per worker over the whole model,
        or over the merged model (``partial`` and ``elect``).
    random: whether ``local`` draws from the seed.
    wire: narrowest format in which the deltas of whole matrices may cross a network; a method
        that raises small singular values raises rounding noise with them.
    """

    workers: Literal["sum", "each"] = "sum"
    unit: Literal["element", "matrix"] = "element"
    stats: tuple[Stat, ...] = ()
    random: bool = False
    wire: Literal["float32", "bfloat16", "int8"] = "int8"


@dataclass(frozen=True)
class OuterSettings:
    """Step size and Nesterov momentum of the outer optimizer that suit a method."""

    lr: float = 1.0
    momentum: float = 0.0


def _nothing() -> None:
    return None


def _unheard(what: str, value: Tensor) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Context:
    """What an operator may know besides the tensors.

    ``weights`` are those of the workers that take part, in order. ``worker``, ``stats`` and
    ``mask`` concern the one worker whose delta ``local`` was given: its number among all
    workers, what ``measure`` returned for it, and an explicit keep mask (bool, the chunk's
    shape). ``offset`` is the flat index, in the unsharded tensor, of the chunk's first element.
    ``elected()`` returns the merged model's statistic. Engines may gather it, by a pass over
    all deltas, when it is first asked for: ask only where it makes a difference. ``note`` takes
    a measurement by name (Iso-C: the ``residual`` of its polar factor), for reports.
    """

    weights: tuple[float, ...] = (1.0,)
    seed: int = 0
    round: int = 0
    worker: int = 0
    offset: int = 0
    stats: Any = None
    mask: Tensor | None = None
    elected: Callable[[], Any] = _nothing
    note: Callable[[str, Tensor], None] = _unheard

    @property
    def weight_sum(self) -> float:
        """Sum of the weights of the workers that take part."""
        return sum(self.weights)


@dataclass(frozen=True)
class DeltaStream:
    """One worker's deltas in chunks, tensor by tensor in a fixed order; iterable more than once.

    Each chunk comes with its tensor's info and the worker's own context (seed, round, worker,
    offset, mask). ``numel`` counts the elements of all chunks, ``dtype`` is the widest of them.
    """

    numel: int
    chunks: Callable[[], Iterator[tuple[TensorInfo, Tensor, Context]]]
    dtype: torch.dtype = torch.float32

    def __iter__(self) -> Iterator[tuple[TensorInfo, Tensor, Context]]:
        return self.chunks()

    def map(self, function: Callable[[Tensor, TensorInfo, Context], Tensor]) -> DeltaStream:
        """Return the stream with ``function`` applied to every chunk."""
        return replace(
            self, chunks=lambda: ((i, function(x, i, ctx), ctx) for i, x, ctx in self.chunks())
        )


@dataclass(frozen=True, kw_only=True)
class MergeMethod(Options):
    """Base of all operators: a frozen record of options with the functions named above.

    Options are the dataclass fields; their annotations (types, ranges, descriptions) are the
    single source for validation, ``mergekit-iso methods`` and the reference. A value that does
    not fit raises :class:`MethodError`.
    """

    name: ClassVar[str] = ""

    # Both are class attributes in methods where they do not depend on the options.

    @property
    def requires(self) -> Requires:
        """What the operator needs."""
        return Requires()

    @property
    def symmetries(self) -> frozenset[Symmetry]:
        """What the operator commutes with; ``mergekit_iso.testing`` holds it to that."""
        return frozenset()

    def outer(self, workers: int) -> OuterSettings:
        """Return the outer optimizer's settings as a DiLoCo outer step of that many workers.

        By default the outer step is the operator's own result.
        """
        return OuterSettings()

    def check(self, infos: Sequence[TensorInfo], weights: Sequence[float]) -> list[str]:
        """Refuse (MethodError) or warn (sentences) from shapes and weights, before any work."""
        return []

    def measure(self, stream: DeltaStream) -> Any:
        """Return one worker's statistic over a tensor or the model; None if there is none."""
        return None

    def local(self, delta: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Return one worker's delta as it enters the combination, same shape."""
        return delta

    def combine(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> Tensor:
        """Return one tensor from all workers' local deltas of a unit, same shape."""
        return weighted_sum(deltas, ctx.weights)

    def partial(self, deltas: Sequence[Tensor], info: TensorInfo, ctx: Context) -> int:
        """Return this unit's share of the merged model's statistic."""
        return 0

    def elect(self, partials: Iterable[int]) -> Any:
        """Return the merged model's statistic from the partials of all units."""
        return None

    def finalize(self, total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
        """Return the merged delta from the combined one, same shape."""
        return total


@dataclass(frozen=True)
class Worker:
    """One worker's share in a unit, as an engine hands it to :func:`merge_unit`.

    ``index`` is its number among all workers (it keys the random masks), ``delta`` the chunk or
    tensor in compute dtype, ``stats`` and ``mask`` as in :class:`Context`.
    """

    index: int
    delta: Tensor
    stats: Any = None
    mask: Tensor | None = None


def local_delta(method: MergeMethod, worker: Worker, info: TensorInfo, ctx: Context) -> Tensor:
    """Return ``method.local`` of one worker's delta."""
    own = replace(ctx, worker=worker.index, stats=worker.stats, mask=worker.mask)
    return method.local(worker.delta, info, own)


def merge_unit(
    method: MergeMethod, workers: Iterable[Worker], info: TensorInfo, ctx: Context
) -> Tensor:
    """Run a method on one unit (a tensor or a chunk of one): local, combine, finalize.

    ``workers`` are those with a weight other than 0, in order; an iterator is consumed one
    delta at a time, so a ``sum`` method holds two. Where no worker has a weight, one zero delta
    of weight 0 stands for them: a sum is then zero and a mean undefined.
    """
    return method.finalize(combine_unit(method, workers, info, ctx), info, ctx)


def combine_unit(
    method: MergeMethod, workers: Iterable[Worker], info: TensorInfo, ctx: Context
) -> Tensor:
    """Run a method on one unit as :func:`merge_unit` does, up to what ``finalize`` is given."""
    locals_ = (local_delta(method, w, info, ctx) for w in workers)
    if method.requires.workers == "sum":
        return weighted_sum(locals_, ctx.weights)
    return method.combine(list(locals_), info, ctx)


def weighted_sum(deltas: Iterable[Tensor], weights: Sequence[float]) -> Tensor:
    """Return Σ w_t Δ_t, added in order; products and sums are rounded one by one.

    The operations are kept apart on purpose: a fused multiply-add rounds differently in the
    tail of a vectorised loop, and the result would depend on where chunks begin.
    """
    total: Tensor | None = None
    for delta, weight in zip(deltas, weights, strict=True):
        term = delta if weight == 1.0 else delta * weight
        if total is None:
            total = term.clone() if term is delta else term
        else:
            total += term
    if total is None:
        raise ValueError("a weighted sum needs at least one delta")
    return total


def weighted_mean(total: Tensor, info: TensorInfo, ctx: Context) -> Tensor:
    """Return Σ w_t Δ_t / Σ w_t from that sum; raises MethodError where Σ w_t ≤ 0."""
    if not ctx.weight_sum > 0:
        raise MethodError(
            f"the weights sum to {ctx.weight_sum:g}, so a mean of {info.name} is not defined",
            hint="give weights with a positive sum",
        )
    return total if ctx.weight_sum == 1.0 else total / ctx.weight_sum


def matrix_by_matrix(
    merge: Callable[[Sequence[Tensor], Context], Tensor], deltas: Sequence[Tensor], ctx: Context
) -> Tensor:
    """Run ``merge`` on every matrix of deltas (…, m, n), each alone; same shape."""
    if deltas[0].dim() == 2:
        return merge(deltas, ctx)
    stacks = zip(*(d.flatten(0, -3) for d in deltas), strict=True)
    return torch.stack([merge(matrices, ctx) for matrices in stacks]).view_as(deltas[0])


def resolve_weights(
    weights: Sequence[float] | float | Literal["mean"] | None, workers: int
) -> tuple[float, ...]:
    """Return one finite weight per worker: None is 1 each, ``"mean"`` 1/T each, a number that each.

    Raises MethodError if the count does not fit or a weight is not a finite number.
    """
    if weights is None:
        return (1.0,) * workers
    if isinstance(weights, str):
        if weights != "mean":
            raise MethodError(f"weights cannot be {weights!r}: give numbers or 'mean'")
        return (1.0 / workers,) * workers
    if not isinstance(weights, Sequence):
        weights = (weights,) * workers
    if len(weights) != workers:
        raise MethodError(f"{len(weights)} weights were given for {workers} models")
    return tuple(finite_number("a weight", w) for w in weights)


def finite_number(what: str, value: Any) -> float:
    """Return ``value`` as a float, or raise MethodError unless it is a finite number."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # an integer beyond all floats
            if isfinite(number := float(value)):
                return number
    raise MethodError(f"{what} cannot be {value!r}: give a finite number")
