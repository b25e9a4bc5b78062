"""What cannot work is one clear sentence on every rank, and no rank waits for another."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from mergekit_iso import LoopedMerger, simulate
from mergekit_iso.errors import IncompatibleError, MergekitIsoError, MethodError, SyncError

from .models import uneven, values, wander
from .ranks import try_ranks

WORLD = 2


def construct(rank: int, how: str) -> None:
    """Build mergers that do not fit together."""
    model = uneven()
    given: dict[str, Any] = {"method": "iso_c", "sync_every": 2}
    other: dict[str, Callable[[], object]] = {
        "name": lambda: model.register_parameter("more", nn.Parameter(torch.ones(2))),
        "shape": lambda: setattr(model, "0", nn.Embedding(38, 24)),
        "dtype": lambda: model.to(torch.bfloat16),
        "frozen": lambda: model.requires_grad_(False).get_parameter("1.bias").requires_grad_(True),
        "method": lambda: given.update(method="average"),
        "option": lambda: given.update(power=0.5),
        "no such option": lambda: given.update(density=0.5),
        "no such method": lambda: given.update(method="iso_d"),
        "nothing to train": lambda: model.requires_grad_(False),
        "setting": lambda: given.update(seed=1),
        "sync_every": lambda: given.update(sync_every=3),
        "outer_lr": lambda: given.update(outer_lr=0.1),
        "fragments": lambda: given.update(fragments=2),
        "outer": lambda: given.update(outer=lambda p: torch.optim.SGD(p, lr=1.0)),
    }
    if rank == 1:
        other[how]()
    LoopedMerger(model, **given)


CONSTRUCTED = {
    "name": "tensors: more is",
    "shape": r"tensors: 0\.weight is \[\[38, 24\], 'torch\.float32'\] and \[\[37, 24\]",
    "dtype": r"tensors: temperature is .*bfloat16.* and .*float32",
    "frozen": r"tensors: .* is missing",
    "method": "method: name is average and iso_c",
    "option": "method: power is 0.5 and 0.0",
    "setting": "settings: seed is 1 and 0",
    "sync_every": "settings: sync_every is 3 and 2",
    "outer_lr": "outer optimizer is",
    "fragments": "settings: fragments is 2 and 1",
    "outer": "outer optimizer is given there and",
}


def steps(rank: int, how: str) -> None:
    """Build a merger that fits, and use it wrongly in the second round."""
    model = uneven(seed=0)
    settings: dict[str, Any] = {"weights": "tokens"} if how == "no tokens" else {}
    merger = LoopedMerger(model, "iso_c", sync_every=2, **settings)
    for step in range(4):
        wander(model, rank, step)
        if step == 2 and rank == 1:
            misuse(model, how, merger)
        merger.step(tokens=0 if how == "no tokens" and step > 1 else 1)


def misuse(model: nn.Sequential, how: str, merger: LoopedMerger) -> None:
    if how == "frozen later":
        model[1].weight.requires_grad_(False)
    if how == "replaced":
        model[1].weight = nn.Parameter(model[1].weight.detach().clone())
    if how == "added":
        model.register_parameter("more", nn.Parameter(torch.ones(2)))
    if how == "NaN":
        with torch.no_grad():
            model[1].weight[0, 0] = math.nan
    if how == "extra step":
        merger._step -= 1  # as a rank that skipped an iteration
        merger._since = [n - 1 for n in merger._since]
        merger.sync()


ALONE = {
    "no such option": "density",
    "no such method": "there is no method",
    "nothing to train": "no trainable parameter",
}

STEPPED = {
    "frozen later": r"the trainable parameters of worker 1 changed .*, the first is 1\.weight",
    "replaced": r"the trainable parameters of worker 1 changed .*, the first is 1\.weight",
    "added": "the trainable parameters of worker 1 changed since the merger was made",
    "NaN": r"worker 1 has a NaN or infinity in 1\.weight",
    "extra step": "worker 1 is at step -1 of round 1 and worker 0 at step 2 of round 1",
    "no tokens": "weights='tokens' needs the tokens of a round, and none were reported",
}


def groups(rank: int, how: str) -> None:
    """Use process groups that cannot work."""
    model = uneven()
    if how == "foreign":
        groups_of_one = [dist.new_group([r]) for r in range(WORLD)]
        LoopedMerger(model, "iso_c", group=groups_of_one[1 - rank])
    if how == "two axes":
        LoopedMerger(model, "iso_c", group=init_device_mesh("cpu", (2, 1)))
    if how == "destroyed":
        merger = LoopedMerger(model, "iso_c", sync_every=1)
        start = values(model)
        dist.destroy_process_group()
        wander(model, rank, 0)
        try:
            merger.step()
        finally:
            assert all(torch.equal(x, start[n]) for n, x in values(model).items())
    if how == "destroyed before":
        group = dist.new_group([0, 1])
        dist.destroy_process_group(group)
        LoopedMerger(model, "iso_c", group=group)


GROUPS = {
    "foreign": "using the process group failed",
    "two axes": "the mesh across workers has 2 dimensions, and must have one",
    "destroyed": "the vote failed",
    "destroyed before": "using the process group failed",
}


def heard(rank: int, world: int, function: Callable[[int, str], None], how: str) -> tuple[str, str]:
    """Return the kind of error and its sentence."""
    try:
        function(rank, how)
    except MergekitIsoError as error:
        return type(error).__name__, f"{error}"
    return "", "nothing was wrong"


@pytest.mark.parametrize(
    ("function", "how", "kind", "sentence"),
    [
        *((construct, how, "IncompatibleError", said) for how, said in CONSTRUCTED.items()),
        *(
            (
                steps,
                how,
                {"NaN": "NonFiniteError", "no tokens": "SyncError"}.get(how, "IncompatibleError"),
                said,
            )
            for how, said in STEPPED.items()
        ),
        *((groups, how, "SyncError", said) for how, said in GROUPS.items()),
    ],
)
def test_every_rank_hears_one_sentence(
    function: Callable[[int, str], None], how: str, kind: str, sentence: str
) -> None:
    for outcome in try_ranks(WORLD, heard, function, how, timeout=40):
        assert outcome.error is None, outcome.error[2]
        found, said = outcome.value
        assert found == kind, said
        assert re.search(sentence, said), said
        assert "\n" not in said


@pytest.mark.parametrize("how", ALONE)
def test_one_ranks_own_mistake_is_heard_by_all(how: str) -> None:
    others, mistaken = try_ranks(WORLD, heard, construct, how, timeout=40)
    assert others.error is None, others.error[2]
    assert others.value[0] == "IncompatibleError"
    assert re.search(f"rank 1 cannot build its merger: .*{ALONE[how]}", others.value[1])
    assert mistaken.value[1] in others.value[1]


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ({"method": "iso_d"}, MethodError, "there is no method"),
        ({"densty": 0.5}, MethodError, "densty"),
        ({"sync_every": 0}, MethodError, "sync_every"),
        ({"wire": "int4"}, MethodError, "wire"),
        ({"order": "momentum"}, MethodError, "order"),
        ({"method": "ties", "order": "momentum_then_merge"}, MethodError, "each worker"),
        ({"exclude": ""}, MethodError, "exclude"),
        ({"bucket_bytes": 0}, MethodError, "bucket_bytes"),
        ({"outer": lambda p: torch.optim.SGD(p, 1.0), "outer_lr": 1.0}, MethodError, "outer"),
    ],
)
def test_settings_that_do_not_exist(
    given: dict[str, Any], error: type[Exception], sentence: str
) -> None:
    for build in (lambda: LoopedMerger(uneven(), **given), lambda: simulate([uneven()], **given)):
        with pytest.raises(error, match=sentence) as caught:
            build()
        assert "\n" not in str(caught.value)


def test_models_that_cannot_be_trained() -> None:
    with pytest.raises(IncompatibleError, match="no trainable parameter"):
        LoopedMerger(uneven().requires_grad_(False))
    with torch.device("meta"), pytest.raises(IncompatibleError, match="no plain values"):
        LoopedMerger(uneven())
    with pytest.raises(IncompatibleError, match="other tensors"):
        simulate([uneven(), nn.Linear(3, 3)])
    with pytest.raises(IncompatibleError, match="nothing to simulate"):
        simulate([])
    with pytest.raises(SyncError, match="using the process group failed"):
        LoopedMerger(uneven(), group=object())  # type: ignore[arg-type]
