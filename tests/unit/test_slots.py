"""Slot pools."""

from __future__ import annotations

import pytest

from kvtier.errors import IntegrityError
from kvtier.slots import SlotPool
from kvtier.types import Slot


def take(pool: SlotPool, num_slots: int) -> list[int | None]:
    return [pool.take() for _ in range(num_slots)]


def test_slots_are_handed_out_lowest_first_and_once() -> None:
    pool = SlotPool(4)
    assert take(pool, 5) == [0, 1, 2, 3, None]
    pool.give_back(Slot(2))
    pool.give_back(Slot(0))
    assert take(pool, 3) == [0, 2, None]
    pool.check_integrity()


def test_counts() -> None:
    pool = SlotPool(4)
    take(pool, 3)
    pool.give_back(Slot(1))
    assert (pool.num_used, pool.num_free, pool.peak_used, pool.used_frac) == (2, 2, 3, 0.5)


def test_a_slot_cannot_be_given_back_twice() -> None:
    pool = SlotPool(2)
    pool.take()
    pool.give_back(Slot(0))
    for slot in (0, 1, 7):
        with pytest.raises(IntegrityError, match=f"slot {slot} was given back"):
            pool.give_back(Slot(slot))
    assert pool.num_free == 2
    pool.check_integrity()


def test_a_lowered_ceiling_retires_slots_as_they_come_back() -> None:
    pool = SlotPool(5)
    take(pool, 4)
    pool.lower_ceiling(2)
    assert (pool.ceiling, pool.num_free, pool.num_used) == (2, 0, 4)
    pool.check_integrity()
    pool.give_back(Slot(3))
    pool.check_integrity()
    assert pool.take() is None
    pool.give_back(Slot(1))
    assert take(pool, 2) == [1, None]
    pool.check_integrity()


def test_a_ceiling_only_goes_down() -> None:
    pool = SlotPool(3)
    pool.lower_ceiling(1)
    pool.lower_ceiling(2)
    assert pool.ceiling == 1
    pool.lower_ceiling(-4)
    assert pool.ceiling == 0
    assert pool.take() is None


def test_a_raised_ceiling_brings_back_the_free_slots_beyond_it() -> None:
    pool = SlotPool(8)
    assert take(pool, 6) == [0, 1, 2, 3, 4, 5]
    pool.lower_ceiling(2)
    pool.give_back(Slot(3))
    pool.give_back(Slot(1))
    pool.raise_ceiling(5)  # 2 and 4 were in use all the time
    assert (pool.ceiling, pool.num_free, pool.num_used) == (5, 2, 4)
    pool.check_integrity()
    pool.give_back(Slot(4))
    pool.give_back(Slot(5))
    assert take(pool, 4) == [1, 3, 4, None]
    pool.raise_ceiling(100)
    assert pool.ceiling == 8
    assert take(pool, 4) == [5, 6, 7, None]
    pool.check_integrity()
    pool.raise_ceiling(3)  # never lowers
    assert pool.ceiling == 8


def test_what_was_held_back_beyond_a_lowered_ceiling_is_ordinary_when_it_is_raised() -> None:
    pool = SlotPool(6)
    pool.hold_back([Slot(4), Slot(1)])
    assert take(pool, 2) == [0, 2]
    pool.lower_ceiling(3)
    pool.raise_ceiling(6)
    pool.check_integrity()
    assert take(pool, 5) == [3, 4, 5, 1, None]
    pool.check_integrity()


def test_a_tier_without_slots_is_full() -> None:
    assert SlotPool(0).used_frac == 1.0


def test_what_is_held_back_goes_last_in_the_order_given() -> None:
    pool = SlotPool(6)
    pool.hold_back([Slot(4), Slot(0), Slot(3)])
    assert (pool.num_free, pool.num_used) == (6, 0)
    assert take(pool, 3) == [1, 2, 5]
    assert pool.num_free == 3
    pool.check_integrity()
    pool.give_back(Slot(2))
    assert take(pool, 5) == [2, 4, 0, 3, None]
    pool.give_back(Slot(4))  # handed out once: an ordinary slot
    pool.give_back(Slot(1))
    pool.hold_back([Slot(4), Slot(1)])
    assert take(pool, 2) == [1, 4]
    pool.check_integrity()


def test_holding_back_can_be_said_anew() -> None:
    pool = SlotPool(6)
    pool.hold_back([Slot(1), Slot(2), Slot(5)])
    assert take(pool, 2) == [0, 3]
    pool.hold_back([Slot(5), Slot(2), Slot(0)])  # 1 is ordinary now, 0 was handed out
    assert pool.num_free == 4
    pool.check_integrity()
    assert take(pool, 5) == [1, 4, 5, 2, None]
    pool.check_integrity()


def test_a_lowered_ceiling_retires_what_is_held_back_too() -> None:
    pool = SlotPool(6)
    pool.hold_back([Slot(5), Slot(0), Slot(4)])
    assert take(pool, 3) == [1, 2, 3]
    pool.lower_ceiling(4)
    assert pool.num_free == 1
    pool.check_integrity()
    assert take(pool, 2) == [0, None]
    pool.check_integrity()


def test_a_retired_slot_is_never_handed_out_again_and_counts_no_more() -> None:
    pool = SlotPool(5)
    assert take(pool, 4) == [0, 1, 2, 3]
    pool.retire(Slot(1))
    pool.check_integrity()
    assert (pool.ceiling, pool.num_free, pool.num_used, pool.used_frac) == (4, 1, 3, 0.75)
    pool.give_back(Slot(0))
    pool.hold_back([Slot(1), Slot(4)])
    assert take(pool, 3) == [0, 4, None]
    with pytest.raises(IntegrityError, match="slot 1"):
        pool.retire(Slot(1))
    with pytest.raises(IntegrityError, match="slot 1"):
        pool.give_back(Slot(1))
    pool.retire(Slot(3))
    pool.lower_ceiling(3)  # of which 1 is retired
    pool.check_integrity()
    assert pool.ceiling == 2
    pool.retire(Slot(4))  # beyond the ceiling: gone anyway
    pool.retire(Slot(0))
    pool.retire(Slot(2))
    pool.check_integrity()
    assert (pool.ceiling, pool.num_free, pool.used_frac) == (0, 0, 1.0)


def test_integrity_sees_a_retired_slot_that_is_in_use_too() -> None:
    pool = SlotPool(3)
    slot = pool.take()
    pool.retire(slot)
    pool._taken.add(slot)
    with pytest.raises(IntegrityError, match="retired slot"):
        pool.check_integrity()


def test_integrity_sees_a_slot_that_is_held_back_and_free() -> None:
    pool = SlotPool(3)
    pool.hold_back([Slot(0)])
    pool.take()
    pool._free.append(0)
    with pytest.raises(IntegrityError, match="held back twice, or free"):
        pool.check_integrity()


def test_integrity_sees_a_slot_that_is_free_and_in_use_and_one_that_is_lost() -> None:
    pool = SlotPool(3)
    slot = pool.take()
    pool.give_back(slot)
    pool._taken.add(slot)
    with pytest.raises(IntegrityError, match="free and in use"):
        pool.check_integrity()
    pool = SlotPool(3)
    pool.give_back(pool.take())
    pool._free.pop()
    with pytest.raises(IntegrityError, match="are not 1 of 3"):
        pool.check_integrity()
