"""One process per worker over gloo on this machine, each on one thread."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(world: int, function: Callable[..., Any], *args: Any) -> Any:
    """Return what ``function(rank, world, *args)`` returns on rank 0; raise what any rank does."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, folder, function, args), nprocs=world)
        return torch.load(Path(folder) / "result", weights_only=False)


def _rank(
    rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
    )
    result = function(rank, world, *args)
    if rank == 0:
        torch.save(result, Path(folder) / "result")
    dist.barrier()
    dist.destroy_process_group()
