"""The loop in the training loops people write: real models, real inner optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

from mergekit_iso import LoopedMerger, simulate
from mergekit_iso.loop.parameters import Parameters

from .models import same, values, wander
from .ranks import run_ranks

VOCABULARY = 32


def llama(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a Llama of two layers, the same in every process."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def lora() -> nn.Module:
    """Return the Llama with a LoRA of rank 2 on its queries; all else is frozen."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    return get_peft_model(llama(), config)


def batch(worker: int, iteration: int) -> Tensor:
    """Return sequences that count upwards from a random start, int64 (4, 12)."""
    generator = torch.Generator().manual_seed(997 * worker + iteration)
    start = torch.randint(0, VOCABULARY, (4, 1), generator=generator)
    return (start + torch.arange(12)) % VOCABULARY


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


@dataclass
class Training:
    """One worker's own loop, an iteration at a time; nothing in it knows of other workers.

    ``overflows`` is the iteration whose loss is infinite, as half precision's can be.
    """

    model: nn.Module
    worker: int
    iterations: int = 8
    lr: float = 0.01
    accumulate: int = 1
    overflows: int | None = None
    optimizer: Optimizer = field(init=False)
    scaler: GradScaler = field(init=False)
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = AdamW(trained, lr=self.lr)
        self.scaler = GradScaler("cpu", enabled=self.overflows is not None)

    def __iter__(self) -> Iterator[None]:
        scheduler = CosineAnnealingLR(self.optimizer, T_max=self.iterations)
        for iteration in range(self.iterations):
            loss = loss_of(self.model, batch(self.worker, iteration))
            self.losses.append(loss.item())
            if iteration == self.overflows:
                loss = loss * torch.inf
            self.scaler.scale(loss / self.accumulate).backward()
            if (iteration + 1) % self.accumulate == 0:
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.optimizer.zero_grad()
                scheduler.step()
            yield


@dataclass(frozen=True)
class Case:
    """A model, what is special about its training, and the loop's settings."""

    build: Callable[[], nn.Module] = llama
    training: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    overflow_of: int | None = None  # this worker's loss is infinite once

    def train(self, model: nn.Module, worker: int) -> Training:
        overflows = {} if self.overflow_of is None else {"overflows": 8}
        if worker == self.overflow_of:
            overflows = {"overflows": 2}
        return Training(model, worker, **self.training, **overflows)


CASES = {
    "llama": Case(),
    "untied, bf16": Case(build=lambda: llama(tied=False, dtype=torch.bfloat16)),
    "accumulation": Case(training={"accumulate": 2}),
    "a skipped step": Case(overflow_of=1),
    "LoRA": Case(build=lora),
    "tensors larger than a bucket": Case(settings={"bucket_bytes": 700}),
    "bf16 wire": Case(settings={"wire": "bfloat16"}),
}


def workers_against_simulation(rank: int, world: int) -> dict[str, Any]:
    """Return what differs between this worker and the simulation of all of them."""
    torch.use_deterministic_algorithms(True)
    wrong = {}
    for name, case in CASES.items():
        model, models = case.build(), [case.build() for _ in range(world)]
        settings = {"sync_every": 4, "verify_every": 1, **case.settings}
        merger, simulation = LoopedMerger(model, **settings), simulate(models, **settings)
        mine = case.train(model, rank)
        reports = [r for _ in mine if (r := merger.step(tokens=48)) is not None]
        everyone = [case.train(m, r) for r, m in enumerate(models)]
        for _ in zip(*everyone, strict=True):
            simulation.step(tokens=48)
        if not all(same(values(model), values(m)) for m in models):
            wrong[name] = "other parameters"
        if [(r.round, r.step, r.tokens) for r in reports] != [(0, 4, 384), (1, 4, 384)]:
            wrong[name] = reports
        scales = [t.scaler.get_scale() for t in everyone]
        if case.overflow_of is not None and not scales[case.overflow_of] < scales[0]:
            wrong[name] = f"no step was skipped: {scales}"
    return wrong


