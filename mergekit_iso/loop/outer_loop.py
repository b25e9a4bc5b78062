"""What every outer loop does: count inner steps, sync what is due, keep the anchor."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import MergeWarning, MethodError, SyncError
from ..methods.base import MergeMethod
from . import buffers
from .contribution import Source
from .exchange import Exchange
from .owner import OuterFactory, Owner, sgd
from .parameters import Parameters, Slot
from .report import OnReport, OuterReport
from .resume import Resumable
from .round import Round
from .settings import LoopSettings
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
        self._round = 0
        self._step = 0
        self._tokens = [0.0] * len(models)

    @property
    def outer_optimizer(self) -> Optimizer:
        """The outer optimizer of what this rank owns; learning-rate schedulers attach to it."""
        return self._owner.optimizer

    @property
    def round(self) -> int:
        """Number of outer steps taken."""
        return self._round

    def sync(self) -> OuterReport:
        """Take an outer step now, and begin a new round. Every worker must call it.

        Raises:
            SyncError: the exchange failed; parameters are the anchor's again, and the step did
                not happen. With ``on_failure`` other than "raise" the report says so instead.
            NonFiniteError: a worker is not finite (see ``nonfinite``), or the step overflows.
            IncompatibleError: a worker's parameters changed, or it is at another step.
        """
        staged: dict[int, Tensor] = {}
        keeps = self._settings.on_failure == "skip_round"
        with torch.no_grad():
            try:
                report, new_buffers = self._run(staged if keeps else None)
            except BaseException as error:
                if keeps and isinstance(error, SyncError):
                    return self._skipped(error)
                self._restore()
                if self._settings.on_failure == "restore_anchor" and isinstance(error, SyncError):
                    return self._skipped(error)
                self._begin_round()
                raise
            self._commit(staged, new_buffers)
        self._round += 1
        self._begin_round()
        return self._tell(report)

    def _run(self, staged: dict[int, Tensor] | None) -> tuple[OuterReport, dict[str, Tensor]]:
        changed = [name for m in self._models if (name := m.changed()) is not None]
        names = [s.name for s in self._slots]
        round_ = Round(
            number=self._round,
            step=self._step,
            fragment=0,
            method=self._method,
            settings=self._settings,
            exchange=self._exchange,
            owner=self._owner,
            slots=self._slots,
            names=names,
            sources=self._sources,
            tokens=self._tokens,
            changed=_index(names, changed[0]) if changed else -1,
        )

        def land(slot: Slot, new: Tensor) -> None:
            if staged is not None:
                staged[slot.index] = new.clone()
                return
            for source in self._sources:
                source.values[slot.index].copy_(new)

        report = round_.run(land)
        new_buffers = buffers.gather(
            self._exchange, [m.buffers for m in self._models], round_.participants
        )
        return report, new_buffers

    def _commit(self, staged: dict[int, Tensor], new_buffers: dict[str, Tensor]) -> None:
        for index, new in staged.items():
            for source in self._sources:
                source.values[index].copy_(new)
        self._held = None
        for index, value in enumerate(self._sources[0].values):
            self._anchor[index].copy_(value)
        for model in self._models:
            for name, new in new_buffers.items():
                model.buffers[name].copy_(new)

    def _restore(self) -> None:
        for source in self._sources:
            source.residuals.clear()
            for value, anchor in zip(source.values, self._anchor, strict=True):
                value.copy_(anchor)

    def _skipped(self, error: SyncError) -> OuterReport:
        report = OuterReport(
            round=self._round,
            step=self._step,
            participants=0,
            tokens=sum(self._tokens),
            skipped=str(error),
        )
        self._begin_round()
        return self._tell(report)

    def _tell(self, report: OuterReport) -> OuterReport:
        if self._on_event is not None:
            self._on_event(report)
        return report

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

    def _count(self, tokens: Sequence[float]) -> bool:
        """Count one inner step; return whether a sync is due."""
        self._step += 1
        self._tokens = [a + b for a, b in zip(self._tokens, tokens, strict=True)]
        return self._step >= self._settings.sync_every


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
