"""Methods by name: the one place that every engine, the command line and the docs look in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from ..errors import MergeWarning, MethodError
from ..options import Options
from .base import MergeMethod

ENTRY_POINT_GROUP = "mergekit_iso.methods"

M = TypeVar("M", bound=MergeMethod)


@dataclass(frozen=True)
class MethodEntry:
    """What is known of a registered name.

    ``preset`` holds the options in which a second name of a class differs from the class's own
    defaults; ``summary`` is the first line of the class's docstring.
    """

    name: str
    cls: type[MergeMethod]
    paper: str
    formula: str
    cost: str
    summary: str
    preset: dict[str, Any] = field(default_factory=dict)

    @property
    def defaults(self) -> dict[str, Any]:
        """Every option of this name with its default."""
        own: dict[str, Any] = {}
        for f in fields(self.cls):
            own[f.name] = f.default_factory() if f.default_factory is not MISSING else f.default
        return own | self.preset


_ENTRIES: dict[str, MethodEntry] = {}


def register(
    name: str,
    *,
    paper: str = "",
    formula: str = "",
    cost: str = "",
    summary: str = "",
    **preset: Any,
) -> Callable[[type[M]], type[M]]:
    """Class decorator: make a method known under a name, with ``preset`` as its own defaults.

    ``paper`` is where the method is from, ``formula`` one line of it, ``cost`` one line on what
    it needs. A name that is taken raises MethodError.
    """

    def add(cls: type[M]) -> type[M]:
        if name in _ENTRIES:
            holder = _ENTRIES[name].cls.__module__
            raise MethodError(f"a method called {name!r} is registered already, by {holder}")
        if not cls.__dict__.get("name"):
            cls.name = name
        first_line = (cls.__doc__ or "").strip().partition("\n")[0]
        _ENTRIES[name] = MethodEntry(name, cls, paper, formula, cost, summary or first_line, preset)
        return cls

    return add


def list_methods() -> tuple[MethodEntry, ...]:
    """Return every registered method, plug-ins among them, in the order of their names."""
    _load_plugins()
    return tuple(sorted(_ENTRIES.values(), key=lambda entry: entry.name))


def method_entry(name: str) -> MethodEntry:
    """Return what is known of a method; MethodError with the nearest name if there is none."""
    _load_plugins()
    if name not in _ENTRIES:
        raise MethodError(f"there is no method {name!r}", hint=_nearest(name, sorted(_ENTRIES)))
    return _ENTRIES[name]


def get_method(name: str, **options: Any) -> MergeMethod:
    """Return a method by name with the options given, the others at their defaults.

    Raises MethodError for a name or an option that does not exist, with the nearest that does,
    and for a value that is out of range.
    """
    entry = method_entry(name)
    valid = list(entry.defaults)
    for option in options:
        if option not in valid:
            hint = _nearest(option, valid) if valid else f"{name} has no options"
            raise MethodError(f"method {name!r} has no option {option!r}", hint=hint)
    chosen = {option: _refined(entry.defaults[option], value) for option, value in options.items()}
    return entry.cls(**(entry.preset | chosen))


def resolve_method(method: str | MergeMethod, options: dict[str, Any]) -> MergeMethod:
    """Return a method from a name and its options, or the object given (options then raise)."""
    if isinstance(method, str):
        return get_method(method, **options)
    if not isinstance(method, MergeMethod):
        raise MethodError(f"a method is a name or a MergeMethod, not {type(method).__name__}")
    if options:
        raise MethodError(
            f"options beside a method object: {', '.join(options)}",
            hint=f"set them on the object: {type(method).__name__}({next(iter(options))}=…)",
        )
    return method


def _refined(default: Any, value: Any) -> Any:
    # {"steps": 8} for a policy refines the method's own default policy.
    if isinstance(default, Options) and isinstance(value, dict) and "name" not in value:
        return default.options() | value
    return value


@cache
def _load_plugins() -> None:
    # Importing the module that an entry point names registers what it holds.
    for entry in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda e: e.name):
        try:
            entry.load()
        except (Exception, SystemExit) as error:
            warnings.warn(_failure(entry, error), MergeWarning, stacklevel=2)


def _failure(entry: EntryPoint, error: BaseException) -> str:
    package = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown package"
    reason = str(error) if isinstance(error, MethodError) else f"{type(error).__name__}: {error}"
    return f"the plug-in {entry.name!r} ({entry.value}) of {package} failed to load: {reason}"


def _nearest(name: str, valid: list[str]) -> str:
    close = get_close_matches(name, valid, n=1)
    guess = f"did you mean {close[0]!r}? " if close else ""
    return f"{guess}valid: {', '.join(valid)}"
