"""Which blocks of a tier may leave it: views that eviction policies are handed. They hold no facts of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container

from kvtier.copies import Copies
from kvtier.types import BlockId, Tier


class View(Container[BlockId]):
    """Some of a tier's blocks, and a bound on how many: a policy need not be asked for what is not there."""

    @property
    @abstractmethod
    def most(self) -> int:
        """At least as many as it contains. O(1)."""


class Evictable(View):
    """Blocks that may leave a tier now, of running sequences or of idle ones.

    Attributes:
        num_looked_at: how often it was asked for a block.
    """

    def __init__(self, copies: Copies, tier: Tier, running: bool) -> None:
        self._copies, self._residency = copies, copies.residency
        self._running_blocks = copies.running_blocks
        self._tier = tier
        self.running = running
        self.num_looked_at = 0

    @property
    def most(self) -> int:
        return self._running_blocks.num_copies(self._tier, running=self.running)

    def __contains__(self, block: object) -> bool:
        self.num_looked_at += 1
        record = self._residency.get(block)  # type: ignore[arg-type]  # Container promises only `object`
        if record is None or record.move is not None or (slot := record.slot(self._tier)) is None:
            return False
        return (
            (block in self._running_blocks) is self.running
            and not record.pins[self._tier]
            and not self._copies.is_held(self._tier, slot)
        )


class Droppable(View):
    """Idle blocks on a tier that may lose every copy: they can be computed again."""

    def __init__(self, copies: Copies, tier: Tier, recomputable: Container[BlockId]) -> None:
        self._residency, self._recomputable, self._pinned = copies.residency, recomputable, copies.pinned
        self._idle = Evictable(copies, tier, running=False)

    @property
    def most(self) -> int:
        return self._idle.most

    def __contains__(self, block: object) -> bool:
        if block not in self._idle:
            return False
        is_pinned = self._residency[block].is_pinned  # type: ignore[index]  # it is in `_idle`, so it is a block
        return not is_pinned and block in self._recomputable and block not in self._pinned


class Cached(View):
    """Blocks on a tier that only the prefix index holds."""

    def __init__(self, copies: Copies, tier: Tier) -> None:
        self._copies, self._tier = copies, tier
        self._idle = Evictable(copies, tier, running=False)

    @property
    def most(self) -> int:
        return self._copies.num_cached[self._tier]

    def __contains__(self, block: object) -> bool:
        copies = self._copies
        if block not in copies.prefixes or block not in self._idle or block in copies.pinned:
            return False
        record = copies.residency[block]  # type: ignore[index]  # it is in the index, so it is a block
        return record.holders == 1 and not record.is_pinned


class CachedLeaf(Cached):
    """Those of them that no other block in the index continues."""

    def __contains__(self, block: object) -> bool:
        return super().__contains__(block) and self._copies.prefixes.is_leaf(block)  # type: ignore[arg-type]
