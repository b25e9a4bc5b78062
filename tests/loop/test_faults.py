"""Workers that die, stall, or go astray: the others hear of it, keep the anchor, and go on."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mergekit_iso import LoopedMerger, simulate
from mergekit_iso.errors import MergekitIsoError, NonFiniteError, SyncError
from mergekit_iso.methods.task_arithmetic import Average

from .models import same, uneven, values, wander
from .ranks import try_ranks

H = 2
TIMEOUT = 6.0
_stopped: set[int] = set()


@dataclass(frozen=True, kw_only=True)
class Fragile(Average):
    """An average whose operator is the end of one rank in one round."""

    rank: int = 2
    round: int = 3
    how: str = "die"

    def finalize(self, name: str, combined: Tensor, ctx: Any) -> Tensor:
        if ctx.round == self.round and dist.get_rank() == self.rank:
            if self.how == "die":
                os._exit(7)
            if self.how == "stall" and os.getpid() not in _stopped:
                _stopped.add(os.getpid())
                os.kill(os.getpid(), signal.SIGSTOP)
            if self.how == "fail":
                raise RuntimeError("the operator gave up")
        return super().finalize(name, combined, ctx)


class DiesInStep(torch.optim.SGD):
    """An outer optimizer whose fourth step is the end of rank 2: deltas were exchanged by then."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        type(self).steps += 1
        if self.steps == 4 and dist.get_rank() == 2:
            os._exit(7)
        return super().step(closure)


