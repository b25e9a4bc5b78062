"""A worker of several ranks: which part of every tensor each of them holds, and provides.

A matrix operator acts on a whole matrix, so the parts that FSDP, HSDP or tensor parallelism leave
on a worker's ranks have to meet. What a rank holds is a box of the tensor. Where several ranks
hold the same box, as under DDP, each provides its share of it, so that what crosses the slow
links between workers is divided by the number of ranks in every layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ..errors import IncompatibleError, SyncError
from .comm import Comm
from .parameters import Parameters, Slot
from .wire import as_bytes

# Parts of a message start at multiples of this, so that they can be viewed in any dtype.
_ALIGNED = 8


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor; one number per dimension, a scalar has one of length 1."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of entries."""
        return prod(self.shape)

    def of(self, x: Tensor) -> Tensor:
        """Return the part of a tensor, sharing its storage."""
        part = x.view(1) if x.dim() == 0 else x
        for dim, (start, length) in enumerate(zip(self.offset, self.shape, strict=True)):
            part = part.narrow(dim, start, length)
        return part

    def within(self, outer: Box) -> Box:
        """Return this box as a part of ``outer``, which contains it."""
        offset = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))
        return Box(offset, self.shape)

    def meets(self, other: Box) -> bool:
        """Return whether two boxes share an entry."""
        return all(
            max(a, b) < min(a + m, b + n)
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )

    def share(self, place: int, of: int) -> Box:
        """Return one of ``of`` nearly equal parts along the first dimension, some maybe empty."""
        n = self.shape[0]
        start, stop = n * place // of, n * (place + 1) // of
        first = self.offset[0] + start
        return Box((first, *self.offset[1:]), (stop - start, *self.shape[1:]))


@dataclass(frozen=True)
class Layout:
    """How one tensor lies on a worker's ranks: the box each holds, and the piece it provides.

    The pieces tile the tensor; a rank's piece lies in its box.
    """

    boxes: tuple[Box, ...]
    pieces: tuple[Box, ...]

    @classmethod
    def of(cls, boxes: Sequence[Box], turn: int) -> Layout:
        """Return the layout of these boxes; ``turn`` spreads what is too short to be shared."""
        pieces = []
        for rank, box in enumerate(boxes):
            holders = [r for r, other in enumerate(boxes) if other == box]
            place = (holders.index(rank) + turn) % len(holders)
            pieces.append(box.share(place, len(holders)))
        return cls(tuple(boxes), tuple(pieces))

    def holders(self, rank: int) -> list[int]:
        """Return the other ranks that hold this rank's box, if it has any entries."""
        box = self.boxes[rank]
        return [r for r, b in enumerate(self.boxes) if r != rank and b == box and box.numel]

    @property
    def replicated(self) -> bool:
        """Whether any box is held by more than one rank."""
        return any(self.holders(rank) for rank in range(len(self.boxes)))

    def tiles(self, shape: tuple[int, ...]) -> bool:
        """Return whether the pieces cover a tensor of this shape, each entry once."""
        full = [p for p in self.pieces if p.numel]
        inside = all(
            o + n <= length
            for p in full
            for o, n, length in zip(p.offset, p.shape, shape or (1,), strict=True)
        )
        apart = not any(a.meets(b) for a, b in combinations(full, 2))
        return inside and apart and sum(p.numel for p in full) == prod(shape)


