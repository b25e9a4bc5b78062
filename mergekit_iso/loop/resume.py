"""Going on from a state: after an interruption, with other workers, or in a new group."""

from __future__ import annotations

import json
import re
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import IncompatibleError, MergeWarning
from . import background, state
from .contribution import Source
from .exchange import Exchange
from .owner import Owner
from .parameters import Parameters, Slot
from .report import OuterReport
from .settings import LoopSettings
from .under_way import Outcome, UnderWay, snapshot


@dataclass(frozen=True)
class _Template:
    """What of the workers' own belongs into a state: residuals always, unless a load says else.

    ``under_way`` are the names of tensors that were sent and not yet applied.
    """

    worker: bool = False
    residual: bool = True
    under_way: frozenset[str] = frozenset()


class Resumable:
    """What an outer loop saves, loads and shares; its attributes are the loop's."""

    _models: Sequence[Parameters]
    _exchange: Exchange
    _slots: Sequence[Slot]
    _anchor: Sequence[Tensor]
    _sources: Sequence[Source]
    _owner: Owner
    _round: int
    _settings: LoopSettings
    _fragments: Sequence[Sequence[Slot]]
    _step: int
    _since: list[int]
    _tokens: list[list[float]]
    _apart: bool
    _held: state.Held | None
    _under_way: UnderWay | None
    _template = _Template()

    def _begin_round(self, step: int = 0) -> None:
        """Count each fragment's iterations and tokens from nothing, all workers being equal."""
        self._step = step
        self._since = [0] * len(self._fragments)
        self._tokens = [[0.0] * len(self._fragments) for _ in self._models]
        self._apart = False

    @abstractmethod
    def _commit(self, sent: UnderWay, outcome: Outcome, *, overwrite: bool = False) -> None:
        """Give the result of an outer step to the workers."""

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return all it takes to go on; every rank must call it, unless the group has failed.

        What is still under way is waited for, and is part of the state.
        ``anchor.<name>``, ``master.<name>``, ``outer.<name>.<key>`` and ``buffer.<name>`` are
        whole tensors, the same on every rank; within a round ``worker.<r>.<name>`` are those of
        this process's workers. After a failed exchange a rank gives what it decides itself.
        Raises SyncError where the exchange fails.
        """
        if self._under_way is not None:
            self._under_way.outcome()  # whose thread uses the group
        exchange, alone = self._exchange, self._exchange.failed
        found: dict[str, Any] = {
            f"anchor.{s.name}": exchange.joined(s, self._anchor[s.index]).clone()
            for s in self._slots
        }
        found |= {f"buffer.{k}": b.detach().clone() for k, b in self._models[0].buffers.items()}
        found |= state.outer_state(exchange, self._owner, self._slots, alone=alone)
        found["param_groups"] = state.save_groups(self._owner)
        found["round"], found["step"] = torch.tensor(self._round), torch.tensor(self._step)
        found["since"], found["apart"] = torch.tensor(self._since), torch.tensor(self._apart)
        found["workers"] = torch.tensor(exchange.workers)
        found |= self._state_under_way()
        for source, model, tokens in zip(self._sources, self._models, self._tokens, strict=True):
            if self._apart or self._template.worker:
                found |= state.own_state(exchange, source, self._slots, model.buffers)
                key = f"worker.{source.worker}.tokens"  # of each fragment
                found[key] = torch.tensor(tokens, dtype=torch.float64)
            if not alone and self._template.residual:
                found |= state.residuals(exchange, source, self._slots)
        return found

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a state: anchor, parameters in place, outer state of what this rank owns.

        Raises IncompatibleError for the state of another model, and for one within a round that
        lacks this process's workers or has another number of workers. Nothing is changed then.
        """
        given, since = state_dict, [int(n) for n in state_dict["since"]]
        within, same_workers = bool(given["apart"]), int(given["workers"]) == self._exchange.workers
        self._check_state(given, since, same_workers)
        round_ = int(given["round"])
        self._held = state.read_outer(given, self._owner.factory, self._slots, round_)
        if self._under_way is not None:
            self._under_way.outcome()  # its thread is over before anything changes
            self._under_way = None
        self._begin_round()
        self._round = round_
        if within:
            self._step, self._since, self._apart = int(given["step"]), since, True
        for slot in self._slots:
            self._take_anchor(slot, given[f"anchor.{slot.name}"])
        for slot in self._exchange.owned(self._slots):
            master = self._held.masters.get(slot.index, self._owner.anchor[slot.index])
            self._owner.load(slot, master, self._held.states.get(slot.index, {}))
        state.load_groups(self._owner, given["param_groups"])
        for v, (source, model) in enumerate(zip(self._sources, self._models, strict=True)):
            own = f"worker.{source.worker}."
            prefix = own if within else ""
            for name, b in model.buffers.items():
                b.copy_(given[f"{prefix}buffer.{name}"])
            if within:
                self._tokens[v] = given[f"{own}tokens"].tolist()
            source.residuals.clear()
            for slot in self._slots:
                if within:
                    value = self._exchange.part(slot, given[own + slot.name])
                    source.values[slot.index].copy_(value)
                left = given.get(f"{own}residual.{slot.name}") if same_workers else None
                if left is not None:
                    left = self._exchange.part(slot, left, provided=True)
                    residual = torch.empty_like(left, device=source.values[slot.index].device)
                    source.residuals[slot.index] = residual.copy_(left)
        self._load_under_way(given)

    def _state_under_way(self) -> dict[str, Any]:
        """Return the new values that wait to be applied, and what their applying needs."""
        sent = self._under_way
        outcome = None if sent is None else sent.outcome()
        names = self._template.under_way
        where = [-1, 0]
        if sent is not None and outcome is not None:
            where = [-1 if sent.fragment is None else sent.fragment, sent.left]
            names = frozenset(s.name for s in sent.slots)
        found: dict[str, Any] = {"under_way": torch.tensor(where)}
        if not names:
            return found
        for slot in (s for s in self._slots if s.name in names):
            new = outcome.staged[slot.index] if outcome else self._anchor[slot.index]
            found[f"under_way.new.{slot.name}"] = self._exchange.joined(slot, new).clone()
            for source in sent.sources if sent else self._sources:
                then = self._exchange.joined(slot, source.values[slot.index]).clone()
                found[f"worker.{source.worker}.sent.{slot.name}"] = then
        new_buffers = outcome.buffers if outcome else self._models[0].buffers
        found |= {f"under_way.buffer.{k}": b.detach().clone() for k, b in new_buffers.items()}
        step, tokens = (sent.step, sent.tokens) if sent else (0, [0.0] * len(self._sources))
        record = outcome.report.record() if outcome else {}
        for source, n in zip(self._sources, tokens, strict=True):
            said = {"step": step, "tokens": n, "report": record}
            found[f"worker.{source.worker}.under_way"] = json.dumps(said)
        return found

    def _load_under_way(self, given: Mapping[str, Any]) -> None:
        where, left = given["under_way"].tolist()
        if not left:
            return
        fragment = None if where < 0 else where
        slots = self._slots if fragment is None else self._fragments[fragment]
        said = [json.loads(given[f"worker.{s.worker}.under_way"]) for s in self._sources]
        sources = [snapshot(source, slots) for source in self._sources]
        staged: dict[int, Tensor] = {}
        for slot in slots:
            part = self._exchange.part(slot, given[f"under_way.new.{slot.name}"])
            anchor = self._anchor[slot.index]
            staged[slot.index] = torch.empty_like(anchor).copy_(part)
            for source in sources:
                then = given[f"worker.{source.worker}.sent.{slot.name}"]
                source.values[slot.index].copy_(self._exchange.part(slot, then))
        new_buffers = {
            name: torch.empty_like(b).copy_(given[f"under_way.buffer.{name}"])
            for name, b in self._models[0].buffers.items()
        }
        report = OuterReport.of_record(said[0]["report"])
        self._under_way = UnderWay(
            fragment,
            slots,
            left,
            sources,
            said[0]["step"],
            [float(own["tokens"]) for own in said],
            [dict(s.residuals) for s in sources],
            background.done(lambda: Outcome(report, staged, new_buffers)),
        )

    def _check_state(
        self, given: Mapping[str, Any], since: Sequence[int], same_workers: bool
    ) -> None:
        for slot in self._slots:
            if f"anchor.{slot.name}" not in given:
                raise IncompatibleError(
                    f"the state has no {slot.name}", hint="load the state of the same model"
                )
            key = f"anchor.{slot.name}"
            state.check(key, given[key], tuple(slot.info.shape))
        if not bool(given["apart"]):
            return
        if len(since) != len(self._fragments):
            raise IncompatibleError(
                f"the state was taken within a round of {len(since)} fragments, and there are "
                f"{len(self._fragments)}",
                hint="resume with as many fragments, or from a state taken after sync()",
            )
        if not same_workers:
            raise IncompatibleError(
                f"the state was taken within a round of {int(given['workers'])} workers, "
                f"and there are {self._exchange.workers}",
                hint="resume with as many workers, or from a state taken at a sync; "
                "with fragments, after sync()",
            )
        for source in self._sources:
            if f"worker.{source.worker}.{self._slots[0].name}" not in given:
                raise IncompatibleError(
                    f"the state was taken within a round, at step {max(since)}, and has no "
                    f"parameters of worker {source.worker}",
                    hint="give each worker the state that it saved; from a folder of "
                    "torch.distributed.checkpoint, call load_checkpoint(folder)",
                )

    def load_checkpoint(self, folder: str | Path, key: str = "merger") -> None:
        """Load what torch.distributed.checkpoint saved as ``{key: merger}``, at a sync or within.

        ``torch.distributed.checkpoint.load`` does the same for a state taken at a sync by as many
        workers; only the folder tells what else there is.
        """
        # Slow to import, and seldom needed.
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        if f"{key}.round" not in saved:
            raise IncompatibleError(
                f"{folder} has no state of a merger under {key}",
                hint="give the key under which it was saved: save({'merger': merger}, …)",
            )
        own = {source.worker for source in self._sources}
        marks = [m for k in saved if (m := re.match(rf"{re.escape(key)}\.worker\.(\d+)\.(.*)", k))]
        new = f"{key}.under_way.new."
        mine = [m[2] for m in marks if int(m[1]) in own]
        self._template = _Template(
            worker="tokens" in mine,
            residual=any(k.startswith("residual.") for k in mine),
            under_way=frozenset(k.removeprefix(new) for k in saved if k.startswith(new)),
        )
        try:
            wanted = self.state_dict()
        finally:
            self._template = _Template()
        load({key: wanted}, checkpoint_id=folder)
        self.load_state_dict(wanted)

    @torch.no_grad()
    def join(self, src: int) -> None:
        """Begin a round from worker ``src``'s anchor; every rank must call it.

        Outer state of a tensor is that of the lowest rank which has it and is at src's round:
        of a merger before, or loaded from its state. Where nobody has it, it starts afresh, with
        a MergeWarning.
        Raises IncompatibleError for a worker that does not exist, SyncError as :meth:`sync`.
        """
        exchange = self._exchange
        if not 0 <= src < exchange.workers:
            raise IncompatibleError(f"there is no worker {src} among {exchange.workers}")
        sent, self._under_way = self._under_way, None
        outcome = None if sent is None else sent.outcome()
        if sent is not None and outcome is not None:
            self._commit(sent, outcome)
        held = self._held or state.held_by(self._owner, self._slots, self._round)
        said = (self._round, sorted(held.masters), state.save_groups(self._owner))
        everyone = exchange.gather_all(said)
        source = src * (len(everyone) // exchange.workers)
        self._round, _, groups = everyone[source]
        afresh = 0
        for slot in self._slots:
            anchor = exchange.joined(slot, self._anchor[slot.index]).clone()
            self._take_anchor(slot, exchange.spread(anchor, source))
            holder = next(
                (
                    p
                    for p, (r, has, _) in enumerate(everyone)
                    if r == self._round and slot.index in has
                ),
                None,
            )
            if holder is not None:
                self._take_outer(slot, held, holder)
            elif slot.index in self._owner.masters:
                self._owner.load(slot, self._owner.anchor[slot.index], {})
            afresh += holder is None
        for model in self._models:
            for b in model.buffers.values():
                b.copy_(exchange.spread(b.clone(), source))
        state.load_groups(self._owner, groups)
        self._held = None
        for worker in self._sources:
            worker.residuals.clear()
        self._begin_round()
        if afresh and self._round:
            warnings.warn(
                f"the outer state of {afresh} of {len(self._slots)} tensors was lost and starts "
                "afresh from the anchor",
                MergeWarning,
                stacklevel=2,
            )

    def _take_anchor(self, slot: Slot, whole: Tensor) -> None:
        """Take a slot's anchor, and give it to this process's workers."""
        if slot.index in self._owner.anchor:
            self._owner.anchor[slot.index].copy_(whole)
        part = self._exchange.part(slot, whole)
        self._anchor[slot.index].copy_(part)
        for source in self._sources:
            source.values[slot.index].copy_(part)

    def _take_outer(self, slot: Slot, held: state.Held, holder: int) -> None:
        """Give the owner of a slot the master and outer state that process ``holder`` has."""
        master, own = held.masters.get(slot.index), held.states.get(slot.index, {})
        if master is None:
            master = torch.zeros(slot.info.shape, dtype=slot.compute)
        flag = self._exchange.spread(torch.tensor([float(bool(own))]), holder)
        master = self._exchange.spread(master.clone(), holder)
        entries: dict[str, Any] = {}
        if bool(flag):
            for key, like in state.template(self._owner.factory, slot).items():
                value = torch.as_tensor(own.get(key, like)).clone()
                entries[key] = state.restored(like, self._exchange.spread(value, holder))
        if slot.index in self._owner.masters:
            self._owner.load(slot, master, entries)
