"""Moves of an nvme tier that hangs, on tiers of a handful of slots: whose the slots are, and what goes on."""

from __future__ import annotations

import logging

import pytest

from kvtier.errors import BlockLostError, CapacityError, TransferTimeoutError
from kvtier.types import MovePurpose, MoveResult, MoveStatus, Slot, Tier
from tests.small_tiers import HandEngine, House, build

NO_BACKGROUND = {"low_frac": 0.0}


def pass_deadline(house: House) -> None:
    """Wait for what hangs until nobody waits for it any more."""
    while house.placement.moves:
        house.placement.wait()
    house.manager.check_integrity()


def to_nvme(house: House) -> None:
    for tier in (Tier.GPU, Tier.CPU):
        while tier in house.placement.pools and house.placement.give_up(tier, 100):
            house.drain()


def hung_write(house: House) -> Slot:
    """Demote one gpu block to nvme, which hangs; returns its source."""
    house.engine.nvme_hangs = True
    assert house.placement.give_up(Tier.GPU, 1) == 1
    (move,) = house.placement.moves.values()
    move_slot = move.source_slot
    house.engine._read = lambda flight: None  # type: ignore[method-assign]  # it had begun, and reads at its end
    original = house.engine.withdraw
    house.engine.withdraw = lambda ids: []  # type: ignore[method-assign]
    pass_deadline(house)
    house.engine.withdraw = original  # type: ignore[method-assign]
    del house.engine._read
    assert house.placement.hung.moves
    return move_slot


def test_the_source_of_a_write_that_hangs_is_nobodys_until_it_ends() -> None:
    house = build(gpu=2, cpu=0, nvme=4, **NO_BACKGROUND)
    batch = house.filled(4)
    slot = hung_write(house)
    house.manager.drop(batch)
    house.manager.check_integrity()
    assert house.used() == {"gpu": 1, "nvme": 1} and house.manager.residency_len == 0
    other = house.manager.new_batch()
    house.append(other, [1, 2, 3, 4])  # House.write would tell of a slot that a move still reads
    with pytest.raises(CapacityError, match=r"the nvme tier hangs: a transfer took longer than io_timeout_s"):
        house.append(other, [5])
    house.check()
    assert house.placement.is_held(Tier.GPU, slot) and house.placement.num_held(Tier.GPU) == 1
    house.engine.nvme_hangs = False
    house.drain()
    house.append(other, [5])
    assert house.used() == {"gpu": 2, "nvme": 0} and not house.placement.is_held(Tier.GPU, slot)
    house.check()


def test_a_block_whose_write_hangs_stays_where_it_is_and_is_not_given_up_for_room() -> None:
    house = build(gpu=2, cpu=1, nvme=4, **NO_BACKGROUND)
    house.placement.breakers[Tier.CPU].is_resting = True  # straight to nvme
    house.placement.breakers[Tier.CPU]._rest.lengthen()
    batch = house.filled(4)
    slot = hung_write(house)
    house.placement.breakers[Tier.CPU].succeeded()
    other = house.filled(4, 100)
    house.append(other, [104])  # its own block goes to the cpu tier: giving up the other would free nothing
    assert house.tiers_of(batch) == ["gpu"] and house.placement.residency[batch.tables[0].blocks[0]].copies == {
        Tier.GPU: slot
    }
    assert house.read(batch) == [0, 1, 2, 3]
    house.engine.nvme_hangs = False
    house.drain()
    assert house.tiers_of(batch) == ["gpu"]  # what came of the write is not used
    house.check()


def test_a_tail_whose_write_hangs_is_copied_before_it_grows() -> None:
    house = build(gpu=3, cpu=0, nvme=4, **NO_BACKGROUND)
    batch = house.filled(2)
    slot = hung_write(house)
    house.append(batch, [7])
    assert house.read(batch) == [0, 1, 7]
    assert house.cells(Tier.GPU, slot)[:2] == (0, 1) and 7 not in house.cells(Tier.GPU, slot)
    assert house.used()["gpu"] == 2
    house.engine.nvme_hangs = False
    house.drain()
    assert house.used() == {"gpu": 1, "nvme": 0}
    house.check()


