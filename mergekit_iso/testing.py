"""A test bench for operators: every registered method passes it, plug-ins are welcome to.

    from mergekit_iso.testing import check_method
    check_method("my_method")

It checks what every engine relies on (shapes, dtypes, untouched inputs, honest ``Requires``,
independence of chunks) and the symmetries that the method declares.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .errors import MergeWarning
from .merge import merge
from .methods.base import Context, MergeMethod, Worker, merge_unit
from .methods.registry import get_method, resolve_method
from .tensors import DEFAULT_EXCLUDE, TensorInfo, describe

SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (11, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.up_proj.weight": (12, 8),
    "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.mlp.experts.up_proj": (3, 6, 8),
    "model.layers.0.self_attn.q_proj.bias": (8,),
    "model.layers.0.row.weight": (1, 8),
    "model.layers.0.column.weight": (8, 1),
    "model.conv.weight": (4, 3, 2, 2),
    "model.logit_scale": (),
}

Model = dict[str, Tensor]


def random_models(
    workers: int = 3, *, seed: int = 0, dtype: torch.dtype = torch.float32, size: float = 1.0
) -> tuple[Model, list[Model]]:
    """Return a base and ``workers`` deltas with tensors of every role, entries N(0, size²)."""
    generator = torch.Generator().manual_seed(seed)

    def model(factor: float) -> Model:
        return {
            name: (torch.randn(shape, generator=generator, dtype=torch.float64) * factor).to(dtype)
            for name, shape in SHAPES.items()
        }

    return model(size), [model(size) for _ in range(workers)]


def check_method(method: str | MergeMethod, **options: Any) -> None:
    """Raise AssertionError, saying which, unless a method keeps the operators' contract."""
    operator = resolve_method(method, options)
    with warnings.catch_warnings():
        # The models have matrices of one row; that a method warns of them is no fault.
        warnings.simplefilter("ignore", MergeWarning)
        _check_all(operator)


def _check_all(operator: MergeMethod) -> None:
    for check in (
        _check_shapes_and_dtypes,
        _check_compute_dtype,
        _check_inputs_unmodified,
        _check_scales,
        _check_zero,
        _check_record,
        _check_requires,
        _check_chunks,
        _check_symmetries,
    ):
        try:
            check(operator)
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"{check.__name__.lstrip('_')}: {error!r}") from error


def merged_delta(operator: MergeMethod, deltas: Sequence[Model], **arguments: Any) -> Model:
    """Return M(Δ_1 … Δ_T) itself: the merge onto a base of zeros."""
    base = {k: torch.zeros_like(v) for k, v in deltas[0].items()}
    return merge(base, deltas, operator, **arguments)


def _check_shapes_and_dtypes(operator: MergeMethod) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for workers in (1, 2, 3):
            base, deltas = random_models(workers, dtype=dtype)
            result = merge(base, deltas, operator)
            assert list(result) == list(base), "names changed"
            for name, weight in base.items():
                got = result[name]
                assert got.shape == weight.shape, f"{name}: shape {tuple(got.shape)}"
                assert got.dtype == weight.dtype, f"{name}: dtype {got.dtype}"
                assert torch.isfinite(got).all(), f"{name}: not finite"


def _check_compute_dtype(operator: MergeMethod) -> None:
    """What an engine gets back must have the dtype and shape it gave."""
    if operator.requires.stats:
        return
    for name in SHAPES:
        for dtype in (torch.float32, torch.float64):
            info, deltas = _unit(name)
            workers = [Worker(t, d.to(dtype)) for t, d in enumerate(deltas)]
            got = merge_unit(operator, workers, info, Context(weights=(1.0, 1.0, 1.0)))
            assert got.dtype == dtype, f"{name}: {got.dtype} from deltas of {dtype}"
            assert got.shape == deltas[0].shape, f"{name}: shape {tuple(got.shape)}"


def _check_inputs_unmodified(operator: MergeMethod) -> None:
    base, deltas = random_models()
    before = [{k: v.clone() for k, v in model.items()} for model in (base, *deltas)]
    merge(base, deltas, operator, weights=[0.5, 2.0, 1.0])
    for old, new in zip(before, (base, *deltas), strict=True):
        for name in old:
            assert torch.equal(old[name], new[name]), f"{name} was modified"


def _check_scales(operator: MergeMethod) -> None:
    if "scale" not in operator.symmetries:
        return
    _, deltas = random_models()
    expected = merged_delta(operator, deltas)
    for exponent in (-100, -60, 60, 100):  # powers of two, so that scaling itself is exact
        factor = 2.0**exponent
        got = merged_delta(operator, _map(deltas, lambda d, f=factor: d * f))  # type: ignore[misc]
        _assert_close({k: v / factor for k, v in got.items()}, expected, f"at scale {factor:g}")


def _check_zero(operator: MergeMethod) -> None:
    base, deltas = random_models()
    result = merge(base, _map(deltas, torch.zeros_like), operator)
    for name, weight in base.items():
        assert torch.equal(result[name], weight), f"{name}: zero deltas moved the base"


