"""The polar factor U Vᵀ of A = U diag(σ) Vᵀ, and the policies that say how it is computed.

Iso-C is σ̄ U Vᵀ with σ̄ the mean singular value, and σ̄ = ⟨U Vᵀ, A⟩ / min(m, n) exactly, so a
polar factor is all it needs; Newton–Schulz iterations give one from matrix products alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from math import sqrt
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BeforeValidator, Field, InstanceOf
from torch import Tensor

from ..errors import MethodError
from ..options import Options
from .choice import EXACT, FAST, QUICK, Quick, choose
from .halley import deviation, halley, halley_mild, halley_mixed, halley_steep
from .newton_schulz import (
    POLISH,
    SCHEDULES,
    Triple,
    newton_schulz,
    newton_schulz_step,
    to_unit_norm,
    upcast,
    wide,
)
from .products import commuting_product, gram, quick_float32_products
from .spectrum import (
    SVD,
    low_rank_svd,
    normalised,
    null_rtol,
    polar_by_gram,
    polar_by_gram_within,
    svd,
)

_MOST_POLISH_STEPS = 12
# Halley's legs before the polish leave this deviation at most; one null direction far more.
_CONVERGED = 3e-3
# halley_mild leaves 1e-4 at most of the matrices that it is made for.
_CONVERGED_MILD = 2e-4
_EXACT_HALLEY = {
    "halley_mild": (halley_mild, _CONVERGED_MILD),
    "halley_mixed": (halley_mixed, _CONVERGED),
}
# Iterations in float16 reach this on spectra down to a condition of 1e3.
_HALF_PRECISION = 2e-2


class PolarResult(NamedTuple):
    """A polar decomposition: A ≈ factor · (its own positive part).

    factor (…, m, n): the polar factor, a partial isometry where null directions were dropped.
    scale (…): ⟨factor, A⟩ / min(m, n): the mean of all singular values, null ones being zero.
    residual (…): ‖R − R²‖_F / √r with R the Gram matrix of the factor; about twice the error of
        the factor's singular values near 1, while a null direction (σ = 0) adds nothing. It is
        0 where the result is exact: by ``Exact``, or by a fast policy that had to fall back to it.
    """

    factor: Tensor
    scale: Tensor
    residual: Tensor


@dataclass(frozen=True, kw_only=True)
class PolarPolicy(Options):
    """How a polar factor is computed; a frozen record of options. Subclasses decompose."""

    name: ClassVar[str] = ""

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the polar decomposition of A (…, m, n), float32 or float64."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the options as plain data, with the policy's name first."""
        return {"name": self.name, **super().options()}


@dataclass(frozen=True, kw_only=True)
class Exact(PolarPolicy):
    """As by SVD, with null directions dropped: the semantic reference.

    What is quickest at a float32 SVD's accuracy: a small SVD where the rank is low, else the
    kernels of :mod:`.choice` in turn until one succeeds. Halley steps succeed where they leave
    no direction short of 1; the eigenvectors of the Gram matrix, in float64 for matrices twice
    as long as wide, and the SVD itself always do.
    """

    name: ClassVar[str] = "exact"
    null_rtol: Annotated[
        float | None,
        Field(ge=0, lt=1, description="σ ≤ null_rtol·σ₁ counts as null; None is 16 eps"),
    ] = None

    def decompose(self, A: Tensor) -> PolarResult:
        """Return U Vᵀ without null directions, and the mean singular value; residual 0."""
        rtol = null_rtol(A.dtype) if self.null_rtol is None else self.null_rtol
        if (low_rank := _by_low_rank(A, rtol)) is not None:
            return low_rank
        for kernel in choose(A, EXACT) if A.dtype == torch.float32 else ("svd",):
            if kernel == "svd":
                break
            if kernel == "gram":
                # Forming a float64 Gram matrix leaves nothing of directions below.
                if rtol < null_rtol(A.dtype):
                    break
                return _by_gram(A, rtol)
            iterate, most = _EXACT_HALLEY[kernel]
            # Steps that converge a direction can't drop it, so another null bound needs its σ.
            if self.null_rtol is None and (P := _by_halley(A, iterate, most)) is not None:
                return _result(P, A, torch.zeros(A.shape[:-2]).to(A))
        return _of_svd(svd(A), A, rtol)


