"""The exchange between workers of several ranks: whole tensors meet at one rank of one worker.

With R workers of S ranks, rank (i, s) sends the pieces that it provides to rank (j, s) of the
worker j that decides a tensor; inside that worker the pieces go to the one rank which owns the
tensor and sees it whole. New values take the same way back. What crosses between workers is
2(R − 1)/R · P/S per rank; operators and outer state are divided by R·S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .comm import Comm, Future, Traffic
from .contribution import Contribution, Source, decoded, encoded_update
from .exchange import Land
from .owners import buckets
from .parameters import Slot
from .shards import Shards, pack, padded
from .wire import Codec, as_bytes


@dataclass
class ShardedExchange:
    """One rank of one worker in this process.

    ``columns`` reaches the ranks with the same place in all workers, ``shards.comm`` those of
    this worker. ``owners`` is the owner of every slot by index: rank s of worker i is i·S + s.
    """

    columns: Comm
    shards: Shards
    owners: Sequence[int]
    bucket_bytes: int
    _anchors: dict[int, Tensor] = field(default_factory=dict)
    # Whole tensors are put together before they are added up.
    reduces = False

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.columns.size

    @property
    def traffic(self) -> Traffic:
        """Bytes so far; those inside the worker apart."""
        across, inside = self.columns.traffic, self.shards.comm.traffic
        return Traffic(
            across.sent, across.received, across.control + inside.control, inner=inside.sent
        )

    @property
    def place(self) -> int:
        """This process's number: rank s of worker i is i·S + s."""
        return self.columns.rank * self.shards.comm.size + self.shards.comm.rank

    @property
    def failed(self) -> bool:
        """Whether one of the two groups failed."""
        return self.columns.failed or self.shards.comm.failed

    def spread(self, x: Tensor, place: int) -> Tensor:
        """Return one process's tensor, first inside its worker, then across."""
        worker, rank = divmod(place, self.shards.comm.size)
        if worker == self.columns.rank:
            x = self.shards.comm.spread(x, rank)
        return self.columns.spread(x, worker)

    def owner_of(self, slot: Slot) -> int:
        """Return the owner's number."""
        return self.owners[slot.index]

    def joined(self, slot: Slot, held: Tensor, *, provided: bool = False) -> Tensor:
        """Return the whole tensor; every rank of the worker must call it."""
        return self.shards.whole(slot, held if provided else self.shards.piece(slot, held))

    def part(self, slot: Slot, whole: Tensor, *, provided: bool = False) -> Tensor:
        """Return this rank's part."""
        held = self.shards.held(slot, whole)
        return self.shards.piece(slot, held) if provided else held

    def owned(self, slots: Sequence[Slot]) -> list[Slot]:
        """Return the slots that this rank decides."""
        return [s for s in slots if self.owners[s.index] == self.place]

    def gather(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's column."""
        return self.columns.gather(rows[0])

    def gather_ranks(self, rows: Tensor) -> Tensor:
        """Return the rows of all ranks of all workers."""
        inner = self.shards.comm.gather(rows[0])
        everyone = self.columns.gather(inner.reshape(-1))
        return everyone.view(self.columns.size, *inner.shape)

    def gather_objects(self, values: Sequence[Any]) -> list[Any]:
        """Return the values of this rank's column."""
        return self.columns.gather_objects(values[0])

    def gather_all(self, value: Any) -> list[Any]:
        """Return the values of all ranks of all workers."""
        inner = self.shards.comm.gather_objects(value)
        return [x for row in self.columns.gather_objects(inner) for x in row]

    def provided(self, source: Source) -> Source:
        """Return what this rank provides of its worker: pieces of its tensors."""
        slots = self.shards.slots
        return Source(
            source.worker,
            [self.shards.piece(s, source.values[s.index]) for s in slots],
            [self.shards.piece(s, source.anchor[s.index]) for s in slots],
            [self._codec(source, s, self.shards.comm.rank) for s in slots],
            source.residuals,
        )

    def whole(self, source: Source) -> Source:
        """Return the worker as one that holds whole tensors, gathered as they are looked at."""
        return _Whole(self.provided(source), self.shards)

    def anchors(self, slots: Sequence[Slot], source: Source) -> dict[int, Tensor]:
        """Return the whole anchors of ``slots``, brought up to date whenever deltas come in.

        Every rank of the worker must call it at once.
        """
        mine, wanted = self.provided(source), {s.index for s in slots}
        for slot in self.shards.slots:
            whole = self.shards.whole(slot, mine.anchor[slot.index])
            if slot.index in wanted:
                self._anchors[slot.index] = whole
        return {i: self._anchors[i] for i in wanted}

    def collect(
        self, slots: Sequence[Slot], sources: Sequence[Source], participants: Sequence[int]
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        """Yield every slot of this rank, with the participants' contributions in their order."""
        (source,) = sources
        mine = self.provided(source)
        groups = self._buckets(slots, source)
        under_way: list[Future] = []
        for k, group in enumerate(groups):
            if k == 0:
                under_way.append(self._across(group, mine))
            if k + 1 < len(groups):
                under_way.append(self._across(groups[k + 1], mine))
            received = self._inside(group, source, mine, under_way.pop(0).wait(), participants)
            yield from self._assemble(group, source, received, participants)

    def collect_sums(
        self, slots: Sequence[Slot], term: Callable[[Slot], Tensor]
    ) -> Iterator[tuple[Slot, Tensor]]:
        """Nothing is added up on the way."""
        raise NotImplementedError("this exchange does not reduce")

    def _across(self, group: Sequence[Slot], mine: Source) -> Future:
        """Start sending this rank's pieces to its column's rank in each owner's worker."""
        parts: list[list[Tensor]] = [[] for _ in range(self.workers)]
        for slot in group:
            parts[self._owner(slot)[0]].append(mine.payload(slot))
        here = sum(padded(mine.payload_bytes(s)) for s in self._of_worker(group))
        return self.columns.all_to_all(*pack(parts, self.columns.device), [here] * self.workers)

    def _inside(
        self,
        group: Sequence[Slot],
        source: Source,
        mine: Source,
        received: Tensor,
        participants: Sequence[int],
    ) -> Tensor:
        """Return all pieces of what this rank owns: from each rank its anchors, then workers'."""
        inner, place = self.shards.comm, 0
        share = len(received) // self.workers
        parts: list[list[Tensor]] = [[] for _ in range(inner.size)]
        for slot in self._of_worker(group):
            n = mine.payload_bytes(slot)
            parts[self._owner(slot)[1]] += [
                as_bytes(mine.anchor[slot.index]),
                *(received[r * share + place :][:n] for r in participants),
            ]
            place += padded(n)
        sizes = [
            sum(
                padded(self._bytes(source, s, r, coded=False))
                + len(participants) * padded(self._bytes(source, s, r))
                for s in self.owned(group)
            )
            for r in range(inner.size)
        ]
        return inner.all_to_all(*pack(parts, inner.device), sizes).wait()

    def _assemble(
        self,
        group: Sequence[Slot],
        source: Source,
        received: Tensor,
        participants: Sequence[int],
    ) -> Iterator[tuple[Slot, list[Contribution]]]:
        ranks = range(self.shards.comm.size)
        reader = _Reader(received)
        parts: dict[tuple[int, int, int], Tensor] = {}
        for rank in ranks:
            for slot in self.owned(group):
                for r in (-1, *participants):
                    n = self._bytes(source, slot, rank, coded=r >= 0)
                    parts[slot.index, r, rank] = reader.take(n)
        for slot in self.owned(group):
            boxes, values = self.shards.layouts[slot.index].pieces, source.values[slot.index]
            anchor = self._anchors[slot.index]
            contributions = []
            codec = source.codecs[slot.index]
            for rank in ranks:
                x = decoded(None, parts[slot.index, -1, rank], boxes[rank].shape, anchor.dtype)
                boxes[rank].of(anchor).copy_(x)
            for r in participants:
                dtype = values.dtype if codec is None else slot.compute
                tensor = torch.empty(slot.info.shape, dtype=dtype, device=values.device)
                for rank in ranks:
                    payload = parts.pop((slot.index, r, rank)).to(values.device)
                    rank_codec = self._codec(source, slot, rank)
                    x = decoded(rank_codec, payload, boxes[rank].shape, values.dtype)
                    boxes[rank].of(tensor).copy_(x)
                contributions.append(Contribution(r, tensor, is_delta=codec is not None))
            yield slot, contributions

    def distribute(
        self,
        slots: Sequence[Slot],
        sources: Sequence[Source],
        new: Callable[[Slot], Tensor],
        land: Land,
    ) -> None:
        """Give every rank its part of every slot's new value, bucket by bucket, and land it."""
        (source,) = sources
        mine = self.provided(source)
        under_way: list[tuple[list[Slot], Future]] = []
        for group in self._buckets(slots, source):
            under_way += self._return(group, source, mine, new)
            # At most two buckets are in memory.
            while len(under_way) > 2 * self.workers:
                self._land(*under_way.pop(0), source, mine, land)
        while under_way:
            self._land(*under_way.pop(0), source, mine, land)

    def _return(
        self,
        group: Sequence[Slot],
        source: Source,
        mine: Source,
        new: Callable[[Slot], Tensor],
    ) -> Iterator[tuple[list[Slot], Future]]:
        """Start giving all columns the pieces of what each worker decided."""
        inner = self.shards.comm
        parts: list[list[Tensor]] = [[] for _ in range(inner.size)]
        for slot in self.owned(group):
            value, anchor = new(slot), self._anchors[slot.index]
            for rank, box in enumerate(self.shards.layouts[slot.index].pieces):
                codec = self._codec(source, slot, rank)
                parts[rank].append(encoded_update(codec, slot, box.of(anchor), box.of(value)))
        here: list[list[Slot]] = [[] for _ in range(inner.size)]
        for slot in self._of_worker(group):
            here[self._owner(slot)[1]].append(slot)
        sizes = [sum(padded(mine.payload_bytes(s)) for s in owned) for owned in here]
        decided = inner.all_to_all(*pack(parts, inner.device), sizes).wait()
        for worker in range(self.workers):
            theirs = sorted(
                (s for s in group if self._owner(s)[0] == worker),
                key=lambda s: self._owner(s)[1],
            )
            if theirs:
                total = sum(padded(mine.payload_bytes(s)) for s in theirs)
                buffer = decided if worker == self.columns.rank else decided.new_empty(total)
                yield theirs, self.columns.broadcast(buffer, worker)

    def _land(
        self,
        theirs: list[Slot],
        future: Future,
        source: Source,
        mine: Source,
        land: Land,
    ) -> None:
        reader, pieces, held = _Reader(future.wait()), [], []
        for slot in theirs:
            payload = reader.take(mine.payload_bytes(slot))
            values = source.values[slot.index]
            device = mine.anchor[slot.index].device
            pieces.append(mine.decode_update(slot, payload.to(device)))
            held.append(torch.empty(values.shape, dtype=values.dtype, device=device))
        self.shards.share(theirs, pieces, held)
        for slot, x in zip(theirs, held, strict=True):
            land(slot, x)

    def _owner(self, slot: Slot) -> tuple[int, int]:
        return divmod(self.owners[slot.index], self.shards.comm.size)

    def _of_worker(self, group: Sequence[Slot]) -> list[Slot]:
        return [s for s in group if self._owner(s)[0] == self.columns.rank]

    def _codec(self, source: Source, slot: Slot, rank: int) -> Codec | None:
        """Return how a rank's piece is coded; one without entries is not."""
        empty = not self.shards.layouts[slot.index].pieces[rank].numel
        return None if empty else source.codecs[slot.index]

    def _bytes(self, source: Source, slot: Slot, rank: int, *, coded: bool = True) -> int:
        """Return the bytes of a rank's piece, as it is contributed or as it is held."""
        box = self.shards.layouts[slot.index].pieces[rank]
        codec = self._codec(source, slot, rank) if coded else None
        return box.numel * slot.info.dtype.itemsize if codec is None else codec.nbytes(box.shape)

    def _buckets(self, slots: Sequence[Slot], source: Source) -> list[list[Slot]]:
        ranks = range(self.shards.comm.size)
        sizes = [max(self._bytes(source, s, r) for r in ranks) for s in slots]
        owners = [self.owners[s.index] for s in slots]
        return [[slots[i] for i in group] for group in buckets(sizes, owners, self.bucket_bytes)]


@dataclass
class _Reader:
    """Takes the parts of a message in their order."""

    message: Tensor
    offset: int = 0

    def take(self, nbytes: int) -> Tensor:
        """Return the next part."""
        part = self.message[self.offset :][:nbytes]
        self.offset += padded(nbytes)
        return part


class _Whole(Source):
    """A worker's deltas as whole tensors; every rank of the worker looks at the same ones."""

    def __init__(self, pieces: Source, shards: Shards) -> None:
        super().__init__(
            pieces.worker, pieces.values, pieces.anchor, pieces.codecs, pieces.residuals
        )
        self._pieces = pieces
        self._shards = shards

    def peek(self, slot: Slot) -> Contribution:
        """Return the whole delta that the worker will contribute."""
        anchor = self._pieces.anchor[slot.index]
        delta = self._pieces.peek(slot).delta(anchor, slot.compute)
        return Contribution(self.worker, self._shards.whole(slot, delta), is_delta=True)
