"""When a tier that failed, or whose disk was full, is tried again. Knows no blocks, and no time but its clock's."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from kvtier.log import logger
from kvtier.slots import SlotPool

Clock = Callable[[], float]
"""Seconds that never go back, as `time.monotonic`."""


class Rest:
    """A time to wait, twice as long after each failure, up to a limit."""

    def __init__(self, first_s: float, longest_s: float, clock: Clock) -> None:
        self._first_s, self._longest_s, self._clock = first_s, longest_s, clock
        self._length_s = 0.0
        self._until_s = 0.0

    @property
    def is_over(self) -> bool:
        """Whether the time has passed, or none was begun."""
        return self._length_s == 0.0 or self._clock() >= self._until_s

    def lengthen(self) -> None:
        """Begin a rest from now on: the first one, or twice the last one."""
        self._length_s = min(self._longest_s, max(self._first_s, 2 * self._length_s))
        self._until_s = self._clock() + self._length_s

    def repeat(self) -> None:
        """Begin a rest as long as the last one."""
        self._length_s = max(self._first_s, self._length_s)
        self._until_s = self._clock() + self._length_s

    def reset(self) -> None:
        """Forget all failures."""
        self._length_s = 0.0


class Breaker:
    """Takes a tier out of use whose moves fail one after the other: closed, then resting, then one move as a probe.

    A rest is for moves into the tier alone: what lies there goes on being read.

    A tier *hangs* from when a read or write of it has passed its deadline until all that have are over. Then nothing is
    read there either: each call would take a thread, and a slot or a buffer, that nobody gets back.

    Attributes:
        num_failed: moves that failed, ever.
        last_error: of the last one.
        is_hanging: as `look` saw it last.
        overdue_error: what passed its deadline first, while it hangs.
        overdue_calls: reads and writes that have passed their deadline and are not over, each with what is said of it.
            `look` has something to see while there are any, or the tier hangs.
    """

    # That many in a row: one or two may be bad luck, and each costs a step that waits for room.
    MAX_FAILURES = 3
    FIRST_REST_S, LONGEST_REST_S = 1.0, 60.0

    def __init__(self, label: str, clock: Clock = time.monotonic) -> None:
        """`label`: the tier's, for the log."""
        self.label = label
        self.num_failed = 0
        self.last_error = ""
        self.is_resting = False
        """Whether it is out of use. Stays so until a move has succeeded."""
        self.is_hanging = False
        self.overdue_error = ""
        self.overdue_calls: dict[Hashable, str] = {}
        self._num_in_a_row = 0
        self._probe: int | None = None
        self._rest = Rest(self.FIRST_REST_S, self.LONGEST_REST_S, clock)

    @property
    def state(self) -> str:
        """For people: `hanging`, `resting` or `ok`."""
        return "hanging" if self.is_hanging else "resting" if self.is_resting else "ok"

    @property
    def allows(self) -> bool:
        """Whether a move into the tier may start now. While it rests: one at a time, when the rest is over."""
        return not self.is_hanging and (not self.is_resting or (self._probe is None and self._rest.is_over))

    def overdue(self, call: Hashable, error: str) -> None:
        """A read or write of the tier has passed its deadline. On any thread; `look` draws the conclusion."""
        self.overdue_calls[call] = error

    def ended(self, call: Hashable) -> None:
        """One that had is over, well or not. On any thread."""
        self.overdue_calls.pop(call, None)

    def look(self) -> None:
        """Whether the tier hangs, from here on. By the thread that has the turn: nothing changes under a plan."""
        if self.is_hanging is bool(self.overdue_calls):
            return
        errors = list(self.overdue_calls.values())
        self.is_hanging = bool(errors)
        if self.is_hanging:
            self.overdue_error = errors[0]
            logger.warning("the %s tier hangs: %s; going on without it until that has ended", self.label, errors[0])
        else:
            logger.info("the %s tier answers again, and is in use", self.label)

    def started(self, move_id: int) -> None:
        """A move that was allowed has begun."""
        if self.is_resting:
            self._probe = move_id

    def succeeded(self) -> None:
        """A move has ended well, the probe or one that began before: the tier is in use again."""
        if not self._num_in_a_row and not self.is_resting:
            return
        if self.is_resting:
            logger.info("the %s tier takes blocks again; %d moves failed", self.label, self._num_in_a_row)
        self.is_resting = False
        self._probe = None
        self._num_in_a_row = 0
        self._rest.reset()

    def failed(self, move_id: int, error: str) -> None:
        """A move has failed. Those that began before the rest do not make it longer."""
        self.num_failed += 1
        self._num_in_a_row += 1
        self.last_error = error
        if self.is_resting:
            if move_id == self._probe:
                self._probe = None
                self._rest.lengthen()
        elif self._num_in_a_row >= self.MAX_FAILURES:
            self.is_resting = True
            self._rest.lengthen()
            logger.warning(
                "the %s tier takes no blocks for now: %d moves to it failed in a row (%s); going on with the other "
                "tiers, and trying it again from time to time",
                self.label, self._num_in_a_row, error,
            )  # fmt: skip

    def undecided(self, move_id: int) -> None:
        """A move has ended in a way that says nothing of the tier's health: its slot has no backing."""
        if move_id == self._probe:
            self._probe = None


class Regrowth:
    """Raises a pool's ceiling again that a full disk had lowered.

    The disk is asked at most every `FIRST_REST_S`, and less and less often where what it promises does not come true,
    as with a quota.
    """

    FIRST_REST_S, LONGEST_REST_S = 5.0, 300.0

    def __init__(self, label: str, pool: SlotPool, room: Callable[[], int], clock: Clock = time.monotonic) -> None:
        """`room`: how many slots, from 0, can be had now."""
        self._label, self._pool, self._room = label, pool, room
        self._raised_from: int | None = None
        """The ceiling before it was raised, until a block was written beyond it."""
        self._rest = Rest(self.FIRST_REST_S, self.LONGEST_REST_S, clock)

    def lowered(self) -> bool:
        """The ceiling was lowered. Whether that is news: not if the room that was promised just never came."""
        is_news = self._raised_from is None
        self._raised_from = None
        if is_news:
            self._rest.repeat()
        else:
            self._rest.lengthen()
        return is_news

    def written(self, slot: int) -> None:
        """A block was written."""
        if self._raised_from is not None and slot >= self._raised_from:
            self._raised_from = None
            self._rest.reset()

    def look(self) -> None:
        """Raise the ceiling if the disk has room again. O(1) but for the slots that come back."""
        pool, before = self._pool, self._pool.ceiling
        if before >= pool.num_slots or not self._rest.is_over:
            return
        self._rest.repeat()
        pool.raise_ceiling(self._room())
        if pool.ceiling > before:
            if self._raised_from is None:
                self._raised_from = before
            logger.info("the %s tier has room for %d blocks again", self._label, pool.ceiling)
