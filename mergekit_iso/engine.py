"""The file engine: a method run over streamed tensors, by what the method requires."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .checkpoints.stream import CHUNK, InputReader, all_finite
from .checkpoints.survey import DeltaSurvey
from .checkpoints.writer import CheckpointWriter
from .errors import CheckpointError, NonFiniteError
from .kernels.memory import keep_freed_memory
from .methods.base import (
    Context,
    DeltaStream,
    Worker,
    local_delta,
    merge_unit,
    weighted_sum,
)
from .plan import Plan, TensorPlan
from .tensors import TensorInfo, apply_delta, task_vector_of

_BASE = 0


class Engine:
    """Runs one plan. A unit is a flat chunk, or a whole tensor where the method needs one.

    Every unit is read, merged, rounded once and written before the next is touched; a method
    that works on the weighted sum holds two deltas, others one per model.
    """

    def __init__(self, plan: Plan, reader: InputReader, survey: DeltaSurvey) -> None:
        self._method = plan.method
        self._scale = plan.scale
        self._steps = plan.tensors
        self._merged = [s for s in plan.tensors if s.action == "merge" and s.same_as is None]
        self._models = plan.models
        self._reader = reader
        self._survey = survey
        self.taking_part = [t for t, w in enumerate(plan.weights) if w != 0]
        weights = tuple(plan.weights[t] for t in self.taking_part) or (0.0,)
        self._ctx = Context(weights=weights, seed=plan.seed, round=plan.round)
        self._of_model: dict[int, Any] = {}

    def write_all(self, writer: CheckpointWriter) -> Iterator[str]:
        """Write every tensor of the plan, yielding each name when it is done."""
        keep_freed_memory()
        self._gather_statistics()
        for step in self._steps:
            if step.same_as is None:
                units = self._copy(step) if step.action == "copy" else self._merge(step)
                with _out_of_memory(step.info):
                    for unit in units:
                        writer.write(step.info.name, unit)
                yield step.info.name
        for step in self._steps:
            if step.same_as is not None:
                writer.repeat(step.info.name, step.same_as)
                yield step.info.name

    def _gather_statistics(self) -> None:
        stats = self._method.requires.stats
        if "worker_model" in stats:
            for t in self.taking_part:
                self._of_model[t] = self._method.measure(self._stream(t, self._merged))
        if "merged_model" in stats and self.taking_part:
            self._ctx = replace(self._ctx, elected=cache(self._elect))

    def _elect(self) -> Any:
        return self._method.elect(p for step in self._merged for p in self._partials(step))

    def _partials(self, step: TensorPlan) -> Iterator[int]:
        stats = self._stats(step)
        for ctx, _, deltas in self._units(step):
            local = [
                local_delta(self._method, Worker(t, d, stats[t]), step.info, ctx)
                for t, d in zip(self.taking_part, deltas, strict=True)
            ]
            yield self._method.partial(local, step.info, ctx)

    def _merge(self, step: TensorPlan) -> Iterator[Tensor]:
        info, stats = step.info, self._stats(step)
        if max(map(abs, self._ctx.weights)) > torch.finfo(step.compute).max:
            raise _overflow(info, step.compute)
        for ctx, base, deltas in self._units(step):
            self._survey.add_base(info, base)

            def workers(base: Tensor = base, deltas: Iterator[Tensor] = deltas) -> Iterator[Worker]:
                if not self.taking_part:
                    yield Worker(0, torch.zeros_like(base))
                for t, delta in zip(self.taking_part, deltas, strict=True):
                    stored = self._models[t].tensors[step.model_sources[t]].dtype
                    self._survey.add(t, info, delta, stored)
                    yield Worker(t, delta, stats[t])

            try:
                merged = merge_unit(self._method, workers(), info, ctx)
            except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
                if self._overflows(step):
                    raise _overflow(info, step.compute) from None
                reason = str(error).partition("\n")[0]
                raise CheckpointError(
                    f"the decomposition of {info.name} failed: {reason}"
                ) from error
            values = apply_delta(base, merged, self._scale, info.dtype)
            if not all_finite(values) and not all_finite(merged):
                raise _overflow(info, step.compute)
            yield _fitting(values, info)

    def _overflows(self, step: TensorPlan) -> bool:
        """Whether the products that decompositions start from are too large for the dtype."""
        return any(
            not all_finite(weighted_sum(deltas, self._ctx.weights).square().sum())
            for _, _, deltas in self._units(step)
            if self.taking_part
        )

    def _copy(self, step: TensorPlan) -> Iterator[Tensor]:
        for chunk in self._reader.chunks(_BASE, step.base_source, finite=False):
            if chunk.dtype == step.info.dtype:
                yield chunk
            else:
                yield _fitting(chunk.to(step.info.dtype), step.info)

    def _stats(self, step: TensorPlan) -> dict[int, Any]:
        if "worker_tensor" in self._method.requires.stats:
            return {t: self._method.measure(self._stream(t, [step])) for t in self.taking_part}
        return {t: self._of_model.get(t) for t in self.taking_part}

    def _stream(self, t: int, steps: Sequence[TensorPlan]) -> DeltaStream:
        def chunks() -> Iterator[tuple[TensorInfo, Tensor, Context]]:
            for step in steps:
                for ctx, _, (delta,) in self._units(step, [t]):
                    yield step.info, delta, replace(ctx, worker=t)

        widest = torch.float64 if any(s.compute == torch.float64 for s in steps) else torch.float32
        return DeltaStream(sum(s.info.numel for s in steps), chunks, widest)

    def _units(
        self, step: TensorPlan, models: Sequence[int] | None = None
    ) -> Iterator[tuple[Context, Tensor, Iterator[Tensor]]]:
        """Yield each unit's context, base values and deltas; the deltas are read one by one."""
        whole = self._method.requires.unit == "matrix" and step.info.spectral
        chosen = self.taking_part if models is None else models
        reads = [self._reader.chunks(t + 1, step.model_sources[t], whole=whole) for t in chosen]
        base_chunks = self._reader.chunks(_BASE, step.base_source, whole=whole)
        for number, base in enumerate(base_chunks):
            wide = base.to(step.compute)
            deltas = (task_vector_of(wide, next(chunks), step.compute) for chunks in reads)
            yield replace(self._ctx, offset=number * CHUNK), wide, deltas
        # Running each stream off its end is what completes its checksum.
        for chunks in reads:
            for _ in chunks:
                raise ValueError(f"{step.info.name} has more values in a model than in the base")