def _triples(value: Any) -> Any:
    # Lists come from YAML; what is no sequence of sequences is left for the validation to refuse.
    if isinstance(value, (list, tuple)):
        return tuple(tuple(t) if isinstance(t, (list, tuple)) else t for t in value)
    return value


@dataclass(frozen=True, kw_only=True)
class NewtonSchulz(PolarPolicy):
    """By an odd polynomial iteration in matrix products alone (Horoi et al., arXiv:2607.03011).

    Directions with σ below about 1e-5·‖A‖_F are left unconverged, rounding noise among them is
    raised: the residual says how far it got. ``preset`` names a schedule, or ``coefficients``
    gives one; further ``steps`` repeat its last triple.
    """

    name: ClassVar[str] = "newton_schulz"
    preset: Annotated[str, Field(description=f"schedule: {', '.join(SCHEDULES)}")] = (
        "polar_express8"
    )
    coefficients: Annotated[
        Annotated[tuple[Triple, ...], Field(min_length=1)] | None,
        BeforeValidator(_triples),
        Field(description="(a, b, c) of every step, instead of a preset"),
    ] = None
    steps: Annotated[
        int | None,
        Field(ge=1, le=64, description="steps; None is the schedule's, 10 with polar_express8"),
    ] = None
    tolerance: Annotated[
        float | None,
        Field(gt=0, description="polish further until the residual is at most this"),
    ] = None
    norm_safety: Annotated[float, Field(gt=0, description="factor on the norm divided by")] = 1.0
    norm_eps: Annotated[float, Field(ge=0, description="added to the norm divided by")] = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preset not in SCHEDULES:
            raise MethodError(
                f"option preset of NewtonSchulz cannot be {self.preset!r}",
                hint=f"valid presets: {', '.join(SCHEDULES)}",
            )

    @property
    def schedule(self) -> tuple[Triple, ...]:
        """The (a, b, c) of every step."""
        triples = self.coefficients or SCHEDULES[self.preset]
        # Two more of the last step take Polar Express from σ/‖A‖_F = 3e-4 to 4e-5.
        extra = 2 if self.coefficients is None and self.preset == "polar_express8" else 0
        steps = self.steps or len(triples) + extra
        return triples[:steps] + triples[-1:] * (steps - len(triples))

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the iteration's result, the scale ⟨P, A⟩/r and the residual."""
        P = newton_schulz(A, self.schedule, norm_safety=self.norm_safety, norm_eps=self.norm_eps)
        residual = _residual(_small_gram(P))
        if self.tolerance is not None:
            for _ in range(_MOST_POLISH_STEPS):
                if bool((residual <= self.tolerance).all()):
                    break
                P = wide(P, lambda X: newton_schulz_step(X, POLISH))
                residual = _residual(_small_gram(P))
        return _result(P, A, residual)