def killed(rank: int, world: int, where: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train until rank 2 dies in the fourth round; go on in a new group of the other two."""
    model = uneven(seed=rank)
    method: Any = Fragile() if where == "operator" else "average"
    settings = {"sync_every": H, **settings}
    if where == "optimizer":
        settings["outer"] = lambda p: DiesInStep(p, lr=0.7, momentum=0.9, nesterov=True)
    merger = LoopedMerger(model, method, **settings)
    for step in range(2 * H):
        wander(model, rank, step)
        merger.step()
    merger.sync()  # the fourth round begins after it, whatever is under way
    agreed, round_ = values(model), merger.round
    began = time.monotonic()
    try:
        for step in range(2 * H, 4 * H):
            if rank == 2 and where == "loop":
                os._exit(7)
            wander(model, rank, step)
            report = merger.step()
            if report is not None and report.skipped:
                raise SyncError(report.skipped)
    except SyncError as error:
        said, waited = str(error), time.monotonic() - began
    restored = same(values(model), agreed)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    fresh = LoopedMerger(model, method, group=group, **settings)
    fresh.load_state_dict(merger.state_dict())
    with pytest.warns(match="was lost and starts afresh"):
        fresh.join(0)
    rejoined = same(values(model), agreed)
    for step in range(2 * H):
        wander(model, rank, step)
        fresh.step()
    fresh.sync()
    return {
        "said": said,
        "waited": waited,
        "restored": restored,
        "rejoined": rejoined,
        "rounds": fresh.round - round_,
        "values": {k: x.numpy() for k, x in values(model).items()},
    }


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "before the sync": ("loop", {}),
    "in the operator": ("operator", {}),
    "before the return": ("optimizer", {}),
    "under way": ("loop", {"delay": 1, "apply": "rebase"}),
    "anchor kept": ("loop", {"on_failure": "restore_anchor"}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_others_go_on_without_a_worker_that_died(case: str) -> None:
    where, settings = CASES[case]
    if where == "operator":  # which is a method of the tests', without outer settings of its own
        settings = {**settings, "outer_momentum": 0.9}
    *survivors, dead = try_ranks(3, killed, where, settings, group_timeout=TIMEOUT)
    assert dead.exitcode == 7
    for outcome in survivors:
        assert outcome.error is None, outcome.error[2]
        found = outcome.value
        assert "failed" in found["said"]
        assert found["restored"], "the anchor is not restored"
        assert found["rejoined"], "the anchor is not kept"
        assert found["waited"] < 4 * TIMEOUT
        assert found["rounds"] == 3 if settings.get("delay") else 2
    a, b = (outcome.value["values"] for outcome in survivors)
    assert a.keys() == b.keys()
    assert all((x == b[k]).all() for k, x in a.items())


def stalled(rank: int, world: int, policy: str) -> tuple[str, bool, float]:
    """Stop rank 1 until rank 0 has given up on it; both then meet in a new group."""
    model = uneven(seed=rank)
    method = Fragile(rank=1, round=1, how="stall")
    merger = LoopedMerger(model, method, sync_every=H, on_failure=policy)
    store = dist.distributed_c10d._get_default_store()
    if rank == 1:
        store.set("pid", str(os.getpid()))
    for step in range(H):
        wander(model, rank, step)
        merger.step()
    agreed = values(model)
    for step in range(H, 2 * H):
        wander(model, rank, step)
        own = values(model)
        try:
            report = merger.step()
            said = "" if report is None else str(report.skipped)
        except SyncError as error:
            said = str(error)
    kept = own if policy == "skip_round" else agreed
    restored = same(values(model), kept)
    if rank == 0:
        os.kill(int(store.get("pid")), signal.SIGCONT)
    group = dist.new_group([0, 1], use_local_synchronization=True)
    fresh = LoopedMerger(model, method, group=group, sync_every=H)
    fresh.load_state_dict(merger.state_dict())
    fresh.join(0)
    for step in range(2 * H):
        wander(model, rank, step)
        fresh.step()
    return said, restored, float(sum(x.double().sum() for x in values(model).values()))


@pytest.mark.parametrize("policy", ["raise", "skip_round", "restore_anchor"])
def test_a_worker_that_stalls_beyond_the_timeout(policy: str) -> None:
    outcomes = try_ranks(2, stalled, policy, group_timeout=TIMEOUT)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error[2]
    (said, restored, total), (_, other_restored, other_total) = (o.value for o in outcomes)
    assert "failed" in said
    assert restored
    assert other_restored
    assert total == other_total


def failing(rank: int, world: int, how: str) -> list[str]:
    """Return what each rank hears where one rank's round fails, and goes on in the same group."""
    model = uneven(seed=rank)
    settings: dict[str, Any] = {"sync_every": H, "outer_lr": 1.0, "outer_momentum": 0.0}
    method: Any = "average"
    if how == "operator":
        method = Fragile(rank=1, round=1, how="fail")
    if how == "overflow":
        settings = {"sync_every": H, "outer": lambda p: torch.optim.SGD(p, lr=1.0)}
    merger = LoopedMerger(model, method, **settings)
    said: list[str] = []
    for step in range(3 * H):
        if step == H:
            agreed = values(model)
        wander(model, rank, step, size=10.0 if how == "overflow" else 0.01)
        if how == "overflow":
            merger.outer_optimizer.param_groups[0]["lr"] = 3e38 if H <= step < 2 * H else 1.0
        if how == "nan" and step == 2 * H - 1 and rank == 1:
            with torch.no_grad():
                model[1].weight[0, 0] = math.nan
        try:
            merger.step()
        except MergekitIsoError as error:
            said.append(f"{type(error).__name__}: {error}")
            assert same(values(model), agreed)
            if how == "operator":
                break
    return [*said, str(float(sum(x.double().sum() for x in values(model).values())))]


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        ("operator", r"SyncError: .* failed: the operator gave up"),
        ("overflow", "NonFiniteError: the outer step makes .* overflow"),
        ("nan", r"NonFiniteError: worker 1 has a NaN or infinity in 1\.weight"),
    ],
)
def test_one_ranks_error_is_raised_on_all(how: str, sentence: str) -> None:
    first, *others = try_ranks(3, failing, how)
    assert first.error is None, first.error[2]
    assert len(first.value) == 2
    assert all(other == first for other in others)
    assert re.match(sentence, first.value[0])


