"""Fragments at staggered steps, with training going on while they are under way."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mergekit_iso import LoopedMerger, OuterReport, simulate
from mergekit_iso.errors import IncompatibleError, MethodError, NonFiniteError, SyncError
from mergekit_iso.loop.fragments import due, split
from mergekit_iso.loop.parameters import Slot
from mergekit_iso.tensors import describe

from .models import same, uneven, values, wander
from .ranks import run_ranks

H = 6


def slots_of(shapes: dict[str, tuple[int, ...]]) -> list[Slot]:
    return [
        Slot(k, describe(name, torch.Size(shape), torch.float32, ()))
        for k, (name, shape) in enumerate(shapes.items())
    ]


LLAMA = {
    "model.embed_tokens.weight": (100, 8),
    **{f"model.layers.{k}.mlp.up_proj.weight": (8, 8) for k in range(5)},
    **{f"model.layers.{k}.norm.weight": (8,) for k in range(5)},
    "model.norm.weight": (8,),
    "lm_head.weight": (100, 8),
}


@given(
    layers=st.lists(st.integers(1, 3), min_size=1, max_size=9),
    outside=st.lists(st.integers(1, 50), max_size=5),
    data=st.data(),
)
def test_every_tensor_is_in_one_fragment(
    layers: list[int], outside: list[int], data: st.DataObject
) -> None:
    shapes: dict[str, tuple[int, ...]] = {f"head{k}.weight": (n,) for k, n in enumerate(outside)}
    for k, tensors in enumerate(layers):
        shapes |= {f"h.{k}.w{j}": (3, 2) for j in range(tensors)}
    slots = slots_of(shapes)
    count = data.draw(st.integers(1, len(layers)))
    parts = split(slots, count)
    assert len(parts) == count
    assert all(parts)
    assert sorted(s.index for part in parts for s in part) == list(range(len(slots)))


def test_layers_are_dealt_out_in_turn_and_the_rest_evens_out() -> None:
    parts = [[s.name for s in part] for part in split(slots_of(LLAMA), 2)]
    of_layers = [sorted({n.split(".")[2] for n in part if "layers" in n}) for part in parts]
    assert of_layers == [["0", "2", "4"], ["1", "3"]]
    assert ["model.embed_tokens.weight" in part for part in parts] != [
        "lm_head.weight" in part for part in parts
    ]


def test_patterns_take_tensors_first_come() -> None:
    parts = split(slots_of(LLAMA), (("layers.0.", "layers.1."), ("role:vector",), ("*",)))
    names = [{s.name for s in part} for part in parts]
    assert names[0] == {n for n in LLAMA if ".0." in n or ".1." in n}
    assert names[1] == {n for n in LLAMA if "norm" in n} - names[0]
    assert names[2] == set(LLAMA) - names[0] - names[1]


@pytest.mark.parametrize(
    ("fragments", "sentence"),
    [
        (6, "the model has 5 layers, fewer than fragments=6"),
        ((("layers",),), "model.embed_tokens.weight is in no fragment"),
        ((("*",), ("lm_head",)), "fragment 1 has no tensors"),
    ],
)
def test_what_cannot_be_split(fragments: Any, sentence: str) -> None:
    with pytest.raises(IncompatibleError, match=sentence):
        split(slots_of(LLAMA), fragments)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_every_fragment_is_due_once_a_round_at_equal_distances(count: int) -> None:
    found = [(step, f) for step in range(1, 13) if (f := due(step, 12, count)) is not None]
    assert [f for _, f in found] == list(range(count))
    assert [step for step, _ in found] == [12 // count * (f + 1) for f in range(count)]


@pytest.mark.parametrize(
    "settings",
    [
        {"sync_every": 5, "fragments": 2},
        {"sync_every": 6, "fragments": 2, "delay": 3},
        {"sync_every": 6, "fragments": 0},
        {"sync_every": 6, "fragments": []},
        {"sync_every": 6, "fragments": [[""]]},
        {"sync_every": 6, "delay": -1},
        {"sync_every": 6, "mix": 1.5},
        {"sync_every": 6, "apply": "blend"},
    ],
)
def test_settings_that_do_not_fit(settings: dict[str, Any]) -> None:
    with pytest.raises(MethodError):
        simulate([uneven()], "average", **settings)


class Streamed:
    """DiLoCo by fragments, written as its formulas: the reference for the loop."""

    def __init__(
        self, models: list[nn.Module], groups: list[list[str]], lr: float, mu: float
    ) -> None:
        self.models, self.groups, self.lr, self.mu = models, groups, lr, mu
        self.theta = {n: p.detach().double() for n, p in models[0].named_parameters()}
        self.b = {n: torch.zeros_like(p) for n, p in self.theta.items()}
        self.waiting: list[tuple[int, str, Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def step(self, k: int, delay: int, apply: str, mix: float) -> None:
        own = [dict(m.named_parameters()) for m in self.models]
        fragment = due((k - 1) % H + 1, H, len(self.groups))
        for n in [] if fragment is None else self.groups[fragment]:
            sent = [p[n].detach().double().clone() for p in own]
            g = self.theta[n] - sum(sent) / len(sent)
            self.b[n] = self.mu * self.b[n] + g
            new = self.theta[n] - self.lr * (g + self.mu * self.b[n])
            self.waiting.append((k + delay, n, new, sent))
        for _, n, new, sent in [w for w in self.waiting if w[0] == k]:
            self.theta[n] = new
            for p, then in zip(own, sent, strict=True):
                now = p[n].detach().double()
                p[n].copy_(
                    {
                        "overwrite": new,
                        "mix": mix * new + (1 - mix) * now,
                        "rebase": new + (now - then),
                    }[apply]
                )
        self.waiting = [w for w in self.waiting if w[0] > k]


@pytest.mark.parametrize("apply", ["overwrite", "mix", "rebase"])
@pytest.mark.parametrize(("fragments", "delay"), [(1, 0), (1, 4), (2, 0), (3, 1)])
def test_the_formulas_of_streaming(fragments: int, delay: int, apply: str) -> None:
    models = [plain() for _ in range(3)]
    references = [plain() for _ in range(3)]
    loop = simulate(
        models,
        "average",
        sync_every=H,
        fragments=fragments,
        delay=delay,
        apply=apply,
        mix=0.3,
        outer_lr=0.7,
        outer_momentum=0.9,
    )
    groups = [[s.name for s in part] for part in split(loop._slots, fragments)]
    reference = Streamed(references, groups, 0.7, 0.9)
    reports = []
    for k in range(1, 3 * H + 2):
        for r, (model, other) in enumerate(zip(models, references, strict=True)):
            wander(model, r, k)
            wander(other, r, k)
        reports.append(loop.step())
        reference.step(k, delay, apply, 0.3)
        for model, other in zip(models, references, strict=True):
            torch.testing.assert_close(values(model), values(other), rtol=1e-5, atol=1e-6)
    told = [(k, r.fragment) for k, r in enumerate(reports, 1) if r is not None]
    every = H // fragments
    assert told == [
        (k * every + delay, None if fragments == 1 else (k - 1) % fragments)
        for k in range(1, 3 * fragments + 1)
        if k * every + delay <= 3 * H + 1
    ]


def plain(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(11, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8), nn.Linear(8, 11)
    )


def test_a_sync_leaves_other_fragments_and_their_outer_state_alone() -> None:
    model = plain()
    loop = simulate([model], "average", sync_every=H, fragments=[["0."], ["1."], ["*"]])
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    for step in range(2):
        wander(model, 0, step)
        before = values(model)
        report = loop.step()
    assert report is not None
    assert (report.fragment, report.tensors, report.step) == (0, 1, 2)
    moved = {name for name, x in values(model).items() if not torch.equal(x, before[name])}
    assert moved == {"0.weight"}
    assert len(loop.outer_optimizer.state) == 1
    assert all(torch.equal(p.grad, torch.full_like(p, 3.0)) for p in model.parameters())  # type: ignore[arg-type]


def test_evaluation_while_a_fragment_is_under_way() -> None:
    models = [plain(), plain()]
    loop = simulate(models, "average", sync_every=H, fragments=2, delay=2, apply="rebase")
    start = values(models[0])
    for step in range(4):
        for r, model in enumerate(models):
            wander(model, r, step)
        loop.step()
    own = [values(m) for m in models]
    with loop.eval_parameters():  # sent at step 3, applied at step 5
        assert all(same(values(m), start) for m in models)
    assert all(same(values(m), x) for m, x in zip(models, own, strict=True))


def test_tokens_count_by_fragment_from_sending_to_sending() -> None:
    loop = simulate(
        [plain(), plain()], "average", sync_every=4, fragments=2, delay=1, weights="tokens"
    )
    tokens = {}
    for k in range(1, 14):
        report = loop.step(tokens=[k, 10 * k])
        if report is not None:
            tokens[k - 1] = report.tokens
    sent = {2: (1, 2), 4: (1, 4), 6: (3, 6), 8: (5, 8), 10: (7, 10), 12: (9, 12)}
    assert tokens == {k: 11 * sum(range(a, b + 1)) for k, (a, b) in sent.items()}


def test_sync_applies_what_is_under_way_and_joins_all_workers() -> None:
    told: list[OuterReport] = []
    models = [plain(), plain()]
    loop = simulate(
        models, "average", sync_every=H, fragments=2, delay=2, apply="mix", on_event=told.append
    )
    for step in range(H + 1):
        for r, model in enumerate(models):
            wander(model, r, step)
        loop.step()
    assert any(key.startswith("worker.") for key in loop.state_dict())
    report = loop.sync()
    assert [r.fragment for r in told] == [0, 1, None]
    assert (report.tensors, loop.round) == (len(list(models[0].parameters())), 3)
    assert not any(key.startswith("worker.") for key in loop.state_dict())


SETTINGS: dict[str, dict[str, Any]] = {
    "fragments": {"method": "iso_c", "fragments": 3},
    "delay": {"method": "average", "delay": 3},
    "rebase": {"method": "iso_c_fast", "fragments": 2, "delay": 2, "apply": "rebase"},
    "mix": {"method": "average", "fragments": 2, "delay": 1, "apply": "mix", "wire": "int8"},
    "mix at once": {"method": "iso_c", "fragments": 2, "apply": "mix", "mix": 0.25},
    "mix all": {"method": "average", "apply": "mix", "mix": 0.25},
    "ties": {"method": "ties", "fragments": 3, "delay": 1, "apply": "rebase"},
    "tokens": {"method": "dare", "fragments": 2, "delay": 2, "weights": "tokens"},
    "first": {"method": "iso_c", "fragments": 2, "delay": 1, "order": "momentum_then_merge"},
}


def settings_of(name: str) -> tuple[str, dict[str, Any]]:
    settings = {"sync_every": H, **SETTINGS[name]}
    return settings.pop("method"), settings


def train(rank: int, world: int) -> list[str]:
    """Return what differs from the simulation of all workers at any step."""
    wrong = []
    for name in SETTINGS:
        method, settings = settings_of(name)
        model, models = uneven(seed=rank), [uneven(seed=0) for _ in range(world)]
        merger = LoopedMerger(model, method, verify_every=1, **settings)
        loop = simulate(models, method, **settings)
        for step in range(3 * H + 4):
            wander(model, rank, step)
            for r, simulated in enumerate(models):
                wander(simulated, r, step)
            reports = merger.step(tokens=rank + 1), loop.step(tokens=list(range(1, world + 1)))
            if not same(values(model), values(models[rank])):
                wrong.append(f"{name} at {step}")
            if [r and (r.round, r.fragment, r.tokens) for r in reports[:1]] != [
                r and (r.round, r.fragment, r.tokens) for r in reports[1:]
            ]:
                wrong.append(f"{name} at {step}: {reports}")
        merger.sync()
        loop.sync()
        if not same(values(model), values(models[0])):
            wrong.append(f"{name} after sync")
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_distributed_equals_simulated(world: int) -> None:
    assert run_ranks(world, train) == [[]] * world


def sharded(rank: int, world: int) -> list[str]:
    """Return what differs between 2 x 2 sharded ranks and two whole workers in one process."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    wrong = []
    for name in ("rebase", "mix", "first"):
        method, settings = settings_of(name)
        model, models = plain(), [plain(), plain()]
        fully_shard(model, mesh=mesh["shards"])
        worker = mesh.get_coordinate()[0]  # type: ignore[index]
        if settings.get("wire") == "int8":
            settings["wire"] = "bfloat16"
        merger = LoopedMerger(
            model, method, group=mesh["workers"], shard_mesh=mesh["shards"], **settings
        )
        loop = simulate(models, method, **settings)
        for step in range(2 * H + 3):
            for r, simulated in enumerate(models):
                wander(simulated, r, step)
            generator = torch.Generator().manual_seed(1000 * worker + step)
            with torch.no_grad():
                for p in model.parameters():
                    noise = 0.01 * torch.randn(p.shape, generator=generator)
                    p.add_(dist.tensor.distribute_tensor(noise, p.device_mesh, p.placements))
            # Inner collectives on the ranks' own groups go on while a fragment is under way.
            model(torch.arange(5)).sum().backward()
            merger.step()
            loop.step()
            whole = {n: p.full_tensor() for n, p in model.named_parameters()}
            if not same(whole, dict(models[worker].named_parameters())):  # type: ignore[arg-type]
                wrong.append(f"{name} at {step}")
                break
    return wrong


