"""Step plans."""

from __future__ import annotations

import pytest

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError
from kvtier.metrics import SequenceMetrics
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
    return StepPlan.build(Batch([table], SequenceMetrics()), residency)


def test_neighbouring_slots_are_one_run_in_whatever_order_the_blocks_come() -> None:
    plan = plan_of([{Tier.GPU: slot} for slot in (5, 1, 0, 2, 7, 6)])
    assert plan.rows[0].runs == (SlotRun(Slot(0), 3), SlotRun(Slot(5), 3))
    assert plan.rows[0].resident == tuple(Resident(i, Slot(slot)) for i, slot in enumerate((5, 1, 0, 2, 7, 6)))
    assert plan.streamed == ()


def test_single_slots_and_none() -> None:
    assert plan_of([{Tier.GPU: 3}, {Tier.GPU: 5}]).rows[0].runs == (SlotRun(Slot(3), 1), SlotRun(Slot(5), 1))
    assert plan_of([]).rows[0].runs == ()


def test_each_block_comes_from_its_fastest_tier_and_streams_in_block_order() -> None:
    plan = plan_of([{Tier.NVME: 9}, {Tier.NVME: 1, Tier.CPU: 2}, {Tier.GPU: 0, Tier.CPU: 0}, {Tier.CPU: 1}])
    assert plan.rows[0].resident == (Resident(2, Slot(0)),)
    places = [(source.index, source.tier, source.slot) for source in plan.streamed]
    assert places == [(0, Tier.NVME, 9), (1, Tier.CPU, 2), (3, Tier.CPU, 1)]
    assert all(isinstance(source, Source) and source.rows == (0,) for source in plan.streamed)


def test_the_tail_is_not_planned() -> None:
    plan = plan_of([{Tier.GPU: 0}, {Tier.GPU: 1}], tail_tokens=3)
    assert plan.rows[0].runs == (SlotRun(Slot(0), 1),)


def test_blocks_without_a_copy_are_lost_and_the_error_names_all_of_them() -> None:
    with pytest.raises(BlockLostError, match="2 blocks of the batch were dropped to make room") as caught:
        plan_of([{Tier.GPU: 0}, {}, {Tier.CPU: 0}, {}])
    assert caught.value.blocks == (1, 3)


def test_a_block_that_rows_share_is_streamed_once_and_names_them() -> None:
    residency = ResidencyTable()
    shared, own_0, on_gpu, own_2 = (residency.create(SequenceId(1), index) for index in (0, 1, 1, 1))
    places = [(shared, Tier.CPU, 3), (own_0, Tier.CPU, 1), (on_gpu, Tier.GPU, 5), (own_2, Tier.NVME, 0)]
    for block, tier, slot in places:
        residency.add_copy(block, tier, Slot(slot))
    tables = [BlockTable(SequenceId(row), 4) for row in range(4)]
    for table, second in zip(tables, (own_0, on_gpu, own_2, own_2), strict=True):
        table.append(8, None, [shared, second])
    plan = StepPlan.build(Batch(tables, SequenceMetrics()), residency)
    assert plan.streamed == (
        Source(shared, 0, Tier.CPU, Slot(3), (0, 1, 2, 3)),
        Source(own_0, 1, Tier.CPU, Slot(1), (0,)),
        Source(own_2, 1, Tier.NVME, Slot(0), (2, 3)),
    )
    assert [row.resident for row in plan.rows] == [(), (Resident(1, Slot(5)),), (), ()]
    assert [row.runs for row in plan.rows] == [(), (SlotRun(Slot(5), 1),), (), ()]


def test_a_resident_block_that_rows_share_is_in_each_rows_plan() -> None:
    residency = ResidencyTable()
    blocks = [residency.create(SequenceId(1), index) for index in range(2)]
    for block in blocks:
        residency.add_copy(block, Tier.GPU, Slot(7 - block))
    tables = [BlockTable(SequenceId(row), 4) for row in range(2)]
    tables[0].append(8, None, blocks)
    tables[1].append(6, None, blocks)
    plan = StepPlan.build(Batch(tables, SequenceMetrics()), residency)
    assert [row.runs for row in plan.rows] == [(SlotRun(Slot(6), 2),), (SlotRun(Slot(7), 1),)]
    assert not plan.streamed
