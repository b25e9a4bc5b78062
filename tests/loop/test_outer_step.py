"""What an outer step computes, against formulas written out by hand, merge() and torch.optim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Muon
from torch.optim.lr_scheduler import LambdaLR, StepLR

from mergekit_iso import LoopedMerger, list_methods, merge, simulate
from mergekit_iso.errors import MethodError
from mergekit_iso.kernels.random import keep_mask
from mergekit_iso.loop.round import Round
from mergekit_iso.loop.settings import DEFAULT_LOOP_EXCLUDE
from mergekit_iso.methods import get_method

from .models import same, uneven, values, wander
from .ranks import run_ranks

# One row of 48 entries has no direction for each of three tasks.
pytestmark = pytest.mark.filterwarnings("ignore:tsv keeps no direction")

Tensors = dict[str, Tensor]
Merge = Callable[[str, Sequence[Tensor]], Tensor]

METHODS = sorted(m.name for m in list_methods())
SUM = [name for name in METHODS if get_method(name).requires.workers == "sum"]
ODD = [name for name in METHODS if "odd" in get_method(name).symmetries]
WORKERS = 3
PLAIN = {"outer_lr": 1.0, "outer_momentum": 0.0}


def trained(model: nn.Module) -> Tensors:
    """Return a copy of the trainable parameters, by name."""
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def crew(workers: int = WORKERS, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    return [uneven(dtype=dtype) for _ in range(workers)]


def deltas_of(models: Sequence[nn.Module], anchor: Mapping[str, Tensor]) -> list[Tensors]:
    """Return θ_r − anchor in float32 by worker and name."""
    return [{n: p.float() - anchor[n].float() for n, p in trained(m).items()} for m in models]


def mean(name: str, deltas: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(deltas)).mean(0)


def iso_c(name: str, deltas: Sequence[Tensor]) -> Tensor:
    """Iso-C of the mean for what is a matrix, by a float64 SVD."""
    D = mean(name, deltas).double()
    if D.dim() != 2:
        return D.float()
    U, sigma, Vh = torch.linalg.svd(D, full_matrices=False)
    return (sigma.mean() * (U @ Vh)).float()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_average_with_lr_1_is_the_mean_of_the_weights(dtype: torch.dtype) -> None:
    models = crew(dtype=dtype)
    simulation = simulate(models, "average", **PLAIN)
    for r, model in enumerate(models):
        wander(model, r, 0, size=0.1)
    weights = [trained(m) for m in models]
    simulation.sync()
    for name, got in trained(models[0]).items():
        expected = torch.stack([w[name].double() for w in weights]).mean(0)
        rounding = torch.finfo(dtype).eps * expected.abs().max()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=float(rounding))
    assert all(same(values(models[0]), values(m)) for m in models)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_a_round_is_a_merge_of_the_gathered_deltas(method: str, dtype: torch.dtype) -> None:
    """In bits, where the outer optimizer adds nothing: its state is the float32 master alone."""
    models = crew(dtype=dtype)
    simulation = simulate(models, method, seed=5, **PLAIN)
    handed_out = trained(models[0])
    master = {n: p.float() for n, p in handed_out.items()}
    for round_ in range(4):
        for r, model in enumerate(models):
            wander(model, r, round_)
        deltas = deltas_of(models, handed_out)
        master = merge(
            master,
            deltas,
            method,
            weights="mean",
            seed=5,
            round=round_,
            exclude=DEFAULT_LOOP_EXCLUDE,
        )
        report = simulation.sync()
        assert report.round == round_
        handed_out = {n: p.to(dtype) for n, p in master.items()}
        assert all(same(trained(m), handed_out) for m in models)


def test_a_bf16_model_keeps_what_rounding_would_lose() -> None:
    """Steps of a quarter of a bf16 ulp add up in the master, and no step is made of nothing."""
    models = [nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    nn.init.ones_(models[0].weight)
    simulation = simulate(models, "average", outer_lr=0.25, outer_momentum=0.0)
    seen = []
    for _ in range(8):
        with torch.no_grad():
            for model in models:
                model.weight += 2.0**-7  # an ulp at 1
        simulation.sync()
        seen.append(models[0].weight[0, 0].item())
    assert seen[0] == 1.0
    assert seen[-1] == 1.0 + 2 * 2.0**-7
    before = values(models[0])
    assert simulation.sync().delta_norm == (0.0, 0.0)
    assert same(values(models[0]), before)


def test_the_models_move_towards_the_workers() -> None:
    for lr in (1.0, 0.5):
        models = [nn.Linear(1, 1, bias=False) for _ in range(2)]
        nn.init.zeros_(models[0].weight)
        simulation = simulate(models, "average", outer_lr=lr, outer_momentum=0.0)
        with torch.no_grad():
            models[0].weight += 1.0
            models[1].weight += 3.0
        simulation.sync()
        assert models[0].weight.item() == 2.0 * lr


@pytest.mark.parametrize("method", ODD)
def test_the_opposite_deltas_give_the_opposite_step(method: str) -> None:
    steps = []
    for sign in (1, -1):
        models = crew()
        with torch.no_grad():
            for p in models[0].parameters():
                p.zero_()
        simulation = simulate(models, method)
        for round_ in range(2):
            for r, model in enumerate(models):
                wander(model, r, round_, size=sign * 0.01)
            simulation.sync()
        steps.append(trained(models[0]))
    for name, step in steps[0].items():
        torch.testing.assert_close(step, -steps[1][name], rtol=1e-4, atol=1e-7)


SGD_SETTINGS = [
    {"lr": 1.0},
    {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    {"lr": 0.7, "momentum": 0.9},
    {"lr": 0.3, "momentum": 0.5, "dampening": 0.4},
    {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", SGD_SETTINGS, ids=str)
def test_the_outer_step_is_sgd_on_minus_the_mean_delta(settings: dict[str, Any]) -> None:
    """By torch's documented formula, within rounding."""
    lr, mu = settings["lr"], settings.get("momentum", 0.0)
    damp, decay = settings.get("dampening", 0.0), settings.get("weight_decay", 0.0)
    models = crew()
    simulation = simulate(models, "average", outer=lambda params: SGD(params, **settings))
    theta = {n: p.double() for n, p in trained(models[0]).items()}
    buffer: Tensors = {}
    for round_ in range(5):
        anchor = trained(models[0])
        for r, model in enumerate(models):
            wander(model, r, round_)
        deltas = deltas_of(models, anchor)
        simulation.sync()
        for name in theta:
            g = decay * theta[name] - mean(name, [d[name] for d in deltas]).double()
            b = mu * buffer[name] + (1 - damp) * g if name in buffer else g
            buffer[name] = b
            theta[name] = theta[name] - lr * (g + mu * b if settings.get("nesterov") else b)
    for name, p in trained(models[0]).items():
        torch.testing.assert_close(p.double(), theta[name], rtol=1e-6, atol=2e-7)


