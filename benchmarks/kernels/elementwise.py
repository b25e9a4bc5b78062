"""Exact selection, TIES and DARE beside straightforward code and the memory's own speed.

``python -m benchmarks.kernels.elementwise [--out DIR] [--smoke]``

One thread, process CPU time, all candidates in turn in every round; a ratio is the median over
rounds. Results of candidates that compute the same are compared bit for bit. The compiled
kernels are measured where numba is installed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import click
import numpy as np
import torch
from torch import Tensor

from benchmarks.kernels.timing import ratio, rounds
from benchmarks.machine import machine
from mergekit_iso import merge
from mergekit_iso.kernels import compiled, random
from mergekit_iso.kernels.memory import keep_freed_memory, room_for
from mergekit_iso.kernels.sparsify import kth_magnitude
from mergekit_iso.methods import TIES
from mergekit_iso.methods.base import Context, DeltaStream, Worker, merge_unit
from mergekit_iso.tensors import describe

CHUNK = 1 << 18
DENSITY = 0.2
DROP_RATE = 0.1
NAME = "layer.weight"


@dataclass(frozen=True)
class Line:
    """One candidate: its median milliseconds, ns per element, and ratios to the reference."""

    task: str
    candidate: str
    milliseconds: float
    ns_per_element: float
    times_reference: float
    rounds: int


@dataclass(frozen=True)
class Task:
    """Candidates for one task; times are given as multiples of ``reference``'s."""

    name: str
    elements: int
    reference: str
    work: Mapping[str, Callable[[], object]]
    fewest: int

    def lines(self) -> list[Line]:
        """Measure every candidate."""
        seconds = rounds(self.work, clock=process_time, budget=0, fewest=self.fewest)
        return [
            Line(
                self.name,
                candidate,
                median(s) * 1e3,
                median(s) / self.elements * 1e9,
                1 / ratio(seconds[self.reference], s),
                len(s),
            )
            for candidate, s in seconds.items()
        ]


@contextmanager
def plain() -> Iterator[None]:
    """Run without the compiled kernels, also where numba is installed."""
    worthwhile = compiled._WORTHWHILE
    compiled._WORTHWHILE = 1 << 62
    try:
        yield
    finally:
        compiled._WORTHWHILE = worthwhile


def both(name: str, run: Callable[[], object]) -> dict[str, Callable[[], object]]:
    """Return a candidate without the compiled kernels and, where there are any, with them."""

    def without() -> object:
        with plain():
            return run()

    work: dict[str, Callable[[], object]] = {name: without}
    if find_spec("numba") is not None:
        run()  # compiles
        work[f"{name}, compiled"] = run
    return work


