"""Every registered method keeps the operators' contract, with its options too."""

from __future__ import annotations

from typing import Any

import pytest

from mergekit_iso.methods import list_methods
from mergekit_iso.testing import check_method

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("ties", {"scope": "tensor"}),
    ("ties", {"sign": "frequency", "aggregate": "sum"}),
    ("ties", {"aggregate": "max"}),
    ("ties", {"density": 0.0}),
    ("ties", {"density": 1.0}),
    ("dare", {"drop_rate": 0.9}),
    ("dare", {"drop_rate": 1.0}),
    ("dare", {"rescale": False}),
    ("dare_ties", {"scope": "tensor", "density": 1.0, "drop_rate": 0.5}),
    ("tsv", {"min_rank": 1}),
    ("tsv", {"rank_fraction": 0.5}),
    ("tsv", {"rank_tolerance": 0.5}),
    ("tsv", {"polar": "fast"}),
    ("iso_c", {"norm": "frobenius"}),
    ("iso_c", {"power": 0.5}),
    ("iso_c", {"power": 1.0}),
    ("iso_c", {"rank_tolerance": 0.3}),
    ("iso_c", {"polar": {"name": "newton_schulz", "preset": "muon5"}}),
    ("iso_c_ns", {"norm": "frobenius"}),
    ("iso_cts", {"common_fraction": 1.0}),
    ("iso_cts", {"norm": "frobenius", "power": 0.5}),
]


@pytest.mark.parametrize("name", [entry.name for entry in list_methods()])
def test_with_its_defaults(name: str) -> None:
    check_method(name)


@pytest.mark.parametrize(("name", "options"), OPTIONS)
def test_with_options(name: str, options: dict[str, Any]) -> None:
    check_method(name, **options)
