"""When no tier takes a block: which idle blocks are dropped, which never, and what a batch without them is like."""

from __future__ import annotations

import pytest

from kvtier.batch import Batch
from kvtier.errors import BlockLostError, CapacityError
from kvtier.losses import Losses
from kvtier.policies.mru import MRU
from kvtier.recomputable import Past
from kvtier.step import NewColumns
from kvtier.types import BlockId, Tier
from tests.small_tiers import BROKEN_POLICIES, House, build, columns
from tests.unit.test_losses import chunk, mend, opener

NO_BACKGROUND = {"low_frac": 0.0}


def full(gpu: int = 2, cpu: int = 2, nvme: int = 2, **values: object) -> tuple[House, list[Batch]]:
    """Idle conversations of one block each, one for each slot; the oldest are on the slowest tier."""
    house = build(gpu, cpu, nvme, drops=True, **NO_BACKGROUND | values)  # type: ignore[arg-type]
    return house, [house.filled(4, 100 * number) for number in range(gpu + cpu + nvme)]


def gone(house: House, batches: list[Batch]) -> list[int]:
    """Numbers of those that have a block without a copy."""
    copies = [[house.placement.residency[block].copies for block in batch.tables[0].blocks] for batch in batches]
    return [number for number, each in enumerate(copies) if not all(each)]


def test_the_slowest_tiers_idle_blocks_go_first_and_no_more_than_are_needed() -> None:
    house, idle = full()
    running = house.manager.new_batch()
    house.append(running, [1, 2, 3, 4])
    assert gone(house, idle) == [0] and house.used() == {"gpu": 2, "cpu": 2, "nvme": 2}
    house.append(running, [5, 6, 7, 8])
    assert gone(house, idle) == [0, 1] and house.placement.metrics.dropped_blocks == 2
    house.append(running, [9, 10, 11, 12])
    assert gone(house, idle) == [0, 1, 2]  # those of nvme are running by now, or were cpu's
    house.manager.check_integrity()


def test_without_lower_tiers_the_policy_names_them() -> None:
    house, idle = full(3, 0, 0)
    house.append(house.manager.new_batch(), [1, 2, 3, 4, 5])
    assert gone(house, idle) == [0, 1]
    house, idle = full(3, 0, 0, policies={Tier.GPU: MRU()})
    house.append(house.manager.new_batch(), [1, 2, 3, 4, 5])
    assert gone(house, idle) == [1, 2]


@pytest.mark.parametrize("name", BROKEN_POLICIES)
def test_a_policy_that_does_not_work_does_not_stop_the_house(name: str) -> None:
    house, idle = full(2, 0, 2, policies={tier: BROKEN_POLICIES[name]() for tier in (Tier.GPU, Tier.NVME)})
    house.append(house.manager.new_batch(), [1, 2, 3, 4, 5])
    assert len(gone(house, idle)) == 2
    house.manager.check_integrity()


def test_a_tier_that_takes_none_is_no_help() -> None:
    house, idle = full(2, 0, 4)
    house.engine.fail_frac = 1.0
    house.append(house.manager.new_batch(), [1, 2, 3, 4])
    # One of nvme's went, three moves into its slot failed, and then one of the gpu tier's went.
    assert gone(house, idle) == [0, 4] and house.placement.breakers[Tier.NVME].is_resting
    house.append(house.manager.new_batch(), [1, 2, 3, 4])
    assert gone(house, idle) == [0, 4, 5]
    assert house.used() == {"gpu": 2, "nvme": 3}


def test_nothing_goes_for_a_step_that_cannot_fit() -> None:
    house, idle = full(4, 0, 0)
    running = house.manager.new_batch()
    house.append(running, list(range(12)))
    assert gone(house, idle) == [0, 1, 2]
    with pytest.raises(CapacityError, match="no tier takes another block"):
        house.append(running, list(range(8)))
    assert gone(house, idle) == [0, 1, 2] and running.length == 12
    house.append(running, [1])
    assert gone(house, idle) == [0, 1, 2, 3]


