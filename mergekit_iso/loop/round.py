"""One outer step, the same for workers in one process and across a network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import NonFiniteError, SyncError
from ..methods.base import Context, MergeMethod
from .contribution import Source
from .exchange import Exchange, Land
from .guard import Guard
from .operate import (
    Batches,
    Gathered,
    adds_up,
    combine,
    finalize,
    finalize_alike,
    partials,
    stream,
    sum_of,
    term,
)
from .owner import Owner, Saved
from .parameters import Slot
from .report import Observed, Observer, OuterReport, Stopwatch
from .settings import LoopSettings
from .vote import Ballot, Participants, count, measure


@dataclass
class Round:
    """An outer step of some slots: vote, exchange, operator, outer optimizer, return.

    ``sources`` are the workers of this process, ``owner`` what it decides, ``names`` those of all
    slots. An error of one process's operator is kept until all have met again, so that it is
    raised in all of them and none waits for another.
    """

    number: int
    step: int
    fragment: int | None
    method: MergeMethod
    settings: LoopSettings
    exchange: Exchange
    owner: Owner
    slots: Sequence[Slot]
    names: Sequence[str]
    sources: Sequence[Source]
    tokens: Sequence[float]
    changed: int = -1
    participants: Participants = field(init=False)
    _watch: Stopwatch = field(default_factory=Stopwatch)
    _guard: Guard = field(default_factory=Guard)
    _checksum: int = 0

    def run(self, land: Land) -> OuterReport:
        """Take the step; ``land`` is given every slot's new value, in the model's dtype.

        What the owner holds is as before where this raises; what was landed is not.

        Raises:
            NonFiniteError, IncompatibleError: as the vote says, in every process alike;
                NonFiniteError also where the new values overflow.
            SyncError: the exchange failed, an operator failed, or replicas differ.
        """
        start = replace(self.exchange.traffic)
        with self._watch.phase("total"):
            with self._watch.phase("vote"):
                self.participants = participants = self._vote()
            observer = Observer(participants.weights, full=self.settings.report == "full")
            ctx = Context(
                weights=participants.weights,
                seed=self.settings.seed,
                round=self.number,
                note=observer.note,
            )
            combined = self._combine(participants, ctx, observer)
            owned = self.exchange.owned(self.slots)
            with self._watch.phase("optimizer"):
                saved = self.owner.save(owned)
                self._guard.run("the outer optimizer", self._move, combined, saved, ctx, observer)
            try:
                with self._watch.phase("vote"):
                    self._guard.agree(self.exchange)
                with self._watch.phase("return"):
                    self.exchange.distribute(
                        self.slots, self.sources, self.owner.value, self._counted(land)
                    )
                with self._watch.phase("vote"):
                    observed, residual = self._close(observer)
            except BaseException:
                self.owner.restore(saved)
                raise
        traffic = self.exchange.traffic
        return OuterReport(
            round=self.number,
            step=self.step,
            participants=len(participants.workers),
            tokens=participants.tokens,
            fragment=self.fragment,
            tensors=len(self.slots),
            bytes_sent=traffic.sent - start.sent,
            bytes_received=traffic.received - start.received,
            bytes_control=traffic.control - start.control,
            seconds=self._watch.seconds,
            delta_norm=participants.norms,
            update_norm=observed.update_norm,
            cosine=observed.cosine,
            sign_agreement=observed.sign_agreement,
            stable_rank=observed.stable_rank,
            residual=residual if residual >= 0 else None,
            skipped="; ".join(participants.left_out) or None,
        )

    def _vote(self) -> Participants:
        rows = []
        for source, tokens in zip(self.sources, self.tokens, strict=True):
            norm, bad = measure(self.exchange.provided(source), self.slots)
            fragment = -1 if self.fragment is None else self.fragment
            ballot = Ballot(self.number, self.step, fragment, tokens, norm, bad, self.changed)
            rows.append(ballot.row())
        everyone = self.exchange.gather_ranks(torch.stack(rows))
        ballots = [Ballot.of_worker(ranks) for ranks in everyone]
        return count(ballots, self.settings, self.names)

    def _statistics(self, participants: Participants, ctx: Context) -> Mapping[int, Any]:
        if "worker_model" not in self.method.requires.stats:
            return {}
        own: list[Any] = [None] * len(self.sources)
        for place, source in enumerate(self.sources):
            if source.worker in participants.workers:
                deltas = stream(self.exchange.whole(source), self.slots, ctx)
                own[place] = self._guard.run("a statistic", self.method.measure, deltas)
        return dict(enumerate(self.exchange.gather_objects(own)))

    def _combine(
        self, participants: Participants, ctx: Context, observer: Observer
    ) -> dict[int, Tensor]:
        with self._watch.phase("statistics"):
            stats = self._statistics(participants, ctx)
        finalized = self.settings.order == "merge_then_momentum"
        combined: dict[int, Tensor] = {}

        def merge(gathered: Gathered, ctx: Context) -> None:
            merged = combine(self.method, gathered, stats, ctx, finalized=finalized)
            combined[gathered.slot.index] = merged
            if self.settings.report == "full":
                observer.spectra(gathered, merged)

        if self.exchange.reduces:
            self._combine_sums(participants, ctx, combined, finalized=finalized)
            return combined

        def flatten(slots: Sequence[Slot]) -> None:
            totals = [combined[s.index] for s in slots]
            for slot, merged in zip(
                slots, finalize_alike(self.method, slots, totals, ctx), strict=True
            ):
                combined[slot.index] = merged

        # A CPU gains nothing from stacks, and would hold them.
        batches = Batches(self.settings.bucket_bytes if self._on_accelerator() else 1)
        votes = "merged_model" in self.method.requires.stats
        held: list[Gathered] = []
        shares = 0
        for slot, contributions in self._watch.timed(
            "exchange", self.exchange.collect(self.slots, self.sources, participants.workers)
        ):
            gathered = Gathered(slot, self.owner.anchor[slot.index], contributions)
            with self._watch.phase("report"):
                observer.deltas(gathered)
            with self._watch.phase("operator"):
                if adds_up(self.method, slot) and self.settings.report != "full":
                    total = self._guard.run(slot.name, sum_of, gathered, ctx)
                    contributions.clear()  # as large as the tensor, R times
                    if total is not None:
                        combined[slot.index] = total
                        if finalized and (group := batches.add(slot)):
                            self._guard.run(slot.name, flatten, group)
                elif votes:  # the majority is known once every tensor has been seen
                    held.append(gathered)
                    share = self._guard.run(slot.name, partials, self.method, gathered, stats, ctx)
                    shares += share or 0
                else:
                    self._guard.run(slot.name, merge, gathered, ctx)
        with self._watch.phase("operator"):
            for group in batches.rest():
                self._guard.run(group[0].name, flatten, group)
        if votes:
            elected = self.method.elect(self.exchange.gather_all(shares))
            ctx = replace(ctx, elected=lambda: elected)
            with self._watch.phase("operator"):
                for gathered in held:
                    self._guard.run(gathered.slot.name, merge, gathered, ctx)
        return combined

    def _on_accelerator(self) -> bool:
        return any(a.device.type != "cpu" for a in self.owner.anchor.values())

    def _combine_sums(
        self,
        participants: Participants,
        ctx: Context,
        combined: dict[int, Tensor],
        *,
        finalized: bool,
    ) -> None:
        (source,) = self.sources
        weights = dict(zip(participants.workers, participants.weights, strict=True))
        weight = weights.get(source.worker, 0.0)

        def term_of(slot: Slot) -> Tensor:
            found = self._guard.run(slot.name, term, self.method, source, slot, weight, ctx)
            return source.delta(slot).zero_() if found is None else found

        for slot, total in self._watch.timed(
            "exchange", self.exchange.collect_sums(self.slots, term_of)
        ):
            with self._watch.phase("operator"):
                combined[slot.index] = total
                if finalized:
                    merged = self._guard.run(slot.name, finalize, self.method, slot, total, ctx)
                    combined[slot.index] = total if merged is None else merged

    def _move(
        self, combined: Mapping[int, Tensor], saved: Saved, ctx: Context, observer: Observer
    ) -> None:
        self.owner.step(combined, lambda slot, x: finalize(self.method, slot, x, ctx))
        for slot in self.exchange.owned(self.slots):
            value = self.owner.value(slot)
            low, high = value.to(slot.info.dtype).aminmax()
            if not bool(torch.isfinite(low) & torch.isfinite(high)):
                raise NonFiniteError(
                    f"the outer step makes {slot.name} overflow",
                    hint="lower the outer learning rate, or look at the inner training",
                )
            observer.update(saved.masters[slot.index], value)

    def _counted(self, land: Land) -> Land:
        verify = self.settings.verify_every
        if not verify or (self.number // self.settings.parts + 1) % verify:
            return land

        def counted(slot: Slot, new: Tensor) -> None:
            self._checksum = (self._checksum * 1_000_003 + checksum(new)) % (1 << 50)
            land(slot, new)

        return counted

    def _close(self, observer: Observer) -> tuple[Observed, float]:
        """Return what all processes observed; the last meeting of a round."""
        row = observer.row()
        rows = row.new_zeros(len(self.sources), len(row) + 2)
        rows[0, :-2] = row
        rows[:, -2] = observer.residual
        rows[:, -1] = float(self._checksum)
        rows = self.exchange.gather_ranks(rows)
        sums = rows[:, :, -1].tolist()
        differing = [r for r, worker in enumerate(sums) if worker != sums[0]]
        if differing:
            raise SyncError(
                f"the replicas differ: worker {differing[0]} has other parameters than worker 0",
                hint="resume all workers from one checkpoint, or call join(0)",
            )
        return Observed.read(rows[:, :, :-2].sum((0, 1))), float(rows[:, :, -2].max())


def checksum(x: Tensor) -> int:
    """Return a number that depends on every bit of a tensor."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return int(x.contiguous().view(-1).view(integer).sum(dtype=torch.int64)) % (1 << 50)
