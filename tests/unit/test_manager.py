"""The tier manager's named behaviours. Blocks of 4 tokens; every tier is a handful of slots."""

from __future__ import annotations

import logging
from collections.abc import Container
from typing import Any

import pytest

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError, CapacityError, IntegrityError, TransferTimeoutError, UnsupportedError
from kvtier.evictable import Evictable
from kvtier.metrics import SequenceMetrics
from kvtier.placement import Watermark
from kvtier.policies.lru import LRU
from kvtier.policies.mru import MRU
from kvtier.residency import BlockState
from kvtier.step import NewColumns, StepState
from kvtier.types import BlockId, EvictionPolicy, MovePurpose, MoveResult, MoveStatus, SequenceId, Tier
from tests.small_tiers import BROKEN_POLICIES, HandEngine, House, build

# With nothing to fill up to, no block is copied down early or promoted in the background.
NO_BACKGROUND = {"low_frac": 0.0}


def purposes(house: House) -> list[tuple[str, str, str]]:
    return [(move.purpose.value, move.source.label, move.dest.label) for move in house.engine.started]


# -- who goes first ---------------------------------------------------------------------------------------------------


def test_blocks_of_idle_sequences_go_before_running_ones() -> None:
    house = build(
        gpu=4, cpu=4, policies={Tier.GPU: MRU()}, **NO_BACKGROUND
    )  # MRU alone would name the running sequence's blocks
    idle = house.filled(8, 100)
    running = house.manager.new_batch()
    house.manager.enter(running)
    house.append(running, [1, 2, 3, 4, 5, 6, 7, 8])
    house.append(running, [9])
    assert sorted(house.tiers_of(idle)) == ["cpu", "gpu"]
    assert house.tiers_of(running) == ["gpu"] * 3
    house.append(running, [10, 11, 12, 13])
    assert house.tiers_of(idle) == ["cpu", "cpu"]
    house.append(running, [14, 15, 16, 17])
    assert house.tiers_of(running).count("gpu") == 4
    house.check()


def test_the_last_stepped_sequence_counts_as_running_until_it_leaves() -> None:
    house = build(gpu=3, cpu=4, policies={Tier.GPU: MRU()})
    idle, other = house.filled(4, 100), house.filled(4, 200)
    last = house.manager.new_batch()
    house.append(last, [1, 2, 3, 4])
    house.append(last, [5])
    assert house.tiers_of(last) == ["gpu", "gpu"]
    assert sorted(house.tiers_of(idle) + house.tiers_of(other)) == ["cpu", "gpu"]


# -- clean and dirty --------------------------------------------------------------------------------------------------


def test_write_behind_makes_sealed_blocks_clean_and_evicting_them_is_free() -> None:
    house = build(gpu=2, cpu=8, nvme=0)
    batch = house.filled(8)
    house.manager.poll()
    assert purposes(house) == [("write_behind", "gpu", "cpu")] * 2
    house.drain()
    assert house.tiers_of(batch) == ["gpu+cpu"] * 2
    other = house.manager.new_batch()
    house.append(other, [1, 2, 3, 4, 5])
    assert house.tiers_of(batch) == ["cpu"] * 2
    assert len(house.engine.started) == 2
    house.check()


def test_blocks_that_are_not_sealed_are_not_copied_down_early() -> None:
    house = build(gpu=4, cpu=8)
    batch = house.manager.new_batch()
    house.manager.enter(batch)
    house.append(batch, [1, 2, 3, 4])
    house.manager.poll()
    assert not house.engine.started
    house.append(batch, [5])  # the next step seals
    assert house.placement.residency[batch.tables[0].blocks[0]].state is BlockState.SEALED
    house.manager.poll()
    assert purposes(house) == [("write_behind", "gpu", "cpu")]


def test_demoting_a_dirty_block_keeps_the_source_until_the_copy_has_committed() -> None:
    house = build(gpu=1, cpu=2, max_delay=0)
    batch = house.filled(4)
    house.placement.give_up(Tier.GPU, 1)
    assert house.tiers_of(batch) == ["gpu"]
    assert house.used() == {"gpu": 1, "cpu": 1, "nvme": 0}
    house.drain()
    assert house.tiers_of(batch) == ["cpu"]
    assert house.used() == {"gpu": 0, "cpu": 1, "nvme": 0}
    house.check()


