"""The polar factor U Vᵀ of A = U diag(σ) Vᵀ, and the policies that say how it is computed.

Iso-C is σ̄ U Vᵀ with σ̄ the mean singular value, and σ̄ = ⟨U Vᵀ, A⟩ / min(m, n) exactly, so a
polar factor is all it needs; Newton–Schulz iterations give one from matrix products alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from math import sqrt
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import BeforeValidator, Field, FiniteFloat, InstanceOf
from torch import Tensor

from ..errors import MethodError
from ..options import Options
from .spectrum import normalised, null_rtol, svd

Triple = tuple[FiniteFloat, FiniteFloat, FiniteFloat]

#: Schedules of (a, b, c) in σ ← aσ + bσ³ + cσ⁵, by name.
SCHEDULES: dict[str, tuple[Triple, ...]] = {
    # Jordan et al. 2024, "Muon": five times the same step, tuned for slope, never converges.
    "muon5": ((3.4445, -4.7750, 2.0315),) * 5,
    # You 2025, a five-step quintic; as in NVIDIA Emerging-Optimizers.
    "quintic5": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al. 2025, "Polar Express" (arXiv:2505.16932), safety 1.02 folded in; as in dion.
    "polar_express5": (
        (8.156554524902461, -22.48329292557795, 15.878769915207462),
        (4.042929935166739, -2.808917465908714, 0.5000178451051316),
        (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
        (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
        (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
    ),
    # The same paper's eight steps, the last of which has the fixed point 1 and may be repeated.
    "polar_express8": (
        (8.2051, -22.9019, 16.4607),
        (4.0664, -2.8612, 0.5184),
        (3.9096, -2.8234, 0.5250),
        (3.2856, -2.4153, 0.4853),
        (2.2779, -1.6198, 0.3985),
        (1.8726, -1.2307, 0.3585),
        (1.8564, -1.2132, 0.3568),
        (1.8750, -1.2500, 0.3750),
    ),
}
_POLISH: Triple = (1.875, -1.25, 0.375)
_MOST_POLISH_STEPS = 12


class PolarResult(NamedTuple):
    """A polar decomposition: A ≈ factor · (its own positive part).

    factor (…, m, n): the polar factor, a partial isometry where null directions were dropped.
    scale (…): ⟨factor, A⟩ / min(m, n): the mean of all singular values, null ones being zero.
    residual (…): ‖R − R²‖_F / √r with R the Gram matrix of the factor; about twice the error of
        the factor's singular values near 1, while a null direction (σ = 0) adds nothing.
    """

    factor: Tensor
    scale: Tensor
    residual: Tensor


@dataclass(frozen=True, kw_only=True)
class PolarPolicy(Options):
    """How a polar factor is computed; a frozen record of options."""

    name: ClassVar[str] = ""

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the polar decomposition of A (…, m, n), float32 or float64."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Return the options as plain data, with the policy's name first."""
        return {"name": self.name, **super().options()}


@dataclass(frozen=True, kw_only=True)
class Exact(PolarPolicy):
    """By SVD, with null directions dropped: the semantic reference."""

    name: ClassVar[str] = "exact"
    null_rtol: Annotated[
        float | None,
        Field(ge=0, lt=1, description="σ ≤ null_rtol·σ₁ counts as null; None is 16 eps"),
    ] = None

    def decompose(self, A: Tensor) -> PolarResult:
        """Return U Vᵀ without null directions, and the mean singular value; residual 0."""
        U, sigma, Vh = svd(A)
        rtol = null_rtol(A.dtype) if self.null_rtol is None else self.null_rtol
        kept = sigma > rtol * sigma[..., :1]
        factor = (U * kept[..., None, :]) @ Vh
        scale = (sigma * kept).double().mean(-1).to(A.dtype)
        return PolarResult(factor, scale, torch.zeros_like(scale))


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
        residual = _residual(P)
        if self.tolerance is not None:
            for _ in range(_MOST_POLISH_STEPS):
                if bool((residual <= self.tolerance).all()):
                    break
                P = _wide(P, lambda X: _step(X, _POLISH))
                residual = _residual(P)
        return PolarResult(P, _mean_by_inner_product(P, A), residual)


