"""Work that goes on beside the training loop."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")


def begin(work: Callable[[], T], device: torch.device) -> Future[T]:
    """Start ``work`` in a thread of its own, and on a stream of its own on a CUDA device.

    It begins after what is queued on the caller's stream, and is over when the future is.
    """
    stream = None
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(device))

    def run() -> T:
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            result = work()
            if stream is not None:
                stream.synchronize()
            return result

    # Threads have a setting of their own for this, and products' last bits can depend on it.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,))
    try:
        return pool.submit(run)
    finally:
        pool.shutdown(wait=False)


def done(work: Callable[[], T]) -> Future[T]:
    """Do ``work`` at once, and return what :func:`begin` would."""
    future: Future[T] = Future()
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
    return future
