"""Coded deltas: how far off they are, and that what rounding takes is given back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mergekit_iso import LoopedMerger, simulate
from mergekit_iso.loop.contribution import Source
from mergekit_iso.loop.parameters import Slot
from mergekit_iso.loop.wire import BFloat16, Int8Rows, codec_for
from mergekit_iso.methods import get_method
from mergekit_iso.tensors import describe

from .models import same, uneven, values, wander
from .ranks import run_ranks

SHAPES = st.sampled_from([(), (1,), (7,), (3, 5), (1, 9), (9, 1), (2, 3, 4)])
CODECS = [BFloat16(), Int8Rows()]


@st.composite
def deltas(draw: st.DrawFn) -> Tensor:
    """Draw a delta whose rows are of sizes 1e-20 … 1e20, some of them zero."""
    shape = draw(SHAPES)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(shape, generator=generator)
    rows = (*shape[:-1], 1) if shape else ()
    powers = torch.randint(-20, 21, rows, generator=generator).double()
    x = (x.double() * 10.0**powers).float()
    return torch.where(torch.rand(rows, generator=generator) < 0.2, 0.0, x)


@given(deltas())
def test_bfloat16_is_within_half_an_ulp(delta: Tensor) -> None:
    codec = BFloat16()
    payload = codec.encode(delta)
    assert len(payload) == codec.nbytes(tuple(delta.shape)) == 2 * delta.numel()
    error = (codec.decode(payload, tuple(delta.shape)) - delta).abs()
    assert bool((error <= delta.abs() * 2.0**-8).all())


@given(deltas())
def test_int8_is_within_half_a_level_of_the_row(delta: Tensor) -> None:
    codec = Int8Rows()
    payload = codec.encode(delta)
    assert len(payload) == codec.nbytes(tuple(delta.shape))
    decoded = codec.decode(payload, tuple(delta.shape))
    assert decoded.shape == delta.shape
    level = (delta.abs().amax(-1, keepdim=True) if delta.dim() else delta.abs()) / 127
    assert bool(((decoded - delta).abs() <= level * 0.5001).all())
    torch.testing.assert_close(  # the largest of a row survives
        decoded.abs().amax(-1) if delta.dim() else decoded.abs(),
        delta.abs().amax(-1) if delta.dim() else delta.abs(),
        rtol=1e-6,
        atol=0,
    )


@pytest.mark.parametrize("codec", CODECS)
@given(deltas())
def test_what_was_decoded_is_coded_without_loss(codec: BFloat16 | Int8Rows, delta: Tensor) -> None:
    """And the opposite delta to the opposite: a code favours no sign."""
    shape = tuple(delta.shape)
    decoded = codec.decode(codec.encode(delta), shape)
    torch.testing.assert_close(
        codec.decode(codec.encode(decoded), shape), decoded, rtol=1e-6, atol=0
    )
    assert torch.equal(codec.decode(codec.encode(-delta), shape), -decoded)


@pytest.mark.parametrize("codec", CODECS)
def test_the_sum_of_what_was_sent_tracks_the_sum_of_deltas(codec: BFloat16 | Int8Rows) -> None:
    """Error feedback: what rounding took of all rounds is never more than that of one."""
    torch.manual_seed(0)
    slot = Slot(0, describe("w", (16, 24), torch.float32))
    anchor = torch.zeros(16, 24)
    source = Source(0, [torch.zeros(16, 24)], [anchor], [codec])
    wanted, sent = torch.zeros(16, 24), torch.zeros(16, 24)
    for _ in range(60):
        delta = torch.randn(16, 24) * 0.01 + 0.001
        source.values[0].copy_(delta)
        wanted += delta
        peeked = source.peek(slot).delta(anchor, torch.float32)
        shared = source.contribution(slot).delta(anchor, torch.float32)
        assert torch.equal(peeked, shared)
        sent += shared
        torch.testing.assert_close(source.residuals[0], wanted - sent, rtol=0, atol=1e-5)
    one_round = float((codec.decode(codec.encode(delta), (16, 24)) - delta).abs().max())
    assert float((wanted - sent).abs().max()) < 3 * one_round


WIRES = ["float32", "bfloat16", "int8"]


@pytest.mark.parametrize(
    ("method", "wire", "matrix", "vector"),
    [
        ("iso_c", "int8", BFloat16(), Int8Rows()),
        ("iso_c", "bfloat16", BFloat16(), BFloat16()),
        ("average", "int8", Int8Rows(), Int8Rows()),
        ("average", "float32", None, None),
    ],
)
def test_a_spectral_method_has_a_floor(
    method: str, wire: str, matrix: object, vector: object
) -> None:
    requires = get_method(method).requires
    infos = [describe("w", (4, 6), torch.float32), describe("b", (6,), torch.float32)]
    assert [codec_for(i, wire, requires) for i in infos] == [matrix, vector]


def test_a_model_as_narrow_as_the_wire_is_sent_itself() -> None:
    requires = get_method("iso_c").requires
    info = describe("w", (4, 6), torch.bfloat16)
    assert [codec_for(info, wire, requires) for wire in WIRES] == [None, None, None]
    mean = get_method("average").requires
    assert [codec_for(info, wire, mean) for wire in WIRES] == [None, None, Int8Rows()]


@pytest.mark.parametrize("wire", WIRES)
def test_a_coarse_wire_loses_nothing_in_the_long_run(wire: str) -> None:
    """Deltas far below a level of the code arrive all the same, some rounds later."""
    models = [nn.Linear(8, 4, bias=False) for _ in range(2)]
    simulation = simulate(models, "average", wire=wire, outer_lr=1.0, outer_momentum=0.0)
    start = models[0].weight.detach().clone()
    moved = torch.full((4, 8), 1e-4)
    moved[:, 0] = 0.1  # sets the level of every row to 8e-4
    for _ in range(40):
        with torch.no_grad():
            for model in models:
                model.weight += moved
        simulation.sync()
    torch.testing.assert_close(models[0].weight - start, 40 * moved, rtol=0, atol=3e-3)


def replicas(rank: int, world: int) -> list[str]:
    """Return where the owner's next step does not start from what it sent, by wire."""
    wrong = []
    for wire in WIRES:
        model = uneven(seed=rank)
        merger = LoopedMerger(model, "average", wire=wire, verify_every=1)
        for round_ in range(4):
            wander(model, rank, round_)
            merger.sync()
            with merger.eval_parameters():
                anchor = values(model)
            if not same(anchor, values(model)):
                wrong.append(f"{wire}: the anchor is not what was handed out")
        idle = merger.sync()  # nobody moved
        if idle.delta_norm != (0.0,) * world:
            wrong.append(f"{wire}: {idle.delta_norm}")
    return wrong


@pytest.mark.distributed
def test_replicas_are_equal_after_a_coded_return() -> None:
    """``verify_every`` compares checksums of what was landed; the anchor is that, everywhere."""
    assert run_ranks(2, replicas) == [[], []]
