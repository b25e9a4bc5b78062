"""The Triton kernels against float64, in Triton's interpreter; test_triton_ops.py runs this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mergekit_iso.errors import MethodError
from mergekit_iso.kernels import polar, triton_ops
from mergekit_iso.kernels.polar import SCHEDULES
from mergekit_iso.kernels.random import keep_mask
from mergekit_iso.kernels.spectrum import normalised
from mergekit_iso.kernels.triton_ops import (
    Tile,
    drop_and_rescale,
    multiply,
    newton_schulz_symmetric,
    polar_factor_half,
    symmetric_polynomial,
    symmetric_product,
    tile_for,
)

HALVES = [torch.float16, torch.bfloat16]
DTYPES = [torch.float32, *HALVES]
SHAPES = [(1, 1), (3, 5), (64, 64), (65, 63), (130, 70), (2, 67, 33), (2, 3, 33, 65), (5, 17, 1)]
KEY = {"seed": 3, "round": 1, "worker": 2, "name": "model.layers.0.weight"}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def symmetric(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    D = random(*shape, seed=1)
    return (D + D.mT).to(dtype)


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def with_spectrum(sigma: Tensor, r: int, n: int) -> Tensor:
    U = torch.linalg.qr(random(r, r).double()).Q
    V = torch.linalg.qr(random(n, r, seed=1).double()).Q
    return ((U * sigma) @ V.T).float()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_product_is_that_of_float64_and_symmetric_to_the_bit(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    X = random(*shape, dtype=dtype)
    C = symmetric_product(X, out_dtype=torch.float32)
    assert relative(C, X.double() @ X.double().mT) < 5e-7
    assert torch.equal(C, C.mT)
    rounded = symmetric_product(X)
    assert rounded.dtype == dtype
    assert torch.equal(rounded, C.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_epilogue(dtype: torch.dtype) -> None:
    X, D = random(2, 67, 40, dtype=dtype), symmetric(2, 67, 67, dtype=dtype)
    kept = X.clone(), D.clone()
    C = symmetric_product(X, D=D, alpha=0.5, beta=-2.0, gamma=3.0, out_dtype=torch.float32)
    expected = 0.5 * X.double() @ X.double().mT - 2 * D.double() + 3 * torch.eye(67)
    assert relative(C, expected) < 5e-7
    assert torch.equal(C, C.mT)
    assert torch.equal(X, kept[0])
    assert torch.equal(D, kept[1])


def test_only_the_lower_half_of_the_added_matrix_counts() -> None:
    X, D = random(70, 9), symmetric(70, 70)
    expected = symmetric_product(X, D=D)
    assert torch.equal(symmetric_product(X, D=D.tril()), expected)


def test_product_of_two_that_commute() -> None:
    G = symmetric_product(random(70, 90) / 20)
    Z = symmetric_polynomial(G, 2.0, -1.5, 0.5)
    C = symmetric_product(Z, G)
    assert relative(C, Z.double() @ G.double()) < 5e-7
    assert torch.equal(C, C.mT)


def test_strides_are_respected() -> None:
    A = random(90, 2, 40)
    X = A.permute(1, 2, 0)
    assert not X.is_contiguous()
    assert torch.equal(symmetric_product(X), symmetric_product(X.contiguous()))


@pytest.mark.parametrize("tile", [Tile(16, 16, 4, 3), Tile(32, 64, 4, 3), Tile(128, 32, 8, 3)])
def test_any_tile_gives_the_product(tile: Tile) -> None:
    X = random(2, 100, 50)
    C = multiply(X, X, None, 1.0, 1.0, 0.0, "ieee", torch.float32, tile)
    assert relative(C, X.double() @ X.double().mT) < 5e-7
    assert torch.equal(C, C.mT)


def test_tiles_are_large_where_there_is_work_for_all() -> None:
    assert tile_for(torch.float16, 512, 1, "ieee").side == 64
    assert tile_for(torch.float16, 512, 64, "ieee").side == 128
    assert tile_for(torch.float16, 2048, 1, "ieee").side == 128


def test_every_tile_of_a_large_triangle_is_visited() -> None:
    x = random(330, 1)
    C = multiply(x, x, None, 1.0, 1.0, 0.0, "ieee", torch.float32, Tile(16, 16, 4, 3))
    assert torch.equal(C, x @ x.T)


def test_values_that_are_not_finite_stay_where_they_belong() -> None:
    X = random(2, 70, 20)
    X[0, 3, 4] = torch.nan
    C = symmetric_product(X)
    bad = C.isnan()
    assert bad[0, 3].all()
    assert bad[0, :, 3].all()
    assert bad.sum() == 2 * 70 - 1


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 5)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    X = torch.empty(shape)
    assert symmetric_product(X).shape == (*shape[:-1], shape[-2])
    assert newton_schulz_symmetric(X, SCHEDULES["muon5"]).shape == shape
    assert polar_factor_half(X).shape == shape


def test_refusals() -> None:
    X = random(4, 6)
    with pytest.raises(MethodError, match="float64"):
        symmetric_product(X.double())
    with pytest.raises(MethodError, match="float16"):
        symmetric_product(X, X.half())
    with pytest.raises(MethodError, match=r"\(4, 6\), \(6, 4\)"):
        symmetric_product(X, X.mT)
    with pytest.raises(MethodError, match=r"\(4, 6\), \(4, 6\), \(3, 3\)"):
        symmetric_product(X, D=torch.zeros(3, 3))
    with pytest.raises(MethodError, match="precision 'tf64'"):
        symmetric_product(X, precision="tf64")
    with pytest.raises(MethodError, match="float64"):
        drop_and_rescale(X.double(), 0.5, **KEY)


@pytest.mark.parametrize("dtype", DTYPES)
def test_polynomial(dtype: torch.dtype) -> None:
    G = symmetric_product((random(2, 70, 100) / 18).to(dtype))
    P = symmetric_polynomial(G, 3.9, -2.8, 0.5)
    E = G.double()
    expected = 3.9 * torch.eye(70) - 2.8 * E + 0.5 * E @ E
    assert relative(P, expected) < 1.5 * torch.finfo(dtype).eps
    assert torch.equal(P, P.mT)


@pytest.mark.parametrize("preset", sorted(SCHEDULES))
@pytest.mark.parametrize("shape", [(2, 40, 40), (33, 130)])
def test_iteration_is_that_of_polar(shape: tuple[int, ...], preset: str) -> None:
    A = random(*shape)
    X = A / torch.linalg.matrix_norm(A)[..., None, None]
    P = newton_schulz_symmetric(X, SCHEDULES[preset])
    assert relative(P, polar.newton_schulz(A, SCHEDULES[preset]).double()) < 2e-5


def test_legs_give_the_same_factor() -> None:
    A = with_spectrum(torch.logspace(0, -2, 40), 40, 130)
    X = A / A.norm()
    schedule = SCHEDULES["polar_express8"]
    one, two, three = (newton_schulz_symmetric(X, schedule, steps_per_leg=s) for s in (1, 2, 3))
    assert relative(two, one.double()) < 5e-5
    assert relative(three, one.double()) < 5e-4
    assert not torch.equal(two, one)


def test_renormalising_takes_any_norm_and_converges_further() -> None:
    A = random(64, 256)
    U, _, Vh = torch.linalg.svd(A.double(), full_matrices=False)
    # Three steps: few for singular values near 1/8, which division by ‖A‖_F leaves.
    schedule = SCHEDULES["polar_express8"][5:]
    plain = relative(newton_schulz_symmetric(A / A.norm(), schedule), U @ Vh)
    closer = relative(newton_schulz_symmetric(A * 3, schedule, renormalise=True), U @ Vh)
    assert closer < 0.2 * plain


def iso_error(A: Tensor) -> float:
    """Return the error of A's mean singular value times the factor, relative to that of SVD."""
    P = polar_factor_half(A)
    assert P.shape == A.shape
    assert P.dtype == A.dtype
    X, _ = normalised(A.float())
    X = X.double()
    U, sigma, Vh = torch.linalg.svd(X, full_matrices=False)
    scale = (P.double() * X).sum() / min(A.shape)
    return relative(scale * P.double(), sigma.mean() * U @ Vh)


