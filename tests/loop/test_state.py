"""The state of a loop: runs that were interrupted go on to the same bits."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from mergekit_iso import LoopedMerger, simulate
from mergekit_iso.errors import IncompatibleError, MergeWarning
from mergekit_iso.loop.simulate import Simulation

from .models import same, uneven, values, wander
from .ranks import run_ranks

H = 3
SETTINGS: dict[str, dict[str, Any]] = {
    "diloco": {"method": "average"},
    "iso": {"method": "iso_c"},
    "ties": {"method": "ties", "wire": "int8", "outer_momentum": 0.9},
    "int8": {"method": "average", "wire": "int8"},
    "adam": {"method": "average", "outer": lambda p: torch.optim.Adam(p, lr=0.01)},
    "first": {"method": "average", "order": "momentum_then_merge"},
}


def loop_of(models: list[nn.Module], name: str) -> Simulation:
    settings = dict(SETTINGS[name])
    return simulate(models, settings.pop("method"), sync_every=H, **settings)


def advance(loop: Simulation, models: list[nn.Module], start: int, stop: int) -> None:
    for step in range(start, stop):
        for r, model in enumerate(models):
            wander(model, r, step)
        loop.step(tokens=list(range(1, len(models) + 1)))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("at", [0, 2, 2 * H, 2 * H + 1])
def test_a_resumed_run_ends_with_the_same_bits(name: str, at: int, tmp_path: Path) -> None:
    models: list[nn.Module] = [uneven(seed=0) for _ in range(3)]
    loop = loop_of(models, name)
    advance(loop, models, 0, at)
    torch.save(loop.state_dict(), tmp_path / "state.pt")
    advance(loop, models, at, 4 * H + 1)
    others: list[nn.Module] = [uneven(seed=7) for _ in range(3)]
    resumed = loop_of(others, name)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    advance(resumed, others, at, 4 * H + 1)
    assert all(same(values(a), values(b)) for a, b in zip(models, others, strict=True))
    assert resumed.round == loop.round == 4


def test_a_schedule_goes_on() -> None:
    def start() -> tuple[list[nn.Module], Simulation, torch.optim.lr_scheduler.LRScheduler]:
        models: list[nn.Module] = [uneven(seed=0) for _ in range(2)]
        loop = loop_of(models, "diloco")
        return models, loop, torch.optim.lr_scheduler.ExponentialLR(loop.outer_optimizer, 0.5)

    models, loop, schedule = start()
    advance(loop, models, 0, H)
    schedule.step()
    _, other, resumed = start()
    other.load_state_dict(loop.state_dict())
    resumed.load_state_dict(schedule.state_dict())
    resumed.step()
    assert other.outer_optimizer.param_groups[0]["lr"] == pytest.approx(0.7 / 4)


def test_another_number_of_workers_at_a_sync_but_not_within_a_round() -> None:
    models: list[nn.Module] = [uneven(seed=0) for _ in range(2)]
    loop = loop_of(models, "diloco")
    advance(loop, models, 0, 2 * H)
    more: list[nn.Module] = [uneven(seed=3) for _ in range(5)]
    larger = loop_of(more, "diloco")
    larger.load_state_dict(loop.state_dict())
    assert same(values(more[4]), values(models[0]))
    name = "1.weight"
    assert torch.equal(
        larger.state_dict()[f"outer.{name}.momentum_buffer"],
        loop.state_dict()[f"outer.{name}.momentum_buffer"],
    )
    advance(loop, models, 0, 1)
    with pytest.raises(IncompatibleError, match="within a round of 2 workers"):
        larger.load_state_dict(loop.state_dict())


def test_the_state_of_another_model_changes_nothing() -> None:
    models: list[nn.Module] = [uneven(seed=0)]
    loop = loop_of(models, "diloco")
    before = values(models[0])
    other: list[nn.Module] = [nn.Linear(3, 3)]
    with pytest.raises(IncompatibleError, match="the state has no"):
        loop.load_state_dict(loop_of(other, "diloco").state_dict())
    state = loop.state_dict()
    state["anchor.1.weight"] = torch.zeros(2, 2)
    with pytest.raises(IncompatibleError, match=r"anchor\.1\.weight has shape \[2, 2\]"):
        loop.load_state_dict(state)
    assert same(before, values(models[0]))


def merger_of(model: nn.Module, name: str, **more: Any) -> LoopedMerger:
    settings = {**SETTINGS[name], **more}
    return LoopedMerger(model, settings.pop("method"), sync_every=H, **settings)


def equal(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(x, b[k]) if isinstance(x, Tensor) else x == b[k] for k, x in a.items()
    )


def resume(rank: int, world: int, folder: str) -> list[str]:
    """Return what is not as it was for a run that torch.distributed.checkpoint saved."""
    wrong = []
    for name in ("diloco", "iso", "ties", "int8", "first"):
        for at in (0, 2 * H, 2 * H + 2):
            where = f"{folder}/{name}-{at}"
            model = uneven(seed=0)
            merger = merger_of(model, name)
            for step in range(at):
                wander(model, rank, step)
                merger.step()
            dcp.save({"merger": merger}, checkpoint_id=where)
            keys = sorted(k for k in merger.state_dict() if not k.startswith("worker."))
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, keys)
            if any(other != keys for other in everyone):
                wrong.append(f"{name} {at}: keys differ between ranks")
            again = uneven(seed=5)
            resumed = merger_of(again, name)
            if at % H:
                with pytest.raises(IncompatibleError, match="no parameters of worker"):
                    dcp.load({"merger": resumed}, checkpoint_id=where)
                resumed.load_checkpoint(where)
            else:
                dcp.load({"merger": resumed}, checkpoint_id=where)
            for step in range(at, 4 * H):
                for m in (model, again):
                    wander(m, rank, step)
                merger.step()
                resumed.step()
            if not (same(values(model), values(again)) and resumed.round == merger.round):
                wrong.append(f"{name} {at}")
            if not equal(merger.state_dict(), resumed.state_dict()):
                wrong.append(f"{name} {at}: state")
    return wrong


def test_resume_through_distributed_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(2, resume, str(tmp_path)) == [[]] * 2


def reshard(rank: int, world: int, folder: str) -> list[str]:
    """Return what is not as it was after loading the states that two workers saved."""
    wrong = []
    for name in ("diloco", "int8"):
        model = uneven(seed=8)
        merger = merger_of(model, name)
        merger.load_checkpoint(f"{folder}/{name}-{2 * H}")
        simulated: list[nn.Module] = [uneven(seed=0) for _ in range(2)]
        loop = loop_of(simulated, name)
        advance(loop, simulated, 0, 2 * H)
        expected, found = loop.state_dict(), merger.state_dict()
        for key, x in found.items():
            shared = key.startswith(("anchor", "master", "outer", "buffer"))
            if shared and not torch.equal(x, expected[key]):
                wrong.append(f"{name} {key}")
    return wrong


def test_another_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(2, resume, str(tmp_path))
    assert run_ranks(3, reshard, str(tmp_path)) == [[]] * 3


def newcomer(rank: int, world: int) -> list[str]:
    """Two workers go on in a group of three, whose last rank knows nothing."""
    wrong = []
    pair = dist.new_group([0, 1])
    for name in ("diloco", "iso", "int8"):
        model = uneven(seed=rank)
        state: dict[str, Any] | None = None
        if rank < 2:
            merger = merger_of(model, name, group=pair)
            for step in range(2 * H):
                wander(model, rank, step)
                merger.step()
            state = merger.state_dict()
        # The newcomer is rank 0 of the new group: nobody may take its values for the anchor.
        group = dist.new_group([0, 1, 2])
        with warnings.catch_warnings():
            warnings.simplefilter("error", MergeWarning)
            fresh = merger_of(model, name, group=group)
            if state is not None:
                fresh.load_state_dict(state)
            fresh.join(0)
        given: list[Any] = [None]
        if rank == 0:
            given = [{k: v for k, v in state.items() if not k.startswith("worker.")}]
        dist.broadcast_object_list(given, 0)
        found = fresh.state_dict()
        wrong += [
            f"{name} {k}"
            for k, x in given[0].items()
            if k != "workers" and isinstance(x, Tensor) and not torch.equal(found[k], x)
        ]
    return wrong


def test_a_newcomer_takes_anchor_and_outer_state() -> None:
    assert run_ranks(3, newcomer) == [[]] * 3


def partial(rank: int, world: int) -> list[str]:
    """Outer state that went with a lost worker starts afresh, and a warning says so."""
    model = uneven(seed=0)
    merger = merger_of(model, "diloco")
    for step in range(2 * H):
        wander(model, rank, step)
        merger.step()
    whole = merger.state_dict()
    merger._exchange.comm.failed = True  # what a failed collective leaves
    mine = merger.state_dict()
    pair = dist.new_group([0, 1])
    if rank == 2:
        return []
    fresh = merger_of(model, "diloco", group=pair)
    fresh.load_state_dict(mine)
    with pytest.warns(MergeWarning, match="the outer state of"):
        fresh.join(1)
    lost = {s.name for s in merger._slots if merger._exchange.owners[s.index] == 2}
    found = fresh.state_dict()
    wrong = []
    for slot, started in zip(merger._slots, found["started"].tolist(), strict=True):
        key = f"outer.{slot.name}.momentum_buffer"
        kept = torch.equal(found[key], whole[key]) and started
        if kept == (slot.name in lost):
            wrong.append(slot.name)
        if not torch.equal(found[f"anchor.{slot.name}"], whole[f"anchor.{slot.name}"]):
            wrong.append(f"anchor {slot.name}")
    return wrong


def test_what_nobody_has_starts_afresh() -> None:
    assert run_ranks(3, partial) == [[]] * 3


def test_join_needs_a_worker() -> None:
    models: list[nn.Module] = [uneven(seed=0)]
    with pytest.raises(IncompatibleError, match="no worker 1 among 1"):
        loop_of(models, "diloco").join(1)
