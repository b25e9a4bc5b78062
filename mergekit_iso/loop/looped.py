"""LoopedMerger: any merge operator as a DiLoCo outer step, in three lines of a training loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..methods.base import MergeMethod
from ..methods.registry import resolve_method
from .agreement import check_agreement, together
from .comm import Comm, as_group
from .exchange import Exchange, GroupExchange, LocalExchange
from .fragments import split
from .outer_loop import OuterLoop, outer_factory
from .owner import OuterFactory
from .owners import assign, cost
from .parameters import Parameters
from .report import OnReport, OuterReport
from .settings import DEFAULT_LOOP_EXCLUDE, Apply, LoopSettings, Order, Wire
from .sharded import ShardedExchange
from .shards import check_grid, check_layouts, check_unsharded, find_shards, shard_group


class LoopedMerger(OuterLoop):
    """The outer step of DiLoCo around a training loop, with a merge operator in place of the mean.

    Every ``sync_every`` iterations the workers' deltas from their common anchor are merged by
    ``method``; minus the result is the pseudo-gradient of an outer optimizer on float32 masters,
    whose new values all workers go on from (Douillard et al., arXiv:2311.08105; IsoLoCo: Horoi et
    al., arXiv:2607.03011). The model is updated in place and its gradients are never touched.

    Args:
        model: the worker's model, on its device; wrapped by DDP, fully_shard or torch.compile as
            you like. Frozen parameters stay out, tied ones count once. All workers get rank 0's
            values.
        method: an operator's name, with its options beside it, or a method object.
        group: the workers: a process group or 1-D DeviceMesh. None is the default group, or one
            worker where torch.distributed is not initialised.
        shard_mesh: the ranks of this worker, where it has several (FSDP2, HSDP, tensor
            parallelism, DDP): a DeviceMesh or process group. ``group`` then joins the ranks with
            the same place in every worker.
        outer: a factory from a list of tensors to a torch optimizer. Without it SGD with
            ``outer_lr``, ``outer_momentum`` and ``nesterov`` (default: where there is momentum);
            what is None is as published for the method.
        anchor_device: where the anchor is kept; None is beside the parameters.
        on_event: called with each OuterReport.
        **options: the method's options, where it is given by name.

    The other arguments are described in :class:`LoopSettings`.

    Raises:
        MethodError: a method, option or setting that does not exist or fit.
        IncompatibleError: workers with different models, methods or settings; no trainable
            parameter.
        SyncError: the group does not work, this process is no member of it, or group and
            shard_mesh form no grid.
    """

    def __init__(
        self,
        model: nn.Module,
        method: str | MergeMethod = "iso_c",
        *,
        sync_every: int = 30,
        group: ProcessGroup | DeviceMesh | None = None,
        shard_mesh: ProcessGroup | DeviceMesh | None = None,
        outer: OuterFactory | None = None,
        outer_lr: float | None = None,
        outer_momentum: float | None = None,
        nesterov: bool | None = None,
        order: Order = "merge_then_momentum",
        fragments: int | Sequence[str | Sequence[str]] = 1,
        delay: int = 0,
        apply: Apply = "overwrite",
        mix: float = 0.5,
        wire: Wire = "float32",
        deterministic: bool = False,
        anchor_device: torch.device | str | None = None,
        weights: str = "uniform",
        on_failure: str = "raise",
        nonfinite: str = "raise",
        min_workers: int = 1,
        verify_every: int = 0,
        exclude: str | Sequence[str] = DEFAULT_LOOP_EXCLUDE,
        seed: int = 0,
        bucket_bytes: int = 32 << 20,
        report: str = "cheap",
        on_event: OnReport | None = None,
        **options: Any,
    ) -> None:
        members = as_group(group)
        comm = None if members is None else Comm(members, _device(model))
        rank, workers = (0, 1) if comm is None else (comm.rank, comm.size)
        with together(comm):
            operator = resolve_method(method, options)
            settings = LoopSettings(
                sync_every=sync_every,
                fragments=fragments,  # type: ignore[arg-type]  # validated by LoopSettings
                delay=delay,
                apply=apply,
                mix=mix,
                order=order,
                wire=wire,
                deterministic=deterministic,
                weights=weights,  # type: ignore[arg-type]
                on_failure=on_failure,  # type: ignore[arg-type]
                nonfinite=nonfinite,  # type: ignore[arg-type]
                min_workers=min_workers,
                verify_every=verify_every,
                exclude=(exclude,) if isinstance(exclude, str) else tuple(exclude),
                seed=seed,
                bucket_bytes=bucket_bytes,
                report=report,  # type: ignore[arg-type]
            )
            parameters = Parameters(model, settings.exclude)
            factory = outer_factory(operator, workers, outer, outer_lr, outer_momentum, nesterov)
        exchange: Exchange = LocalExchange(1)
        if comm is not None:
            said = "given" if outer else str((outer_lr, outer_momentum, nesterov))
            check_agreement(comm, parameters, operator, settings, said)
            exchange = _exchange(comm, shard_mesh, parameters, operator, settings)
            _broadcast(comm, parameters)
        super().__init__(
            [parameters],
            operator,
            settings,
            exchange,
            factory,
            first_worker=rank,
            anchor_device=None if anchor_device is None else torch.device(anchor_device),
            on_event=on_event,
        )

    def step(self, *, tokens: float = 0) -> OuterReport | None:
        """Count one iteration, after the inner optimizer's step; sync what is due.

        ``tokens`` are those of this iteration, on this worker. Count iterations, also those in
        which a gradient scaler skipped the inner step, so that workers stay together.
        Returns the report of an outer step that was applied, else None. Raises what
        :meth:`sync` does.
        """
        return self._count([float(tokens)])


def _exchange(
    comm: Comm,
    shard_mesh: ProcessGroup | DeviceMesh | None,
    parameters: Parameters,
    method: MergeMethod,
    settings: LoopSettings,
) -> Exchange:
    """Return the exchange between workers of one rank each, or of those in ``shard_mesh``."""
    if shard_mesh is None:
        check_unsharded(parameters)
        if comm.size == 1:
            return LocalExchange(1)
        if settings.delay:
            comm = comm.apart()
        reduces = _reduces(comm, parameters, method, settings)
        owners = _owners(parameters, method, settings, comm.size)
        return GroupExchange(comm, owners, settings.bucket_bytes, reduces=reduces)
    members = shard_group(shard_mesh)
    inner = Comm(members, comm.device)
    check_grid(comm, inner)
    shards = find_shards(parameters, inner)
    check_layouts(comm, shards, [s.name for s in parameters.slots])
    if settings.delay:
        comm, inner = comm.apart(), inner.apart()
        shards = replace(shards, comm=inner)
    owners = _owners(parameters, method, settings, comm.size, inner.size)
    return ShardedExchange(comm, shards, owners, settings.bucket_bytes)


def _owners(
    parameters: Parameters,
    method: MergeMethod,
    settings: LoopSettings,
    workers: int,
    shards: int = 1,
) -> list[int]:
    """Return the owner of every slot by index, balanced within each fragment."""
    ranks, owners = workers * shards, [0] * len(parameters.slots)
    for f, part in enumerate(split(parameters.slots, settings.fragments)):
        costs = [cost(s.info, method.requires, workers) for s in part]
        for slot, owner in zip(part, assign(costs, ranks), strict=True):
            # Each fragment begins with another rank, so that all of them together balance too.
            owners[slot.index] = (owner + f) % ranks
    return owners


def _reduces(
    comm: Comm, parameters: Parameters, method: MergeMethod, settings: LoopSettings
) -> bool:
    """Whether sums are best formed on the way.

    That is where the backend's reduce-scatter sends a share only, the operator needs but the sum,
    and values are no narrower than their deltas.
    """
    return (
        comm.backend == "nccl"
        and method.requires.workers == "sum"
        and settings.wire == "float32"
        and not settings.deterministic
        and all(s.info.dtype == s.compute for s in parameters.slots)
    )


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


@torch.no_grad()
def _broadcast(comm: Comm, parameters: Parameters) -> None:
    """Give every worker rank 0's parameters and buffers."""
    buffers = [b.detach() for b in parameters.buffers.values()]
    for x in (*parameters.local(), *buffers):
        moved = x.to(comm.device, copy=True, memory_format=torch.contiguous_format)
        comm.broadcast(moved.view(-1), 0).wait()
        x.copy_(moved.view(x.shape))
