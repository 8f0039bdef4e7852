"""No operation of the control plane visits more entries because there are more blocks. Counted, never timed.

Instructions of Python are counted for each operation in two houses of which one is ten times the other; entries that a
loop in C walks through are counted by the containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from kvtier.benchmarks.scale import metadata
from kvtier.benchmarks.scale_house import SHARE, House, Instructions, Meter, build, only_row
from kvtier.benchmarks.scale_operations import OPERATIONS
from kvtier.block_table import BlockTable
from kvtier.step import NewColumns
from kvtier.types import BlockId, SequenceId, Tier
from tests.counting import Visits

SMALL, LARGE = 400, 4000
COUNT = 40


class Walks(Meter):
    """Entries of containers that an operation walks through."""

    def __init__(self, visits: Visits) -> None:
        super().__init__()
        self._visits = visits

    def _start(self) -> None:
        self._before = self._visits.count

    def _stop(self) -> float:
        return self._visits.count - self._before


def instrumented(house: House, visits: Visits) -> None:
    """Have what grows with the house counted when somebody walks through it."""
    placement = house.placement
    owners: list[tuple[object, str]] = [
        (placement.residency, "records"), (house.manager, "tables"), (placement, "unreadable"),
        (placement, "sequence_metrics"), (placement, "kept"), (placement, "pinned"),
        (placement.prefixes, "_blocks"), (placement.prefixes, "_sealed"),
    ]  # fmt: skip
    for tier, pool in placement.pools.items():
        owners += [(pool, name) for name in ("_free", "_held", "_retired")]
        policies = placement.policies[tier], placement.cached_policies[tier]
        owners += [(policy._policy, "_blocks") for policy in policies]
        placement.residency.redundant[tier] = visits.counting(placement.residency.redundant[tier])
    for owner, name in owners:
        setattr(owner, name, visits.counting(getattr(owner, name)))


@pytest.fixture(scope="module")
def houses() -> Iterator[tuple[House, House]]:
    small, large = build(SMALL), build(LARGE)
    yield small, large
    for house in (small, large):
        house.check()  # whatever was measured in it


def test_the_house_is_what_it_says(houses: tuple[House, House]) -> None:
    for house, num_blocks in zip(houses, (SMALL, LARGE), strict=True):
        assert house.num_blocks == len(house.placement.prefixes) == num_blocks
        copies = house.placement.residency.num_copies
        for tier, share in SHARE.items():
            assert abs(copies[tier] - share * num_blocks) <= 0.02 * num_blocks
        house.check()


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_instructions_do_not_grow_with_the_number_of_blocks(
    houses: tuple[House, House], operation: Callable[[House, Meter, int], None]
) -> None:
    found = []
    for house in houses:
        before = house.num_blocks
        meter = Instructions()
        operation(house, meter, COUNT)
        assert house.num_blocks == before
        found.append({name: count for name, (count,) in meter.found.items()})
    small, large = found
    assert small.keys() == large.keys()
    grown = {name: (small[name], large[name]) for name in small if large[name] > 1.15 * small[name] + 20}
    assert not grown


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.__name__)
def test_no_loop_in_c_walks_through_more_entries_either(operation: Callable[[House, Meter, int], None]) -> None:
    found = []
    for num_blocks in (SMALL, LARGE):
        house, visits = build(num_blocks), Visits()
        instrumented(house, visits)
        meter = Walks(visits)
        operation(house, meter, COUNT)
        found.append({name: count for name, (count,) in meter.found.items()})
    small, large = found
    grown = {name: (small[name], large[name]) for name in small if large[name] > small[name] + 2}
    assert not grown


def test_a_walk_is_seen_by_both() -> None:
    """What the tests above would say of an operation that walks through all blocks."""
    house, visits = build(SMALL), Visits()
    instructions = Instructions()
    with instructions("walk", 1):
        sum(house.placement.residency[block].holders for block in house.placement.residency.blocks())
    assert instructions.found["walk"][0] > 5 * SMALL
    instrumented(house, visits)
    house.placement.residency.blocks()
    assert visits.count == SMALL


def test_a_step_visits_no_block_of_its_own_row() -> None:
    """At 128K tokens a row has as many blocks as a small house."""
    found = []
    for num_blocks in (40, 400):
        house = build(SMALL)
        house.placement.pools[Tier.GPU].raise_ceiling(house.placement.pools[Tier.GPU].num_slots)
        batch = house.manager.new_batch()
        house.manager.enter(batch)
        num_tokens = num_blocks * house.manager.block_tokens
        for size in (num_tokens, 1):  # the second one seals
            new = [NewColumns.of(size, list(range(size)))]
            house.manager.commit_step(house.manager.begin_step(batch, new))
        while house.placement.moves:
            house.manager.poll()
        meter, table = Instructions(), only_row(batch)
        with meter("step", 10):
            for _ in range(10):
                house.manager.commit_step(house.manager.begin_step(batch, [NewColumns.of(1, [7])]))
        assert len(table.blocks) == num_blocks + 1
        found += meter.found["step"]
        house.check()
    assert found[1] <= 1.1 * found[0]


def test_metadata_stays_within_its_bound() -> None:
    row = metadata(2000)
    assert 100 < row["block_bytes"] < row["target_block_bytes"]
    assert 3.9 < row["token_bytes"] < row["target_token_bytes"]


def test_tokens_take_the_bytes_of_their_ids() -> None:
    """Positions that are counted on, and what a token was made from, are runs."""
    table = BlockTable(SequenceId(1), 64)
    for first in range(0, 6400, 64):
        table.append(64, range(first, first + 64), [BlockId(first)])
    assert len(table._runs) == 1