def test_what_lies_further_down_stays_if_nothing_of_the_tier_may_move_there() -> None:
    house = build(2, 0, 1, drops=True, **NO_BACKGROUND)
    idle = house.filled(4, 100)
    pinned = house.filled(8, 200)
    assert house.tiers_of(idle) == ["nvme"]
    for block in pinned.tables[0].blocks:
        house.placement.residency.pin(block, Tier.GPU)
    with pytest.raises(CapacityError):
        house.append(house.manager.new_batch(), [1])
    assert house.tiers_of(idle) == ["nvme"] and house.placement.metrics.dropped_blocks == 0


def test_running_pinned_and_shared_blocks_stay() -> None:
    house = build(4, 0, 0, drops=True, **NO_BACKGROUND)
    entered, shared, pinned = house.filled(4, 100), house.filled(4, 200), house.filled(4, 300)
    house.manager.enter(entered)
    house.manager.enter(house.manager.fork(shared))
    (block,) = pinned.tables[0].blocks
    house.placement.residency.pin(block, Tier.GPU)
    other = house.manager.new_batch()
    house.append(other, [1, 2, 3, 4])
    with pytest.raises(CapacityError):
        house.append(other, [5])
    assert house.placement.metrics.dropped_blocks == 0
    house.placement.residency.unpin(block, Tier.GPU)
    house.append(other, [5])
    assert gone(house, [entered, shared, pinned]) == [2]


def test_tokens_that_are_not_known_and_padding_before_states_stay() -> None:
    for past, ids, masked in ((Past.BLOCKS, None, 0), (Past.STATES, [1, 2, 3, 4], 1)):
        house = build(2, 0, 0, drops=True, past=past, **NO_BACKGROUND)
        batch, running = house.manager.new_batch(), house.manager.new_batch()
        given = columns([None] * masked + [1, 2, 3, 4])
        step = house.manager.begin_step(batch, [NewColumns(given.num_columns, given.runs, ids)])
        house.manager.commit_step(step)
        house.append(running, [1, 2, 3, 4])
        with pytest.raises(CapacityError):
            house.append(running, [5])
        assert gone(house, [batch]) == []


def test_a_batch_with_blocks_that_are_gone_is_forked_cropped_and_dropped_as_any_other() -> None:
    house, (first, *_) = full(3, 0, 0)
    house.append(house.manager.new_batch(), [1, 2, 3, 4])
    assert gone(house, [first]) == [0]
    twin = house.manager.fork(first)
    house.manager.truncate(twin, 2)
    assert twin.tables[0].blocks == first.tables[0].blocks
    house.manager.check_integrity()
    house.manager.drop(first)
    with pytest.raises(BlockLostError, match="dropped to make room") as caught:
        house.append(twin, [7])
    assert list(caught.value.blocks) == twin.tables[0].blocks
    assert not house.placement.residency_pins(Tier.GPU)
    (block,) = twin.tables[0].blocks
    mend(house, twin, [columns([7])])
    assert house.read(twin) == [0, 1, 7]
    house.manager.drop(twin)
    house.manager.check_integrity()
    assert block not in house.placement.unreadable


def test_a_row_whose_past_is_gone_is_mended_for_its_twin_too() -> None:
    house = build(4, 0, 0, drops=True, **NO_BACKGROUND)
    batch = house.filled(10)
    twin = house.manager.fork(batch)
    house.append(house.manager.new_batch(), list(range(100, 116)))
    assert gone(house, [batch, twin]) == [0, 1] and house.placement.metrics.dropped_blocks == 3
    mend(house, batch, [columns([10])])
    assert house.read(batch) == list(range(11)) and house.placement.metrics.recomputed_blocks == 3
    house.manager.check_integrity()


@pytest.mark.parametrize("past", [Past.BLOCKS, Past.WINDOWS])
def test_a_batch_that_is_mended_outside_of_generate_keeps_what_was_mended(past: Past) -> None:
    house = build(5, 0, 0, drops=True, past=past, **NO_BACKGROUND)
    batch = house.filled(14)
    house.append(house.manager.new_batch(), list(range(100, 120)))
    assert house.placement.metrics.dropped_blocks == 4
    mend(house, batch, [columns([14])])
    assert house.placement.metrics.recomputed_blocks == 4 and house.placement.metrics.dropped_blocks == 8
    assert house.read(batch) == list(range(15))
    house.manager.check_integrity()