def test_sharded_workers_stream_too() -> None:
    assert run_ranks(4, sharded) == [[]] * 4


def overlap(rank: int, world: int) -> int:
    """Train on while the other worker is late: were step() to wait, neither would go on."""
    store = dist.distributed_c10d._get_default_store()
    model = plain()
    merger = LoopedMerger(model, "average", sync_every=H, delay=4)
    for step in range(1, H + 5):
        if rank == 1 and step == H:
            store.wait(["three steps further"])
        wander(model, rank, step)
        report = merger.step()
        assert (report is not None) == (step == H + 4)
        if rank == 0 and step == H + 3:
            store.set("three steps further", "yes")
    assert report is not None
    return report.participants


def test_training_goes_on_while_a_fragment_is_under_way() -> None:
    assert run_ranks(2, overlap) == [2, 2]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_resumed_run_ends_with_the_same_bits(name: str, tmp_path: Path) -> None:
    method, settings = settings_of(name)
    for at in (1, 3, 4, H, H + 1):
        models = [uneven(seed=0) for _ in range(3)]
        loop = simulate(models, method, **settings)
        advance(loop, models, 0, at)
        torch.save(loop.state_dict(), tmp_path / "state.pt")
        others = [uneven(seed=7) for _ in range(3)]
        resumed = simulate(others, method, **settings)
        resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        ahead = [
            [r and (r.round, r.step, r.tokens, r.fragment, r.delta_norm) for r in reports]
            for reports in (
                advance(loop, models, at, at + 2 * H),
                advance(resumed, others, at, at + 2 * H),
            )
        ]
        assert ahead[0] == ahead[1]
        assert all(same(values(a), values(b)) for a, b in zip(models, others, strict=True))


