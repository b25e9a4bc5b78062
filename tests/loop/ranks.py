"""Real processes over gloo: runs a function on every rank and returns what each of them did."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# A server imports the slow packages once; every rank is forked from it.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "torch.distributed.tensor", "mergekit_iso.loop"])

GROUP_TIMEOUT = 20.0


@dataclass(frozen=True)
class Outcome:
    """What one rank returned, or the error it raised (class name, message, traceback)."""

    value: Any = None
    error: tuple[str, str, str] | None = None
    exitcode: int | None = 0


def run_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = GROUP_TIMEOUT,
) -> list[Any]:
    """Return ``function(rank, world, *args)`` of every rank; fail the test where one raises.

    The function must be importable (a module's own), its result must be picklable.
    """
    outcomes = try_ranks(world, function, *args, timeout=timeout, group_timeout=group_timeout)
    for rank, outcome in enumerate(outcomes):
        if outcome.error is not None:
            pytest.fail(f"rank {rank}: {outcome.error[2]}", pytrace=False)
        assert outcome.exitcode == 0, f"rank {rank} exited with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def try_ranks(
    world: int,
    function: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = GROUP_TIMEOUT,
) -> list[Outcome]:
    """As ``run_ranks``, but return errors and deaths; a rank that hangs fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        init = f"file://{Path(folder) / 'store'}"
        pipes = [_CONTEXT.Pipe(duplex=False) for _ in range(world)]
        processes = [
            _CONTEXT.Process(
                target=_rank,
                args=(rank, world, init, group_timeout, pipes[rank][1], function, args),
            )
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        for _, sender in pipes:
            sender.close()
        deadline = time.monotonic() + timeout
        try:
            return [
                _result(rank, process, pipe[0], deadline)
                for rank, (process, pipe) in enumerate(zip(processes, pipes, strict=True))
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(rank: int, process: Any, receiver: Connection, deadline: float) -> Outcome:
    outcome = Outcome(exitcode=None)
    if not receiver.poll(max(0.0, deadline - time.monotonic())):
        pytest.fail(f"rank {rank} hangs", pytrace=False)
    try:
        outcome = receiver.recv()
    except EOFError:  # it died without a word
        process.join(max(0.0, deadline - time.monotonic()))
        return Outcome(exitcode=process.exitcode)
    return outcome


def _rank(
    rank: int,
    world: int,
    init: str,
    group_timeout: float,
    sender: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=init,
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = Outcome(function(rank, world, *args))
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        outcome = Outcome(error=(type(error).__name__, str(error), trace))
    sender.send(outcome)
    sender.close()
    # Peers may be gone, and tearing a group down waits for them.
    os._exit(0)
