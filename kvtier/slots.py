"""Which slots of one tier are free. Knows no block ids."""

from __future__ import annotations

import heapq

from kvtier.errors import IntegrityError
from kvtier.types import Slot


class SlotPool:
    """Free slots of one tier, handed out lowest first.

    Lowest first keeps neighbours in use together (long runs for attention) and lets a file-backed tier grow only as
    far as it is needed.

    Cost: O(log free) a slot.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._ceiling = num_slots
        self._fresh = 0
        """The lowest slot never handed out: those behind it are free too, and take no memory here."""
        self._free: list[int] = []  # a heap of slots given back, all below _fresh
        self._taken: set[int] = set()
        self.peak_used = 0

    @property
    def ceiling(self) -> int:
        """Slots that may be used: `num_slots`, or fewer once the medium turned out smaller."""
        return self._ceiling

    @property
    def num_free(self) -> int:
        """Slots that `take` can still hand out."""
        return len(self._free) + max(0, self._ceiling - self._fresh)

    @property
    def num_used(self) -> int:
        """Slots handed out and not given back."""
        return len(self._taken)

    @property
    def used_frac(self) -> float:
        """Used share of the ceiling; 1.0 for a tier without slots."""
        return len(self._taken) / self._ceiling if self._ceiling else 1.0

    def take(self) -> Slot | None:
        """Hand out the lowest free slot, or None when there is none."""
        if self._free:
            slot = heapq.heappop(self._free)
        elif self._fresh < self._ceiling:
            slot, self._fresh = self._fresh, self._fresh + 1
        else:
            return None
        self._taken.add(slot)
        self.peak_used = max(self.peak_used, len(self._taken))
        return Slot(slot)

    def give_back(self, slot: Slot) -> None:
        """Take a slot back. A slot beyond a lowered ceiling is retired.

        Raises:
            IntegrityError: the slot was not handed out; nothing changed.
        """
        if slot not in self._taken:
            raise IntegrityError(f"slot {slot} was given back but not in use")
        self._taken.discard(slot)
        if slot < self._ceiling:
            heapq.heappush(self._free, slot)

    def lower_ceiling(self, num_slots: int) -> None:
        """Use only slots below `num_slots` from now on (those in use beyond it stay until given back)."""
        self._ceiling = min(self._ceiling, max(0, num_slots))
        self._free = [slot for slot in self._free if slot < self._ceiling]
        heapq.heapify(self._free)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every slot below the ceiling is free or in use, and none is both."""
        free = set(self._free)
        if len(free) != len(self._free) or free & self._taken:
            raise IntegrityError("a slot is free twice, or free and in use")
        below = {slot for slot in self._taken if slot < self._ceiling}
        if len(free) + len(below) != min(self._fresh, self._ceiling) or any(slot >= self._ceiling for slot in free):
            raise IntegrityError(f"{len(free)} free + {len(below)} used slots are not {self._fresh} of {self._ceiling}")