def advance(loop: Any, models: list[Any], start: int, stop: int) -> list[OuterReport | None]:
    reports = []
    for step in range(start, stop):
        for r, model in enumerate(models):
            wander(model, r, step)
        reports.append(loop.step(tokens=list(range(1, len(models) + 1))))
    return reports


def test_a_state_within_a_round_needs_as_many_fragments() -> None:
    models = [plain()]
    loop = simulate(models, "average", sync_every=H, fragments=2)
    advance(loop, models, 0, H)
    other = simulate([plain()], "average", sync_every=H, fragments=3)
    with pytest.raises(IncompatibleError, match="within a round of 2 fragments"):
        other.load_state_dict(loop.state_dict())
    loop.sync()
    other.load_state_dict(loop.state_dict())
    assert other.round == 3


def resume(rank: int, world: int, folder: str) -> list[str]:
    """Return what is not as it was for a run saved while a fragment was under way."""
    wrong = []
    for name, at in itertools.product(("rebase", "mix"), (4, H + 1)):
        method, settings = settings_of(name)
        model, again = uneven(seed=0), uneven(seed=5)
        merger = LoopedMerger(model, method, **settings)
        for step in range(at):
            wander(model, rank, step)
            merger.step()
        where = f"{folder}/{name}-{at}"
        dcp.save({"merger": merger}, checkpoint_id=where)
        resumed = LoopedMerger(again, method, **settings)
        resumed.load_checkpoint(where)
        for step in range(at, at + 2 * H):
            for m in (model, again):
                wander(m, rank, step)
            merger.step()
            resumed.step()
        if not same(values(model), values(again)) or merger.round != resumed.round:
            wrong.append(where)
    return wrong