# -- tails ------------------------------------------------------------------------------------------------------------


def test_forked_tails_are_copied_when_one_side_appends() -> None:
    house = build(**NO_BACKGROUND)
    batch = house.filled(6)
    twin = house.manager.fork(batch)
    assert not house.engine.started
    assert twin.tables[0].blocks == batch.tables[0].blocks
    house.append(twin, [90])
    assert purposes(house) == [("copy_tail", "gpu", "gpu")]
    assert twin.tables[0].blocks[0] == batch.tables[0].blocks[0]
    assert twin.tables[0].blocks[1] != batch.tables[0].blocks[1]
    house.append(batch, [80])  # the tail is its own now
    assert len(house.engine.started) == 1
    assert house.read(batch) == [0, 1, 2, 3, 4, 5, 80]
    assert house.read(twin) == [0, 1, 2, 3, 4, 5, 90]
    house.check()


def test_dropping_one_fork_leaves_the_other_whole() -> None:
    house = build()
    batch = house.filled(6)
    twin = house.manager.fork(batch)
    house.manager.drop(batch)
    assert house.read(twin) == [0, 1, 2, 3, 4, 5]
    house.check()
    house.manager.drop(twin)
    assert house.used() == {"gpu": 0, "cpu": 0, "nvme": 0}


@pytest.mark.parametrize("tier", list(Tier))
def test_a_crop_into_a_sealed_block_copies_its_first_tokens_from_any_tier(tier: Tier) -> None:
    house = build(cpu=0 if tier is Tier.NVME else 4, **NO_BACKGROUND)
    batch = house.filled(8)
    if tier is not Tier.GPU:
        house.placement.give_up(Tier.GPU, 2)
        house.drain()
    assert house.tiers_of(batch) == [tier.label] * 2
    sealed = batch.tables[0].blocks[1]
    house.manager.truncate(batch, 6)
    house.append(batch, [60, 70])
    assert ("copy_tail", tier.label, "gpu") in purposes(house)
    assert house.placement.residency.get(sealed) is None
    assert house.read(batch) == [0, 1, 2, 3, 4, 5, 60, 70]
    house.check()


def test_a_crop_into_a_shared_sealed_block_leaves_the_twin_as_it_was() -> None:
    house = build()
    batch = house.filled(8)
    twin = house.manager.fork(batch)
    house.manager.truncate(batch, 5)
    house.append(batch, [50, 60])
    assert house.read(batch) == [0, 1, 2, 3, 4, 50, 60]
    assert house.read(twin) == list(range(8))
    house.check()


def test_a_crop_into_a_full_block_that_is_not_sealed_reopens_it() -> None:
    house = build()
    batch = house.manager.new_batch()
    house.append(batch, [0, 1, 2, 3])
    house.manager.truncate(batch, 2)
    house.append(batch, [9])
    assert not house.engine.started
    assert house.read(batch) == [0, 1, 9]


def test_a_demoted_tail_is_promoted_for_its_step_and_its_lower_copies_go_when_it_grows() -> None:
    house = build()
    batch = house.filled(6)
    tail = batch.tables[0].blocks[1]
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    assert house.tiers_of(batch) == ["cpu", "cpu"]
    step = house.manager.begin_step(batch, [NewColumns.of(1)])
    record = house.placement.residency[tail]
    assert set(record.copies) == {Tier.GPU, Tier.CPU}
    assert record.pins[Tier.GPU] == 1
    house.manager.abort_step(step)
    assert set(record.copies) == {Tier.GPU, Tier.CPU}
    assert not record.pins[Tier.GPU]
    generation = record.generation
    house.append(batch, [60])
    assert set(record.copies) == {Tier.GPU}
    assert record.generation > generation
    assert house.read(batch) == [0, 1, 2, 3, 4, 5, 60]
    house.check()