@pytest.mark.parametrize("shape", [(64, 64), (64, 100), (40, 130), (130, 40)])
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_half_precision_on_gaussians(shape: tuple[int, int], scale: float) -> None:
    assert iso_error(random(*shape) * scale) < 1e-2


@pytest.mark.parametrize(("r", "n"), [(96, 96), (96, 200)])
def test_half_precision_to_condition_1000(r: int, n: int) -> None:
    index = torch.arange(1, r + 1, dtype=torch.float64)
    # So few rows feel float16's rounding of A more than large matrices do.
    assert iso_error(with_spectrum(1000 ** -(index.log() / index[-1].log()), r, n)) < 2.5e-2


def test_half_precision_of_a_batch_with_a_zero_matrix() -> None:
    A = random(3, 24, 60)
    A[1] = 0
    P = polar_factor_half(A)
    assert not P[1].any()
    for i in (0, 2):
        assert torch.allclose(P[i], polar_factor_half(A[i]), atol=2e-3)


@pytest.mark.parametrize("offset", [0, 1, 4097, 2**31 - 100, 2**32 - 100, 2**32, 5 * 2**32 - 7])
@pytest.mark.parametrize("drop_rate", [0.1, 0.5, 0.999, 1.0])
def test_drop_has_the_bits_of_the_mask(offset: int, drop_rate: float) -> None:
    x = random(501)
    keep = keep_mask(501, drop_rate, **KEY, offset=offset)
    got = drop_and_rescale(x, drop_rate, **KEY, offset=offset, divisor=0.7)
    assert torch.equal(got, torch.where(keep, x, 0.0) / 0.7)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("worker", [0, 7])