def left_out(rank: int, world: int, weights: str, min_workers: int) -> Any:
    """Two rounds of three workers, one of which has a NaN in the second."""
    model, models = uneven(seed=rank), [uneven(seed=0) for _ in range(3)]
    settings: dict[str, Any] = {
        "sync_every": H,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "nonfinite": "leave_out",
        "weights": weights,
        "min_workers": min_workers,
    }
    merger = LoopedMerger(model, "average", **settings)
    simulation = simulate(models, "average", **settings)
    for step in range(2 * H):
        for r, m in enumerate(models):
            wander(m, r, step)
        wander(model, rank, step)
        if step == 2 * H - 1:
            before = [values(m) for m in models]
            with torch.no_grad():
                models[1].temperature.fill_(math.inf)
                if rank == 1:
                    model.temperature.fill_(math.inf)
        try:
            report = merger.step(tokens=rank + 1)
        except SyncError as error:
            return str(error)
        simulation.step(tokens=[1, 2, 3])
    assert report is not None
    shares = (1 / 4, 0, 3 / 4) if weights == "tokens" else (1 / 2, 0, 1 / 2)
    for name, x in model.named_parameters():
        mean = sum(s * b[name].double() for s, b in zip(shares, before, strict=True) if s)
        torch.testing.assert_close(x.detach().double(), mean, rtol=1e-5, atol=1e-6)
    assert all(same(values(model), values(m)) for m in models)
    return report.participants, report.tokens, report.skipped, len(report.delta_norm)


@pytest.mark.parametrize("weights", ["uniform", "tokens"])
def test_a_worker_with_infinities_can_be_left_out(weights: str) -> None:
    outcomes = try_ranks(3, left_out, weights, 2)
    for outcome in outcomes:
        assert outcome.error is None, outcome.error[2]
        participants, tokens, skipped, norms = outcome.value
        assert (participants, tokens, norms) == (2, H * 4, 2)
        assert skipped == "worker 1 has a NaN or infinity in temperature"


def test_what_was_held_back_goes_with_a_worker_that_is_left_out() -> None:
    models: list[nn.Module] = [uneven(), uneven()]
    loop = simulate(models, "average", sync_every=1, nonfinite="leave_out", wire="int8")
    for step in range(3):
        for r, model in enumerate(models):
            wander(model, r, step)
        if step == 1:
            with torch.no_grad():
                models[1].get_parameter("1.weight").fill_(math.nan)
        report = loop.step()
        assert report is not None
        assert report.participants == (1 if step == 1 else 2)
    assert all(bool(x.isfinite().all()) for x in values(models[0]).values())


def test_but_not_below_the_fewest_workers() -> None:
    for outcome in try_ranks(3, left_out, "uniform", 3):
        assert outcome.error is None, outcome.error[2]
        assert outcome.value == (
            "2 of 3 workers can take part, fewer than min_workers=3: "
            "worker 1 has a NaN or infinity in temperature"
        )


def corrupted(rank: int, world: int) -> str:
    """Flip one bit of one replica's anchor; the next check finds it."""
    model = uneven(seed=0)
    merger = LoopedMerger(model, "average", sync_every=1, verify_every=1, wire="bfloat16")
    wander(model, rank, 0)
    merger.step()
    if rank == 1:
        merger._anchor[1].view(-1)[3] += 1e-3
    wander(model, rank, 1)
    with pytest.raises(SyncError) as caught:
        merger.step()
    merger.join(0)
    merger.step()
    return str(caught.value)


def test_replicas_that_differ_are_found() -> None:
    for outcome in try_ranks(2, corrupted):
        assert outcome.error is None, outcome.error[2]
        assert outcome.value.startswith("the replicas differ: worker 1")


def test_an_interrupted_sync_leaves_the_anchor() -> None:
    class Interrupts(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            raise KeyboardInterrupt

    models: list[nn.Module] = [uneven(), uneven()]
    loop = simulate(models, "average", sync_every=1, outer=lambda p: Interrupts(p, lr=1.0))
    start = values(models[0])
    wander(models[0], 0, 0)
    with pytest.raises(KeyboardInterrupt):
        loop.step()
    assert all(same(values(m), start) for m in models)


def test_nothing_moves_where_every_worker_is_left_out() -> None:
    models: list[nn.Module] = [uneven(), uneven()]
    loop = simulate(models, "average", sync_every=1, nonfinite="leave_out")
    with torch.no_grad():
        for m in models:
            m.get_parameter("3.bias").fill_(math.nan)
    with pytest.raises((SyncError, NonFiniteError), match="0 of 2 workers can take part"):
        loop.step()