def test_resume_through_distributed_checkpoints(tmp_path: Path) -> None:
    assert run_ranks(2, resume, str(tmp_path)) == [[]] * 2


def poisoned(rank: int, world: int) -> list[str]:
    """Return each rank's errors where worker 1 has a NaN when a fragment is sent."""
    model = plain()
    merger = LoopedMerger(model, "average", sync_every=H, fragments=2, delay=2)
    start, said = values(model), []
    for step in range(2 * H):
        wander(model, rank, step)
        if step == 2 and rank == 1:
            with torch.no_grad():
                model[0].weight[3, 3] = math.nan
        try:
            merger.step()
        except NonFiniteError as error:
            said.append(f"{step}: {error}")
            assert same(values(model), start)
    assert all(bool(x.isfinite().all()) for x in values(model).values())
    merger.sync()
    return [*said, str(sum(float(x.double().sum()) for x in values(model).values()))]


def test_a_failed_fragment_restores_the_anchor_in_all_workers() -> None:
    found = run_ranks(2, poisoned)
    assert found[0] == found[1]
    assert len(found[0]) == 2
    assert found[0][0].startswith("4: worker 1 has a NaN or infinity in 0.weight")


@pytest.mark.parametrize("policy", ["raise", "skip_round", "restore_anchor"])
def test_what_a_failed_sync_leaves(policy: str) -> None:
    models = [plain(), plain()]
    loop = simulate(
        models, "average", sync_every=4, fragments=2, delay=1, on_failure=policy, min_workers=2,
        nonfinite="leave_out",
    )  # fmt: skip
    start = values(models[0])
    advance(loop, models, 0, 1)
    with torch.no_grad():
        models[1][0].weight[0, 0] = math.nan
        models[1][4].weight[0, 0] = math.nan
    advance(loop, models, 1, 2)
    own = [values(m) for m in models]
    if policy == "raise":
        with pytest.raises(SyncError, match="fewer than min_workers=2"):
            loop.step()
    else:
        report = loop.step()
        assert report is not None
        assert "fewer than min_workers=2" in str(report.skipped)
        assert report.fragment == 0
    assert loop.round == 0
    for model, mine in zip(models, own, strict=True):
        expected = mine if policy == "skip_round" else start
        torch.testing.assert_close(values(model), expected, rtol=0, atol=0, equal_nan=True)