def test_rows_that_are_mended_do_not_cost_each_other_their_blocks() -> None:
    """Nothing pins a tail that was mended, and this policy would name it first."""
    house = build(4, 0, 0, drops=True, policies={Tier.GPU: MRU()}, **NO_BACKGROUND)
    batch, other = house.manager.new_batch(2), house.manager.new_batch()
    house.append(batch, [[1, 2], [3, 4]])
    house.append(other, list(range(100, 116)))
    assert gone(house, [batch]) == [0] and house.placement.metrics.dropped_blocks == 2
    losses = Losses(house.manager, batch, [columns([5]), columns([6])], opener(house), chunk(4))
    losses.mend(losses.known(), "known")
    losses.close()
    assert house.placement.metrics.recomputed_blocks == 2 and not losses.known()
    house.append(batch, [[5], [6]])
    assert house.read_rows(batch) == [[1, 2, 5], [3, 4, 6]] and house.placement.metrics.recomputed_blocks == 2
    house.manager.check_integrity()


def test_a_batch_too_large_to_be_mended_is_short_of_room_and_not_broken() -> None:
    house = build(3, 0, 1, drops=True, **NO_BACKGROUND)
    batch = house.filled(16)
    other = house.manager.new_batch()
    house.append(other, list(range(100, 112)))
    house.manager.enter(other)
    assert house.placement.metrics.dropped_blocks == 3
    losses = Losses(house.manager, batch, [columns([16])], opener(house), chunk(4))
    for _ in range(2):
        with pytest.raises(CapacityError):
            losses.mend(losses.known(), "known")
        losses.close()
        house.manager.check_integrity()
        assert batch.length == 16 and len(house.manager.tables) == 2
    house.manager.leave(other)
    mend(house, batch, [columns([])])
    assert house.read(batch) == list(range(16))


def test_a_mend_that_starts_over_and_runs_out_of_room_half_way_is_short_of_room_and_not_broken() -> None:
    house = build(3, 0, 1, drops=True, past=Past.WINDOWS, **NO_BACKGROUND)
    batch = house.filled(16)
    other = house.manager.new_batch()
    house.append(other, list(range(100, 112)))
    house.manager.enter(other)
    house.manager.truncate(other, 8)  # one block of room
    first = batch.tables[0].blocks[0]
    losses = Losses(house.manager, batch, [columns([16])], opener(house), chunk(4))
    with pytest.raises(CapacityError):
        losses.mend(losses.known(), "known")
    losses.close()
    assert house.placement.residency[first].copies  # it was mended
    house.manager.check_integrity()


def test_moves_that_fail_after_a_drop_end_in_an_error_and_not_in_a_loop() -> None:
    house = build(2, 0, 2, drops=True, **NO_BACKGROUND)
    idle, running = house.filled(8, 100), house.manager.new_batch()
    house.append(running, list(range(8)))
    house.engine.fail_frac = 1.0
    with pytest.raises(CapacityError, match="the nvme tier takes none for now"):
        house.append(running, [8])
    assert gone(house, [idle]) == [0] and house.placement.metrics.moves_failed == 3
    assert not house.placement.moves
    house.manager.check_integrity()
    house.engine.fail_frac = 0.0
    house.clock.now_s += 1
    house.append(running, [8])
    assert house.read(running) == list(range(9))


def test_dropped_blocks_that_are_gone_with_their_batch_are_forgotten() -> None:
    house, idle = full(2, 0, 0)
    house.append(house.manager.new_batch(), [1, 2, 3, 4, 5])
    assert len(house.placement.unreadable) == 2
    for batch in idle:
        house.manager.drop(batch)
    assert not house.placement.unreadable and BlockId(0) not in house.manager.recomputable
    house.manager.check_integrity()
