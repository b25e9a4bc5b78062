"""How deltas reach the owners of their tensors, and new values come back.

A tensor's contributions go to its owner alone, which decides it and gives the new value to all:
2(R − 1)/R of the model per rank on average, the bytes of an all-reduce, for any operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .comm import Comm, Future, Traffic
from .contribution import Contribution, Source
from .owners import buckets
from .parameters import Slot

# Parts of a message start at multiples of this, so that they can be viewed in any dtype.
_ALIGNED = 8

Land = Callable[[Slot, Tensor], None]


class Exchange(Protocol):
    """Moves contributions to owners and new values back, for the workers of one process."""

    @property
    def workers(self) -> int:
        """Number of workers of all processes."""
        ...

    @property
    def traffic(self) -> Traffic:
        """Bytes of this process so far."""
        ...

    def owner_of(self, slot: Slot) -> int:
        """Return the number of the process that decides a slot."""
        ...

    @property
    def place(self) -> int:
        """This process's number among all."""
        ...

    @property
    def failed(self) -> bool:
        """Whether the others cannot be reached any more."""
        ...

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots that this process decides."""
        ...

    def spread(self, x: Tensor, place: int) -> Tensor:
        """Return process ``place``'s tensor in all, on ``x``'s device; ``x`` is used up."""
        ...

    def joined(self, slot: Slot, held: Tensor, *, provided: bool = False) -> Tensor:
        """Return a whole tensor from what this worker's processes hold, or provide, of it."""
        ...

    def part(self, slot: Slot, whole: Tensor, *, provided: bool = False) -> Tensor:
        """Return what this process holds, or provides, of a whole tensor."""
        ...

    def gather(self, rows: Tensor) -> Tensor:
        """Return all workers' rows of numbers (R, n), from those of this process (V, n)."""
        ...

    def gather_ranks(self, rows: Tensor) -> Tensor:
        """Return the rows of every rank of every worker (R, S, n), from this process's (V, n)."""
        ...

    def gather_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return all workers' values, from those of this process."""
        ...

    def gather_all(self, value: Any) -> list[Any]:
        """Return every process's value."""
        ...

    def provided(self, source: Source) -> Source:
        """Return what this process provides of one of its workers; all do so of a whole model."""
        ...

    def whole(self, source: Source) -> Source:
        """Return a worker's whole tensors to look at with ``peek``, as all its ranks do at once."""
        ...

    def anchors(self, slots: Sequence[Slot], source: Source) -> dict[int, Tensor]:
        """Return the whole anchors of slots that this process decides; they follow the source's."""
        ...

    def collect(
        self, slots: Sequence[Slot], sources: Sequence[Source], participants: Sequence[int]
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        """Yield every slot that this process decides, with the participants' contributions."""
        ...

    @property
    def reduces(self) -> bool:
        """Whether sums are formed on the way, by ``collect_sums`` in place of ``collect``."""
        ...

    def collect_sums(
        self, slots: Sequence[Slot], term: Callable[[Slot], Tensor]
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Yield every slot that this process decides, with the sum of all workers' terms."""
        ...

    def distribute(
        self,
        slots: Sequence[Slot],
        sources: Sequence[Source],
        new: Callable[[Slot], Tensor],
        land: Land,
    ) -> None:
        """Give every slot's new value, asked of its owner, to ``land`` in every process."""
        ...


class LocalExchange:
    """All workers are in this process: nothing moves."""

    reduces = False
    place = 0
    failed = False

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.traffic = Traffic()

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return all slots."""
        return list(slots)

    def owner_of(self, slot: Slot) -> int:
        """Return 0: this process."""
        return 0

    def spread(self, x: Tensor, place: int) -> Tensor:
        """Return the tensor."""
        return x

    def joined(self, slot: Slot, held: Tensor, *, provided: bool = False) -> Tensor:
        """Return the tensor."""
        return held

    def part(self, slot: Slot, whole: Tensor, *, provided: bool = False) -> Tensor:
        """Return the tensor."""
        return whole

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows."""
        return rows

    def gather_ranks(self, rows: Tensor) -> Tensor:
        """Return the rows, of one rank a worker."""
        return rows[:, None]

    def gather_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return the values."""
        return list(values)

    def gather_all(self, value: Any) -> list[Any]:
        """Return the value."""
        return [value]

    def provided(self, source: Source) -> Source:
        """Return the source."""
        return source

    def whole(self, source: Source) -> Source:
        """Return the source."""
        return source

    def anchors(self, slots: Sequence[Slot], source: Source) -> dict[int, Tensor]:
        """Return the source's anchors."""
        return {s.index: source.anchor[s.index] for s in slots}

    def collect(
        self, slots: Sequence[Slot], sources: Sequence[Source], participants: Sequence[int]
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        """Yield every slot with the participants' contributions."""
        for slot in slots:
            yield slot, [sources[r].contribution(slot) for r in participants]

    def collect_sums(
        self, slots: Sequence[Slot], term: Callable[[Slot], Tensor]
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Not used: nothing is on the way."""
        raise NotImplementedError

    def distribute(
        self,
        slots: Sequence[Slot],
        sources: Sequence[Source],
        new: Callable[[Slot], Tensor],
        land: Land,
    ) -> None:
        """Land every slot's new value."""
        for slot in slots:
            land(slot, sources[0].decode_update(slot, sources[0].encode_update(slot, new(slot))))


@dataclass
class GroupExchange:
    """One worker in this process, the others reached through a process group.

    ``owners`` is the owner's rank of every slot, by index. Contributions travel by all-to-all
    in buckets, the next one under way while the owner works on the last. With ``reduces`` they
    are added up on the way, by reduce-scatter: the same bytes, the order of summation left to
    the backend.
    """

    comm: Comm
    owners: Sequence[int]
    bucket_bytes: int
    reduces: bool = False

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.comm.size

    @property
    def traffic(self) -> Traffic:
        """Bytes so far."""
        return self.comm.traffic

    @property
    def place(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def failed(self) -> bool:
        """Whether the group failed."""
        return self.comm.failed

    def owner_of(self, slot: Slot) -> int:
        """Return the owner's rank."""
        return self.owners[slot.index]

    def spread(self, x: Tensor, place: int) -> Tensor:
        """Return rank ``place``'s tensor."""
        return self.comm.spread(x, place)

    def joined(self, slot: Slot, held: Tensor, *, provided: bool = False) -> Tensor:
        """Return the tensor."""
        return held

    def part(self, slot: Slot, whole: Tensor, *, provided: bool = False) -> Tensor:
        """Return the tensor."""
        return whole

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots that this rank decides."""
        return [s for s in slots if self.owners[s.index] == self.comm.rank]

    def gather(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows."""
        return self.comm.gather(rows[0])

    def gather_ranks(self, rows: Tensor) -> Tensor:
        """Return all ranks' rows, of one rank a worker."""
        return self.gather(rows)[:, None]

    def gather_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return all ranks' values."""
        return self.comm.gather_objects(values[0])

    def gather_all(self, value: Any) -> list[Any]:
        """Return all ranks' values."""
        return self.comm.gather_objects(value)

    def provided(self, source: Source) -> Source:
        """Return the source."""
        return source

    def whole(self, source: Source) -> Source:
        """Return the source."""
        return source

    def anchors(self, slots: Sequence[Slot], source: Source) -> dict[int, Tensor]:
        """Return the source's anchors."""
        return {s.index: source.anchor[s.index] for s in slots}

    def collect(
        self, slots: Sequence[Slot], sources: Sequence[Source], participants: Sequence[int]
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        """Yield every slot of this rank, with the participants' contributions in their order."""
        (source,) = sources
        groups = self._buckets(slots, [source.payload_bytes(s) for s in slots])
        under_way: list[Future] = []
        for k, group in enumerate(groups):
            if k == 0:
                under_way.append(self._send(group, source))
            if k + 1 < len(groups):
                under_way.append(self._send(groups[k + 1], source))
            yield from self._unpack(group, source, under_way.pop(0).wait(), participants)

    def collect_sums(
        self, slots: Sequence[Slot], term: Callable[[Slot], Tensor]
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Yield every slot of this rank, with the sum of all ranks' terms in compute dtype."""
        for dtype in dict.fromkeys(s.compute for s in slots):
            of_dtype = [s for s in slots if s.compute == dtype]
            sizes = [s.info.numel * dtype.itemsize for s in of_dtype]
            for group in self._buckets(of_dtype, sizes):
                parts: list[list[Slot]] = [[] for _ in range(self.comm.size)]
                for slot in group:
                    parts[self.owners[slot.index]].append(slot)
                nothing = torch.empty(0, dtype=dtype, device=self.comm.device)
                send = [
                    torch.cat([nothing, *(term(s).reshape(-1).to(nothing.device) for s in part)])
                    for part in parts
                ]
                mine = parts[self.comm.rank]
                sums = self.comm.reduce_scatter(send).wait()
                numels = [s.info.numel for s in mine]
                for slot, total in zip(mine, torch.split(sums, numels), strict=True):
                    yield slot, total.view(slot.info.shape)

    def distribute(
        self,
        slots: Sequence[Slot],
        sources: Sequence[Source],
        new: Callable[[Slot], Tensor],
        land: Land,
    ) -> None:
        """Broadcast every slot's new value from its owner, bucket by bucket, and land it."""
        (source,) = sources
        groups = self._buckets(slots, [source.payload_bytes(s) for s in slots])
        under_way: list[tuple[list[Slot], Future]] = []
        for group in groups:
            for rank in range(self.comm.size):
                mine = [s for s in group if self.owners[s.index] == rank]
                if mine:
                    under_way.append((mine, self._return(mine, rank, source, new)))
            # At most two buckets are in memory.
            while len(under_way) > 2 * self.comm.size:
                self._land(*under_way.pop(0), source, land)
        while under_way:
            self._land(*under_way.pop(0), source, land)

    def _buckets(self, slots: Sequence[Slot], sizes: Sequence[int]) -> list[list[Slot]]:
        owners = [self.owners[s.index] for s in slots]
        return [[slots[i] for i in group] for group in buckets(sizes, owners, self.bucket_bytes)]

    def _send(self, group: Sequence[Slot], source: Source) -> Future:
        rank, size = self.comm.rank, self.comm.size
        parts: list[list[Slot]] = [[] for _ in range(size)]
        for slot in group:
            parts[self.owners[slot.index]].append(slot)
        mine = sum(_padded(source.payload_bytes(s)) for s in parts[rank])
        parts[rank] = []  # what this rank owns of itself does not travel
        send_sizes = [sum(_padded(source.payload_bytes(s)) for s in part) for part in parts]
        send = torch.empty(sum(send_sizes), dtype=torch.uint8, device=self.comm.device)
        _pack(send, (source.payload(s) for part in parts for s in part))
        recv_sizes = [0 if r == rank else mine for r in range(size)]
        return self.comm.all_to_all(send, send_sizes, recv_sizes)

    def _unpack(
        self,
        group: Sequence[Slot],
        source: Source,
        received: Tensor,
        participants: Sequence[int],
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        mine = self.owned(group)
        share = sum(_padded(source.payload_bytes(s)) for s in mine)
        others = [r for r in range(self.comm.size) if r != self.comm.rank]
        start = {r: place * share for place, r in enumerate(others)}
        offset = 0
        for slot in mine:
            n = source.payload_bytes(slot)
            device = source.values[slot.index].device
            contributions = [
                source.contribution(slot)
                if r == self.comm.rank
                else source.decode(slot, received[start[r] + offset :][:n].to(device), r)
                for r in participants
            ]
            offset += _padded(n)
            if slot is mine[-1]:
                del received  # the caller can let its parts go
            yield slot, contributions

    def _return(
        self, mine: Sequence[Slot], rank: int, source: Source, new: Callable[[Slot], Tensor]
    ) -> Future:
        total = sum(_padded(source.payload_bytes(s)) for s in mine)
        buffer = torch.empty(total, dtype=torch.uint8, device=self.comm.device)
        if rank == self.comm.rank:
            _pack(buffer, (source.encode_update(s, new(s)) for s in mine))
        return self.comm.broadcast(buffer, rank)

    def _land(self, mine: Sequence[Slot], future: Future, source: Source, land: Land) -> None:
        buffer, offset = future.wait(), 0
        for slot in mine:
            n = source.payload_bytes(slot)
            device = source.anchor[slot.index].device
            land(slot, source.decode_update(slot, buffer[offset:][:n].to(device)))
            offset += _padded(n)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _pack(buffer: Tensor, payloads: Iterator[Tensor]) -> None:
    offset = 0
    for payload in payloads:
        buffer[offset : offset + len(payload)] = payload
        offset += _padded(len(payload))