@dataclass(frozen=True, kw_only=True)
class Fast(PolarPolicy):
    """Newton–Schulz where its measured deviation from orthogonality allows, else exact.

    The deviation is ‖P Pᵀ − I‖_F / √r, which unconverged and null directions raise alike: a
    rank-deficient matrix always takes the exact path.
    """

    name: ClassVar[str] = "fast"
    tolerance: Annotated[
        float, Field(gt=0, lt=1, description="largest deviation from orthogonality accepted")
    ] = 1e-3

    def decompose(self, A: Tensor) -> PolarResult:
        """Return the first of the two results that meets the tolerance."""
        result = NewtonSchulz().decompose(A)
        met = _deviation(result.factor) <= self.tolerance
        if bool(met.all()):
            return result
        exact = Exact().decompose(A)
        return PolarResult(
            torch.where(met[..., None, None], result.factor, exact.factor),
            torch.where(met, result.scale, exact.scale),
            torch.where(met, result.residual, exact.residual),
        )


POLICIES: dict[str, type[PolarPolicy]] = {p.name: p for p in (Exact, NewtonSchulz, Fast)}


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
    A = _upcast(A)
    if A.numel() == 0:
        nothing = A.new_zeros(A.shape[:-2])
        return PolarResult(A.clone(), nothing, nothing)
    if A.dim() > 2 and A.device.type == "cpu":
        each = [policy.decompose(a) for a in A.flatten(0, -3)]
        stacks = (torch.stack(part) for part in zip(*each, strict=True))
        return PolarResult(*(s.reshape(*A.shape[:-2], *s.shape[1:]) for s in stacks))
    return policy.decompose(A)


def rank_cutoff(polar: PolarPolicy, rank_tolerance: float | None, dtype: torch.dtype) -> float:
    """Return the share of σ₁ at or below which a spectral method drops a direction."""
    own = polar.null_rtol if isinstance(polar, Exact) else None
    return max(null_rtol(dtype) if own is None else own, rank_tolerance or 0.0)


def polar_factor(A: Tensor, polar: PolarPolicy | str | dict[str, Any] = Exact()) -> Tensor:
    """Return U Vᵀ of every matrix of A (…, m, n), null directions dropped as ``polar`` says."""
    return decompose(A, polar).factor


def mean_singular_value(A: Tensor) -> Tensor:
    """Return the mean of all min(m, n) singular values of A (…, m, n), per matrix; shape (…)."""
    X, largest = normalised(_upcast(A))
    sigma: Tensor = torch.linalg.svdvals(X)
    return sigma.double().mean(-1).to(X.dtype) * largest[..., 0, 0]


def newton_schulz(
    A: Tensor,
    coefficients: Sequence[Sequence[float]],
    *,
    norm_safety: float = 1.0,
    norm_eps: float = 0.0,
) -> Tensor:
    """Return the raw polynomial iteration on A (…, m, n): σ ← aσ + bσ³ + cσ⁵ for every triple.

    A is first divided by norm_safety·‖A‖_F + norm_eps, so that σ ≤ 1; zero stays zero. Half
    precision is upcast to float32, in which the result then is.
    """
    X, largest = normalised(_upcast(A))
    frobenius = X.double().square().sum(dim=(-2, -1), keepdim=True).sqrt()
    norm = frobenius * norm_safety + norm_eps / largest.double()
    X = X / torch.where(norm == 0, 1.0, norm).to(X.dtype)

    def iterate(X: Tensor) -> Tensor:
        for a, b, c in coefficients:
            X = _step(X, (a, b, c))
        return X

    return _wide(X, iterate)


def _upcast(A: Tensor) -> Tensor:
    return A if A.dtype == torch.float64 else A.float()


def _step(X: Tensor, triple: Triple) -> Tensor:
    a, b, c = triple
    G = X @ X.mT
    Y: Tensor = (b * G + c * (G @ G)) @ X
    return Y.add_(X, alpha=a)


def _wide(X: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    # Gram matrices are then r × r with r the smaller side.
    return function(X.mT).mT if X.shape[-2] > X.shape[-1] else function(X)


def _gram(P: Tensor) -> Tensor:
    return P.mT @ P if P.shape[-2] > P.shape[-1] else P @ P.mT


def _residual(P: Tensor) -> Tensor:
    R = _gram(P)
    return _frobenius(R - R @ R) / sqrt(R.shape[-1])


def _deviation(P: Tensor) -> Tensor:
    R = _gram(P)
    return _frobenius(R - torch.eye(R.shape[-1]).to(R)) / sqrt(R.shape[-1])


def _frobenius(A: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.matrix_norm(A)
    return norm


def _mean_by_inner_product(P: Tensor, A: Tensor) -> Tensor:
    X, largest = normalised(A)
    inner = (P * X).sum(dim=(-2, -1), dtype=torch.float64)
    return (inner / min(A.shape[-2:])).to(A.dtype) * largest[..., 0, 0]
