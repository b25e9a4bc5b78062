"""Who decides which tensor: a static, greedy balance of the operator's cost.

Every tensor has one owner, which alone runs the operator and the outer optimizer on it, so work
and state are divided by the number of ranks and all replicas receive the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace

from ..methods.base import Requires
from ..tensors import TensorInfo

# A polar factor costs about this many operations per m n r and r³, measured at r = 512 with sides
# in ratios from 1 to 62; an element-wise operation moves bytes for about this many of a product.
_LONG, _SQUARE = 8.0, 26.0
_ELEMENT = 50.0


def cost(info: TensorInfo, requires: Requires, workers: int) -> float:
    """Return what an operator costs on a tensor, relative to others.

    Spectral work on an m x n matrix with r = min(m, n) is counted as 8 m n r + 26 r³ operations,
    times the number of workers where the operator needs each delta; all else by elements.
    """
    elements = _ELEMENT * info.numel * workers
    if requires.unit != "matrix" or not info.spectral:
        return elements
    *batch, m, n = info.shape
    count = 1
    for b in batch:
        count *= b
    r = min(m, n)
    matrix = count * (_LONG * m * n * r + _SQUARE * r**3)
    return elements + matrix * (workers if requires.workers == "each" else 1)


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the owner of each item: dearest first, always to the rank with the least so far.

    Ties go to the lower item and rank, so that every process comes to the same result.
    """
    load = [(0.0, rank) for rank in range(ranks)]
    heapify(load)
    owners = [0] * len(costs)
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        total, rank = load[0]
        owners[item] = rank
        heapreplace(load, (total + costs[item], rank))
    return owners


def buckets(sizes: Sequence[int], owners: Sequence[int], limit: int) -> list[list[int]]:
    """Return all items in groups of at most ``limit`` bytes, drawn from every owner in turn.

    An item larger than the limit is a group of its own. Every item is in exactly one group.
    """
    queues: dict[int, list[int]] = {}
    for item, owner in enumerate(owners):
        queues.setdefault(owner, []).append(item)
    turns = [
        queue[turn]
        for turn in range(max(map(len, queues.values()), default=0))
        for _, queue in sorted(queues.items())
        if turn < len(queue)
    ]
    groups: list[list[int]] = []
    room = -1
    for item in turns:
        if not groups or sizes[item] > room:
            groups.append([])
            room = limit
        groups[-1].append(item)
        room -= sizes[item]
    return groups
