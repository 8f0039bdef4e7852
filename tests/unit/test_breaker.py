"""When a tier that failed or was full is tried again, by a clock that stands still."""

from __future__ import annotations

import logging

import pytest

from kvtier.breaker import Breaker, Regrowth
from kvtier.slots import SlotPool
from tests.small_tiers import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def breaker(clock: FakeClock) -> Breaker:
    return Breaker("nvme", clock)


def fail(breaker: Breaker, *move_ids: int) -> None:
    for move_id in move_ids:
        breaker.started(move_id)
    for move_id in move_ids:
        breaker.failed(move_id, f"error {move_id}")


def test_three_failures_in_a_row_open_it(breaker: Breaker) -> None:
    fail(breaker, 1, 2)
    assert breaker.allows and not breaker.is_resting
    breaker.succeeded()
    fail(breaker, 3, 4)
    assert breaker.allows
    fail(breaker, 5)
    assert breaker.is_resting and not breaker.allows
    assert (breaker.num_failed, breaker.last_error) == (5, "error 5")


def test_a_full_disk_neither_opens_nor_closes_it(breaker: Breaker, clock: FakeClock) -> None:
    fail(breaker, 1, 2)
    breaker.undecided(3)
    fail(breaker, 4)
    assert breaker.is_resting
    clock.now_s += 1
    breaker.started(5)
    assert not breaker.allows
    breaker.undecided(5)
    assert breaker.is_resting and breaker.allows  # the next one probes


def test_it_rests_twice_as_long_each_time_up_to_a_minute(breaker: Breaker, clock: FakeClock) -> None:
    fail(breaker, 1, 2, 3)
    rests = []
    for move_id in range(4, 12):
        began_s = clock.now_s
        while not breaker.allows:
            clock.now_s += 0.5
        rests.append(clock.now_s - began_s)
        fail(breaker, move_id)
    assert rests == [1, 2, 4, 8, 16, 32, 60, 60]
    clock.now_s += 60
    breaker.started(12)
    breaker.succeeded()
    assert breaker.allows and not breaker.is_resting
    fail(breaker, 13, 14, 15)
    clock.now_s += 1
    assert breaker.allows  # a new failure rests a second again


def test_only_one_move_probes_and_only_its_failure_makes_the_rest_longer(breaker: Breaker, clock: FakeClock) -> None:
    for move_id in range(6):
        breaker.started(move_id)
    for move_id in range(3):
        breaker.failed(move_id, "error")
    breaker.failed(3, "error")  # began before the rest
    clock.now_s += 1
    assert breaker.allows
    breaker.started(6)
    assert not breaker.allows
    breaker.failed(4, "error")  # began before the rest too: the probe is still on its way
    clock.now_s += 100
    assert not breaker.allows
    breaker.failed(6, "error")
    clock.now_s += 1.5
    assert not breaker.allows
    clock.now_s += 0.5
    assert breaker.allows


def test_an_older_move_that_succeeds_closes_it(breaker: Breaker) -> None:
    fail(breaker, 2, 3, 4)
    breaker.succeeded()
    assert breaker.allows and not breaker.is_resting


def test_one_warning_when_it_opens_and_one_info_when_it_closes(
    breaker: Breaker, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        fail(breaker, 1, 2, 3, 4, 5)
        clock.now_s += 1
        fail(breaker, 6)
        clock.now_s += 2
        breaker.started(7)
        breaker.succeeded()
        breaker.succeeded()
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        (
            "WARNING",
            "the nvme tier takes no blocks for now: 3 moves to it failed in a row (error 3); going on with the other "
            "tiers, and trying it again from time to time",
        ),
        ("INFO", "the nvme tier takes blocks again; 6 moves failed"),
    ]


# -- a ceiling that rises ----------------------------------------------------------------------------------------------


class Disk:
    """How many slots it says it has, and how often it was asked."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots, self.num_asked = num_slots, 0

    def __call__(self) -> int:
        self.num_asked += 1
        return self.num_slots


def test_the_disk_is_asked_every_few_seconds_while_the_ceiling_is_lowered(clock: FakeClock) -> None:
    pool, disk = SlotPool(8), Disk(3)
    growth = Regrowth("nvme", pool, disk, clock)
    growth.look()
    assert disk.num_asked == 0
    pool.lower_ceiling(3)
    assert growth.lowered()
    for _ in range(100):
        clock.now_s += 0.5
        growth.look()
    assert disk.num_asked == 10 and pool.ceiling == 3
    disk.num_slots = 5
    clock.now_s += 5
    growth.look()
    assert pool.ceiling == 5
    disk.num_slots = 100
    clock.now_s += 5
    growth.look()
    assert pool.ceiling == 8
    clock.now_s += 100
    growth.look()
    assert disk.num_asked == 12


def test_a_disk_that_promises_what_it_does_not_have_is_asked_less_and_less(clock: FakeClock) -> None:
    pool, disk = SlotPool(8), Disk(8)
    growth = Regrowth("nvme", pool, disk, clock)
    pool.lower_ceiling(3)
    assert growth.lowered()
    waits = []
    for _ in range(8):
        began_s = clock.now_s
        while pool.ceiling < 8:
            clock.now_s += 5
            growth.look()
        waits.append(clock.now_s - began_s)
        growth.written(2)  # it has backing: says nothing
        pool.lower_ceiling(3)
        assert not growth.lowered()
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300]
    clock.now_s += 300
    growth.look()
    growth.written(3)
    pool.lower_ceiling(4)
    assert growth.lowered()  # it had come true: news
    clock.now_s += 5
    growth.look()
    assert pool.ceiling == 8


def test_it_hangs_from_the_first_call_that_is_overdue_until_the_last_has_ended(
    breaker: Breaker, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        breaker.look()
        breaker.overdue("read", "a read takes long")
        assert breaker.allows  # nothing changes under a plan
        breaker.look()
        assert not breaker.allows and breaker.state == "hanging" and breaker.overdue_error == "a read takes long"
        breaker.overdue(17, "so does a write")
        breaker.ended("read")
        breaker.look()
        assert breaker.is_hanging
        breaker.ended(17)
        breaker.ended(18)
        assert breaker.is_hanging
        breaker.look()
        breaker.look()
    assert breaker.allows and breaker.state == "ok"
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "the nvme tier hangs: a read takes long" in caplog.text


def test_a_tier_that_rested_when_it_hung_rests_on(breaker: Breaker) -> None:
    fail(breaker, 1, 2, 3)
    breaker.overdue(4, "slow")
    breaker.look()
    assert breaker.state == "hanging"
    breaker.ended(4)
    breaker.look()
    assert breaker.state == "resting" and not breaker.allows