class Wrapped(nn.Module):
    """A model of which one tensor has no gradient and one is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.body(x)
        return out


def regress(model: nn.Module, worker: int, iterations: int, lr: float = 0.05) -> Iterator[None]:
    """Train a model (n, 6) → (n, 4), an iteration at a time."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    for iteration in range(iterations):
        generator = torch.Generator().manual_seed(100 * worker + iteration)
        x = torch.randn(16, 6, generator=generator)
        (model(x) - x[:, :4]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def compiled(model: nn.Module) -> tuple[Any, list[int]]:
    """Return torch.compile's wrapper of a model, and a list that grows with each compilation."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        graphs.append(len(inputs))
        return graph.forward

    return torch.compile(model, backend=backend), graphs


def wrapped_workers(rank: int, world: int) -> list[str]:
    """Return what is wrong where one worker is compiled and the other under DDP."""
    wrong = []
    groups = [dist.new_group([r]) for r in range(world)]
    model: Any = Wrapped()
    graphs: list[int] = []
    if rank == 0:
        model, graphs = compiled(model)
    else:
        model = DistributedDataParallel(
            model, process_group=groups[rank], find_unused_parameters=True
        )
    merger = LoopedMerger(model, "iso_c", sync_every=3, verify_every=1)
    models = [Wrapped() for _ in range(world)]
    simulation = simulate(models, "iso_c", sync_every=3)
    for _ in regress(model, rank, 9):
        merger.step()
    for _ in zip(*(regress(m, r, 9) for r, m in enumerate(models)), strict=True):
        simulation.step()
    plain = {n: p.detach() for n, p in Parameters(model, ()).tensors.items()}
    if not same(plain, {n: p.detach() for n, p in models[0].named_parameters()}):
        wrong.append("other parameters")
    if rank == 0 and len(graphs) != 1:
        wrong.append(f"compiled {len(graphs)} times")
    return wrong


class Motley(nn.Module):
    """Every dtype, a parameter in transposed storage, one without elements, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.half_precision = nn.Parameter(torch.randn(9, 7).half())
        self.double_precision = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
        self.brain = nn.Parameter(torch.randn(5, 11).bfloat16())
        self.transposed = nn.Parameter(torch.randn(10, 6).t())
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scalar = nn.Parameter(torch.ones(()))


def motley_workers(rank: int, world: int) -> list[str]:
    wrong = []
    for method in ("iso_c", "ties", "dare_ties", "iso_cts", "average"):
        for wire in ("float32", "bfloat16", "int8"):
            model, models = Motley(), [Motley() for _ in range(world)]
            merger = LoopedMerger(model, method, wire=wire, verify_every=1)
            simulation = simulate(models, method, wire=wire)
            for round_ in range(2):
                wander(model, rank, round_, size=0.1)
                for r, m in enumerate(models):
                    wander(m, r, round_, size=0.1)
                before = values(model)
                merger.sync()
                simulation.sync()
            if not all(same(values(model), values(m)) for m in models):
                wrong.append(f"{method} over {wire}: other parameters")
            moved = {n: not torch.equal(x, before[n]) for n, x in values(model).items()}
            if moved != dict.fromkeys(moved, True) | {"empty": False}:
                wrong.append(f"{method} over {wire}: {moved}")
            if model.transposed.is_contiguous():
                wrong.append(f"{method} over {wire}: another layout")
    return wrong


def everything(rank: int, world: int) -> list[Any]:
    """Return all that is wrong on a rank; one start of the processes for all of it."""
    return [
        *workers_against_simulation(rank, world).items(),
        *wrapped_workers(rank, world),
        *motley_workers(rank, world),
    ]


@pytest.mark.distributed
def test_two_workers_train_as_the_simulation_does() -> None:
    assert run_ranks(2, everything) == [[], []]


@pytest.mark.parametrize("method", ["iso_c", "average"])
def test_the_loss_goes_down(method: str) -> None:
    models = [llama() for _ in range(4)]
    simulation = simulate(models, method, sync_every=5)
    held_out = batch(worker=99, iteration=0)
    with torch.no_grad():
        before = loss_of(models[0], held_out).item()
    workers = [Training(m, r, iterations=60, lr=0.01) for r, m in enumerate(models)]
    reports = [r for _ in zip(*workers, strict=True) if (r := simulation.step()) is not None]
    assert len(reports) == 12
    with torch.no_grad():
        after = loss_of(models[0], held_out).item()
    assert after < 0.5 * before
    assert all(same(values(models[0]), values(m)) for m in models)


def test_what_is_not_trained_stays() -> None:
    """A parameter without a gradient has no delta, so momentum has nothing to carry on."""
    models = [Wrapped() for _ in range(2)]
    models[0].body[0].requires_grad_(False)
    models[1].body[0].requires_grad_(False)
    simulation = simulate(models, "iso_c", sync_every=2)
    before = values(models[0])
    for _ in zip(*(regress(m, r, 6) for r, m in enumerate(models)), strict=True):
        simulation.step()
    after = values(models[0])
    assert {n for n in after if not torch.equal(after[n], before[n])} == {
        "body.2.weight",
        "body.2.bias",
    }


def test_batch_norm_statistics_are_averaged() -> None:
    models = [nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)) for _ in range(2)]
    simulation = simulate(models, "iso_c")
    workers = [regress(m, r, 3 + r) for r, m in enumerate(models)]
    for worker in workers:
        list(worker)
    means = [m[1].running_mean.clone() for m in models]
    assert not torch.equal(*means)
    simulation.sync()
    for model in models:
        torch.testing.assert_close(model[1].running_mean, (means[0] + means[1]) / 2)
        assert model[1].num_batches_tracked == 3  # the first worker's: a count has no mean


def test_one_merger_round_is_not_seen_by_inner_state() -> None:
    """AdamW's moments live on across a sync, as in DiLoCo."""
    model = llama()
    merger = LoopedMerger(model, "average", sync_every=2, outer_lr=1.0, outer_momentum=0.0)
    alone = copy.deepcopy(model)
    looped, plain = Training(model, 0), Training(alone, 0)
    for _ in looped:
        merger.step()
    list(plain)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_evaluation_in_the_middle_of_a_round() -> None:
    models = [llama() for _ in range(2)]
    simulation = simulate(models, "iso_c", sync_every=4)
    initial, held_out = values(models[0]), batch(99, 0)
    workers = [Training(m, r) for r, m in enumerate(models)]
    for iteration, _ in enumerate(zip(*workers, strict=True)):
        if iteration == 2:
            own = [values(m) for m in models]
            with simulation.eval_parameters(), torch.no_grad():
                assert all(same(values(m), initial) for m in models)
                losses = {loss_of(m, held_out).item() for m in models}
            assert len(losses) == 1
            assert all(same(values(m), x) for m, x in zip(models, own, strict=True))
        simulation.step()
    assert simulation.round == 2
