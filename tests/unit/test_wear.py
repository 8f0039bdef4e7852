"""The limit to what is written: in no window more than it, whatever moves, processes and clocks do."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from kvtier.errors import CapacityError
from kvtier.rate import Rate
from kvtier.types import Tier
from kvtier.wear import Ledger, WriteMeter, Written
from tests.small_tiers import FakeClock, House, build

HOUR_S = 3600
MOVE = 100


class FakeLedger(Ledger):
    """A ledger by a wall clock of its own."""

    def __init__(self) -> None:
        self.wall = FakeClock(50_000.0)
        self.kept: tuple[float, list[Written], int] | None = None
        self.fails = False
        self.damaged = False
        self.num_saves = 0

    def load(self) -> list[Written]:
        if self.damaged:
            raise ValueError("it is damaged")
        if self.kept is None:
            return []
        saved_s, written, promised = self.kept
        passed_s = max(0.0, self.wall() - saved_s)
        return [Written(0.0, promised), *(Written(w.age_s + passed_s, w.num_bytes) for w in written)]

    def save(self, written: Sequence[Written], promised_bytes: int) -> None:
        if self.fails:
            raise OSError(30, "read-only")
        self.num_saves += 1
        self.kept, self.damaged = (self.wall(), list(written), promised_bytes), False


def meter(limit: int, clock: FakeClock, ledger: FakeLedger | None = None, period_s: int = HOUR_S) -> WriteMeter:
    return WriteMeter(Rate(limit, period_s), MOVE, ledger, clock)


def move(writes: WriteMeter, num_bytes: int = MOVE) -> bool:
    if not writes.allows():
        return False
    writes.begin()
    writes.wrote(num_bytes)
    writes.end()
    return True


def test_moves_are_let_in_until_the_limit_and_again_a_period_later() -> None:
    clock = FakeClock()
    writes = meter(1000, clock)
    assert [move(writes) for _ in range(12)] == [True] * 10 + [False] * 2
    assert writes.is_used_up and writes.written_bytes == writes.in_period_bytes() == 1000
    clock.now_s += HOUR_S - 1
    assert not move(writes)
    clock.now_s += HOUR_S / WriteMeter.NUM_BUCKETS + 1
    assert move(writes) and not writes.is_used_up
    assert (writes.written_bytes, writes.in_period_bytes()) == (1100, 100)


def test_moves_under_way_count_with_the_most_that_they_may_write_and_then_with_what_they_wrote() -> None:
    writes = meter(1000, FakeClock())
    for _ in range(10):
        assert writes.allows()
        writes.begin()
    assert not writes.allows()
    for _ in range(10):
        writes.wrote(40)  # compressed
        writes.end()
    assert writes.in_period_bytes() == 400
    assert sum(move(writes, 40) for _ in range(100)) == 13  # up to 520 … 920 and one whole move more


def test_what_is_not_needed_yet_stops_at_half() -> None:
    writes = meter(1000, FakeClock())
    for _ in range(5):
        assert writes.allows(early=True) and move(writes)
    assert not writes.allows(early=True) and writes.allows()


def test_without_a_limit_all_is_counted_and_nothing_refused() -> None:
    clock = FakeClock()
    writes = WriteMeter(clock=clock)
    assert all(move(writes, 1 << 40) for _ in range(100)) and not writes.is_used_up
    clock.now_s += 2 * 86400
    assert (writes.written_bytes, writes.in_period_bytes()) == (100 << 40, 0)
    writes.close()


def test_the_log_says_once_that_it_is_used_up_and_once_that_it_is_not(caplog: pytest.LogCaptureFixture) -> None:
    clock = FakeClock()
    writes = meter(100, clock)
    with caplog.at_level(logging.INFO, "kvtier"):
        for _ in range(3):
            for _ in range(5):
                move(writes)
            clock.now_s += 2 * HOUR_S
    levels = [record.levelname for record in caplog.records]
    assert levels == ["WARNING", "INFO", "WARNING", "INFO", "WARNING"]
    assert "tiers.nvme.max_writes, 100B/h, is used up" in caplog.text


# -- over restarts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closes", [True, False])
def test_the_next_process_goes_on_with_the_count(closes: bool) -> None:
    clock, ledger = FakeClock(), FakeLedger()
    writes = meter(1000, clock, ledger)
    assert [move(writes) for _ in range(4)] == [True] * 4
    if closes:
        writes.close()
    clock.now_s = 5.0  # another process: another clock
    ledger.wall.now_s += HOUR_S / 2
    again = meter(1000, clock, ledger)
    assert again.in_period_bytes() == 400 + (0 if closes else 3)
    assert again.written_bytes == 0
    assert sum(move(again) for _ in range(10)) == (6 if closes else 5)


def test_a_loop_of_crashes_writes_no_more_than_the_limit() -> None:
    ledger, total = FakeLedger(), 0
    for _ in range(100):
        writes = meter(100_000, FakeClock(), ledger)
        for _ in range(7):
            total += MOVE * move(writes)
        ledger.wall.now_s += 1
    assert 50_000 < total <= 100_000
    for _ in range(300):
        writes = meter(100_000, FakeClock(), ledger)
        total += MOVE * sum(move(writes) for _ in range(20))
    assert total <= 100_000
    ledger.wall.now_s += 2 * HOUR_S
    assert move(meter(100_000, FakeClock(), ledger))


def test_the_ledger_is_written_seldom() -> None:
    ledger = FakeLedger()
    writes = meter(10_000_000, FakeClock(), ledger)
    for _ in range(10_000):
        assert move(writes)
    assert 20 < ledger.num_saves < 40


def test_a_wall_clock_that_goes_back_neither_unlocks_nor_wedges() -> None:
    clock, ledger = FakeClock(), FakeLedger()
    writes = meter(1000, clock, ledger)
    while move(writes):
        pass
    writes.close()
    ledger.wall.now_s -= 40_000
    again = meter(1000, clock, ledger)
    assert not move(again)
    clock.now_s += HOUR_S * 1.1
    assert move(again)
    again.close()
    ledger.wall.now_s += 10
    third = meter(1000, clock, ledger)
    assert third.in_period_bytes() == 100


def test_a_damaged_ledger_counts_as_the_limit_for_one_period(caplog: pytest.LogCaptureFixture) -> None:
    clock, ledger = FakeClock(), FakeLedger()
    ledger.damaged = True
    writes = meter(1000, clock, ledger)
    assert not move(writes) and "it is damaged: going on as if tiers.nvme.max_writes, 1kB/h, were" in caplog.text
    clock.now_s += HOUR_S * 1.1
    assert move(writes) and ledger.kept is not None


def test_nothing_is_written_that_cannot_be_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock, ledger = FakeClock(), FakeLedger()
    writes = meter(1000, clock, ledger)
    ledger.fails = True
    assert not move(writes) and not move(writes)
    assert len(caplog.records) == 1 and "their bytes cannot be counted" in caplog.text
    ledger.fails = False
    assert not move(writes)
    clock.now_s += WriteMeter.RETRY_S
    assert move(writes)
    ledger.fails = True
    writes.close()


@pytest.mark.parametrize("seed", range(30))
def test_in_no_window_more_than_the_limit(seed: int) -> None:
    """Moves begin, write a part or all at any time, and end; processes close or die; time passes."""
    rng = random.Random(seed)
    limit, period_s = rng.choice([1000, 5000, 100_000]), rng.choice([HOUR_S, 86400])
    clock, ledger = FakeClock(rng.uniform(0, 1e6)), FakeLedger()
    truth: list[tuple[float, int]] = []
    true_s, writes, under_way = 0.0, meter(limit, clock, ledger, period_s), 0
    num_moves = 0
    for _ in range(3000):
        what = rng.random()
        if what < 0.02:
            if rng.random() < 0.5:
                writes.close()
            clock.now_s, under_way = rng.uniform(0, 1e6), 0
            if rng.random() < 0.3:
                ledger.wall.now_s -= rng.uniform(0, 1e5)
            writes = meter(limit, clock, ledger, period_s)
        elif what < 0.1:
            passed_s = rng.choice([1.0, 60.0, period_s / 24, period_s / 3])
            true_s, clock.now_s, ledger.wall.now_s = (
                true_s + passed_s,
                clock.now_s + passed_s,
                ledger.wall.now_s + passed_s,
            )
        elif what < 0.6 and writes.allows(early=rng.random() < 0.2):
            writes.begin()
            under_way, num_moves = under_way + 1, num_moves + 1
        elif under_way:
            num_bytes = rng.choice([MOVE, MOVE, 40, 0])
            writes.wrote(num_bytes)
            truth.append((true_s, num_bytes))
            writes.end()
            under_way -= 1
        for first_s in {at_s for at_s, _ in truth[-3:]}:
            assert sum(n for at_s, n in truth if first_s - period_s < at_s <= first_s) <= limit
    assert num_moves > 20


# -- the house ---------------------------------------------------------------------------------------------------------


def limited(num_moves: int, **values: object) -> House:
    """A house whose moves to nvme write what they may."""
    house = build(2, 0, 8, low_frac=0.0, **values)  # type: ignore[arg-type]
    writes = house.placement.writes = meter(num_moves * MOVE, house.clock)
    end = house.engine._end

    def counted(flight: object) -> object:
        result = end(flight)  # type: ignore[arg-type]
        if result.move.dest is Tier.NVME:
            writes.wrote(MOVE)
        return result

    house.engine._end = counted  # type: ignore[method-assign, assignment]
    return house


def test_a_tier_whose_limit_is_used_up_takes_none_and_the_error_names_it() -> None:
    house = limited(3)
    batch = house.manager.new_batch()
    house.append(batch, list(range(8)))
    house.append(batch, list(range(8)))
    house.append(batch, [1, 2, 3, 4])
    with pytest.raises(CapacityError, match=r"nvme tier takes none for now: tiers.nvme.max_writes, 300B/h, is used up"):
        house.append(batch, [5])
    assert house.placement.writes.written_bytes == 300 and len(house.engine.started) == 3
    house.check()
    house.clock.now_s += 1.1 * HOUR_S
    house.append(batch, [5])
    house.check()


def test_idle_blocks_are_dropped_instead() -> None:
    house = limited(2, drops=True)
    first, second = house.filled(8, 100), house.filled(8, 200)
    assert house.tiers_of(first) == ["nvme"] * 2
    running = house.manager.new_batch()
    house.append(running, [1, 2, 3, 4])
    house.append(running, [1, 2, 3, 4])
    # What lies on nvme stays: no block of the gpu tier could take its place.
    assert house.tiers_of(second) == ["", ""] and house.tiers_of(first) == ["nvme"] * 2
    assert house.placement.writes.written_bytes == 200
    house.manager.check_integrity()


def test_watermarks_spend_no_more_than_half() -> None:
    house = build(4, 0, 8, high_frac=0.5, low_frac=0.25)
    house.placement.writes = meter(4 * MOVE, house.clock)
    end, writes = house.engine._end, house.placement.writes

    def counted(flight: object) -> object:
        writes.wrote(MOVE)
        return end(flight)  # type: ignore[arg-type]

    house.engine._end = counted  # type: ignore[method-assign, assignment]
    batches = [house.filled(4, 100 * number) for number in range(4)]
    for _ in range(10):
        house.manager.poll()
        house.drain()
    assert writes.written_bytes <= 2 * MOVE and len(house.engine.started) == 2
    batches.append(house.filled(12, 900))
    assert writes.written_bytes > 2 * MOVE
    house.check()
