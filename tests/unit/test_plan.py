"""Step plans."""

from __future__ import annotations

import pytest

from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError
from kvtier.plan import Resident, SlotRun, Source, StepPlan
from kvtier.residency import ResidencyTable
from kvtier.types import SequenceId, Slot, Tier


def plan_of(places: list[dict[Tier, int]], tail_tokens: int = 0) -> StepPlan:
    """The plan of a sequence whose blocks lie there; the last one is a tail if it has tail_tokens."""
    residency, table = ResidencyTable(), BlockTable(SequenceId(1), 4)
    ids = [residency.create(SequenceId(1), index) for index in range(len(places))]
    for block, copies in zip(ids, places, strict=True):
        for tier, slot in copies.items():
            residency.add_copy(block, tier, Slot(slot))
    num_tokens = 4 * len(places) - (4 - tail_tokens if tail_tokens else 0)
    table.append(num_tokens, None, ids)
    return StepPlan.build(table, residency)


def test_neighbouring_slots_are_one_run_in_whatever_order_the_blocks_come() -> None:
    plan = plan_of([{Tier.GPU: slot} for slot in (5, 1, 0, 2, 7, 6)])
    assert plan.runs == (SlotRun(Slot(0), 3), SlotRun(Slot(5), 3))
    assert plan.resident == tuple(Resident(i, Slot(slot)) for i, slot in enumerate((5, 1, 0, 2, 7, 6)))
    assert plan.streamed == ()


def test_single_slots_and_none() -> None:
    assert plan_of([{Tier.GPU: 3}, {Tier.GPU: 5}]).runs == (SlotRun(Slot(3), 1), SlotRun(Slot(5), 1))
    assert plan_of([]).runs == ()


def test_each_block_comes_from_its_fastest_tier_and_streams_in_block_order() -> None:
    plan = plan_of([{Tier.NVME: 9}, {Tier.NVME: 1, Tier.CPU: 2}, {Tier.GPU: 0, Tier.CPU: 0}, {Tier.CPU: 1}])
    assert plan.resident == (Resident(2, Slot(0)),)
    places = [(source.index, source.tier, source.slot) for source in plan.streamed]
    assert places == [(0, Tier.NVME, 9), (1, Tier.CPU, 2), (3, Tier.CPU, 1)]
    assert all(isinstance(source, Source) for source in plan.streamed)


def test_the_tail_is_not_planned() -> None:
    plan = plan_of([{Tier.GPU: 0}, {Tier.GPU: 1}], tail_tokens=3)
    assert plan.runs == (SlotRun(Slot(0), 1),)


def test_a_block_without_a_copy_is_lost_and_the_error_says_which() -> None:
    with pytest.raises(BlockLostError, match="block 1 of sequence 1 has no copy"):
        plan_of([{Tier.GPU: 0}, {}])