@dataclass(frozen=True, kw_only=True)
class Halley(PolarPolicy):
    """By dynamically weighted Halley steps in Gram form with restarts.

    Converges every direction with σ > 2e-6·σ₁; those below are null. In float32 the error stays
    near 5e-4 up to a condition of 1e5, where an SVD's is 7e-3.
    """

    name: ClassVar[str] = "halley"
    smallest: Annotated[
        float,
        Field(gt=1e-7, lt=1, description="σ/σ₁ that the first legs are designed for"),
    ] = 1e-5
    tolerance: Annotated[
        float, Field(gt=1e-5, lt=1, description="deviation from orthogonality to stop at")
    ] = 1e-3

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the iteration's result, the scale ⟨P, A⟩/r and the residual.

        Raises torch.linalg.LinAlgError where rounding leaves a Gram matrix indefinite.
        """
        X, _ = normalised(A)
        tall = A.shape[-2] > A.shape[-1]
        P, R = halley(X.mT if tall else X, self.smallest, self.tolerance)
        return _result(P.mT if tall else P, A, _residual(R))


@dataclass(frozen=True, kw_only=True)
class Fast(PolarPolicy):
    """The quickest kernel for the device and shape that meets a measured tolerance, else exact.

    Which one that is says :mod:`.choice`, or ``kernel``. What is measured is the deviation from
    orthogonality ‖P Pᵀ − I‖_F / √r, which unconverged and null directions raise alike; where it
    stays above the tolerance the float64 eigenvectors of the Gram matrix decide, and the residual
    is 0.
    """

    name: ClassVar[str] = "fast"
    tolerance: Annotated[
        float, Field(gt=1e-5, lt=1, description="largest deviation from orthogonality accepted")
    ] = 1e-3
    kernel: Annotated[
        Quick | None,
        Field(description=f"None: by device and shape; or {', '.join(QUICK)}"),
    ] = None

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the first of the two results that meets the tolerance."""
        kernel = self.kernel or choose(A, FAST)[0]
        if kernel == "svd" or (A.device.type == "cpu" and A.dtype == torch.float64):
            return Exact().decompose(A)
        if (low_rank := _by_low_rank(A, null_rtol(A.dtype))) is not None:
            return low_rank
        quick = self._quick(A, kernel)
        if quick is not None and bool((deviation(quick[1]) <= self.tolerance).all()):
            return _result(quick[0], A, _residual(quick[1]))
        return _by_gram(A, null_rtol(A.dtype))

    def _quick(self, A: Tensor, kernel: str) -> tuple[Tensor, Tensor] | None:
        """Return the polar factor P, and P Pᵀ or Pᵀ P, whichever is smaller."""
        if kernel == "newton_schulz":
            P = self._by_products(A)
            # By torch's own product, so that the measurement does not lean on what it measures.
            return P, (P.mT @ P if P.shape[-2] > P.shape[-1] else P @ P.mT)
        if kernel == "gram":
            return _wide_of(A, polar_by_gram_within)
        if kernel == "halley_steep":
            return _wide_of(A, lambda X: halley_steep(X, self.tolerance))
        return _wide_of(A, lambda X: halley(X, 1e-3, self.tolerance, share=0.5))

    def _by_products(self, A: Tensor) -> Tensor:
        from . import triton_ops  # importing triton takes a quarter of a second

        schedule = NewtonSchulz().schedule
        if not (A.is_cuda and A.dtype == torch.float32 and triton_ops.AVAILABLE):
            return newton_schulz(A, schedule)
        if self.tolerance >= _HALF_PRECISION:
            return triton_ops.polar_factor_half(A)
        X = to_unit_norm(A)
        return wide(X, lambda X: triton_ops.newton_schulz_symmetric(X, schedule))


POLICIES: dict[str, type[PolarPolicy]] = {p.name: p for p in (Exact, NewtonSchulz, Halley, Fast)}


def polar_policy(value: Any) -> PolarPolicy:
    """Return a policy from a name or from ``{"name": …, option: value}``; a policy as it is.

    Raises MethodError for a name or an option that does not exist.
    """
    if isinstance(value, PolarPolicy):
        return value
    options = dict(value) if isinstance(value, dict) else {"name": value}
    name = options.pop("name", Exact.name)
    if not isinstance(name, str) or name not in POLICIES:
        raise MethodError(
            f"there is no polar policy {name!r}", hint=f"valid: {', '.join(POLICIES)}"
        )
    policy = POLICIES[name]
    for option in options:
        if option not in (valid_options := [f.name for f in fields(policy)]):
            valid = ", ".join(valid_options)
            raise MethodError(
                f"polar policy {name!r} has no option {option!r}", hint=f"its options: {valid}"
            )
    return policy(**options)


#: The type of a method's ``polar`` option; also takes a policy's name or plain data.
Polar = Annotated[
    InstanceOf[PolarPolicy],
    BeforeValidator(polar_policy),
    Field(description=f"how the polar factor is computed: {', '.join(POLICIES)}"),
]