def normal(numel: int, seed: int) -> Tensor:
    """Return Gaussian entries of the size of a fine-tune's."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.01


def selection(numel: int, repeats: int) -> Iterator[Task]:
    """The k-th magnitude, keeping 20 %, beside one reading pass."""
    x = normal(numel, 0)
    chunks = torch.split(x, CHUNK)
    keep = int(numel * DENSITY)
    k = numel - keep + 1

    def ours() -> float:
        return kth_magnitude(chunks, k)

    def partition() -> float:
        return float(np.partition(np.abs(x.numpy()), k - 1)[k - 1])

    def kthvalue() -> float:
        return float(torch.kthvalue(x.abs(), k).values)

    def topk() -> float:
        return float(torch.topk(x.abs(), keep).values[-1])

    if not ours() == partition() == kthvalue() == topk():
        raise AssertionError("the k-th magnitudes differ")
    quick = both("kth_magnitude", ours) | {"np.partition": partition}
    read = {"one read": x.sum}
    yield Task("k-th magnitude", numel, "one read", read | quick, repeats)
    slow = {"torch.kthvalue": kthvalue, "torch.topk": topk}
    yield Task("k-th magnitude", numel, "one read", read | slow, 1)


def topk_ties(deltas: list[Tensor]) -> Tensor:
    """TIES over flat task vectors as merging libraries write it: topk, stack, mask."""
    keep = int(deltas[0].numel() * DENSITY)
    trimmed = []
    for delta in deltas:
        mask = torch.zeros_like(delta)
        mask[torch.topk(delta.abs(), keep).indices] = 1
        trimmed.append(delta * mask)
    stack = torch.stack(trimmed)
    elected = stack.sum(0).sign()
    elected = torch.where(elected == 0, elected.sum().sign(), elected)
    agrees = torch.where(elected > 0, stack > 0, stack < 0)
    return (stack * agrees).sum(0) / agrees.sum(0).clamp(min=1)


def ties(numel: int, workers: int, repeats: int) -> Iterator[Task]:
    """Whole-model TIES beside nine passes: a read per threshold and per merge, and a write."""
    base, deltas = normal(numel, 100) * 100, [normal(numel, t) for t in range(workers)]
    models = [{NAME: d} for d in deltas]
    zeros, written = torch.zeros(numel), torch.empty(numel)
    method = TIES(density=DENSITY)
    info = describe(NAME, (numel,), torch.float32)
    cut = [torch.split(d, CHUNK) for d in deltas]

    def passes() -> None:
        for _ in range(2):
            for delta in deltas:
                delta.sum()
        written.fill_(1.0)

    def stream(t: int) -> DeltaStream:
        return DeltaStream(numel, lambda: ((info, chunk, Context()) for chunk in cut[t]))

    def thresholds() -> list[Any]:
        return [method.measure(stream(t)) for t in range(workers)]

    def kernels() -> Tensor:
        stats = thresholds()
        ctx = Context(weights=(1.0,) * workers)
        result = room_for(base)
        for new, *pieces in zip(torch.split(result, CHUNK), *cut, strict=True):
            crew = [Worker(t, d, stats[t]) for t, d in enumerate(pieces)]
            new.copy_(merge_unit(method, crew, info, ctx))
        return result

    def whole() -> Tensor:
        return merge({NAME: base}, models, method)[NAME]

    with plain():
        merged = merge({NAME: zeros}, models, method)[NAME]
    if not torch.equal(kernels(), merged):
        raise AssertionError("the merges differ")
    # topk keeps one entry less than the authors' rule in each delta.
    if int((topk_ties(deltas) != merged).sum()) > 2 * workers:
        raise AssertionError("the code by topk merges something else")
    work: dict[str, Callable[[], object]] = {"nine passes": passes}
    work |= both("thresholds", thresholds)
    work |= both("thresholds and merge", kernels)
    work |= both("merge()", whole)
    yield Task("TIES", numel, "nine passes", work, repeats)
    slow = {"by topk": lambda: topk_ties(deltas)}
    work = {"nine passes": passes} | both("thresholds and merge", kernels) | slow
    yield Task("TIES beside topk", numel, "thresholds and merge", work, min(2, repeats))


def dare(numel: int, repeats: int) -> Iterator[Task]:
    """Drop and rescale, beside torch.bernoulli, in the same chunks."""
    chunks = torch.split(normal(numel, 0), CHUNK)
    written = torch.empty(numel)

    def counter() -> None:
        for i, chunk in enumerate(chunks):
            kept = random.drop(
                chunk, DROP_RATE, seed=0, round=0, worker=0, name=NAME, offset=i * CHUNK
            )
            kept.div_(1 - DROP_RATE)

    def bernoulli() -> None:
        for chunk in chunks:
            keep = torch.bernoulli(torch.full_like(chunk, 1 - DROP_RATE))
            (chunk * keep).div_(1 - DROP_RATE)

    def passes() -> None:
        for chunk in chunks:
            chunk.sum()
        written.fill_(1.0)

    work = {"read and write": passes} | both("drop", counter) | {"torch.bernoulli": bernoulli}
    yield Task("DARE", numel, "read and write", work, repeats)


def table(lines: list[Line]) -> str:
    """Return the lines as Markdown."""
    rows = ["| task | candidate | ms | ns per element | times the reference |", "|" + "---|" * 5]
    rows += [
        f"| {line.task} | {line.candidate} | {line.milliseconds:.1f} | "
        f"{line.ns_per_element:.2f} | {line.times_reference:.2f} |"
        for line in lines
    ]
    return "\n".join(rows)


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results.")
@click.option("--smoke", is_flag=True, help="Small inputs, to see that it runs.")
def main(out: Path | None, smoke: bool) -> None:
    """Measure, print a table, and write elementwise.json to OUT."""
    torch.set_num_threads(1)
    keep_freed_memory()
    size, repeats = (400_000, 1) if smoke else (100_000_000, 7)
    lines: list[Line] = []
    for tasks in (selection(size, repeats), ties(size // 4, 4, repeats), dare(size, repeats)):
        for task in tasks:
            lines += task.lines()
    click.echo(table(lines))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        record = {
            "benchmark": "elementwise",
            "machine": machine() | {"numpy": np.__version__, "numba": _version("numba")},
            "clock": "process CPU time, one thread",
            "lines": [vars(line) for line in lines],
        }
        (out / "elementwise.json").write_text(json.dumps(record, indent=1) + "\n")


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    from importlib.metadata import version

    return version(package)


if __name__ == "__main__":
    main()
