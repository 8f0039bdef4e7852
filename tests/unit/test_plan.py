"""Step plans."""

from __future__ import annotations

import pytest

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError
from kvtier.metrics import SequenceMetrics
from kvtier.plan import Plans, Resident, SlotRun, Source, StepPlan
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


def places(plan: StepPlan) -> list[tuple[Tier, int]]:
    return sorted((block.tier, block.index) for row in plan.rows for block in row.resident)


@pytest.mark.parametrize(("host_frac", "num_on_host"), [(0.0, 0), (0.5, 3), (0.75, 4), (1.0, 6)])
def test_that_share_of_the_cpu_tiers_blocks_is_read_where_it_lies(host_frac: float, num_on_host: int) -> None:
    residency, table = ResidencyTable(), BlockTable(SequenceId(1), 4)
    ids = [residency.create(SequenceId(1), index) for index in range(8)]
    for index, block in enumerate(ids):
        residency.add_copy(block, Tier.NVME if index == 3 else Tier.GPU if index == 0 else Tier.CPU, Slot(index))
    table.append(32, None, ids)
    plan = StepPlan.build(Batch([table], SequenceMetrics()), residency, host_frac)
    resident = places(plan)
    assert sum(tier is Tier.CPU for tier, _ in resident) == num_on_host
    assert (Tier.GPU, 0) in resident and 3 in {source.index for source in plan.streamed}
    assert len(resident) + len(plan.streamed) == 8
    assert sum(run.count for row in plan.rows for run in row.runs if run.tier is Tier.CPU) == num_on_host


def test_runs_do_not_cross_from_one_tier_to_another() -> None:
    residency, table = ResidencyTable(), BlockTable(SequenceId(1), 4)
    ids = [residency.create(SequenceId(1), index) for index in range(4)]
    for block, tier, slot in zip(ids, (Tier.CPU, Tier.GPU, Tier.CPU, Tier.GPU), (0, 1, 1, 2), strict=True):
        residency.add_copy(block, tier, Slot(slot))
    table.append(16, None, ids)
    (row,) = StepPlan.build(Batch([table], SequenceMetrics()), residency, 1.0).rows
    assert row.runs == (SlotRun(Slot(1), 2, Tier.GPU), SlotRun(Slot(0), 2, Tier.CPU))


class Planned:
    """A sequence of full blocks, and the plans of it."""

    def __init__(self, num_blocks: int) -> None:
        self.residency, self.table = ResidencyTable(), BlockTable(SequenceId(1), 4)
        self.plans, self.batch = Plans(self.residency), Batch([self.table], SequenceMetrics())
        for _ in range(num_blocks):
            self.add(4)

    def add(self, num_tokens: int) -> None:
        """Tokens, in a new block if the last is full."""
        new = []
        if not self.table.tail_tokens:
            new = [self.residency.create(SequenceId(1), len(self.table.blocks))]
            self.residency.add_copy(new[0], Tier.GPU, Slot(len(self.residency)))
        self.table.append(num_tokens, None, new)

    def get(self, host_frac: float = 0.0) -> StepPlan:
        plan = self.plans.get(self.batch, host_frac)
        assert plan == StepPlan.build(self.batch, self.residency, host_frac)
        return plan


def test_a_plan_stays_the_same_object_until_a_block_fills() -> None:
    planned = Planned(2)
    planned.add(1)
    first = planned.get()
    for _ in range(2):
        planned.add(1)
        assert planned.get() is first
    planned.add(1)  # full: it is planned for now
    assert planned.get() is not first


def test_a_plan_is_made_anew_when_a_block_of_it_lies_elsewhere_and_when_the_share_changes() -> None:
    planned = Planned(3)
    block = planned.table.blocks[1]
    plan = planned.get()
    planned.residency.add_copy(block, Tier.CPU, Slot(5))
    assert planned.get() is plan  # it is read from where it was
    planned.residency.add_copy(planned.residency.create(SequenceId(2), 0), Tier.GPU, Slot(9))
    assert planned.get() is plan  # another's
    planned.residency.drop_copy(block, Tier.GPU)
    again = planned.get()
    assert again is not plan and len(again.streamed) == 1
    assert not planned.get(1.0).streamed


def test_a_crop_and_another_block_in_the_same_place_make_a_plan_anew() -> None:
    planned = Planned(3)
    before = planned.get()
    (dropped,) = planned.table.truncate(8)
    assert planned.get() is not before
    planned.residency.drop_copy(dropped, Tier.GPU)
    planned.add(4)
    assert planned.get().rows[0].resident[2].slot != before.rows[0].resident[2].slot


def test_no_plan_is_kept_of_a_batch_that_lost_a_block() -> None:
    planned = Planned(3)
    block = planned.table.blocks[1]
    planned.get()
    planned.residency.drop_copy(block, Tier.GPU)
    for _ in range(2):
        with pytest.raises(BlockLostError):
            planned.plans.get(planned.batch)
    planned.residency.add_copy(block, Tier.NVME, Slot(1))
    assert [source.block for source in planned.get().streamed] == [block]
