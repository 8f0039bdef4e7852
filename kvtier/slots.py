"""Which slots of one tier are free. Knows no block ids."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, MutableSet, Sequence
from itertools import accumulate

from kvtier.errors import IntegrityError
from kvtier.types import Slot


class SlotSet(MutableSet[int]):
    """A set of slots of one tier that takes a byte for each slot up to the highest: a tenth of a set's."""

    def __init__(self, slots: Iterable[int] = ()) -> None:
        self._is_in = bytearray()
        self._count = 0
        for slot in slots:
            self.add(slot)

    def __contains__(self, slot: object) -> bool:
        try:
            # Container promises only `object`
            return self._is_in[slot] == 1 and slot >= 0  # type: ignore[call-overload, operator]
        except IndexError:
            return False

    def __iter__(self) -> Iterator[int]:
        return (slot for slot, is_in in enumerate(self._is_in) if is_in)

    def __len__(self) -> int:
        return self._count

    def add(self, slot: int) -> None:
        if slot >= len(self._is_in):
            self._is_in.extend(bytes(slot + 1 - len(self._is_in)))
        if not self._is_in[slot]:
            self._is_in[slot] = 1
            self._count += 1

    def discard(self, slot: int) -> None:
        if slot in self:
            self.remove(slot)

    def remove(self, slot: int) -> None:
        if not 0 <= slot < len(self._is_in) or not self._is_in[slot]:
            raise KeyError(slot)
        self._is_in[slot] = 0
        self._count -= 1


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
        self._fresh = 0
        """From here on slots were never handed out, and take no memory here. Those before it that are held back
        were not either."""
        self._free: set[int] = set()  # given back, all below _fresh
        self._heap: list[int] = []  # of those, and of some that have been claimed since
        self._taken = SlotSet()
        self._held: dict[int, None] = {}  # in the order to hand out
        self._num_passed = 0  # held slots below _fresh
        self._retired: set[int] = set()  # below _ceiling, and not handed out until there is room
        self._last_near = 0
        """What `take_near` handed out last."""
        self.peak_used = 0

    @property
    def ceiling(self) -> int:
        """Slots that may be used: `num_slots`, or fewer while the medium has less room."""
        return self._ceiling - len(self._retired)

    @property
    def num_free(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free) + max(0, self._ceiling - self._fresh) + self._num_passed

    @property
    def num_used(self) -> int:
        """Slots handed out and not given back."""
        return len(self._taken)

    @property
    def used_frac(self) -> float:
        """Used share of the ceiling; 1.0 for a tier without slots."""
        return len(self._taken) / self.ceiling if self.ceiling else 1.0

    def take(self) -> Slot | None:
        """Hand out the lowest free slot that is not held back, then the first that is, or None when there is none."""
        while self._fresh < self._ceiling and self._fresh in self._held:
            self._fresh += 1
            self._num_passed += 1
        if self._free:
            slot = heapq.heappop(self._heap)
            while slot not in self._free:
                slot = heapq.heappop(self._heap)
            self._free.discard(slot)
        elif self._fresh < self._ceiling:
            slot, self._fresh = self._fresh, self._fresh + 1
        elif self._held:
            slot = next(iter(self._held))
            del self._held[slot]
            self._num_passed -= 1
        else:
            return None
        self._taken.add(slot)
        self.peak_used = max(self.peak_used, len(self._taken))
        return Slot(slot)

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
        for slot in sorted(self._free.intersection(self._heap[: self.MAX_LOOKED_AT])):
            if runs and slot == sum(runs[-1]):
                runs[-1] = runs[-1][0] + 1, runs[-1][1]
            else:
                runs.append((1, slot))
        if self._fresh < self._ceiling:
            joins = bool(runs) and sum(runs[-1]) == self._fresh
            length, first = runs.pop() if joins else (0, self._fresh)
            runs.append((length + self._ceiling - self._fresh, first))
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
        number = int(slot)
        if not 0 <= number < self._ceiling or number in self._taken or number in self._retired:
            return False
        if number in self._held:
            del self._held[number]
            self._num_passed -= number < self._fresh
        elif number < self._fresh:
            self._free.discard(number)
        if number >= self._fresh:
            # Those before it were never handed out, and can be: they are free like any that was given back.
            for passed in range(self._fresh, number):
                if passed in self._held:
                    self._num_passed += 1
                else:
                    self._push(passed)
            self._fresh = number + 1
        self._taken.add(number)
        self.peak_used = max(self.peak_used, len(self._taken))
        return True

    def give_back(self, slot: Slot) -> None:
        """Take a slot back. A slot beyond a lowered ceiling is retired.

        Raises:
            IntegrityError: the slot was not handed out; nothing changed.
        """
        try:
            self._taken.remove(slot)
        except KeyError:
            raise IntegrityError(f"slot {slot} was given back but not in use") from None
        if slot < self._ceiling:
            self._push(slot)

    def _push(self, slot: int) -> None:
        self._free.add(slot)
        heapq.heappush(self._heap, slot)
        if len(self._heap) > 2 * len(self._free) + 64:  # slots that were claimed and came back stand in it again
            self._heap = sorted(self._free)

    def retire(self, slot: Slot) -> None:
        """Take a slot back and hand it out no more until `raise_ceiling`: the medium has no room for it.

        Raises:
            IntegrityError: the slot was not handed out; nothing changed.
        """
        self.give_back(slot)
        if slot < self._ceiling:
            self._free.discard(slot)
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
        for slot in set(range(before, min(self._fresh, self._ceiling))) - self._taken:
            self._push(slot)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot below the ceiling is free or in use, and none is both."""
        free = self._free
        if not free <= set(self._heap) or free & self._taken:
            raise IntegrityError("a slot is free and never handed out, or free and in use")
        below = {slot for slot in self._taken if slot < self._ceiling}
        num_passed = sum(slot < self._fresh for slot in self._held)
        if self._held.keys() & (free | self._taken):
            raise IntegrityError("a slot is held back twice, or free or in use as well")
        if self._retired & (free | self._taken | self._held.keys()):
            raise IntegrityError("a retired slot is free, held back or in use")
        num_known = len(free) + len(below) + num_passed + len(self._retired)
        if num_known != min(self._fresh, self._ceiling) or any(slot >= self._ceiling for slot in free):
            raise IntegrityError(
                f"{len(free)} free + {len(below)} used + {num_passed} held + {len(self._retired)} retired slots are "
                f"not {self._fresh} of {self._ceiling}"
            )
        if num_passed != self._num_passed:
            raise IntegrityError(f"{num_passed} slots are held back, {self._num_passed} were counted")
