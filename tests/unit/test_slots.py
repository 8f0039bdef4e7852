"""Slot pools."""

from __future__ import annotations

import itertools
import math
from collections import deque

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
    pool._hand_out(slot)
    with pytest.raises(IntegrityError, match="retired slot"):
        pool.check_integrity()


def test_integrity_sees_a_slot_that_is_held_back_and_free() -> None:
    pool = SlotPool(3)
    pool.hold_back([Slot(0)])
    pool.take()
    pool._push(0)
    with pytest.raises(IntegrityError, match="held back twice, or free"):
        pool.check_integrity()


def test_integrity_sees_a_slot_that_is_free_and_in_use_and_one_that_is_lost() -> None:
    pool = SlotPool(3)
    slot = pool.take()
    pool.give_back(slot)
    pool._hand_out(slot)
    with pytest.raises(IntegrityError, match="free and in use"):
        pool.check_integrity()
    pool = SlotPool(3)
    pool.give_back(pool.take())
    pool._free.pop()
    with pytest.raises(IntegrityError, match="are not 1 of 3"):
        pool.check_integrity()


def test_a_slot_that_is_claimed_is_the_one_and_those_passed_over_stay_free() -> None:
    pool = SlotPool(8)
    assert pool.claim(Slot(5))
    assert (pool.num_used, pool.num_free, pool.peak_used) == (1, 7, 1)
    assert not pool.claim(Slot(5)), "it is in use"
    assert pool.claim(Slot(2)), "one that was passed over"
    pool.check_integrity()
    assert take(pool, 7) == [0, 1, 3, 4, 6, 7, None]
    pool.give_back(Slot(5))
    assert pool.claim(Slot(5)) and not pool.num_free
    pool.check_integrity()


def test_what_is_held_back_can_be_claimed_out_of_its_turn() -> None:
    pool = SlotPool(6)
    pool.hold_back([Slot(1), Slot(4), Slot(2)])
    assert pool.claim(Slot(4))  # 1 and 2 are passed, and stay held back
    pool.check_integrity()
    assert pool.claim(Slot(2))
    pool.check_integrity()
    assert take(pool, 5) == [0, 3, 5, 1, None]
    pool.check_integrity()


def test_a_slot_that_is_retired_or_beyond_the_ceiling_cannot_be_claimed() -> None:
    pool = SlotPool(6)
    assert take(pool, 2) == [0, 1]
    pool.retire(Slot(1))
    pool.lower_ceiling(4)
    for slot in (1, 4, 5, 6, -1, 100):
        assert not pool.claim(Slot(slot))
        pool.check_integrity()
    pool.raise_ceiling(6)
    assert pool.claim(Slot(5)) and pool.claim(Slot(1))
    pool.check_integrity()
    assert take(pool, 4) == [2, 3, 4, None]


def test_neighbours_are_handed_out_where_there_are_any() -> None:
    pool = SlotPool(12)
    take(pool, 9)
    for slot in (0, 3, 4, 6, 7):
        pool.give_back(Slot(slot))
    assert pool.take_near(Slot(3), 1) == 4, "behind the one before"
    assert pool.take_near(None, 2) == 6, "the shortest that is long enough"
    assert pool.take_near(Slot(6), 1) == 7
    assert pool.take_near(Slot(7), 1) == 0, "the shortest, the lowest of several"
    assert pool.take_near(None, 9) == 9, "the longest, of slots that were never handed out"
    assert pool.take_near(Slot(9), 8) == 10
    assert [pool.take_near(Slot(11), 1) for _ in range(3)] == [3, 11, None]
    pool.check_integrity()


def test_prompts_of_one_length_go_round_a_tier_and_one_of_a_round_is_split() -> None:
    """It came apart further each time round: with 54 slots a quarter of all prompts of 8 blocks lay in two runs."""
    pool, prompts, num_split = SlotPool(54), deque[list[Slot]](), 0
    for number in range(54):
        while pool.num_free < 9 and prompts:  # as demotion ahead of need has it: as many as come, oldest first
            pool.give_back(prompts[0].pop(0))
            if not prompts[0]:
                prompts.popleft()
        slots: list[Slot] = []
        for left in range(9, 0, -1):
            slot = pool.take_near(slots[-1] if slots else None, max(1, left - 1))
            assert slot is not None
            slots.append(slot)
        pool.give_back(slots.pop())  # of the answer, which nobody keeps
        prompts.append(slots)
        num_split += number >= 27 and max(slots) - min(slots) > 7
    assert num_split <= 4, "27 prompts of 8 blocks are 4 rounds"


SLOTS = st.integers(-1, 12)
OPERATIONS = st.one_of(
    st.tuples(st.just("take"), st.just(0)),
    st.tuples(st.sampled_from(["near", "claim", "claim", "give_back", "retire", "lower", "raise"]), SLOTS),
    st.tuples(st.just("hold_back"), st.lists(SLOTS, max_size=6, unique=True)),
)