def test_a_tail_that_is_demoted_further_to_make_its_own_room_is_waited_for() -> None:
    house = build(gpu=2, cpu=2, nvme=4)
    engine = house.placement.engine = HandEngine()
    manager, placement = house.manager, house.placement
    manager.upkeep.MAX_BACKGROUND = 1  # type: ignore[misc]  # one write-behind, and nothing is promoted early
    batch = manager.new_batch()
    manager.commit_step(manager.begin_step(batch, [NewColumns.of(2, [1, 2])]))
    placement.give_up(Tier.GPU, 1)
    house.drain()
    early, late = manager.new_batch(), manager.new_batch()
    for other in (early, late):
        manager.commit_step(manager.begin_step(other, [NewColumns.of(4, [1, 2, 3, 4])]))
        manager.leave(other)
    # Room on the gpu tier comes from the write-behind of `early`, while the tail is on its way from cpu to nvme.
    engine.first = lambda move: move.purpose is not MovePurpose.WRITE_BEHIND
    manager.commit_step(manager.begin_step(batch, [NewColumns.of(1, [3])]))
    assert house.tiers_of(batch) == ["gpu"]
    assert house.tiers_of(early) == ["cpu"]
    manager.check_integrity()


def test_a_shared_tail_need_not_stay_on_the_gpu_tier_while_it_is_copied() -> None:
    house = build(gpu=2, cpu=2)
    batch = house.filled(2)
    twin = house.manager.fork(batch)
    num_new = house.manager.max_new_tokens(twin)
    assert num_new == 6
    house.append(twin, list(range(10, 16)))  # takes both gpu slots
    assert house.tiers_of(batch) == ["cpu"]
    house.check()


# -- steps ------------------------------------------------------------------------------------------------------------


def test_an_aborted_step_leaves_nothing_behind() -> None:
    house = build(**NO_BACKGROUND)
    batch = house.filled(6)
    before = (list(batch.tables[0].blocks), batch.tables[0].token_ids(), house.used())
    step = house.manager.begin_step(batch, [NewColumns.of(7)])
    assert house.used()["gpu"] == 4
    for write in step.rows[0].writes:
        house.write(write, [-9] * 7)
    house.manager.abort_step(step)
    assert step.state is StepState.ABORTED
    house.manager.abort_step(step)
    assert (list(batch.tables[0].blocks), batch.tables[0].token_ids(), house.used()) == before
    house.check()


def test_a_step_pins_what_it_writes_to() -> None:
    house = build(gpu=3)
    batch = house.filled(2)
    step = house.manager.begin_step(batch, [NewColumns.of(10)])
    with pytest.raises(CapacityError, match=r"gpu 3/3 blocks \(3 pinned\)"):
        house.placement.make_room(Tier.GPU, 1)
    house.manager.abort_step(step)
    house.placement.make_room(Tier.GPU, 3)


def test_layers_append_once_and_all_of_them() -> None:
    house = build()
    step = house.manager.begin_step(house.manager.new_batch(), [NewColumns.of(3)])
    step.append(0, 3)
    assert (step.length(0), step.length(1)) == (3, 0)
    with pytest.raises(UnsupportedError, match="layers \\[1\\] of 2 appended nothing"):
        step.check_complete((0, 1))
    for layer, num_tokens in ((0, 3), (1, 2)):
        with pytest.raises(UnsupportedError, match=f"layer {layer} appended {num_tokens} tokens"):
            step.append(layer, num_tokens)
    step.append(1, 3)
    with pytest.raises(UnsupportedError, match="layers \\[0, 1\\] attended without kvtier"):
        step.check_complete((0, 1))
    step.attended |= {0, 1}
    step.check_complete((0, 1))
    house.manager.abort_step(step)
    with pytest.raises(IntegrityError, match="aborted"):
        step.append(2, 3)


def test_a_dropped_sequence_has_no_steps() -> None:
    house = build()
    batch = house.filled(4)
    house.manager.dropped.append(batch)
    house.manager.poll()
    assert house.manager.residency_len == 0
    with pytest.raises(IntegrityError, match="a dropped one"):
        house.manager.begin_step(batch, [NewColumns.of(1)])
    house.manager.dropped.append(batch)
    house.manager.dropped.append(Batch([BlockTable(SequenceId(12345), 4)], SequenceMetrics()))
    house.manager.poll()


# -- watermarks -------------------------------------------------------------------------------------------------------


def test_demotion_starts_above_high_and_stops_at_low() -> None:
    house = build(gpu=10, cpu=0, nvme=20, high_frac=0.8, low_frac=0.5)
    batch = house.filled(32)
    house.manager.poll()
    assert not house.engine.started  # at the mark, not above it
    house.filled(4, 100)
    house.manager.poll()
    house.manager.poll()  # what is leaving already is not asked for again
    house.drain()
    house.manager.poll()
    assert house.used() == {"gpu": 5, "nvme": 4}
    assert house.tiers_of(batch) == ["nvme"] * 4 + ["gpu"] * 4
    house.check()