@pytest.mark.parametrize("order", ["merge_then_momentum", "momentum_then_merge"])
@pytest.mark.parametrize(("method", "M"), [("average", mean), ("iso_c", iso_c)])
def test_both_orders_of_merge_and_nesterov(method: str, M: Merge, order: str) -> None:
    """Δ_r = anchor − θ_r, D their mean. Either g = M(D), b ← μb + g, θ ← θ − η(g + μb); or
    b ← μb + D, θ ← θ − η M(D + μb). Rounding of five steps of size 0.01 apart.
    """
    lr, mu = 1.8, 0.8
    models = crew()
    simulation = simulate(
        models, method, outer_lr=lr, outer_momentum=mu, order=order, exclude="nothing"
    )
    theta = trained(models[0])
    buffer = {n: torch.zeros_like(p) for n, p in theta.items()}
    for round_ in range(5):
        anchor = trained(models[0])
        for r, model in enumerate(models):
            wander(model, r, round_)
        deltas = deltas_of(models, anchor)
        simulation.sync()
        for name in theta:
            descent = [-d[name] for d in deltas]
            if order == "merge_then_momentum":
                g = M(name, descent)
                buffer[name] = mu * buffer[name] + g
                u = g + mu * buffer[name]
            else:
                g = mean(name, descent)
                buffer[name] = mu * buffer[name] + g
                u = M(name, [g + mu * buffer[name]])
            theta[name] = theta[name] - lr * u
    for name, p in trained(models[0]).items():
        torch.testing.assert_close(p, theta[name], rtol=1e-5, atol=2e-6)


