"""What a tensor is to a merge: its name, shape, dtype and role.

One classifier serves every engine, so a tensor is treated alike in memory, from files and
in training. A *role* is read from name, shape and dtype alone, never from values.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Literal, get_args

import torch

from .errors import MethodError

Role = Literal["matrix", "vector", "embedding", "head", "experts", "fused", "buffer"]

#: Roles whose tensors are matrices to a spectral method. ``experts`` is a stack of them.
SPECTRAL_ROLES: frozenset[Role] = frozenset({"matrix", "embedding", "head", "experts", "fused"})

DEFAULT_EXCLUDE: tuple[str, ...] = ("text_projection",)

# Recomputed or constant buffers that some checkpoints store among the weights.
_BUFFER = re.compile(
    r"(^|\.)("
    r"inv_freq|original_inv_freq|rope\.freqs|freqs_cis|position_ids|causal_mask"
    r"|num_batches_tracked|(attn|attention)\.masked_bias"
    r")$"
)
# GPT-2's causal mask is called `attn.bias`; the bias of a projection is 1-D, the mask is 4-D.
_MASK = re.compile(r"(^|\.)(attn|attention)\.bias$")
_EMBEDDING = re.compile(
    r"(^|\.)("
    r"embed_tokens\w*|tok_embeddings|word_embeddings|position_embeddings|token_type_embeddings"
    r"|embed_positions|embed_in|wte|wpe|shared|\w*_embeddings?|embeddings?|relative_attention_bias"
    r")\.weight$"
)
_HEAD = re.compile(
    r"(^|\.)(lm_head(\.decoder)?|embed_out|output|score|classifier|predictions\.decoder)\.weight$"
)
_EXPERTS = re.compile(r"(^|\.)\w*experts?(\.|$)")
_FUSED = re.compile(
    r"(^|\.)(qkv\w*|\w*_qkv|c_attn|query_key_value|Wqkv|in_proj_weight|gate_up_proj\w*)(\.weight)?$"
)


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of the unsharded model.

    ``shape`` is the whole tensor's shape, also when an engine hands over a chunk of it.
    ``excluded`` marks a matrix that spectral methods treat like a vector.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role
    excluded: bool = False

    @property
    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor in its own dtype."""
        return self.numel * self.dtype.itemsize

    @property
    def spectral(self) -> bool:
        """Whether spectral methods work on this tensor's singular values."""
        return self.role in SPECTRAL_ROLES and not self.excluded


def classify(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Role:
    """Return the role of a tensor, from its name, shape and dtype alone."""
    if not dtype.is_floating_point or _BUFFER.search(name):
        return "buffer"
    if _MASK.search(name) and len(shape) == 4:
        return "buffer"
    if len(shape) == 3 and _EXPERTS.search(name):
        return "experts"
    if len(shape) != 2:
        return "vector"
    if _HEAD.search(name):
        return "head"
    if _EMBEDDING.search(name):
        return "embedding"
    if _FUSED.search(name):
        return "fused"
    return "matrix"


def describe(
    name: str,
    shape: Iterable[int],
    dtype: torch.dtype,
    exclude: str | Iterable[str] = DEFAULT_EXCLUDE,
) -> TensorInfo:
    """Classify a tensor and mark whether ``exclude`` takes it from the spectral methods.

    A pattern with any of ``*?[`` is matched against the whole name, ``role:NAME`` against
    the role, anything else as a substring of the name.
    """
    size = tuple(shape)
    patterns = (exclude,) if isinstance(exclude, str) else exclude
    role = classify(name, size, dtype)
    excluded = any(matches_tensor(p, name, role) for p in patterns)
    return TensorInfo(name, size, dtype, role, excluded)


def matches(pattern: str, name: str) -> bool:
    """Whether ``pattern`` (a glob if it has any of ``*?[``, else a substring) fits ``name``."""
    if any(c in pattern for c in "*?["):
        return fnmatchcase(name, pattern)
    return pattern in name


def matches_tensor(pattern: str, name: str, role: Role) -> bool:
    """Whether ``pattern`` fits a tensor: ``role:NAME`` its role, anything else its name."""
    if pattern.startswith("role:"):
        return pattern.removeprefix("role:") == role
    return matches(pattern, name)


def as_patterns(option: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Return an option's patterns as a tuple; one pattern may stand alone.

    Raises MethodError for an empty pattern, which every name would contain, and a role that
    does not exist.
    """
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str) or not pattern:
            raise MethodError(f"{option} cannot be {pattern!r}: give a part of a name, or a glob")
        role = pattern.removeprefix("role:")
        if role != pattern and role not in get_args(Role):
            raise MethodError(
                f"{option} cannot be {pattern!r}: there is no such role",
                hint=f"the roles are {', '.join(get_args(Role))}",
            )
    return found


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return float64 if any of ``dtypes`` is float64, else float32."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def task_vector_of(base: torch.Tensor, model: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return ``model - base`` with both upcast to ``dtype`` first; any equal shapes."""
    return model.to(dtype) - base.to(dtype)


def apply_delta(
    base: torch.Tensor, merged: torch.Tensor, scale: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``base + scale * merged``, computed in ``merged.dtype`` and rounded once to ``dtype``.

    Where the scaled delta is zero the base's value is kept bit for bit (also a negative zero,
    which adding a zero would turn into a positive one).
    """
    update = merged if scale == 1.0 else merged * scale
    wide = base.to(update.dtype)
    # 0 − update is never a negative zero, so subtracting it changes no zero's sign.
    return (wide - (0.0 - update)).to(dtype)
