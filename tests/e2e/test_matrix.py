"""A sample of the matrix: modes x families x attention x dtype, kvtier against plain transformers."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from kvtier.hf import VERIFIED_FAMILIES
from tests.e2e.cells import PARTNERS, SERVED_FAMILIES, SERVED_MODES, Cell, pairwise, reference, run_cell, sample
from tests.e2e.families import FAMILIES
from tests.e2e.modes import MODES_BY_NAME


def test_pairwise_covers_every_pair() -> None:
    factors = {"a": "123", "b": "xyz", "c": "pq"}
    cells = pairwise(factors, {})
    for i, j in itertools.combinations(range(3), 2):
        names = list(factors)
        wanted = set(itertools.product(factors[names[i]], factors[names[j]]))
        assert {(cell[i], cell[j]) for cell in cells} == wanted
    assert len(cells) <= 12 and cells == pairwise(factors, {})


def test_the_sample_of_everything() -> None:
    cells = sample(tuple(MODES_BY_NAME), tuple(FAMILIES))
    assert len(cells) == len(set(cells)) <= 80
    for mode in MODES_BY_NAME:
        of = [cell for cell in cells if cell.mode == mode]
        assert len({cell.family for cell in of}) >= PARTNERS
        assert {cell.attention for cell in of} == {"blockwise", "gathered"}
        assert {cell.dtype for cell in of} == {"fp32", "bf16"}
    for family in FAMILIES:
        of = [cell for cell in cells if cell.family == family]
        assert len({cell.mode for cell in of}) >= PARTNERS
        assert {cell.attention for cell in of} == {"blockwise", "gathered"}
        assert {cell.dtype for cell in of} == {"fp32", "bf16"}
    assert {cell[2:] for cell in cells} == set(itertools.product(("blockwise", "gathered"), ("fp32", "bf16")))


@pytest.mark.parametrize("cell", sorted(sample(), key=lambda cell: cell[1:]), ids="-".join)
def test_cell(cell: Cell, tmp_path: Path) -> None:
    run_cell(cell, tmp_path)


def test_a_plain_run_is_shared_by_its_cells() -> None:
    assert reference("greedy", "llama", "fp32") is reference("greedy", "llama", "fp32")


def test_every_family_that_counts_as_verified_is_compared() -> None:
    assert {config.model_type for config, _ in FAMILIES.values()} == set(VERIFIED_FAMILIES)
    assert tuple(MODES_BY_NAME) == SERVED_MODES and set(SERVED_FAMILIES) == set(FAMILIES)


def test_every_mode_is_described_in_a_line() -> None:
    for mode in MODES_BY_NAME.values():
        assert mode.description.endswith(".") and "\n" not in mode.description