def test_the_orders_differ_for_iso_c() -> None:
    results = []
    for order in ("merge_then_momentum", "momentum_then_merge"):
        models = crew()
        simulation = simulate(models, "iso_c", order=order)
        for round_ in range(3):
            for r, model in enumerate(models):
                wander(model, r, round_)
            simulation.sync()
        results.append(models[0][1].weight.detach().clone())
    assert float(torch.dist(*results) / results[0].norm()) > 0.01


@pytest.mark.parametrize("method", sorted(set(METHODS) - set(SUM)))
def test_momentum_first_needs_a_method_of_the_sum(method: str) -> None:
    with pytest.raises(MethodError, match="momentum cannot come before"):
        simulate(crew(), method, order="momentum_then_merge")
    with pytest.raises(MethodError, match="momentum cannot come before"):
        LoopedMerger(uneven(), method, order="momentum_then_merge")


def test_momentum_first_refuses_weight_decay() -> None:
    with pytest.raises(MethodError, match="weight decay"):
        simulate(
            crew(),
            "iso_c",
            order="momentum_then_merge",
            outer=lambda params: SGD(params, lr=1.0, weight_decay=0.1),
        )


def test_a_factory_stands_alone() -> None:
    with pytest.raises(MethodError, match="outer_lr"):
        simulate(crew(), "iso_c", outer=lambda params: SGD(params, lr=1.0), outer_lr=0.5)


DEFAULTS = {
    "average": (0.7, 0.9),
    "task_arithmetic": (0.7, 0.9),
    "iso_c": (1.8, 0.8),
    "iso_c_ns": (1.8, 0.8),
    "iso_c_fast": (1.8, 0.8),
    "iso_cts": (3.1, 0.0),
    "tsv": (0.6 * 4, 0.0),
    "dare": (1.5, 0.0),
    "dare_ties": (1.5, 0.0),
    "ties": (0.7, 0.0),
}


@pytest.mark.parametrize("method", DEFAULTS)
def test_outer_defaults_are_the_published_ones(method: str) -> None:
    lr, momentum = DEFAULTS[method]
    (group,) = simulate(crew(4), method).outer_optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (lr, momentum, momentum > 0)


def test_outer_settings_replace_the_defaults_one_by_one() -> None:
    (group,) = simulate(crew(), "iso_c", outer_lr=0.9).outer_optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.9, 0.8, True)
    (group,) = simulate(
        crew(), "iso_c", outer_momentum=0.5, nesterov=False
    ).outer_optimizer.param_groups
    assert (group["lr"], group["momentum"], group["nesterov"]) == (1.8, 0.5, False)