def _check_record(operator: MergeMethod) -> None:
    assert pickle.loads(pickle.dumps(operator)) == operator, "does not survive pickling"
    if operator.name:
        again = get_method(operator.name, **operator.options())
        assert again == operator, "options() does not give the method back"
    try:
        operator.name = "other"  # type: ignore[misc]
    except AttributeError:
        return
    raise AssertionError("a method must be immutable")


def _check_requires(operator: MergeMethod) -> None:
    if not operator.requires.random:
        _, deltas = random_models()
        first, second = (merged_delta(operator, deltas, seed=s) for s in (0, 1))
        for name in first:
            assert torch.equal(first[name], second[name]), f"{name} depends on the seed"
    overridden = type(operator).combine is not MergeMethod.combine
    assert overridden <= (operator.requires.workers == "each"), (
        "combine is never called where the sum of the deltas is declared to be enough"
    )


def _check_chunks(operator: MergeMethod) -> None:
    """Elements may be cut anywhere: every entry's result must not depend on the cut."""
    if set(operator.requires.stats) - {"merged_model"}:
        return  # whole statistics are the engines' own tests
    for name in SHAPES:
        info, deltas = _unit(name)
        if info.spectral and operator.requires.unit == "matrix":
            continue
        ctx = Context(weights=(1.0, 0.5, 2.0), elected=lambda: 1)
        whole = merge_unit(operator, (Worker(t, d) for t, d in enumerate(deltas)), info, ctx)
        flat = [d.reshape(-1) for d in deltas]
        pieces = []
        for start in range(0, info.numel, 5):
            workers = (Worker(t, d[start : start + 5]) for t, d in enumerate(flat))
            pieces.append(merge_unit(operator, workers, info, replace(ctx, offset=start)))
        assert torch.equal(torch.cat(pieces), whole.reshape(-1)), f"{name}: depends on chunks"


def _check_symmetries(operator: MergeMethod) -> None:
    for symmetry in operator.symmetries:
        broken = symmetry_error(operator, symmetry, random_models(dtype=torch.float64)[1])
        assert broken < 1e-6, f"{symmetry} is declared, but broken by {broken:.2g}"


def symmetry_error(operator: MergeMethod, symmetry: str, deltas: Sequence[Model]) -> float:
    """Return by how much, relative to the result, an operator breaks a symmetry on ``deltas``."""
    deltas = [{k: v for k, v in d.items() if v.dim() <= 2} for d in deltas]
    turned: Callable[[str, Tensor], Tensor]
    plain = merged_delta(operator, deltas)
    if symmetry == "permutation":
        got, expected = merged_delta(operator, deltas[::-1]), plain
    elif symmetry == "scale":
        got = merged_delta(operator, _map(deltas, lambda d: d * 3.7))
        expected = {k: v * 3.7 for k, v in plain.items()}
    elif symmetry == "odd":
        got = merged_delta(operator, _map(deltas, torch.neg))
        expected = {k: -v for k, v in plain.items()}
    elif symmetry == "identity":
        got, expected = merged_delta(operator, deltas[:1]), dict(deltas[0])
    elif symmetry == "idempotent":
        got, expected = merged_delta(operator, [plain]), plain
    elif symmetry == "transpose":
        matrices = [{k: v for k, v in d.items() if v.dim() == 2} for d in deltas]
        got = merged_delta(operator, _map(matrices, lambda d: d.mT.contiguous()))
        expected = {k: v.mT for k, v in merged_delta(operator, matrices).items()}
    elif symmetry == "rotation":
        matrices = [{k: v for k, v in d.items() if v.dim() == 2} for d in deltas]

        def turned(name: str, d: Tensor) -> Tensor:
            return _orthogonal(d.shape[0], d, 1) @ d @ _orthogonal(d.shape[1], d, 2)

        got = merged_delta(operator, [{k: turned(k, v) for k, v in d.items()} for d in matrices])
        expected = {k: turned(k, v) for k, v in merged_delta(operator, matrices).items()}
    else:
        raise ValueError(f"there is no symmetry {symmetry!r}")
    return max(_relative(got[k], expected[k]) for k in expected)


def _orthogonal(n: int, like: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(n, n, generator=generator, dtype=torch.float64).to(like)
    q: Tensor = torch.linalg.qr(random)[0]
    return q


def _unit(name: str) -> tuple[TensorInfo, list[Tensor]]:
    _, deltas = random_models()
    tensors = [d[name] for d in deltas]
    return describe(name, SHAPES[name], torch.float32, DEFAULT_EXCLUDE), tensors


def _map(models: Sequence[Model], function: Callable[[Tensor], Tensor]) -> list[Model]:
    return [{k: function(v) for k, v in m.items()} for m in models]


def _assert_close(got: Model, expected: Model, where: str) -> None:
    for name in expected:
        error = _relative(got[name], expected[name])
        assert error < 1e-3, f"{name} {where}: off by {error:.2g}"


def _relative(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm().clamp_min(1e-30))
