"""Options as frozen dataclasses whose annotations are the single source of their rules.

Types, ranges (``pydantic.Field``) and descriptions stand beside each field; validation, the
command line's help and the reference are all read from there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from reprlib import repr as shortened
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from .errors import MethodError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Base of operators and policies; a value that does not fit raises :class:`MethodError`."""

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for option in option_types(cls):
            value = getattr(self, option)
            try:
                value = _adapter(cls, option).validate_python(value, strict=True)
            except ValidationError as error:
                reason = error.errors()[0]["msg"]
                raise MethodError(
                    f"option {option} of {cls.__name__} cannot be {shortened(value)}: "
                    f"{reason[0].lower()}{reason[1:]}"
                ) from None
            object.__setattr__(self, option, value)

    def options(self) -> dict[str, Any]:
        """Return the options as plain data (numbers, strings, lists, mappings)."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


@cache
def option_types(cls: Any) -> dict[str, Any]:
    """Return the annotated type of every option of a dataclass, by name."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in fields(cls)}


@cache
def _adapter(cls: Any, option: str) -> TypeAdapter[Any]:
    return TypeAdapter(option_types(cls)[option])


def _plain(value: Any) -> Any:
    if isinstance(value, Options):
        return value.options()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value