def flat_model() -> nn.Module:
    """Return a model of matrices alone, as Muon wants them."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 24, bias=False), nn.Linear(24, 8, bias=False))


FACTORIES = {
    "adam": lambda params: Adam(params, lr=0.01),
    "sgd": lambda params: SGD(params, lr=0.7, momentum=0.9, nesterov=True),
    "muon": lambda params: Muon(params, lr=0.02, weight_decay=0.0),
}
SCHEDULES = {
    "step": lambda optimizer: StepLR(optimizer, step_size=2, gamma=0.5),
    "lambda": lambda optimizer: LambdaLR(optimizer, lambda k: 1.0 / (1 + k)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("factory", FACTORIES)
def test_any_torch_optimizer_and_schedule(factory: str, schedule: str) -> None:
    """As if its parameters were the masters and its gradients minus the merged deltas; bits."""
    models = [flat_model() for _ in range(WORKERS)]
    simulation = simulate(models, "average", outer=FACTORIES[factory])
    scheduler = SCHEDULES[schedule](simulation.outer_optimizer)
    theta = trained(models[0])
    reference = FACTORIES[factory](list(theta.values()))
    reference_scheduler = SCHEDULES[schedule](reference)
    for round_ in range(5):
        anchor = trained(models[0])
        zero = {n: torch.zeros_like(p) for n, p in anchor.items()}
        for r, model in enumerate(models):
            wander(model, r, round_)
        delta = merge(zero, deltas_of(models, anchor), "average", weights="mean")
        simulation.sync()
        scheduler.step()
        for name, p in theta.items():
            p.grad = -delta[name]
        reference.step()
        reference_scheduler.step()
        assert all(same(trained(m), {n: p.detach() for n, p in theta.items()}) for m in models)


def test_weights_by_tokens() -> None:
    models = crew()
    simulation = simulate(models, "average", sync_every=2, weights="tokens", **PLAIN)
    anchor = trained(models[0])
    tokens = [(10, 30), (5, 15), (0, 40)]
    for step in range(2):
        for r, model in enumerate(models):
            wander(model, r, step)
        if step == 1:
            deltas = deltas_of(models, anchor)
        report = simulation.step(tokens=[t[step] for t in tokens])
    assert report is not None
    assert report.tokens == 100
    for name, p in trained(models[0]).items():
        expected = sum(w * d[name] for w, d in zip((0.4, 0.2, 0.4), deltas, strict=True))
        torch.testing.assert_close(p, anchor[name] + expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("workers", [1, 2])
def test_gradients_are_left_alone(workers: int) -> None:
    models = crew(workers)
    simulation = simulate(models, "iso_c", sync_every=1)
    grads = []
    for r, model in enumerate(models):
        wander(model, r, 0)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.5)
            grads.append((p, p.grad))
    assert simulation.step() is not None
    for p, grad in grads:
        assert p.grad is grad
        assert bool((grad == 0.5).all())


def test_parameters_keep_their_storage() -> None:
    """Fused optimizers, CUDA graphs and compiled code hold on to it."""
    models = crew()
    simulation = simulate(models, "iso_c")
    before = [p.data_ptr() for m in models for p in m.parameters()]
    for r, model in enumerate(models):
        wander(model, r, 0)
    simulation.sync()
    assert [p.data_ptr() for m in models for p in m.parameters()] == before


def test_dare_draws_by_worker_and_round() -> None:
    """Worker r's mask is that of its own number, also where a worker before it is left out."""
    models = crew()
    simulation = simulate(models, "dare", drop_rate=0.5, seed=3, nonfinite="leave_out", **PLAIN)
    drops = []
    for round_ in range(2):
        anchor = trained(models[0])["1.weight"]
        with torch.no_grad():
            for model in models:
                model[1].weight += 1.0
            if round_ == 1:
                models[0][1].weight[0, 0] = torch.nan
        report = simulation.sync()
        workers = [0, 1, 2] if round_ == 0 else [1, 2]
        assert report.participants == len(workers)
        keeps = [
            keep_mask(anchor.numel(), 0.5, seed=3, round=round_, worker=r, name="1.weight")
            for r in workers
        ]
        expected = sum(k.float() for k in keeps).view_as(anchor) / 0.5 / len(workers)
        moved = models[0][1].weight.detach() - anchor
        torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-6)
        drops.append(moved)
    assert not torch.equal(*drops)


