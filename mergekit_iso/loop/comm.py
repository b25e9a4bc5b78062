"""The collectives between workers, with their bytes counted and their failures made one error."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import SyncError


@dataclass
class Traffic:
    """Bytes this rank has sent and received: payload, and control messages apart.

    A broadcast counts at its root once per other rank, as all of them have to get it. ``inner``
    is what this rank has sent to other ranks of its own worker.
    """

    sent: int = 0
    received: int = 0
    control: int = 0
    inner: int = 0


@dataclass
class Comm:
    """One rank's side of a process group.

    ``device`` is where tensors that cross the group live: the one given, or the CPU for gloo.
    Every failure of a collective (a peer that died or stalled, a destroyed group) raises
    SyncError, and ``failed`` says from then on that the group is of no more use.
    """

    group: dist.ProcessGroup
    device: torch.device
    rank: int = field(init=False)
    size: int = field(init=False)
    backend: str = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    failed: bool = False

    def __post_init__(self) -> None:
        with self.failures("using the process group"):
            self.rank = dist.get_rank(self.group)
            if self.rank < 0:
                raise ValueError("this process is not in it")
            self.size = dist.get_world_size(self.group)
            self.backend = str(dist.get_backend(self.group))
        if self.backend == "gloo":
            self.device = torch.device("cpu")

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Raise SyncError in place of whatever torch.distributed raises in the block."""
        try:
            yield
        except (RuntimeError, ValueError) as error:  # DistError is a RuntimeError
            self.failed = True
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise SyncError(
                f"{what} failed: {reason}",
                hint="a worker died, stalled beyond the group's timeout or left; "
                "go on in a new group of those that are left",
            ) from error

    def apart(self) -> Comm:
        """Return the same ranks in a group of their own, which another thread can use meanwhile."""
        with self.failures("making a process group"):
            backend = self.group._get_backend(self.device)
            group = dist.new_group(
                dist.get_process_group_ranks(self.group),
                timeout=backend.options._timeout,
                backend=self.backend,
                use_local_synchronization=True,
            )
        return Comm(group, self.device)

    def all_to_all(self, send: Tensor, send_sizes: list[int], sizes: list[int]) -> Future:
        """Start sending uint8 slices of ``send`` to every rank; the future gives what came."""
        recv = send.new_empty(sum(sizes))
        self.traffic.sent += sum(send_sizes) - send_sizes[self.rank]
        self.traffic.received += sum(sizes) - sizes[self.rank]
        with self.failures("the exchange of deltas"):
            work = dist.all_to_all_single(
                recv, send, sizes, send_sizes, group=self.group, async_op=True
            )
        return Future(recv, work, send, self)

    def reduce_scatter(self, send: list[Tensor]) -> Future:
        """Start adding up part r of every rank's list on rank r; the future gives the sum."""
        recv = torch.empty_like(send[self.rank])
        others = sum(x.nbytes for x in send) - recv.nbytes
        self.traffic.sent += others
        self.traffic.received += recv.nbytes * (self.size - 1)
        with self.failures("the exchange of deltas"):
            work = dist.reduce_scatter(recv, send, group=self.group, async_op=True)
        return Future(recv, work, send, self)

    def broadcast(self, buffer: Tensor, source: int) -> Future:
        """Start giving rank ``source``'s buffer to every rank, in place."""
        if source == self.rank:
            self.traffic.sent += buffer.nbytes * (self.size - 1)
        else:
            self.traffic.received += buffer.nbytes
        with self.failures("the return of merged parameters"):
            work = dist.broadcast(buffer, group=self.group, group_src=source, async_op=True)
        return Future(buffer, work, buffer, self)

    def spread(self, x: Tensor, source: int) -> Tensor:
        """Return rank ``source``'s tensor, on ``x``'s device. Counted as control."""
        moved = x.detach().to(self.device).contiguous()
        self.traffic.control += moved.nbytes * (self.size - 1) if self.rank == source else 0
        with self.failures("the exchange of state"):
            dist.broadcast(moved, group=self.group, group_src=source)
        return moved.to(x.device)

    def gather(self, row: Tensor) -> Tensor:
        """Return every rank's row (n,) as (ranks, n), on the CPU. Counted as control."""
        mine = row.to(self.device)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        self.traffic.control += row.nbytes * (self.size - 1)
        with self.failures("the vote"):
            dist.get_backend(self.group)  # gloo would go on with a group that was destroyed
            dist.all_gather(rows, mine, group=self.group)
            return torch.stack(rows).cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return every rank's value (anything pickle takes), in the order of ranks."""
        mine = pickle.dumps(value)
        everyone: list[bytes] = [b""] * self.size
        self.traffic.control += len(mine) * (self.size - 1)
        with self.failures("the exchange of settings"):
            dist.all_gather_object(everyone, mine, group=self.group)
        return [pickle.loads(said) for said in everyone]


@dataclass(frozen=True)
class Future:
    """A collective under way; ``wait`` gives its result. ``held`` is kept alive until then."""

    result: Tensor
    work: Any
    held: Tensor | Sequence[Tensor]
    comm: Comm

    def wait(self) -> Tensor:
        """Return the result once it is there; raises SyncError where a peer failed."""
        if self.work is not None:
            with self.comm.failures("the exchange"):
                self.work.wait()
        return self.result


def as_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the process group meant: None is the default group, or no group where there is none.

    Raises SyncError for a mesh of more than one dimension.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise SyncError(
                f"the mesh across workers has {group.ndim} dimensions, and must have one",
                hint="slice it, e.g. mesh['workers']",
            )
        return group.get_group()
    if group is not None:
        return group
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD
