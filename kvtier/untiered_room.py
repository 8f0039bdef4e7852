"""What the layers that are not tiered hold, over all caches of a runtime, and what the gpu budget leaves them."""

from __future__ import annotations

import weakref
from typing import Protocol

from kvtier.errors import BudgetError
from kvtier.size import size_and_bytes


class UntieredBytes(Protocol):
    """What one cache keeps beside the tiers."""

    num_bytes: int
    row_bytes: int
    """Of one of its rows."""


class UntieredRoom:
    """Room on the device that windows and linear attention share: those of every live cache.

    Attributes:
        num_layers: how many there are.
        room_bytes: what the gpu budget leaves them.
        caches: what each live cache keeps.
        is_mending: whether one of them is the temporary row that blocks are computed again on.
        stepping_bytes: what the cache of the last step kept when the step began.
        peak_bytes: the most that `used_bytes` ever said.
    """

    def __init__(self, num_layers: int, room_bytes: int) -> None:
        self.num_layers, self.room_bytes = num_layers, room_bytes
        self.caches: weakref.WeakSet[UntieredBytes] = weakref.WeakSet()
        self.is_mending = False
        self.stepping_bytes = self.peak_bytes = 0

    def used_bytes(self) -> int:
        """Bytes over all live caches."""
        total = sum(held.num_bytes for held in self.caches)
        self.peak_bytes = max(self.peak_bytes, total)
        return total

    def check(self, more_bytes: int = 0) -> None:
        """Raise BudgetError if they hold more than the gpu budget leaves them, or would with `more_bytes`."""
        if self.num_layers and (held := self.used_bytes() + more_bytes) > self.room_bytes:
            raise BudgetError(
                f"the {self.num_layers} layers that are not tiered (windows, linear attention) would hold "
                f"{size_and_bytes(held)} in {len(self.caches)} caches, and tiers.gpu.budget leaves them "
                f"{size_and_bytes(self.room_bytes)}: raise it or tiers.gpu.untiered_frac, drop caches, or use fewer "
                "rows"
            )

    def can_mend(self) -> bool:
        """Whether there is room for the temporary row that computing blocks again takes, unless this is its own step.

        It is counted as the largest row that there is, and so is the cache of the step, which may be new.
        """
        if not self.num_layers:
            return True
        row = max((held.row_bytes for held in self.caches), default=0)
        more_bytes = max(0, row - self.stepping_bytes) + (0 if self.is_mending else row)
        return self.used_bytes() + more_bytes <= self.room_bytes