class Tied(nn.Module):
    """A head tied to the embedding, a frozen layer, and a LoRA on another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(17, 8)
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)
        self.lora_A = nn.Linear(8, 2, bias=False)
        self.lora_B = nn.Linear(2, 8, bias=False)
        self.head = nn.Linear(8, 17, bias=False)
        self.head.weight = self.embed.weight


def test_frozen_tied_and_lora_parameters() -> None:
    models = [Tied() for _ in range(2)]
    simulation = simulate(models, "iso_c", **PLAIN)
    anchor = values(models[0])
    for r, model in enumerate(models):
        wander(model, r, 0)
    deltas = deltas_of(models, anchor)
    assert simulation.sync().tensors == 3  # the embedding once, and two factors
    after = values(models[0])
    for name in ("frozen.weight", "frozen.bias"):
        assert torch.equal(after[name], anchor[name])
    assert models[0].head.weight is models[0].embed.weight
    pairs = {"embed.weight": iso_c, "lora_A.weight": mean, "lora_B.weight": mean}
    for name, M in pairs.items():
        expected = anchor[name] + M(name, [d[name] for d in deltas])
        torch.testing.assert_close(after[name], expected, rtol=1e-5, atol=1e-6)


def lookahead(merger: LoopedMerger, model: nn.Module, worker: int) -> float:
    """Return how far five rounds of one worker are from θ ← θ + η·(θ_fast − θ), with Nesterov."""
    (group,) = merger.outer_optimizer.param_groups
    lr, mu = group["lr"], group["momentum"]
    theta = trained(model)
    buffer = {n: torch.zeros_like(p) for n, p in theta.items()}
    for round_ in range(5):
        anchor = trained(model)
        wander(model, worker, round_)
        (delta,) = deltas_of([model], anchor)
        merger.sync()
        for name in theta:
            buffer[name] = mu * buffer[name] + delta[name]
            theta[name] = theta[name] + lr * (delta[name] + mu * buffer[name])
    return max(float((p - theta[n]).abs().max()) for n, p in trained(model).items())


ALONE = [{"outer_lr": 0.5, "outer_momentum": 0.0}, {"outer_lr": 0.7, "outer_momentum": 0.6}]


@pytest.mark.parametrize("settings", ALONE, ids=["lookahead", "snoo"])
def test_one_worker_without_a_group(settings: dict[str, float]) -> None:
    model = uneven()
    assert lookahead(LoopedMerger(model, "average", **settings), model, 0) < 1e-6


def in_groups(rank: int, world: int) -> list[str]:
    """Return what is wrong with groups of one, and with schedulers where little is owned."""
    import torch.distributed as dist

    wrong = []
    groups = [dist.new_group([r]) for r in range(world)]
    for settings in ALONE:
        model = uneven()
        merger = LoopedMerger(model, "average", group=groups[rank], **settings)
        if not lookahead(merger, model, rank) < 1e-6:
            wrong.append(f"one worker in a group: {settings}")

    # One tensor: only one of the ranks owns anything.
    model, models = nn.Linear(6, 4, bias=False), [nn.Linear(6, 4, bias=False) for _ in range(world)]
    for schedule, make in SCHEDULES.items():
        for m in (model, *models):
            nn.init.ones_(m.weight)
        merger, simulation = LoopedMerger(model, "iso_c"), simulate(models, "iso_c")
        schedulers = [make(merger.outer_optimizer), make(simulation.outer_optimizer)]
        for round_ in range(4):
            wander(model, rank, round_)
            for r, simulated in enumerate(models):
                wander(simulated, r, round_)
            merger.sync()
            simulation.sync()
            for scheduler in schedulers:
                scheduler.step()
        if schedulers[0].get_last_lr() != schedulers[1].get_last_lr():
            wrong.append(f"{schedule}: {schedulers[0].get_last_lr()}")
        if not torch.equal(model.weight, models[0].weight):
            wrong.append(f"{schedule}: other weights")
    return wrong


@pytest.mark.distributed
def test_a_group_of_one_and_a_rank_that_owns_nothing() -> None:
    assert run_ranks(2, in_groups) == [[], []]


@pytest.mark.parametrize("method", ["iso_c", "iso_c_fast", "iso_c_ns", "average"])
@pytest.mark.parametrize("limit", [1, 20_000, 1 << 20])
def test_matrices_of_one_shape_at_once_are_each_alone(
    method: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the owner works on an accelerator, of which there is none in the tests."""
    shapes = [(24, 16), (16, 24), (24, 16), (24, 16), (5,)]

    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        parameters = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        return [nn.ParameterList(parameters), copy.deepcopy(nn.ParameterList(parameters))]

    alone, together = models(), models()
    loops = [simulate(m, method, sync_every=1, bucket_bytes=limit) for m in (alone, together)]
    for step in range(2):
        for r in range(2):
            wander(alone[r], r, step)
            wander(together[r], r, step)
        loops[0].step()
        with monkeypatch.context() as patch:
            patch.setattr(Round, "_on_accelerator", lambda self: True)
            loops[1].step()
    assert same(values(alone[0]), values(together[0]))