def test_running_blocks_come_back_while_there_is_room_below_low() -> None:
    house = build(gpu=10, cpu=0, nvme=20, high_frac=0.8, low_frac=0.5)
    batch, other = house.filled(28), house.filled(12, 100)
    house.placement.give_up(Tier.GPU, 10)
    house.drain()
    assert house.used()["gpu"] == 0
    house.manager.enter(batch)
    for _ in range(5):
        house.manager.poll()
        house.drain()
    assert house.tiers_of(batch) == ["gpu+nvme"] * 5 + ["nvme"] * 2  # clean: its nvme copy stays
    assert house.tiers_of(other) == ["nvme"] * 3
    house.check()


def test_nothing_is_promoted_for_idle_sequences_or_within_a_full_scan() -> None:
    house = build(gpu=3, cpu=0, nvme=20)
    batch = house.filled(24)
    house.drain()
    num_moves = len(house.engine.started)
    house.manager.poll()
    house.manager.enter(batch)
    for _ in range(5):
        house.manager.poll()
        house.drain()
    assert len(house.engine.started) == num_moves
    house.check()


def test_idle_blocks_make_room_for_promotions_and_push_no_running_block_down() -> None:
    house = build(gpu=2, cpu=2, nvme=8)
    running = house.filled(16)
    idle = house.filled(8, 100)
    house.drain()
    assert house.used()["gpu"] == 2
    house.manager.enter(running)
    on_nvme = house.tiers_of(running).count("nvme")
    for _ in range(12):
        house.manager.poll()
        assert house.tiers_of(running).count("nvme") <= on_nvme
    house.drain()
    assert sum("gpu" in place for place in house.tiers_of(running)) == 2
    assert not any("gpu" in place for place in house.tiers_of(idle))
    house.check()


def test_a_slot_goes_to_what_is_read_from_the_slowest_tier() -> None:
    house = build(gpu=8, cpu=8, nvme=8, low_frac=0.0)
    batch = house.filled(28)
    house.placement.give_up(Tier.GPU, 6)
    house.drain()
    house.placement.give_up(Tier.CPU, 3)
    house.drain()
    assert house.tiers_of(batch).count("nvme") == house.tiers_of(batch).count("cpu") == 3
    on_nvme = [number for number, tier in enumerate(house.tiers_of(batch)) if tier == "nvme"]
    house.placement.watermarks[Tier.GPU] = Watermark(1.0, 0.5)  # room for three
    house.manager.enter(batch)
    for _ in range(5):
        house.manager.poll()
        house.drain()
    assert all(house.tiers_of(batch)[number] == "gpu+nvme" for number in on_nvme)
    assert house.tiers_of(batch).count("cpu") == 3
    slots = [house.placement.residency[batch.tables[0].blocks[number]].gpu_slot for number in on_nvme]
    assert sorted(slot for slot in slots if slot is not None) == list(range(min(slots), min(slots) + 3))  # type: ignore[type-var]
    house.check()


def test_a_tier_at_rest_is_not_looked_at_again_before_copies_or_moves_change(monkeypatch: pytest.MonkeyPatch) -> None:
    house = build(gpu=4, cpu=4, nvme=0, high_frac=0.75, low_frac=0.5)
    first = house.filled(4)
    house.manager.poll()
    house.drain()
    house.manager.poll()
    looked_at: list[Tier] = []
    leaving = house.placement.leaving
    monkeypatch.setattr(house.placement, "leaving", lambda tier: looked_at.append(tier) or leaving(tier))
    house.manager.poll()
    assert not looked_at
    house.filled(12)  # above `high`: four of four slots
    house.manager.leave(first)
    house.manager.poll()
    house.drain()
    assert Tier.GPU in looked_at and house.placement.pools[Tier.GPU].num_used <= 2
    house.check()


