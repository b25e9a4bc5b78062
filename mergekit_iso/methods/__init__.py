"""The operators, one file per family, and the registry that knows them by name."""

from .base import Context, DeltaStream, MergeMethod, Requires, Worker, merge_unit
from .dare import DARE, DARETIES
from .iso import IsoC, IsoCTS
from .registry import MethodEntry, get_method, list_methods, method_entry, register, resolve_method
from .task_arithmetic import Average, TaskArithmetic
from .ties import TIES
from .tsv import TSV

__all__ = [
    "DARE",
    "DARETIES",
    "TIES",
    "TSV",
    "Average",
    "Context",
    "DeltaStream",
    "IsoC",
    "IsoCTS",
    "MergeMethod",
    "MethodEntry",
    "Requires",
    "TaskArithmetic",
    "Worker",
    "get_method",
    "list_methods",
    "merge_unit",
    "method_entry",
    "register",
    "resolve_method",
]