def decompose(A: Tensor, polar: PolarPolicy | str | dict[str, Any] = Exact()) -> PolarResult:
    """Return the polar decomposition of every matrix of A (…, m, n).

    Half precision is upcast to float32, in which the result then is. On the CPU a stack is
    worked on matrix by matrix, so that a matrix has the same result alone and in a stack.
    Source: the polar factor as used by Iso-C, arXiv:2502.04959.
    """
    policy = polar_policy(polar)
    A = upcast(A)
    if A.numel() == 0:
        nothing = A.new_zeros(A.shape[:-2])
        return PolarResult(A.clone(), nothing, nothing)
    if A.device.type != "cpu":
        return policy.decompose(A)
    with quick_float32_products():
        if A.dim() == 2:
            return policy.decompose(A)
        each = [policy.decompose(a) for a in A.flatten(0, -3)]
        stacks = (torch.stack(part) for part in zip(*each, strict=True))
        return PolarResult(*(s.reshape(*A.shape[:-2], *s.shape[1:]) for s in stacks))


def rank_cutoff(polar: PolarPolicy, rank_tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the share of σ₁ at or below which a spectral method drops a direction."""
    own = polar.null_rtol if isinstance(polar, Exact) else None
    return max(null_rtol(dtype) if own is None else own, rank_tolerance or 0.0)


def polar_factor(A: Tensor, polar: PolarPolicy | str | dict[str, Any] = Exact()) -> Tensor:
    """Return U Vᵀ of every matrix of A (…, m, n), null directions dropped as ``polar`` says."""
    return decompose(A, polar).factor


def mean_singular_value(A: Tensor) -> Tensor:
    """Return the mean of all min(m, n) singular values of A (…, m, n), per matrix; shape (…)."""
    X, largest = normalised(upcast(A))
    sigma: Tensor = torch.linalg.svdvals(X)
    return sigma.double().mean(-1).to(X.dtype) * largest[..., 0, 0]


def _wide_of(
    A: Tensor, iterate: Callable[[Tensor], tuple[Tensor, Tensor] | None]
) -> tuple[Tensor, Tensor] | None:
    """Return what an iteration gives for A, which it gets normalised and as a wide matrix."""
    X, _ = normalised(A)
    tall = A.shape[-2] > A.shape[-1]
    try:
        found = iterate(X.mT if tall else X)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        return None
    if found is None:
        return None
    P, measured = found
    return (P.mT if tall else P), measured


def _by_halley(
    A: Tensor, iterate: Callable[[Tensor], tuple[Tensor, Tensor]], most: float
) -> Tensor | None:
    """Return the polar factor, or None where the deviation of a matrix exceeds ``most``."""
    found = _wide_of(A, iterate)
    return None if found is None or not bool((found[1] <= most).all()) else found[0]


def _by_low_rank(A: Tensor, rtol: float) -> PolarResult | None:
    found = low_rank_svd(A) if A.dim() == 2 else None
    return None if found is None else _of_svd(found, A, rtol)


def _by_gram(A: Tensor, rtol: float) -> PolarResult:
    P, sigma = polar_by_gram(A, rtol)
    scale = sigma.double().mean(-1).to(A.dtype)
    return PolarResult(P, scale, torch.zeros_like(scale))


def _of_svd(decomposition: SVD, A: Tensor, rtol: float) -> PolarResult:
    U, sigma, Vh = decomposition
    kept = sigma > rtol * sigma[..., :1]
    factor = (U * kept[..., None, :]) @ Vh
    scale = ((sigma * kept).double().sum(-1) / min(A.shape[-2:])).to(A.dtype)
    return PolarResult(factor, scale, torch.zeros_like(scale))


def _result(P: Tensor, A: Tensor, residual: Tensor) -> PolarResult:
    return PolarResult(P, _mean_by_inner_product(P, A), residual)


def _small_gram(P: Tensor) -> Tensor:
    return gram(P.mT if P.shape[-2] > P.shape[-1] else P)


def _residual(R: Tensor) -> Tensor:
    return _frobenius(R - commuting_product(R, R)) / sqrt(R.shape[-1])


def _frobenius(A: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(A)
    return norm


def _mean_by_inner_product(P: Tensor, A: Tensor) -> Tensor:
    X, largest = normalised(A)
    if P.dim() == 2 and P.mT.is_contiguous():
        P, X = P.mT, X.mT
    inner = torch.einsum("...ij,...ij->...i", P, X).sum(-1, dtype=torch.float64)
    return (inner / min(A.shape[-2:])).to(A.dtype) * largest[..., 0, 0]