@pytest.mark.parametrize("in_place", [False, True])
def test_blocks_that_are_read_in_place_come_up_only_where_their_room_is_needed(in_place: bool) -> None:
    house = build(gpu=8, cpu=4, nvme=8, low_frac=0.0)
    batch = house.filled(12)
    house.placement.give_up(Tier.GPU, 3)
    house.drain()
    assert house.tiers_of(batch) == ["cpu"] * 3
    house.placement.watermarks = {Tier.GPU: Watermark(1.0, 1.0), Tier.CPU: Watermark(1.0, 0.8)}
    house.manager.upkeep.reads_in_place = in_place
    house.manager.enter(batch)
    for _ in range(3):
        house.manager.poll()
        house.drain()
    assert house.tiers_of(batch) == (["cpu"] * 3 if in_place else ["gpu+cpu"] * 3)
    house.placement.watermarks[Tier.CPU] = Watermark(1.0, 0.5)
    for _ in range(3):
        house.manager.poll()
        house.drain()
    assert all("gpu" in place for place in house.tiers_of(batch))
    house.check()


def test_a_block_shared_by_two_running_sequences_is_promoted_once() -> None:
    house = build(gpu=4, cpu=0)
    batch = house.filled(8)
    twin = house.manager.fork(batch)
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    house.manager.enter(batch)
    house.manager.enter(twin)
    house.manager.poll()
    house.drain()
    assert house.tiers_of(twin) == ["gpu+nvme"] * 2
    assert len([move for move in house.engine.started if move.purpose is MovePurpose.PROMOTE]) == 2
    house.check()


