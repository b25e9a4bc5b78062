"""Iso-C: one singular value for all directions, exactly or by Newton–Schulz."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mergekit_iso.errors import MethodError
from mergekit_iso.kernels.polar import Exact, Fast, NewtonSchulz
from mergekit_iso.methods import IsoC, get_method
from tests.kernels.matrices import exact_polar, gaussian, power_law, relative, with_spectrum
from tests.methods.models import W, deltas_of, merged, merged_weight, singular_values, total

NAMES = ["iso_c", "iso_c_ns", "iso_c_fast"]
each_name = pytest.mark.parametrize("name", NAMES)


@each_name
@pytest.mark.parametrize("shape", [(6, 9), (9, 6), (7, 7), (1, 5), (5, 1)], ids=str)
def test_every_direction_has_the_mean_singular_value(name: str, shape: tuple[int, int]) -> None:
    deltas = deltas_of(3, *shape)
    A = total(deltas)
    mean = singular_values(A).mean()
    tau = merged_weight(deltas, name)
    gram = tau @ tau.T if shape[0] <= shape[1] else tau.T @ tau
    assert torch.allclose(gram, mean**2 * torch.eye(min(shape), dtype=A.dtype), atol=1e-9)
    assert relative(tau, mean * exact_polar(A)) < 1e-9
    assert float(singular_values(tau).sum()) == pytest.approx(float(singular_values(A).sum()))


@each_name
def test_one_delta_is_changed_too(name: str) -> None:
    deltas = deltas_of(1, 6, 9)
    sigma = singular_values(merged_weight(deltas, name))
    assert torch.allclose(sigma, singular_values(deltas[0][W]).mean())
    assert relative(merged_weight(deltas, name), deltas[0][W]) > 0.1


@each_name
def test_frobenius_keeps_the_frobenius_norm(name: str) -> None:
    deltas = deltas_of(3, 6, 9)
    tau = merged_weight(deltas, name, norm="frobenius")
    assert float(tau.norm()) == pytest.approx(float(total(deltas).norm()), rel=1e-9)
    assert relative(tau / tau.norm(), exact_polar(tau) / 6**0.5) < 1e-9


# (condition number, bound of iso_c_ns, bound of iso_c_fast) relative to iso_c, in float64.
@pytest.mark.parametrize(
    ("condition", "ns", "fast"),
    [(1e1, 1e-9, 1e-9), (1e2, 1e-9, 1e-9), (1e3, 1e-4, 1e-3), (1e4, 1e-2, 1e-3), (1e6, 1, 1e-3)],
)
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (24, 24)], ids=str)
def test_fast_forms_by_condition_number(
    condition: float, ns: float, fast: float, shape: tuple[int, int]
) -> None:
    deltas = [{W: with_spectrum(power_law(condition, 24), *shape)}]
    expected = merged_weight(deltas, "iso_c")
    assert relative(merged_weight(deltas, "iso_c_ns"), expected) < ns
    assert relative(merged_weight(deltas, "iso_c_fast"), expected) < fast


def test_power_1_leaves_the_sum_as_it_is() -> None:
    for norm in ("nuclear", "frobenius"):
        for shape in ((6, 9), (9, 6)):
            deltas = deltas_of(3, *shape)
            tau = merged_weight(deltas, "iso_c", power=1.0, norm=norm)
            assert relative(tau, total(deltas)) < 1e-12


@pytest.mark.parametrize("power", [0.25, 0.5, 0.75])
def test_powers_between_bend_the_spectrum_at_the_same_norm(power: float) -> None:
    deltas = deltas_of(3, 6, 9)
    sigma = singular_values(total(deltas))
    tau = merged_weight(deltas, "iso_c", power=power)
    bent = singular_values(tau)
    assert torch.allclose(bent / bent[0], (sigma / sigma[0]) ** power)
    assert float(bent.sum()) == pytest.approx(float(sigma.sum()))
    assert relative(exact_polar(tau), exact_polar(total(deltas))) < 1e-9
    assert singular_values(
        merged_weight(deltas, "iso_c", power=power, norm="frobenius")
    ).norm() == (pytest.approx(float(sigma.norm())))


def one_direction(kind: str) -> Tensor:
    """Return a matrix with the singular values 3, 0, 0, 0, as exact zeros or with rounding."""
    if kind == "axis":
        A = torch.zeros(4, 4, dtype=torch.float64)
        A[1, 2] = 3.0
        return A
    return with_spectrum(torch.tensor([3.0], dtype=torch.float64), 4, 4)


@pytest.mark.parametrize("power", [0.0, 0.01, 0.5, 0.99, 1.0])
def test_equal_spectra_are_bent_alike(power: float) -> None:
    """Zeros that the solver returns exactly and zeros with rounding are the same zeros."""
    axis, rotated = (
        singular_values(merged_weight([{W: one_direction(kind)}], "iso_c", power=power))
        for kind in ("axis", "rotated")
    )
    assert torch.allclose(axis, rotated, atol=1e-9)


@pytest.mark.parametrize("kind", ["axis", "rotated"])
def test_power_1_leaves_a_low_rank_as_it_is(kind: str) -> None:
    A = one_direction(kind)
    assert relative(merged_weight([{W: A}], "iso_c", power=1.0), A) < 1e-12


@pytest.mark.parametrize("polar", [Exact(), Exact(null_rtol=0.2)], ids=repr)
def test_power_0_is_the_limit_of_small_powers(polar: Exact) -> None:
    sigma = torch.tensor([3.0, 1.0, 0.3], dtype=torch.float64)
    A = with_spectrum(sigma, 6, 8)
    flat, nearly = (merged_weight([{W: A}], IsoC(polar=polar, power=p)) for p in (0.0, 1e-6))
    assert relative(nearly, flat) < 1e-4


def test_rank_tolerance_drops_weak_directions() -> None:
    sigma = torch.tensor([4.0, 2.0, 0.02, 0.01], dtype=torch.float64)
    A = with_spectrum(sigma, 6, 4)
    tau = merged_weight([{W: A}], "iso_c", rank_tolerance=0.1)
    assert relative(exact_polar(tau, 2), exact_polar(A, 2)) < 1e-9
    kept = singular_values(tau)
    assert torch.allclose(kept[:2], kept[0].expand(2))
    assert float(kept[2]) < 1e-12


@pytest.mark.parametrize(
    "options", [{"power": 0.5}, {"rank_tolerance": 0.1}, {"rank_tolerance": 0.0}]
)
def test_newton_schulz_has_no_singular_values_to_bend_or_drop(options: dict[str, float]) -> None:
    with pytest.raises(MethodError, match=next(iter(options))):
        IsoC(polar=NewtonSchulz(), **options)
    assert merged_weight(deltas_of(2, 4, 5), IsoC(polar=Fast(), **options)).isfinite().all()


def test_stacks_of_experts_are_merged_matrix_by_matrix() -> None:
    name = "model.layers.0.mlp.experts.up_proj"
    deltas = deltas_of(2, 3, 6, 8, name=name)
    for method in (*NAMES, "tsv", "iso_cts"):
        stack = merged(deltas, method)[name]
        for e in range(3):
            alone = merged_weight([{W: d[name][e]} for d in deltas], method)
            assert torch.equal(stack[e], alone)


def test_presets() -> None:
    assert get_method("iso_c") == IsoC(polar=Exact())
    assert get_method("iso_c_ns") == IsoC(polar=NewtonSchulz())
    assert get_method("iso_c_fast") == IsoC(polar=Fast())
    assert get_method("iso_c_ns", norm="frobenius").norm == "frobenius"
    by_data = get_method("iso_c", polar={"name": "newton_schulz", "steps": 8})
    assert by_data == IsoC(polar=NewtonSchulz(steps=8))


SHAPES_OF_REPORTS = {"square": (16, 16), "tall": (24, 16), "wide": (8, 16)}


@each_name
@pytest.mark.parametrize("shape", SHAPES_OF_REPORTS.values(), ids=SHAPES_OF_REPORTS)
def test_two_rank_1_updates_in_larger_matrices(name: str, shape: tuple[int, int]) -> None:
    """The value is the arithmetic mean of all min(m, n) singular values, zeros among them.

    The null directions are dropped and not filled, by design: of the nuclear norm of the sum,
    k of r directions at that mean keep k/r. Newton–Schulz raises their rounding noise a little.
    """
    noise = 1e-2 if name == "iso_c_ns" else 1e-5
    column, row = gaussian(2, shape[0], 1), gaussian(2, 1, shape[1], seed=1)
    deltas = [{W: update} for update in (column @ row).float()]
    sigma = singular_values(total(deltas))
    r = min(shape)
    tau = singular_values(merged_weight(deltas, name))
    assert torch.allclose(tau[:2], sigma.sum() / r, rtol=1e-5)
    assert float(tau[2:].sum()) < noise * float(tau[0])
    assert float(tau.sum()) == pytest.approx(float(sigma.sum()) * 2 / r, rel=noise)


@each_name
@pytest.mark.parametrize("shape", SHAPES_OF_REPORTS.values(), ids=SHAPES_OF_REPORTS)
def test_updates_of_1e_12_are_merged_like_any_other(name: str, shape: tuple[int, int]) -> None:
    deltas = deltas_of(2, *shape, dtype=torch.float32)
    tiny = [{W: d[W] * 1e-12} for d in deltas]
    tau = merged_weight(tiny, name)
    A = total(tiny).double()
    assert relative(tau, singular_values(A).mean() * exact_polar(A)) < 1e-4
    assert relative(tau / 1e-12, merged_weight(deltas, name)) < 1e-5
