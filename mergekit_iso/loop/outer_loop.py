"""What every outer loop does: count inner steps, sync what is due, keep the anchor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from time import perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MergeWarning, MethodError, SyncError
from ..kernels.memory import keep_freed_memory
from ..methods.base import MergeMethod
from . import background, buffers
from .contribution import Source
from .exchange import Exchange
from .fragments import due, split
from .owner import OuterFactory, Owner, sgd
from .parameters import Parameters, Slot
from .report import OnReport, OuterReport
from .resume import Resumable
from .round import Round
from .settings import LoopSettings
from .under_way import Outcome, UnderWay, applied, snapshot
from .wire import codec_for


class OuterLoop(Resumable):
    """Workers of this process, their anchor, and the outer step that joins them.

    ``models`` holds one set of parameters per worker of this process, numbered from
    ``first_worker``; all start from the anchor.
    """

    def __init__(
        self,
        models: Sequence[Parameters],
        method: MergeMethod,
        settings: LoopSettings,
        exchange: Exchange,
        outer: OuterFactory,
        *,
        first_worker: int = 0,
        anchor_device: torch.device | None = None,
        on_event: OnReport | None = None,
    ) -> None:
        settings.check(method)
        self._models = models
        self._method = method
        self._settings = settings
        self._exchange = exchange
        self._on_event = on_event
        self._slots = models[0].slots
        self._fragments = split(self._slots, settings.fragments)
        self._anchor = [
            x.to(anchor_device or x.device, copy=True, memory_format=torch.contiguous_format)
            for x in models[0].local()
        ]
        codecs = [codec_for(s.info, settings.wire, method.requires) for s in self._slots]
        self._sources = [
            Source(first_worker + v, model.local(), self._anchor, codecs)
            for v, model in enumerate(models)
        ]
        share = 1.0 / exchange.workers
        for sentence in method.check([s.info for s in self._slots], (share,) * exchange.workers):
            warnings.warn(sentence, MergeWarning, stacklevel=4)
        owned = exchange.owned(self._slots)
        self._owner = Owner(
            owned,
            exchange.anchors(owned, self._sources[0]),
            settings.order,
            outer,
        )
        self._held = None
        self._under_way = None
        self._round = 0
        self._begin_round()
        keep_freed_memory()

    @property
    def outer_optimizer(self) -> Optimizer:
        """The outer optimizer of what this rank owns; learning-rate schedulers attach to it."""
        return self._owner.optimizer

    @property
    def round(self) -> int:
        """Number of outer steps taken."""
        return self._round

    def sync(self) -> OuterReport:
        """Take an outer step of the whole model now, and begin a new round.

        Every worker must call it. A fragment that is still under way is applied first.

        Raises:
            SyncError: the exchange failed; parameters are the anchor's again, and the step did
                not happen. With ``on_failure`` other than "raise" the report says so instead.
            NonFiniteError: a worker is not finite (see ``nonfinite``), or the step overflows.
            IncompatibleError: a worker's parameters changed, or it is at another step.
        """
        if self._under_way is not None:
            self._apply(self._under_way)
        self._step = 0
        return self._apply(self._send(None), overwrite=True)

    def _count(self, tokens: Sequence[float]) -> OuterReport | None:
        """Count one inner step; send the fragment that is due, apply one whose delay is over."""
        self._step += 1
        self._apart = True
        self._since = [n + 1 for n in self._since]
        self._tokens = [
            [n + new for n in own] for own, new in zip(self._tokens, tokens, strict=True)
        ]
        report = None
        if self._under_way is not None:
            self._under_way.left -= 1
            if not self._under_way.left:
                report = self._apply(self._under_way)
        fragment = due(self._step, self._settings.sync_every, self._settings.parts)
        self._step %= self._settings.sync_every
        if fragment is not None:
            sent = self._send(fragment)
            if self._settings.delay:
                self._under_way = sent
            else:
                report = self._apply(sent)
        return report

    @torch.no_grad()
    def _send(self, fragment: int | None) -> UnderWay:
        """Begin the outer step of a fragment, or of the whole model."""
        if self._settings.parts == 1:
            fragment = None
        slots = self._slots if fragment is None else self._fragments[fragment]
        delayed = self._settings.delay > 0
        sources = [snapshot(s, slots) if delayed else s for s in self._sources]
        own_buffers = [
            {name: b.clone() if delayed else b for name, b in m.buffers.items()}
            for m in self._models
        ]
        changed = [name for m in self._models if (name := m.changed()) is not None]
        names = [s.name for s in self._slots]
        round_ = Round(
            number=self._round,
            step=max(self._since) if fragment is None else self._since[fragment],
            fragment=fragment,
            method=self._method,
            settings=self._settings,
            exchange=self._exchange,
            owner=self._owner,
            slots=slots,
            names=names,
            sources=sources,
            tokens=[max(own) if fragment is None else own[fragment] for own in self._tokens],
            changed=_index(names, changed[0]) if changed else -1,
        )
        staged: dict[int, Tensor] = {}
        # New values go where they belong at once, unless the old ones may still be needed.
        keeps = delayed or self._settings.on_failure == "skip_round"
        keeps = keeps or self._settings.apply == "mix"

        def land(slot: Slot, new: Tensor) -> None:
            if keeps:
                staged[slot.index] = new.clone()
                return
            for source in self._sources:
                source.values[slot.index].copy_(new)

        @torch.no_grad()
        def work() -> Outcome:
            report = round_.run(land)
            for source in self._sources:
                if source.worker not in round_.participants.workers:
                    # What it held back is no better than what it was left out for.
                    for slot in slots:
                        source.residuals.pop(slot.index, None)
            new = buffers.gather(self._exchange, own_buffers, round_.participants)
            return Outcome(report, staged, new)

        before = [dict(source.residuals) for source in self._sources]
        waits = delayed and self._exchange.workers > len(self._models)
        device = self._models[0].local()[0].device
        return UnderWay(
            fragment,
            slots,
            self._settings.delay,
            sources,
            round_.step,
            round_.tokens,
            before,
            background.begin(work, device) if waits else background.done(work),
        )

    def _apply(self, sent: UnderWay, *, overwrite: bool = False) -> OuterReport:
        """Wait for an outer step, give its result to the workers, and tell of it."""
        self._under_way = None
        start = perf_counter()
        try:
            outcome = sent.future.result()
        except BaseException as error:
            policy = self._settings.on_failure if isinstance(error, SyncError) else "raise"
            if policy == "skip_round":
                for source, before in zip(self._sources, sent.residuals, strict=True):
                    source.residuals.clear()
                    source.residuals.update(before)
            else:
                self._restore()
            if policy == "raise":
                raise
            report = self._skipped(sent, str(error))
        else:
            report = outcome.report
            if self._settings.delay:
                seconds = {**report.seconds, "waited": perf_counter() - start}
                report = replace(report, seconds=seconds)
            self._commit(sent, outcome, overwrite=overwrite)
        if self._on_event is not None:
            self._on_event(report)
        return report

    @torch.no_grad()
    def _commit(self, sent: UnderWay, outcome: Outcome, *, overwrite: bool = False) -> None:
        for slot in sent.slots:
            new = outcome.staged.get(slot.index)
            if new is None:  # it has landed, the same in all workers
                self._anchor[slot.index].copy_(self._sources[0].values[slot.index])
                continue
            self._anchor[slot.index].copy_(new)
            for source, then in zip(self._sources, sent.sources, strict=True):
                now, at_sending = source.values[slot.index], then.values[slot.index]
                goes_on = new if overwrite else applied(self._settings, slot, new, now, at_sending)
                now.copy_(goes_on)
        for model in self._models:
            for name, x in outcome.buffers.items():
                model.buffers[name].copy_(x)
        self._held = None
        self._round += 1
        for f in range(len(self._fragments)) if sent.fragment is None else (sent.fragment,):
            # What came after sending counts for the next sync.
            self._since[f] = max(0, self._since[f] - sent.step)
            for own, before in zip(self._tokens, sent.tokens, strict=True):
                own[f] = max(0.0, own[f] - before)
        self._apart = any(self._since) or (self._settings.apply == "mix" and not overwrite)

    @torch.no_grad()
    def _restore(self) -> None:
        """Give all workers the anchor; what they did since it is lost."""
        for source in self._sources:
            source.residuals.clear()
            for value, anchor in zip(source.values, self._anchor, strict=True):
                value.copy_(anchor)
        self._begin_round(self._step)

    def _skipped(self, sent: UnderWay, reason: str) -> OuterReport:
        return OuterReport(
            round=self._round,
            step=sent.step,
            participants=0,
            tokens=sum(sent.tokens),
            fragment=sent.fragment,
            skipped=reason,
        )

    @contextmanager
    def eval_parameters(self) -> Iterator[None]:
        """Within the block the models hold the anchor, the parameters all workers share.

        Afterwards they have their own again, bit for bit.
        """
        own = [[x.clone() for x in source.values] for source in self._sources]
        with torch.no_grad():
            for source in self._sources:
                for value, anchor in zip(source.values, self._anchor, strict=True):
                    value.copy_(anchor)
        try:
            yield
        finally:
            with torch.no_grad():
                for source, kept in zip(self._sources, own, strict=True):
                    for value, x in zip(source.values, kept, strict=True):
                        value.copy_(x)


def _index(names: Sequence[str], name: str) -> int:
    return names.index(name) if name in names else len(names)


def outer_factory(
    method: MergeMethod,
    workers: int,
    outer: OuterFactory | None,
    lr: float | None,
    momentum: float | None,
    nesterov: bool | None,
) -> OuterFactory:
    """Return the factory given, or that of SGD, by the method's own settings where none are given.

    Raises MethodError where a factory and settings of SGD are given together.
    """
    if outer is not None:
        if (lr, momentum, nesterov) != (None, None, None):
            raise MethodError(
                "outer_lr, outer_momentum and nesterov are settings of the default optimizer, "
                "and outer gives another one",
                hint="set them in outer: outer=lambda params: torch.optim.SGD(params, …)",
            )
        return outer
    own = method.outer(workers)
    return sgd(
        own.lr if lr is None else lr, own.momentum if momentum is None else momentum, nesterov
    )
