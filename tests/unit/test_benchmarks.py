"""Every benchmark can be started: what nobody runs for weeks breaks first."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

MODULES = sorted(
    path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.parametrize("name", MODULES)
def test_each_module_of_the_benchmarks_can_be_imported(name: str) -> None:
    importlib.import_module(f"kvtier.benchmarks.{name}")
