"""Over gloo the loop gives what one process gives, bit for bit, in every worker."""

from __future__ import annotations

import pytest
import torch

from mergekit_iso import LoopedMerger, list_methods, simulate
from mergekit_iso.methods import get_method

from .models import same, uneven, values, wander
from .ranks import run_ranks

ROUNDS = 3
METHODS = sorted(m if isinstance(m, str) else m.name for m in list_methods())


def variants(method: str) -> list[dict[str, object]]:
    found: list[dict[str, object]] = [
        {},
        {"wire": "bfloat16"},
        {"wire": "int8"},
        {"bucket_bytes": 1},
        {"bucket_bytes": 5000, "deterministic": True},
    ]
    if get_method(method).requires.workers == "sum":
        found.append({"order": "momentum_then_merge"})
    return found


def train(rank: int, world: int) -> list[str]:
    """Return what differs between this worker's model and the simulation of all workers."""
    wrong = []
    for method in METHODS:
        for settings in variants(method):
            model, models = uneven(seed=rank), [uneven(seed=0) for _ in range(world)]
            merger = LoopedMerger(model, method, sync_every=2, verify_every=1, **settings)
            simulation = simulate(models, method, sync_every=2, **settings)
            for step in range(2 * ROUNDS):
                wander(model, rank, step)
                for r, simulated in enumerate(models):
                    wander(simulated, r, step)
                merger.step(tokens=rank + 1)
                simulation.step(tokens=[r + 1 for r in range(world)])
            if not all(same(values(model), values(simulated)) for simulated in models):
                wrong.append(f"{method} {settings}")
    return wrong


@pytest.mark.parametrize("world", [2, 3])
def test_distributed_equals_simulated(world: int) -> None:
    assert run_ranks(world, train) == [[]] * world


SUMS = [m for m in METHODS if get_method(m).requires.workers == "sum"]


def train_by_reduction(rank: int, world: int) -> list[str]:
    """Return what differs from the simulation where sums are formed on the way."""
    wrong = []
    for method in SUMS:
        for settings in ({}, {"bucket_bytes": 1}, {"order": "momentum_then_merge"}):
            model, models = uneven(seed=rank), [uneven(seed=0) for _ in range(world)]
            merger = LoopedMerger(model, method, sync_every=1, verify_every=1, **settings)
            # What nccl gets; gloo's reduce-scatter works too, but sends an all-reduce's bytes.
            merger._exchange.reduces = True
            simulation = simulate(models, method, sync_every=1, **settings)
            for step in range(ROUNDS):
                wander(model, rank, step)
                for r, simulated in enumerate(models):
                    wander(simulated, r, step)
                merger.step()
                simulation.step()
            expected = values(models[0])
            if not all(
                torch.allclose(x, expected[name], rtol=1e-5, atol=1e-6)
                for name, x in values(model).items()
            ):
                wrong.append(f"{method} {settings}")
    return wrong


def test_reduced_sums_equal_simulated() -> None:
    assert run_ranks(3, train_by_reduction) == [[]] * 3