@dataclass
class Shards:
    """The ranks of one worker, and how its tensors lie on them."""

    comm: Comm
    slots: Sequence[Slot]
    layouts: Sequence[Layout]

    def piece(self, slot: Slot, held: Tensor) -> Tensor:
        """Return what this rank provides, a view of what it holds."""
        layout, rank = self.layouts[slot.index], self.comm.rank
        return layout.pieces[rank].within(layout.boxes[rank]).of(held)

    def held(self, slot: Slot, whole: Tensor) -> Tensor:
        """Return what this rank holds of a whole tensor, a view of it in the shape held."""
        box = self.layouts[slot.index].boxes[self.comm.rank]
        return box.of(whole).view(()) if not slot.info.shape else box.of(whole)

    def whole(self, slot: Slot, piece: Tensor) -> Tensor:
        """Return a whole tensor on every rank of the worker, from the pieces each provides.

        Every rank of the worker must call it. Any dtype; the result is on the piece's device.
        """
        pieces = self.layouts[slot.index].pieces
        mine = as_bytes(piece).to(self.comm.device)
        sizes = [p.numel * piece.element_size() for p in pieces]
        received = self.comm.all_to_all(
            mine.repeat(self.comm.size), [len(mine)] * self.comm.size, sizes
        ).wait()
        whole = torch.empty(slot.info.shape, dtype=piece.dtype, device=piece.device)
        for box, part in zip(pieces, torch.split(received, sizes), strict=True):
            # Not all start where their dtype may, so each is copied out first.
            box.of(whole).copy_(part.clone().view(piece.dtype).view(box.shape))
        return whole

    def share(self, slots: Sequence[Slot], mine: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        """Fill what this rank holds of every slot from the pieces that it and others provide."""
        size, rank = self.comm.size, self.comm.rank
        for slot, piece, x in zip(slots, mine, held, strict=True):
            self.piece(slot, x).copy_(piece)
        shared = [
            (self.layouts[s.index], piece, x)
            for s, piece, x in zip(slots, mine, held, strict=True)
            if self.layouts[s.index].replicated
        ]
        if not shared:
            return
        send: list[list[Tensor]] = [[] for _ in range(size)]
        sizes = [0] * size
        for layout, piece, _ in shared:
            for r in layout.holders(rank):
                send[r].append(as_bytes(piece))
                sizes[r] += padded(layout.pieces[r].numel * piece.element_size())
        received = self.comm.all_to_all(*pack(send, self.comm.device), sizes).wait()
        offset = [sum(sizes[:r]) for r in range(size)]
        for layout, piece, x in shared:
            for r in layout.holders(rank):
                box = layout.pieces[r].within(layout.boxes[rank])
                n = box.numel * piece.element_size()
                part = received[offset[r] :][:n].view(piece.dtype).view(box.shape)
                box.of(x).copy_(part)
                offset[r] += padded(n)


def padded(nbytes: int) -> int:
    """Return the room that a part of a message takes."""
    return -(-nbytes // _ALIGNED) * _ALIGNED


def pack(parts: Sequence[Sequence[Tensor]], device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the bytes for every rank in one buffer, each part in its room, and their sizes."""
    sizes = [sum(padded(len(x)) for x in group) for group in parts]
    buffer, offset = torch.empty(sum(sizes), dtype=torch.uint8, device=device), 0
    for x in (x for group in parts for x in group):
        buffer[offset : offset + len(x)] = x
        offset += padded(len(x))
    return buffer, sizes


def shard_group(mesh: DeviceMesh | dist.ProcessGroup) -> dist.ProcessGroup:
    """Return the ranks of this worker as one process group, in the order of the mesh."""
    if not isinstance(mesh, DeviceMesh):
        return mesh
    if mesh.ndim == 1:
        return mesh.get_group()
    group = dist.new_group(mesh.mesh.flatten().tolist(), use_local_synchronization=True)
    assert isinstance(group, dist.ProcessGroup)  # this rank is in its own mesh
    return group


def find_shards(parameters: Parameters, comm: Comm) -> Shards:
    """Return how the parameters lie on the ranks of ``comm``; every rank must call it.

    Raises IncompatibleError in all of them where a DTensor's mesh has other ranks, or a layout
    is none that can be put together from boxes.
    """
    ranks = set(dist.get_process_group_ranks(comm.group))
    said: list[Any] = []
    for slot in parameters.slots:
        p = parameters.tensors[slot.name]
        said.append(_outside(p, ranks) or _box(p))
    everyone = comm.gather_objects(said)
    layouts = []
    for slot, boxes in zip(parameters.slots, zip(*everyone, strict=True), strict=True):
        wrong = next((x for x in boxes if isinstance(x, str)), None)
        if wrong is not None:
            raise IncompatibleError(
                f"parameter {slot.name} {wrong}",
                hint="give the mesh that shards the model inside one worker as shard_mesh, and "
                "the ranks across workers as group",
            )
        layout = Layout.of(boxes, turn=slot.index)
        if not layout.tiles(tuple(slot.info.shape)):
            raise IncompatibleError(
                f"parameter {slot.name} is laid out on the worker's ranks in a way that is not "
                "supported: its shards are no boxes that tile it",
                hint="shard it with Shard and Replicate placements only",
            )
        layouts.append(layout)
    return Shards(comm, parameters.slots, layouts)


def check_unsharded(parameters: Parameters) -> None:
    """Refuse (IncompatibleError) sharded parameters where no shard_mesh was given."""
    for name, p in parameters.tensors.items():
        if isinstance(p, DTensor) and p.device_mesh.size() > 1:
            raise IncompatibleError(
                f"parameter {name} is sharded over {p.device_mesh.size()} ranks, and no "
                "shard_mesh was given",
                hint="give the mesh that shards the model inside one worker as shard_mesh, and "
                "the ranks with the same place in every worker as group: "
                "group=mesh['workers'], shard_mesh=mesh['shards']",
            )


def check_grid(workers: Comm, inner: Comm) -> None:
    """Refuse (SyncError) groups that are not the columns and rows of one grid of ranks."""
    mine = (workers.rank, workers.size, inner.rank, inner.size)
    rows, columns = inner.gather_objects(mine), workers.gather_objects(mine)
    straight = all(
        row == (workers.rank, workers.size, s, inner.size) for s, row in enumerate(rows)
    ) and all(c == (r, workers.size, inner.rank, inner.size) for r, c in enumerate(columns))
    if not all(inner.gather_objects(straight)):
        raise SyncError(
            "group and shard_mesh do not form a grid: rank s of every shard_mesh must be in one "
            "group, in the order of workers",
            hint="make both from one mesh: init_device_mesh(…, (workers, shards))",
        )


def _outside(p: Tensor, ranks: set[int]) -> str | None:
    if not isinstance(p, DTensor):
        return None
    mesh = set(p.device_mesh.mesh.flatten().tolist())
    if not mesh <= ranks:
        return f"is sharded over ranks {sorted(mesh)}, and shard_mesh has {sorted(ranks)}"
    if any(placement.is_partial() for placement in p.placements):
        return "is a partial sum, and has no values of its own"
    return None


def _box(p: Tensor) -> Box:
    if not isinstance(p, DTensor):
        shape = tuple(p.shape) or (1,)
        return Box((0,) * len(shape), shape)
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    if not p.dim():
        return Box((0,), (1,))
    return Box(tuple(int(o) for o in offset), tuple(int(n) for n in shape))


def check_layouts(workers: Comm, shards: Shards, names: Sequence[str]) -> None:
    """Refuse (IncompatibleError, in every rank) workers that are sharded differently."""
    everyone = workers.gather_objects(list(shards.layouts))
    for r, layouts in enumerate(everyone):
        for name, there, first in zip(names, layouts, everyone[0], strict=True):
            if there != first:
                raise IncompatibleError(
                    f"worker {r} and worker 0 hold other parts of {name} on their ranks",
                    hint="shard the model in the same way in every worker",
                )
