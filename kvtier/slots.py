"""Which slots of one tier are free. Knows no block ids."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate, count, groupby
from operator import sub

from kvtier.errors import IntegrityError
from kvtier.types import Slot


class SlotPool:
    """Free slots of one tier, handed out lowest first.

    Lowest first keeps neighbours in use together (long runs for attention) and lets a file-backed tier grow only as
    far as it is needed. Slots that are held back go last, in the order given: what lies in them may still be of use.

    Cost: O(log free) a slot.
    """

    MAX_LOOKED_AT = 512
    """Free slots among which `take_near` looks for a run: among those of a large pool that are enough."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._ceiling = num_slots
        self._is_taken = bytearray()
        """Of each slot before `_fresh`: a tenth of what a set of those in use would take."""
        self._free: set[Slot] = set()  # given back, all below _fresh
        self._heap: list[Slot] = []  # of those, and of some that have been claimed since
        self._held: dict[Slot, None] = {}  # in the order to hand out
        self._num_passed = 0  # held slots below _fresh
        self._retired: set[Slot] = set()  # below _ceiling, and not handed out until there is room
        self._last_near = 0
        """What `take_near` handed out last."""
        self.num_used = 0
        """Slots handed out and not given back."""
        self.peak_used = 0

    @property
    def _fresh(self) -> int:
        """From here on slots were never handed out, and take no memory here. Those before it that are held back
        were not either."""
        return len(self._is_taken)

    @property
    def ceiling(self) -> int:
        """Slots that may be used: `num_slots`, or fewer while the medium has less room."""
        return self._ceiling - len(self._retired)

    @property
    def num_free(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free) + max(0, self._ceiling - len(self._is_taken)) + self._num_passed

    @property
    def used_frac(self) -> float:
        """Used share of the ceiling; 1.0 for a tier without slots."""
        return self.num_used / self.ceiling if self.ceiling else 1.0

    def take(self) -> Slot | None:
        """Hand out the lowest free slot that is not held back, then the first that is, or None when there is none."""
        free, is_taken = self._free, self._is_taken
        if self._held:
            while self._fresh < self._ceiling and self._fresh in self._held:
                is_taken.append(0)
                self._num_passed += 1
        if free:
            slot = heappop(self._heap)
            while slot not in free:
                slot = heappop(self._heap)
            free.discard(slot)
        elif len(is_taken) < self._ceiling:
            slot = Slot(len(is_taken))
            is_taken.append(0)
        elif self._held:
            slot = next(iter(self._held))
            del self._held[slot]
            self._num_passed -= 1
        else:
            return None
        self._hand_out(slot)
        return slot

    def _hand_out(self, slot: Slot) -> None:
        self._is_taken[slot] = 1
        self.num_used += 1
        if self.num_used > self.peak_used:
            self.peak_used += 1

    def take_near(self, before: Slot | None, num_slots: int) -> Slot | None:
        """Hand out the slot behind `before`, or where that is not to be had, one from which on `num_slots` are free.

        Of several such runs the shortest. Where there is none, one of those that make the fewest runs of as many
        slots: the next behind what was handed out here last, so that what comes and goes in turns goes round the tier,
        and is not taken apart further each time. Where slots are held back, the lowest slot. None: no slot is free.
        O(1): some hundreds of free slots are looked at.
        """
        if self._held:
            return self.take()
        if before is not None and self.claim(Slot(before + 1)):
            slot: Slot | None = Slot(before + 1)
        else:
            start = self._start_of_run(num_slots)
            slot = start if start is not None and self.claim(start) else self.take()
        self._last_near = self._last_near if slot is None else slot
        return slot

    def _start_of_run(self, num_slots: int) -> Slot | None:
        """Among slots that were given back, and those that never were handed out, which are one run, the last."""
        runs: list[tuple[int, int]] = []  # length, first slot
        free, num_seen = sorted(self._free.intersection(self._heap[: self.MAX_LOOKED_AT])), 0
        for _, run in groupby(map(sub, free, count())):  # neighbours are as far from their number in the list
            length, first = len(list(run)), free[num_seen]
            if length == num_slots and first + length != self._fresh:
                return first  # none that is long enough is shorter, and it is the first of these
            runs.append((length, first))
            num_seen += length
        if self._fresh < self._ceiling:
            joins = bool(runs) and sum(runs[-1]) == self._fresh
            length, start = runs.pop() if joins else (0, self._fresh)
            runs.append((length + self._ceiling - self._fresh, start))
        fitting = [run for run in runs if run[0] >= num_slots]
        if fitting:
            return Slot(min(fitting)[1])
        # One that leaves no more than the other longest ones have room for.
        lengths = sorted((length for length, _ in runs), reverse=True)
        num_runs = next((n for n, total in enumerate(accumulate(lengths), 1) if total >= num_slots), len(runs))
        least = num_slots - sum(lengths[: num_runs - 1])
        good = [(sum(run) <= self._last_near, run[1]) for run in runs if run[0] >= min(least, lengths[0])]
        return Slot(min(good)[1]) if good else None

    def claim(self, slot: Slot) -> bool:
        """Hand out this very slot, for the sake of what lies in it; whether it was there to be had.

        O(1), and once O(slots before it that were never handed out).
        """
        if not 0 <= slot < self._ceiling or self._is_in_use(slot) or slot in self._retired:
            return False
        fresh = self._fresh
        if slot in self._held:
            del self._held[slot]
            self._num_passed -= slot < fresh
        elif slot < fresh:
            self._pull(slot)
        if slot >= fresh:
            # Those before it were never handed out, and can be: they are free like any that was given back.
            self._is_taken.extend(bytes(slot + 1 - fresh))
            for passed in map(Slot, range(fresh, slot)):
                if passed in self._held:
                    self._num_passed += 1
                else:
                    self._push(passed)
        self._hand_out(slot)
        return True

    def _is_in_use(self, slot: int) -> bool:
        return 0 <= slot < len(self._is_taken) and self._is_taken[slot] == 1

    def give_back(self, slot: Slot) -> None:
        """Take a slot back. A slot beyond a lowered ceiling is retired.

        Raises:
            IntegrityError: the slot was not handed out; nothing changed.
        """
        is_taken = self._is_taken
        if not 0 <= slot < len(is_taken) or not is_taken[slot]:
            raise IntegrityError(f"slot {slot} was given back but not in use")
        is_taken[slot] = 0
        self.num_used -= 1
        if slot < self._ceiling:
            self._free.add(slot)
            heappush(self._heap, slot)

    def _push(self, slot: Slot) -> None:
        self._free.add(slot)
        heappush(self._heap, slot)

    def _pull(self, slot: Slot) -> None:
        """The slot is free no longer, though not the first in the heap: it may come to stand there again."""
        self._free.discard(slot)
        if len(self._heap) > 2 * len(self._free) + 64:
            self._heap = sorted(self._free)

    def retire(self, slot: Slot) -> None:
        """Take a slot back and hand it out no more until `raise_ceiling`: the medium has no room for it.

        Raises:
            IntegrityError: the slot was not handed out; nothing changed.
        """
        self.give_back(slot)
        if slot < self._ceiling:
            self._pull(slot)
            self._retired.add(slot)

    def hold_back(self, slots: Sequence[Slot]) -> None:
        """Hand these out last, in this order. In place of what was said before; O(slots).

        Slots that were handed out once are ordinary from then on, and so are those that `take` has passed and that
        are held back no more: they are not held back again.
        """
        untouched = self._held
        held = [slot for slot in slots if slot < self._ceiling and (slot in untouched or slot >= self._fresh)]
        self._held = dict.fromkeys(held)
        for slot in untouched.keys() - self._held.keys():
            if slot < min(self._fresh, self._ceiling):
                self._push(slot)
        self._num_passed = sum(slot < self._fresh for slot in self._held)

    def lower_ceiling(self, num_slots: int) -> None:
        """Use only slots below `num_slots` from now on (those in use beyond it stay until given back)."""
        self._ceiling = min(self._ceiling, max(0, num_slots))
        self._free = {slot for slot in self._free if slot < self._ceiling}
        self._heap = sorted(self._free)
        self._retired = {slot for slot in self._retired if slot < self._ceiling}
        self.hold_back([Slot(slot) for slot in self._held])

    def raise_ceiling(self, num_slots: int) -> None:
        """Use the slots below `num_slots` again, at most all there were. What was held back there is so no longer.

        With at least the ceiling itself, the medium has room: retired slots can be tried again.
        """
        if num_slots >= self._ceiling:
            for slot in self._retired:
                self._push(slot)
            self._retired.clear()
        before, self._ceiling = self._ceiling, max(self._ceiling, min(num_slots, self.num_slots))
        for slot in map(Slot, range(before, min(self._fresh, self._ceiling))):
            if not self._is_taken[slot]:
                self._push(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot below the ceiling is free or in use, and none is both."""
        free, taken = self._free, {slot for slot, is_taken in enumerate(self._is_taken) if is_taken}
        if len(taken) != self.num_used:
            raise IntegrityError(f"{len(taken)} slots are in use, {self.num_used} were counted")
        if not free <= set(self._heap) or free & taken:
            raise IntegrityError("a slot is free and never handed out, or free and in use")
        below = {slot for slot in taken if slot < self._ceiling}
        num_passed = sum(slot < self._fresh for slot in self._held)
        if self._held.keys() & (free | taken):
            raise IntegrityError("a slot is held back twice, or free or in use as well")
        if self._retired & (free | taken | self._held.keys()):
            raise IntegrityError("a retired slot is free, held back or in use")
        num_known = len(free) + len(below) + num_passed + len(self._retired)
        if num_known != min(self._fresh, self._ceiling) or any(slot >= self._ceiling for slot in free):
            raise IntegrityError(
                f"{len(free)} free + {len(below)} used + {num_passed} held + {len(self._retired)} retired slots are "
                f"not {self._fresh} of {self._ceiling}"
            )
        if num_passed != self._num_passed:
            raise IntegrityError(f"{num_passed} slots are held back, {self._num_passed} were counted")