@contextmanager
def _out_of_memory(info: TensorInfo) -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        on_cpu = "DefaultCPUAllocator" in str(error) or "not enough memory" in str(error)
        if not isinstance(error, (MemoryError, torch.OutOfMemoryError)) and not on_cpu:
            raise
        raise CheckpointError(
            f"there is not enough memory to merge {info.name}, which has shape {info.shape} and "
            f"{info.nbytes:,} bytes",
            hint="free some memory, or use fewer --threads",
        ) from error


def _overflow(info: TensorInfo, compute: torch.dtype) -> NonFiniteError:
    wider = "" if compute == torch.float64 else ", or --dtype float64"
    return NonFiniteError(
        f"the merged delta of {info.name} has values that do not fit {_name(compute)}: the weights "
        "or the scale are too large",
        hint=f"give smaller weights or a smaller scale{wider}",
    )


def _fitting(values: Tensor, info: TensorInfo) -> Tensor:
    if all_finite(values):
        return values
    hint = "give smaller weights or a smaller scale"
    if info.dtype == torch.float16:
        hint = f"give a wider --out-dtype (bfloat16 or float32), or {hint.removeprefix('give ')}"
    elif info.dtype != torch.float64:
        hint += ", or --dtype float64 with --out-dtype float64"
    raise NonFiniteError(
        f"{info.name} would have values that do not fit {_name(info.dtype)}", hint=hint
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
