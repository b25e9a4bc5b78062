"""The settings of an outer loop: one frozen record, validated where it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from ..errors import MethodError
from ..methods.base import MergeMethod
from ..options import Options
from ..tensors import DEFAULT_EXCLUDE, as_patterns

Order = Literal["merge_then_momentum", "momentum_then_merge"]
Apply = Literal["overwrite", "mix", "rebase"]
Wire = Literal["float32", "bfloat16", "int8"]

#: A LoRA's factors mean nothing alone, so spectral methods average them like vectors.
LORA_FACTORS = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B")
DEFAULT_LOOP_EXCLUDE = (*DEFAULT_EXCLUDE, *LORA_FACTORS)


@dataclass(frozen=True, kw_only=True)
class LoopSettings(Options):
    """What an outer loop does at every sync; all workers must agree on it.

    Raises MethodError for a value out of range, and for values that exclude each other.
    """

    sync_every: Annotated[int, Field(ge=1, description="inner steps of a round")] = 30
    fragments: Annotated[
        Annotated[int, Field(ge=1)] | tuple[tuple[str, ...], ...],
        Field(description="parts synced at staggered steps: how many, or the patterns of each"),
    ] = 1
    delay: Annotated[
        int, Field(ge=0, description="inner steps between sending a fragment and applying it")
    ] = 0
    apply: Annotated[
        Apply,
        Field(description="what becomes of inner steps taken during the delay"),
    ] = "overwrite"
    mix: Annotated[
        float, Field(ge=0, le=1, description="share of the global value, where apply is mix")
    ] = 0.5
    order: Annotated[
        Order, Field(description="merge the deltas, then momentum; or the other way round")
    ] = "merge_then_momentum"
    wire: Annotated[
        Wire, Field(description="narrowest format of deltas and updates between workers")
    ] = "float32"
    deterministic: Annotated[
        bool, Field(description="a fixed order of summation, whatever the backend")
    ] = False
    weights: Annotated[
        Literal["uniform", "tokens"], Field(description="what a worker's delta weighs")
    ] = "uniform"
    on_failure: Annotated[
        Literal["raise", "skip_round", "restore_anchor"],
        Field(description="after a failed exchange: raise, keep local values, or the anchor"),
    ] = "raise"
    nonfinite: Annotated[
        Literal["raise", "leave_out"], Field(description="a worker with NaN or infinity")
    ] = "raise"
    min_workers: Annotated[
        int, Field(ge=1, description="fewest workers that a round may count")
    ] = 1
    verify_every: Annotated[
        int, Field(ge=0, description="rounds between checks that replicas are equal; 0 never")
    ] = 0
    exclude: tuple[str, ...] = DEFAULT_LOOP_EXCLUDE
    seed: int = 0
    bucket_bytes: Annotated[
        int, Field(ge=1, description="bytes of one exchange; a larger tensor has its own")
    ] = 32 << 20
    report: Annotated[
        Literal["cheap", "full"],
        Field(description="measure workers on a sample, or on every entry and with spectra"),
    ] = "cheap"

    def __post_init__(self) -> None:
        if isinstance(self.exclude, (str, list)):
            object.__setattr__(self, "exclude", as_patterns("exclude", self.exclude))
        if isinstance(self.fragments, (list, tuple)):
            groups = tuple(as_patterns("fragments", group) for group in self.fragments)
            object.__setattr__(self, "fragments", groups)
        super().__post_init__()
        as_patterns("exclude", self.exclude)
        parts = self.parts
        if not parts:
            raise MethodError("fragments cannot be empty: give a number, or groups of patterns")
        if self.sync_every % parts:
            raise MethodError(
                f"sync_every={self.sync_every} is no multiple of the {parts} fragments",
                hint="each fragment is synced once in sync_every steps, at equal distances",
            )
        if self.delay >= self.sync_every // parts:
            raise MethodError(
                f"a delay of {self.delay} steps reaches the next sync, which is "
                f"{self.sync_every // parts} steps later",
                hint="give a smaller delay, or a larger sync_every",
            )

    @property
    def parts(self) -> int:
        """Number of fragments."""
        return self.fragments if isinstance(self.fragments, int) else len(self.fragments)

    def check(self, method: MergeMethod) -> None:
        """Refuse (MethodError) an order that the method's contract does not allow."""
        if self.order == "momentum_then_merge" and method.requires.workers != "sum":
            raise MethodError(
                f"{method.name} needs the delta of each worker, so momentum cannot come before it",
                hint="use order='merge_then_momentum', or a method that works on the sum",
            )
