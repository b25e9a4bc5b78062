"""Workers of several ranks: what they hold together is what an unsharded worker would have."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from mergekit_iso import LoopedMerger, merge, simulate
from mergekit_iso.errors import IncompatibleError, SyncError
from mergekit_iso.methods import get_method

from .ranks import run_ranks, try_ranks
from .test_distributed import METHODS

ROUNDS = 2


def odd(seed: int) -> nn.Sequential:
    """Return a model whose rows don't divide by 2 or 3: a shard is smaller, or empty."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Embedding(37, 24), nn.Linear(24, 15), nn.Linear(15, 1))


def columns(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every matrix by columns and leave vectors whole, as tensor parallelism may."""
    for module in model:
        for name, p in list(module.named_parameters(recurse=False)):
            placement = Shard(1) if p.dim() == 2 else Replicate()
            value = distribute_tensor(p.detach(), mesh, [placement])
            module.register_parameter(name, nn.Parameter(value))


def lay_out(model: nn.Module, layout: str, mesh: DeviceMesh) -> nn.Module:
    """Return the model as one worker's ranks hold it."""
    if layout == "fsdp":
        for module in model:
            fully_shard(module, mesh=mesh["shards"])
        fully_shard(model, mesh=mesh["shards"])
    elif layout == "hsdp":
        fully_shard(model, mesh=mesh["copies", "shards"])
    elif layout == "columns":
        columns(model, mesh["shards"])
    elif layout == "ddp":
        return DistributedDataParallel(model, process_group=mesh["shards"].get_group())
    return model


def full(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


@torch.no_grad()
def wander(model: nn.Module, worker: int, step: int) -> None:
    """Move every parameter as inner steps might; all ranks of a worker by the same."""
    generator = torch.Generator().manual_seed(1000 * worker + step)
    for p in model.parameters():
        change = 0.01 * torch.randn(p.shape, generator=generator)
        if isinstance(p, DTensor):
            change = distribute_tensor(change, p.device_mesh, p.placements)
        p.add_(change)


def variants(method: str) -> list[dict[str, object]]:
    """Return settings of the loop to try."""
    found: list[dict[str, object]] = [{}, {"wire": "bfloat16", "bucket_bytes": 1000}]
    if get_method(method).requires.workers == "sum":
        found.append({"order": "momentum_then_merge"})
    return found


def train(
    rank: int, world: int, layout: str, names: tuple[str, ...], shape: tuple[int, ...]
) -> list[str]:
    """Return what differs between this worker's model and the simulation of whole workers."""
    axes = ("workers", "copies", "shards") if len(shape) == 3 else ("workers", "shards")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=axes)
    inside = mesh["copies", "shards"] if len(shape) == 3 else mesh["shards"]
    workers, worker = shape[0], mesh.get_local_rank("workers")
    wrong = []
    for method in names:
        for settings in variants(method):
            model = lay_out(odd(seed=0), layout, mesh)
            models = [odd(seed=0) for _ in range(workers)]
            merger = LoopedMerger(
                model,
                method,
                sync_every=1,
                verify_every=1,
                group=mesh["workers"],
                shard_mesh=inside,
                **settings,
            )
            simulation = simulate(models, method, sync_every=1, **settings)
            for step in range(ROUNDS):
                wander(model, worker, step)
                for r, simulated in enumerate(models):
                    wander(simulated, r, step)
                merger.step()
                simulation.step()
            own = [full(p) for p in model.parameters()]
            if not all(map(torch.equal, own, models[0].parameters())):
                wrong.append(f"{method} {settings}")
    return wrong


@pytest.mark.parametrize("layout", ["fsdp", "columns", "ddp"])
def test_two_workers_of_two_ranks_equal_two_whole_ones(layout: str) -> None:
    names = tuple(METHODS) if layout == "fsdp" else ("average", "iso_c", "ties", "dare")
    assert run_ranks(4, train, layout, names, (2, 2)) == [[]] * 4


def test_uneven_and_empty_shards() -> None:
    assert run_ranks(3, train, "fsdp", ("iso_c", "ties"), (1, 3)) == [[]] * 3


@pytest.mark.slow
def test_hybrid_shards() -> None:
    assert run_ranks(8, train, "hsdp", ("iso_c", "ties", "dare"), (2, 2, 2)) == [[]] * 8


def shardwise(rank: int, world: int) -> float:
    """Return how far Iso-C of shards is from Iso-C of the whole matrix, relative to that."""
    delta = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    method = get_method("iso_c")
    model = nn.Linear(16, 24, bias=False)
    nn.init.zeros_(model.weight)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("workers", "shards"))
    fully_shard(model, mesh=mesh["shards"])
    merger = LoopedMerger(
        model,
        method,
        sync_every=1,
        group=mesh["workers"],
        shard_mesh=mesh["shards"],
        outer_lr=1.0,
        outer_momentum=0.0,
    )
    with torch.no_grad():
        model.weight.copy_(distribute_tensor(delta, mesh["shards"], [Shard(0)]))
    merger.step()
    base = {"weight": torch.zeros(12, 16)}
    parts = [merge(base, [{"weight": part}], method)["weight"] for part in delta.chunk(2)]
    whole = full(model.weight)
    return float((torch.cat(parts) - whole).norm() / whole.norm())


def test_a_shard_is_no_matrix() -> None:
    """The test above would see an operator that acts on shards."""
    assert min(run_ranks(2, shardwise)) > 0.1


def misuse(rank: int, world: int, how: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("workers", "shards"))
    model = odd(seed=0)
    fully_shard(model, mesh=mesh["shards"])
    given = {
        "no shard_mesh": {"group": mesh["workers"]},
        "axes swapped": {"group": mesh["shards"], "shard_mesh": mesh["workers"]},
        "no group": {"shard_mesh": mesh["shards"]},
    }[how]
    with pytest.raises((IncompatibleError, SyncError)) as caught:
        LoopedMerger(model, "iso_c", **given)
    return f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("how", ["no shard_mesh", "axes swapped", "no group"])
def test_misuse_is_one_sentence_on_every_rank(how: str) -> None:
    for outcome in try_ranks(4, misuse, how):
        assert outcome.error is None, outcome.error
        assert "shard_mesh" in outcome.value
