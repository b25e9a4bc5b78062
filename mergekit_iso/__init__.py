"""mergekit-iso: merge fine-tuned models, and use the same operators as DiLoCo's outer step.

Names are imported on first use, so importing the package imports no torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

_HOME = {
    "merge": "merge",
    "task_vector": "merge",
    "Average": "methods",
    "TaskArithmetic": "methods",
    "TIES": "methods",
    "DARE": "methods",
    "DARETIES": "methods",
    "TSV": "methods",
    "IsoC": "methods",
    "IsoCTS": "methods",
    "MergeMethod": "methods",
    "Requires": "methods",
    "get_method": "methods",
    "list_methods": "methods",
    "register": "methods",
    "Exact": "kernels.polar",
    "NewtonSchulz": "kernels.polar",
    "Halley": "kernels.polar",
    "Fast": "kernels.polar",
    "merge_checkpoints": "execute",
    "execute": "execute",
    "plan": "plan",
    "verify": "checkpoints.verify",
    "LoopedMerger": "loop",
    "OuterReport": "loop",
    "simulate": "loop",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_HOME[name]}", __name__), name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("mergekit-iso")
    except PackageNotFoundError:  # used from a source tree that is not installed
        return "0+unknown"


class _Package(ModuleType):
    def __setattr__(self, name: str, value: Any) -> None:
        # Importing the submodule `merge` would otherwise put it in place of the function `merge`.
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted(__all__)