# -- tiers that are absent or small -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("cpu", "nvme"), [(0, 9), (9, 0), (1, 9), (4, 5), (1, 8)])
def test_every_set_of_tiers_holds_as_many_blocks_as_it_has_slots(cpu: int, nvme: int) -> None:
    house = build(gpu=3, cpu=cpu, nvme=nvme)
    batches = [house.filled(8, 100 * index) for index in range((3 + cpu + nvme) // 2)]
    house.drain()
    assert sum(house.used().values()) >= 2 * len(batches)
    for batch in batches:
        assert house.read(batch) == batch.tables[0].token_ids()
    house.check()


def test_with_the_gpu_tier_alone_there_is_an_end() -> None:
    house = build(gpu=2, cpu=0, nvme=0)
    batch = house.filled(8)
    with pytest.raises(CapacityError):
        house.manager.begin_step(batch, [NewColumns.of(1)])
    house.manager.poll()
    assert house.read(batch) == list(range(8))
    house.manager.truncate(batch, 4)
    house.append(batch, [9])
    house.check()


def test_a_capacity_error_says_what_is_full_and_what_to_do_and_changes_nothing() -> None:
    house = build(gpu=3, cpu=1, nvme=1)
    batch, other = house.filled(10), house.filled(8, 100)
    before = [(list(t.tables[0].blocks), t.tables[0].token_ids()) for t in (batch, other)]
    with pytest.raises(CapacityError) as caught:
        house.manager.begin_step(batch, [NewColumns.of(8)])
    for part in ("2 slots of 100 bytes", "gpu 3/3 blocks (", "cpu 1/1", "nvme 1/1", "Raise a tier's budget"):
        assert part in str(caught.value)
    assert [(list(t.tables[0].blocks), t.tables[0].token_ids()) for t in (batch, other)] == before
    assert house.placement.residency_pins(Tier.GPU) == 0
    house.check()


def test_a_step_that_can_never_fit_is_refused_before_anything_moves() -> None:
    house = build(gpu=2)
    batch = house.filled(2)
    with pytest.raises(CapacityError, match=r"need 3 gpu slots \(tails 1, new blocks 2\), the gpu tier has 2"):
        house.manager.begin_step(batch, [NewColumns.of(7)])
    assert not house.engine.started
    assert house.manager.max_new_tokens(batch) == 6


# -- misfortune -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(BROKEN_POLICIES))
@pytest.mark.parametrize("cpu", [0, 3])
def test_a_broken_policy_loses_no_block_and_does_not_stop_the_house(
    name: str, cpu: int, caplog: pytest.LogCaptureFixture
) -> None:
    policies: dict[Tier, EvictionPolicy] = {tier: BROKEN_POLICIES[name]() for tier in Tier}
    house = build(gpu=3, cpu=cpu, nvme=6, policies=policies, high_frac=0.9, low_frac=0.5)
    with caplog.at_level(logging.WARNING, "kvtier"):
        batches = [house.filled(8, 100 * index) for index in range((9 + cpu) // 2)]
        for batch in batches:
            assert house.read(batch) == batch.tables[0].token_ids()
        with pytest.raises(CapacityError):
            house.filled(8)
    house.check()
    assert "eviction policy" in caplog.text
    assert caplog.text.count("inserted raised") <= 3  # once a tier
    for batch in batches:
        house.manager.drop(batch)
    house.check()


def test_a_device_that_hangs_is_an_error_and_gives_its_slots_back_later() -> None:
    house = build(gpu=2, cpu=2)
    batch, other = house.filled(4), house.filled(4, 100)
    house.engine.hanging = True
    with pytest.raises(TransferTimeoutError, match="no transfer within memory ended"):
        house.append(other, [1])
    assert house.placement.moves
    house.manager.check_integrity()
    assert other.tables[0].token_ids() == [100, 101, 102, 103]
    house.engine.hanging = False
    house.append(other, [1])
    house.drain()
    house.check()
    for each in (batch, other):
        house.manager.drop(each)
    house.drain()
    assert house.used() == {"gpu": 0, "cpu": 0, "nvme": 0}


@pytest.mark.parametrize("forked", [False, True])
def test_a_tail_whose_copy_hangs_gives_its_slot_back_later(forked: bool) -> None:
    house = build(gpu=4, cpu=2, **NO_BACKGROUND)
    batch = house.filled(2)
    house.placement.give_up(Tier.GPU, 1)
    house.drain()
    twin = house.manager.fork(batch) if forked else batch
    house.engine.hanging = True
    for _ in range(2):  # the second waits for the move of the first
        with pytest.raises(TransferTimeoutError):
            house.manager.begin_step(twin, [NewColumns.of(1)])
    house.manager.check_integrity()
    assert house.used()["gpu"] == 1
    house.engine.hanging = False
    house.drain()
    assert house.used()["gpu"] == (0 if forked else 1)
    house.append(twin, [7])
    assert house.read(twin) == [0, 1, 7]
    house.check()


def test_a_sequence_dropped_while_it_moves_is_gone_when_the_move_ends() -> None:
    house = build(gpu=2, cpu=0, nvme=4)
    batch = house.filled(8)
    house.placement.give_up(Tier.GPU, 2)
    house.manager.drop(batch)
    house.manager.check_integrity()
    house.drain()
    assert house.manager.residency_len == 0
    assert house.used() == {"gpu": 0, "nvme": 0}
    assert not house.placement.sequence_metrics


def test_a_failed_move_changes_nothing() -> None:
    house = build(gpu=2, cpu=2)
    batch = house.filled(8)
    house.engine.fail_frac = 1.0
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    assert house.tiers_of(batch) == ["gpu", "gpu"]
    assert house.used() == {"gpu": 2, "cpu": 0, "nvme": 0}
    assert house.placement.metrics.moves_failed == 2
    assert not house.placement.metrics.bytes_moved
    with pytest.raises(CapacityError, match="the cpu tier takes none for now, 4 moves to it failed: fake: the move "):
        house.append(batch, [1])
    house.engine.fail_frac = 0.0
    house.clock.now_s += 1
    house.append(batch, [1])
    house.check()


def fail_to_rest(house: House) -> Batch:
    """A batch of two blocks on a gpu tier of two slots, below which the nvme tier has failed until it rests."""
    batch = house.filled(8)
    house.engine.fail_frac = 1.0
    with pytest.raises(CapacityError, match=r"the nvme tier takes none for now, \d moves to it failed: fake: the "):
        house.append(batch, [1])
    assert house.placement.breakers[Tier.NVME].is_resting
    return batch


def test_a_tier_that_rests_is_not_tried_and_a_step_without_room_fails_at_once() -> None:
    house = build(gpu=2, cpu=0, nvme=8)
    batch = fail_to_rest(house)
    started = len(house.engine.started)
    for _ in range(5):
        with pytest.raises(CapacityError, match=r"gpu 2/2 .*the nvme tier takes none for now, . moves to it failed"):
            house.append(batch, [1])
        house.manager.poll()
    assert len(house.engine.started) == started
    house.check()


def test_no_space_for_a_slot_that_had_backing_counts_as_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    house = build(gpu=2, cpu=0, nvme=8)
    batch = house.filled(8)

    def end(flight: Any) -> MoveResult:
        return MoveResult(flight.move, MoveStatus.NO_SPACE, "copied on write", available_slots=8)

    monkeypatch.setattr(house.engine, "_end", end)
    with pytest.raises(CapacityError, match="the nvme tier takes none for now, 3 moves to it failed: copied on write"):
        house.append(batch, [1])
    assert house.placement.pools[Tier.NVME].ceiling == 8
    house.check()


def test_what_lies_on_a_tier_that_rests_is_read() -> None:
    house = build(gpu=2, cpu=0, nvme=8, **NO_BACKGROUND)
    low = house.filled(6, 100)
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    assert house.tiers_of(low) == ["nvme"] * 2
    batch = fail_to_rest(house)
    house.engine.fail_frac = 0.0
    house.manager.drop(batch)
    house.append(low, [106])
    assert house.read(low) == list(range(100, 107))
    assert house.placement.breakers[Tier.NVME].is_resting
    house.check()


def test_the_next_faster_tier_takes_what_the_one_that_rests_does_not() -> None:
    house = build(gpu=2, cpu=2, nvme=8, **NO_BACKGROUND)
    batch = house.filled(16)  # gpu and cpu are full
    house.engine.fail_frac = 1.0
    with pytest.raises(CapacityError, match="the nvme tier takes none"):
        house.append(batch, [1])
    house.engine.fail_frac = 0.0
    house.drain()
    started = len(house.engine.started)
    house.manager.truncate(batch, 8)
    house.append(batch, [1, 2, 3, 4, 5, 6, 7, 8])
    assert sorted(house.tiers_of(batch)) == ["cpu", "cpu", "gpu", "gpu"]
    assert all(move.dest is not Tier.NVME for move in house.engine.started[started:])
    house.check()


def test_one_move_probes_a_tier_that_rested_and_the_others_follow_when_it_has_succeeded() -> None:
    house = build(gpu=2, cpu=0, nvme=8, **NO_BACKGROUND)
    batch = fail_to_rest(house)
    house.clock.now_s += 1
    started = len(house.engine.started)
    house.placement.give_up(Tier.GPU, 2)
    assert len(house.engine.started) == started + 1  # all fail: so does the probe
    house.drain()
    house.clock.now_s += 1
    house.placement.give_up(Tier.GPU, 2)
    assert len(house.engine.started) == started + 1  # it rests twice as long
    house.clock.now_s += 1
    house.engine.fail_frac = 0.0
    house.append(batch, [8, 9, 10, 11, 12, 13, 14, 15])  # needs both slots
    assert house.tiers_of(batch) == ["nvme", "nvme", "gpu", "gpu"]
    assert not house.placement.breakers[Tier.NVME].is_resting
    house.check()


def test_a_disk_that_has_room_again_takes_blocks_again(caplog: pytest.LogCaptureFixture) -> None:
    house = build(gpu=2, cpu=0, nvme=8)
    pool = house.placement.pools[Tier.NVME]
    house.engine.nvme_available_slots = 3
    batches = []
    with pytest.raises(CapacityError):
        for index in range(8):
            batches.append(house.filled(4, 100 * index))
    house.engine.nvme_available_slots = 6
    house.manager.poll()
    assert pool.ceiling == 3  # it is not asked all the time
    house.clock.now_s += 5
    with caplog.at_level(logging.INFO, "kvtier"):
        house.manager.poll()
    assert pool.ceiling == 6 and "the nvme tier has room for 6 blocks again" in caplog.text
    for index in range(5, 8):
        batches.append(house.filled(4, 100 * index))
    assert house.used() == {"gpu": 2, "nvme": 6}
    house.check()


def test_a_tail_that_cannot_be_read_is_lost_for_this_step_only() -> None:
    house = build()
    batch = house.filled(6)
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    house.engine.fail_frac = 1.0
    with pytest.raises(BlockLostError, match="cannot be read from cpu"):
        house.append(batch, [6])
    assert house.used()["gpu"] == 0
    house.check()
    house.engine.fail_frac = 0.0
    house.append(batch, [6])
    assert house.read(batch) == list(range(7))


def test_blocks_that_could_not_be_read_are_not_promoted_again_in_the_background() -> None:
    house = build(gpu=4, cpu=0)
    batch = house.filled(8)
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    house.engine.fail_frac = 1.0
    house.manager.enter(batch)
    for _ in range(5):
        house.manager.poll()
        house.drain()
    assert house.placement.metrics.moves_failed == 2
    house.check()


def test_a_full_disk_lowers_the_ceiling_once_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    house = build(gpu=2, cpu=0, nvme=8)
    house.engine.nvme_available_slots = 3
    batches = []
    with caplog.at_level(logging.WARNING, "kvtier"), pytest.raises(CapacityError):
        for index in range(8):
            batches.append(house.filled(4, 100 * index))
    assert len(batches) == 5
    assert house.placement.pools[Tier.NVME].ceiling == 3
    assert "room for 3 blocks instead of 8" in caplog.text
    house.check()


def test_a_slot_that_cannot_be_had_is_not_tried_again_and_the_others_are(caplog: pytest.LogCaptureFixture) -> None:
    house = build(gpu=2, cpu=0, nvme=8)
    house.filled(4)
    house.filled(4, 100)
    pool = house.placement.pools[Tier.NVME]
    house.engine.retire_frac = 1.0
    with caplog.at_level(logging.WARNING, "kvtier"), pytest.raises(CapacityError):
        house.filled(4, 200)
    # Each was tried once, and none twice.
    assert (pool.ceiling, house.placement.metrics.moves_failed, pool.take()) == (0, 8, None)
    assert "room for 7 blocks instead of 8" in caplog.text
    assert not house.placement.breakers[Tier.NVME].is_resting  # the disk is well
    house.check()
    house.engine.retire_frac = 0.0
    pool.raise_ceiling(8)  # there is room again
    house.check()
    house.filled(4, 300)
    assert (pool.ceiling, pool.num_used) == (8, 1)
    house.check()


def test_moves_and_sole_copies_are_counted() -> None:
    house = build(gpu=2, cpu=0, nvme=4)
    batch = house.filled(8)
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    house.manager.enter(batch)
    house.manager.poll()
    house.drain()
    metrics = house.placement.metrics
    assert metrics.bytes_moved == {(Tier.GPU, Tier.NVME): 200, (Tier.NVME, Tier.GPU): 200}
    assert metrics.edges()["nvme_to_gpu"] == 200
    assert (house.placement.residency.peak_only_nvme, metrics.nvme_sole_reads) == (2, 2)
    assert batch.metrics.nvme_read_bytes == 200
    assert (metrics.steps, metrics.tokens, metrics.moves_failed) == (2, 8, 0)


def test_results_for_moves_that_nobody_started_are_a_bug() -> None:
    house = build(gpu=1)
    engine = house.placement.engine = HandEngine()
    batch = house.manager.new_batch()
    house.manager.commit_step(house.manager.begin_step(batch, [NewColumns.of(4, [1, 2, 3, 4])]))
    house.placement.give_up(Tier.GPU, 1)
    move = engine.flying[0]
    house.drain()
    engine.start([move])
    with pytest.raises(IntegrityError, match="not in flight"):
        house.placement.wait()


class NamesOneMore(LRU):
    """A user's policy that asks for all blocks but the last that it names."""

    extra: BlockId

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        return [*super().victims(num_blocks - 1, evictable), self.extra]


def test_a_block_that_a_policy_did_not_ask_for_is_looked_at_before_it_is_given_up() -> None:
    policy = NamesOneMore()
    house = build(gpu=4, cpu=4, policies={Tier.GPU: policy})
    placement, batch = house.placement, house.filled(16)
    policy.extra = batch.tables[0].blocks[3]
    placement.residency.pin(policy.extra, Tier.GPU)
    assert placement.give_up(Tier.GPU, 2) == 1
    house.drain()
    assert placement.residency[policy.extra].gpu_slot is not None
    placement.residency.unpin(policy.extra, Tier.GPU)
    house.check()


def test_blocks_that_a_policy_has_asked_for_are_looked_at_once() -> None:
    house = build(gpu=4, cpu=4)
    house.filled(16)
    asked, checked = (Evictable(house.placement, Tier.GPU) for _ in range(2))
    names = house.placement.policies[Tier.GPU].victims(3, asked)
    assert house.placement._victims(Tier.GPU, 3, checked) == names == checked.granted
    assert checked.num_looked_at == asked.num_looked_at >= 3
