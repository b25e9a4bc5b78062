"""A whole outer step of real processes over gloo: wall time, CPU time, memory and bytes.

    python -m benchmarks.loop.outer_step --out DIR [--only NAME] [--rounds 3] [--smoke]

Contestants take turns in the same processes; a round runs each once. A turn builds the loop
anew and takes three outer steps: an untimed one, one that is timed, and one whose memory and CPU
time by phase are measured. Before each the workers' parameters move by real deltas. ``one rank``
is the operator on all tensors by rank 0 alone, while the others wait.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, median
from time import perf_counter, process_time, thread_time
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mergekit_iso.loop import LoopedMerger, simulate

from ..machine import machine
from ..peers.gather_everything import GatherEverything
from .inputs import SMOKE, Size, delta_of, new_model
from .memory import peak_above
from .ranks import run_ranks

PEERS = ("gather_everything", "gather_each")
CONTESTANTS = ("average", "iso_c_fast", "iso_c", *PEERS)
# As many iterations as nobody takes: outer steps are asked for.
_NEVER = 1 << 30


@dataclass(frozen=True)
class Turn:
    """What one rank measured in one turn: seconds, and bytes of payload, control and memory."""

    wall: float
    cpu: float
    wall_phases: dict[str, float]
    cpu_phases: dict[str, float]
    sent: int
    control: int
    memory: int


@dataclass(frozen=True)
class Round:
    """A contestant's turn on every rank, and the operator's CPU seconds where one rank does all."""

    ranks: list[Turn]
    one_rank: float | None


def measure(
    rank: int, world: int, names: tuple[str, ...], rounds: int, size: Size, cache: Path
) -> dict[str, list[Round]]:
    """Return every contestant's rounds; called on every rank."""
    model = new_model(size)
    delta = delta_of(rank, size, cache)
    found: dict[str, list[Round]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            mine, alone = _turn(name, model, delta), None
            dist.barrier()
            if rank == 0 and name not in PEERS:
                alone = _one_rank(name, world, size, cache)
            everyone: list[Any] = [None] * world
            dist.all_gather_object(everyone, mine)
            found[name].append(Round(everyone, alone))
    return found


def _turn(name: str, model: nn.Module, delta: dict[str, Tensor]) -> Turn:
    step = _peer(name, model) if name in PEERS else _ours(name, model)
    for _ in range(2):  # the second is timed
        _move(model, delta)
        dist.barrier()
        start = perf_counter(), process_time()
        timed = step()
        wall, cpu = perf_counter() - start[0], process_time() - start[1]
    _move(model, delta)
    dist.barrier()
    measured: dict[str, Any] = {}
    with _in_cpu_time():
        memory = peak_above(lambda: measured.update(step()))
    return Turn(
        wall,
        cpu,
        timed["seconds"],
        measured["seconds"],
        timed["bytes_sent"],
        timed["bytes_control"],
        memory,
    )


def _ours(name: str, model: nn.Module) -> Callable[[], dict[str, Any]]:
    merger = LoopedMerger(model, name, sync_every=_NEVER)
    return lambda: merger.sync().record()


def _peer(name: str, model: nn.Module) -> Callable[[], dict[str, Any]]:
    peer = GatherEverything(model, at_once=name == "gather_everything")
    sent = sum(p.nbytes for p in model.parameters()) * (dist.get_world_size() - 1)
    return lambda: {"seconds": peer.sync(), "bytes_sent": sent, "bytes_control": 0}


def _one_rank(name: str, world: int, size: Size, cache: Path) -> float:
    models = [new_model(size) for _ in range(world)]
    deltas = [delta_of(r, size, cache) for r in range(world)]
    loop = simulate(models, name, sync_every=_NEVER)
    for _ in range(2):
        for model, delta in zip(models, deltas, strict=True):
            _move(model, delta)
        with _in_cpu_time():
            seconds = loop.sync().seconds
    return seconds["operator"]


@torch.no_grad()
def _move(model: nn.Module, delta: dict[str, Tensor]) -> None:
    for name, p in model.named_parameters():
        p += delta[name]


@contextmanager
def _in_cpu_time() -> Iterator[None]:
    """Have the stopwatches of both sides count CPU time of their thread, the only one at work."""
    clock = "perf_counter"
    with (
        patch(f"mergekit_iso.loop.report.{clock}", thread_time),
        patch(f"benchmarks.peers.gather_everything.{clock}", thread_time),
    ):
        yield


def summary(rounds: list[Round]) -> dict[str, Any]:
    """Return medians over rounds: of the slowest rank, or of all together where it says so."""
    operator = [[t.cpu_phases["operator"] for t in r.ranks] for r in rounds]
    phases = rounds[0].ranks[0].wall_phases
    result: dict[str, Any] = {
        "wall": median(max(t.wall for t in r.ranks) for r in rounds),
        "cpu_all_ranks": median(sum(t.cpu for t in r.ranks) for r in rounds),
        "wall_by_phase": {
            p: median(mean(t.wall_phases[p] for t in r.ranks) for r in rounds) for p in phases
        },
        "cpu_all_ranks_by_phase": {
            p: median(sum(t.cpu_phases[p] for t in r.ranks) for r in rounds) for p in phases
        },
        "peak_memory": median(max(t.memory for t in r.ranks) for r in rounds),
        "bytes_sent_mean": mean(t.sent for t in rounds[0].ranks),
        "bytes_control_mean": mean(t.control for t in rounds[0].ranks),
    }
    alone = [r.one_rank for r in rounds if r.one_rank is not None]
    if alone:
        result["operator_one_rank"] = median(alone)
        result["operator_all_ranks_of_one"] = median(
            sum(o) / a for o, a in zip(operator, alone, strict=True)
        )
        result["operator_slowest_of_one"] = median(
            max(o) / a for o, a in zip(operator, alone, strict=True)
        )
    return result


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/loop"))
@click.option("--only", multiple=True, help="A method or peer; default some of each.")
@click.option("--ranks", type=click.IntRange(2), default=4, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--smoke", is_flag=True, help="A tiny model, one round.")
def main(out: Path, only: tuple[str, ...], ranks: int, rounds: int, smoke: bool) -> None:
    """Measure outer steps and write one JSON for the model and number of ranks."""
    size = SMOKE if smoke else Size()
    cache = Path("build/loop/cache") if not smoke else out / "cache"
    parameters = sum(p.numel() for p in new_model(size).parameters())
    for rank in range(ranks):
        delta_of(rank, size, cache)
    file = out / f"outer-step-{size.label}-{ranks}r.json"
    record = json.loads(file.read_text()) if file.exists() else {"results": {}}
    found = run_ranks(ranks, measure, only or CONTESTANTS, 1 if smoke else rounds, size, cache)
    for name, turns in found.items():
        short = summary(turns)
        stamp = datetime.now(UTC).isoformat(timespec="seconds")
        record["results"][name] = {
            "summary": short,
            "rounds": [asdict(turn) for turn in turns],
            "measured": stamp,
        }
        click.echo(
            f"{name:<20}{short['wall']:>8.2f} s wall{short['peak_memory'] / 1e6:>8.0f} MB  "
            f"{short['bytes_sent_mean'] / 4 / parameters:.4f} P sent  "
            + " ".join(f"{p} {s:.2f}" for p, s in short["wall_by_phase"].items())
        )
        click.echo(
            f"{'':<20}CPU: "
            + " ".join(f"{p} {s:.2f}" for p, s in short["cpu_all_ranks_by_phase"].items())
            + f"; of one rank {short.get('operator_all_ranks_of_one')}"
            + f" {short.get('operator_slowest_of_one')}"
        )
    record = {
        "benchmark": "outer_step",
        "ranks": ranks,
        "backend": "gloo",
        "threads": 1,
        "model": asdict(size),
        "parameters": parameters,
        "machine": machine(),
        "results": record["results"],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