@pytest.mark.parametrize("forked", [False, True])
def test_a_tail_whose_read_hangs_is_lost_for_one_deadline(forked: bool) -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    batch = house.filled(2)
    to_nvme(house)
    twin = house.manager.fork(batch) if forked else batch
    waits, wait = [], house.engine.wait
    house.engine.wait = lambda timeout_s: waits.append(timeout_s) or wait(timeout_s)  # type: ignore[func-returns-value,method-assign]
    house.engine.nvme_hangs = True
    num_started = len(house.engine.started)
    for _ in range(3):
        with pytest.raises(BlockLostError, match="cannot be read from nvme") as lost:
            house.append(twin, [7])
        assert len(house.engine.started) == num_started + 1
        assert lost.value.blocks == (batch.tables[0].blocks[0],)
        house.manager.check_integrity()
    assert len(waits) == 1
    house.engine.nvme_hangs = False
    house.drain()
    assert house.used()["gpu"] == 0
    house.append(twin, [7])
    assert house.read(twin) == [0, 1, 7] and house.read(batch)[:2] == [0, 1]
    house.check()


def test_a_late_promotion_is_not_used() -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    batch = house.filled(4)
    to_nvme(house)
    (block,) = batch.tables[0].blocks
    pool = house.placement.pools[Tier.GPU]
    slot = pool.take()
    assert slot is not None
    house.engine.nvme_hangs = True
    house.engine.withdraw = lambda ids: []  # type: ignore[method-assign]
    with pytest.raises(BlockLostError, match="longer than io_timeout_s"):
        house.placement.copy_now(block, MovePurpose.PROMOTE, slot)
    with pytest.raises(BlockLostError, match="the tier hangs"):
        house.manager.plan(batch)
    house.manager.check_integrity()
    assert pool.num_used == 1 and house.placement.is_held(Tier.GPU, slot)
    house.engine.nvme_hangs = False
    house.drain()
    assert house.tiers_of(batch) == ["nvme"] and pool.num_used == 0
    assert [source.block for source in house.manager.plan(batch).streamed] == [block]  # and can be read again
    house.check()


def test_nothing_is_started_on_a_tier_that_hangs_and_clean_blocks_of_running_sequences_stay() -> None:
    house = build(gpu=4, cpu=0, nvme=8, **NO_BACKGROUND)
    idle, running = house.filled(4, 100), house.manager.new_batch()
    house.append(running, [1, 2, 3, 4])
    house.manager.enter(running)
    for batch in (idle, running):  # each has a copy on nvme too
        to_nvme(house)
        slot = house.placement.pools[Tier.GPU].take()
        assert slot is not None
        house.placement.copy_now(batch.tables[0].blocks[0], MovePurpose.PROMOTE, slot)
    third = house.filled(4, 200)
    hung_write(house)
    assert house.tiers_of(third) == ["gpu"]
    num_started = len(house.engine.started)
    house.append(running, [5])
    house.append(running, [6, 7, 8])
    house.append(running, [9])  # the idle one's copy on the gpu tier has gone for it
    assert (house.tiers_of(idle), house.tiers_of(running)[0]) == (["nvme"], "gpu+nvme")
    with pytest.raises(CapacityError, match="the nvme tier hangs"):
        house.append(running, [10, 11, 12, 13])
    assert len(house.engine.started) == num_started
    house.check()


def test_a_move_that_nobody_waits_for_is_found_to_hang_by_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    batch = house.filled(4)
    house.engine.nvme_hangs = True
    house.placement.give_up(Tier.GPU, 1)
    house.clock.now_s += 0.009
    house.manager.poll()
    breaker = house.placement.breakers[Tier.NVME]
    assert house.placement.moves and breaker.state == "ok"
    house.clock.now_s += 0.002
    house.engine.withdraw = lambda ids: []  # type: ignore[method-assign]
    with caplog.at_level(logging.INFO, "kvtier"):
        house.manager.poll()
        assert not house.placement.moves and breaker.state == "hanging"
        house.engine.nvme_hangs = False
        house.drain()
        house.manager.poll()
    assert breaker.state == "ok" and house.read(batch) == [0, 1, 2, 3]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_hung_write_that_fails_counts_as_a_failed_move() -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    house.filled(4)
    hung_write(house)
    house.engine.fail_frac, house.engine.nvme_hangs = 1.0, False
    house.drain()
    assert (house.placement.metrics.moves_failed, house.placement.breakers[Tier.NVME].num_failed) == (1, 1)
    assert house.used() == {"gpu": 1, "nvme": 0}
    house.check()