def _runs(free: set[int]) -> list[tuple[int, int]]:
    """Length and first slot of each."""
    starts = [slot for slot in free if slot - 1 not in free]
    return [(next(n for n in itertools.count() if slot + n not in free), slot) for slot in starts]


def _end(runs: list[tuple[int, int]], first: int) -> int:
    return next(sum(run) for run in runs if run[1] == first)


def _fewest(runs: list[tuple[int, int]], num_slots: int, run: tuple[int, int]) -> bool:
    """Whether no other set of runs for so many slots is smaller than the smallest with this run in it."""
    others = [each for each in runs if each != run]

    def num_runs(chosen: list[tuple[int, int]], left: int) -> float:
        sizes = (n for n in range(len(chosen) + 1) if any(
            sum(length for length, _ in some) >= left for some in itertools.combinations(chosen, n)
        ))  # fmt: skip
        return next(sizes, math.inf)

    fewest = num_runs(runs, num_slots)
    return run[0] == max(runs)[0] if fewest == math.inf else 1 + num_runs(others, num_slots - run[0]) == fewest


@given(st.integers(0, 12), st.lists(OPERATIONS, max_size=40))
@example(3, [("hold_back", [0]), ("take", 0), ("hold_back", []), ("hold_back", [0]), ("take", 0)])
def test_random_histories_agree_with_a_plain_set(num_slots: int, history: list[tuple[str, int | list[int]]]) -> None:
    """Free slots are those below the ceiling that are neither in use nor retired; each of them can be claimed."""
    pool, used, retired, ceiling = SlotPool(num_slots), set[int](), set[int](), num_slots
    held: list[int] = []
    touched = set[int]()  # handed out once, or as if
    last_near = 0
    passed = 0  # slots that were looked at, so that those of them that are held back no more are as if handed out
    for name, value in history:
        free = set(range(ceiling)) - used - retired
        before = set(held)
        match name:
            case "take":
                slot = pool.take()
                ordinary = free - set(held)
                expected = min(ordinary) if ordinary else next((each for each in held if each in free), None)
                assert slot == expected
                while passed < ceiling and passed in before:
                    passed += 1
                if slot is not None:
                    passed = max(passed, slot + 1)
                    used.add(slot)
                    touched.add(slot)
            case "near" if not held:
                runs = _runs(free)
                slot = pool.take_near(Slot(value), value)
                fitting = [run for run in runs if run[0] >= value]
                if value + 1 in free:
                    assert slot == value + 1
                elif fitting or not runs:
                    assert slot == (min(fitting)[1] if fitting else None)
                else:
                    good = [first for length, first in runs if _fewest(runs, value, (length, first))]
                    behind = [first for first in good if _end(runs, first) > last_near]
                    assert slot == min(behind or good)
                if slot is not None:
                    last_near = slot
                    used.add(slot)
                    touched |= {slot, *range(slot)}
                    passed = max(passed, slot + 1)
            case "claim":
                assert pool.claim(Slot(value)) is (value in free)
                if value in free:
                    passed = max(passed, value + 1)
                    used.add(value)
                    touched |= {value} | (set(range(value)) - set(held))  # those before it are as if handed out
            case "give_back" | "retire" if used:
                slot = sorted(used)[value % len(used)]
                (pool.give_back if name == "give_back" else pool.retire)(Slot(slot))
                used.discard(slot)
                if name == "retire" and slot < ceiling:
                    retired.add(slot)
            case "lower":
                ceiling = min(ceiling, max(0, value))
                pool.lower_ceiling(value)
                retired = {slot for slot in retired if slot < ceiling}
            case "raise":
                if value >= ceiling:
                    retired.clear()
                pool.raise_ceiling(value)
                ceiling = max(ceiling, min(value, num_slots))
            case "hold_back":
                held = [each for each in value if each >= 0]
                pool.hold_back([Slot(each) for each in held])
        # What was handed out once, or lay beyond a lowered ceiling, is ordinary.
        held = [each for each in held if each < ceiling and each not in touched]
        touched |= {each for each in before.difference(held) if each < passed}
        pool.check_integrity()
        free = set(range(ceiling)) - used - retired
        assert (pool.num_used, pool.num_free) == (len(used), len(free))
    rest = list(itertools.takewhile(lambda slot: slot is not None, iter(pool.take, object())))
    assert set(rest) == set(range(ceiling)) - used - retired and len(set(rest)) == len(rest)


def test_a_slot_that_is_claimed_and_given_back_again_and_again_takes_no_more_memory() -> None:
    pool = SlotPool(8)
    for slot in take(pool, 8):
        assert slot is not None
        pool.give_back(Slot(slot))
    for _ in range(1000):
        assert pool.claim(Slot(5))
        pool.give_back(Slot(5))
    assert len(pool._heap) <= 2 * 8 + 64
    pool.check_integrity()
    assert take(pool, 9) == [*range(8), None]
