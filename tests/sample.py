"""What `make test` leaves to `make test-all`: cases of products that repeat a proof, and further rounds of chance.

A test marked `sampled` has two or more parameters that do not meet in the code (an attention mode and an eviction
policy, say): each value of each is run, and not each with each. `make test` asks for it with KVTIER_TEST_SAMPLE=1; any
other run of pytest runs all.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence

import pytest

IS_SAMPLE = os.environ.get("KVTIER_TEST_SAMPLE", "0") == "1"


def rounds(of_all: int, of_sample: int) -> int:
    """How many seeds, kills or examples."""
    return of_sample if IS_SAMPLE else of_all


def diagonals(cases: Sequence[tuple[int, ...]]) -> list[int]:
    """Which cases of a product to run, by their places in it: an n-th, n being the least number of values of a factor.

    Each value of each factor is in it; where there are three factors, each pair of values of two of them too, as long
    as no factor has more values than each of the others.

    Args:
        cases: the index of each factor's value.
    """
    columns = {column for column in zip(*cases, strict=True) if len(set(column)) > 1}  # those given together count once
    if len(columns) < 2:
        return list(range(len(cases)))
    least = min(len(set(column)) for column in columns)
    return [number for number, case in enumerate(zip(*sorted(columns), strict=True)) if sum(case) % least == 0]


def left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """The cases of tests marked `sampled` that a sample does not run."""
    by_test: dict[tuple[object, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled") and hasattr(item, "callspec"):
            by_test[item.parent, item.originalname].append(item)
    gone: set[pytest.Item] = set()
    for cases in by_test.values():
        # A part of the id for each @parametrize: pytest's own numbers of values count cases.
        parts = list(zip(*(case.callspec._idlist for case in cases), strict=True))
        places = [[list(dict.fromkeys(part)).index(each) for each in part] for part in parts]
        chosen = diagonals(list(zip(*places, strict=True)))
        gone |= set(cases) - {cases[number] for number in chosen}
    return gone