def test_moves_that_never_began_are_taken_back_and_fail_nobody() -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    batch, engine = house.filled(16), HandEngine()
    house.placement.engine = engine
    house.placement.give_up(Tier.GPU, 4)
    begun, *others = engine.flying
    engine.wait = lambda timeout_s: []  # type: ignore[method-assign]

    def withdraw(move_ids: object) -> list[MoveResult]:
        engine.flying = [begun]
        return [MoveResult(move, MoveStatus.WITHDRAWN) for move in others]

    engine.withdraw = withdraw  # type: ignore[method-assign,assignment]
    pass_deadline(house)
    assert list(house.placement.hung.moves.values()) == [begun]
    assert house.used() == {"gpu": 4, "nvme": 1} and house.placement.metrics.moves_failed == 0
    assert house.tiers_of(batch) == ["gpu"] * 4
    assert house.placement.breakers[Tier.NVME].num_failed == 0


def test_moves_within_memory_that_do_not_end_are_still_an_error() -> None:
    house = build(gpu=2, cpu=2, nvme=0)
    house.filled(8)
    house.engine.hanging = True
    house.placement.give_up(Tier.GPU, 2)
    with pytest.raises(TransferTimeoutError, match="no transfer within memory ended"):
        house.placement.wait()
    assert len(house.placement.moves) == 2
    house.manager.check_integrity()


def test_a_probe_of_a_resting_tier_that_hangs_is_not_the_last_one() -> None:
    house = build(gpu=4, cpu=0, nvme=4, **NO_BACKGROUND)
    batch, breaker = house.filled(8), house.placement.breakers[Tier.NVME]
    for move_id in (-1, -2, -3):
        breaker.failed(move_id, "by hand")
    house.clock.now_s += 1
    hung_write(house)
    assert breaker.state == "hanging"
    house.engine.nvme_hangs = False
    house.drain()
    assert breaker.state == "resting" and breaker.allows
    assert house.placement.give_up(Tier.GPU, 1) == 1
    house.drain()
    assert breaker.state == "ok" and sorted(house.tiers_of(batch)) == ["gpu", "nvme"]
    house.check()


def test_a_clean_idle_block_makes_room_behind_one_that_has_no_place_while_the_tier_below_hangs() -> None:
    """Found wrong: a step was refused, because the first idle block in the policy's order could not go."""
    house = build(gpu=3, cpu=0, nvme=4, **NO_BACKGROUND)
    _, dirty, clean = (house.filled(4, 100 * number) for number in range(3))
    slot = house.placement.pools[Tier.NVME].take()
    assert slot is not None
    house.placement.start(clean.tables[0].blocks[0], MovePurpose.WRITE_BEHIND, Tier.GPU, Tier.NVME, slot)
    house.drain()
    hung_write(house)
    house.append(house.manager.new_batch(), [1])
    assert (house.tiers_of(dirty), house.tiers_of(clean)) == (["gpu"], ["nvme"])
    house.check()


@pytest.mark.parametrize("dest", [Tier.GPU, Tier.NVME], ids=str)
def test_a_block_that_could_be_read_after_all_is_unreadable_no_more(dest: Tier) -> None:
    house = build(gpu=2, cpu=2, nvme=2, **NO_BACKGROUND)
    (block,) = house.filled(4).tables[0].blocks
    assert house.placement.give_up(Tier.GPU, 1) == 1
    house.drain()
    house.placement.unreadable.add(block)
    slot = house.placement.pools[dest].take()
    assert slot is not None
    purpose = MovePurpose.PROMOTE if dest is Tier.GPU else MovePurpose.DEMOTE
    house.placement.start(block, purpose, Tier.CPU, dest, slot)
    house.drain()
    assert block not in house.placement.unreadable
    house.check()