@pytest.mark.parametrize("name", ["a", "model.embed_tokens.weight"])
def test_drop_under_other_keys(seed: int, worker: int, name: str) -> None:
    x = torch.ones(3, 1700)
    keep = keep_mask(5100, 0.4, seed=seed, round=9, worker=worker, name=name)
    got = drop_and_rescale(x, 0.4, seed=seed, round=9, worker=worker, name=name)
    assert torch.equal(got != 0, keep.view(3, 1700))


@pytest.mark.parametrize("dtype", HALVES)
def test_drop_rounds_once(dtype: torch.dtype) -> None:
    x = random(300, dtype=dtype)
    keep = keep_mask(300, 0.3, **KEY)
    got = drop_and_rescale(x, 0.3, **KEY, divisor=0.7)
    assert torch.equal(got, (torch.where(keep, x.float(), 0.0) / 0.7).to(dtype))


def test_dropping_nothing_and_from_nothing() -> None:
    x = random(40)
    assert torch.equal(drop_and_rescale(x, 0.0, **KEY, divisor=1.0), x)
    assert drop_and_rescale(x[:0], 0.5, **KEY).shape == (0,)


def test_dropped_values_are_zero_whatever_they_were() -> None:
    x = torch.full((400,), torch.inf)
    got = drop_and_rescale(x, 0.5, **KEY)
    assert set(got.tolist()) == {0.0, torch.inf}


def test_the_compiler_keeps_the_operators_whole() -> None:
    schedule = SCHEDULES["quintic5"]
    X = random(2, 24, 40) / 40
    compiled = torch.compile(
        lambda X: newton_schulz_symmetric(X, schedule), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(X), newton_schulz_symmetric(X, schedule))


def test_the_interpreter_is_what_ran() -> None:
    assert triton_ops.AVAILABLE
    assert triton_ops.triton_kernels.INTERPRETED
