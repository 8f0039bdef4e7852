"""Which blocks of a tier may leave it: views that eviction policies are handed. They hold no facts of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container

from kvtier.copies import Copies
from kvtier.types import BlockId, Tier


class View(Container[BlockId]):
    """Some of a tier's blocks, and a bound on how many: a policy need not be asked for what is not there.

    Attributes:
        running: whether they are of running sequences.
        is_cached: whether only the prefix index holds them.
        num_looked_at: how often it was asked for a block, where that is counted.
    """

    running = False
    is_cached = False
    num_looked_at = 0

    @property
    @abstractmethod
    def most(self) -> int:
        """At least as many as it contains. O(1)."""


class Evictable(View):
    """Blocks that may leave a tier now, of running sequences or of idle ones."""

    def __init__(self, copies: Copies, tier: Tier, running: bool) -> None:
        self._copies, self._record_of, self._tier, self.running = copies, copies.residency.get, tier, running

    @property
    def most(self) -> int:
        return self._copies.running_blocks.num_copies(self._tier, running=self.running)

    def __contains__(self, block: object) -> bool:
        self.num_looked_at += 1
        record, copies, tier = self._record_of(block), self._copies, self._tier  # type: ignore[arg-type]  # as Container
        if record is None or record.move is not None or (slot := record.slot(tier)) is None:
            return False
        return (
            (block in copies.running_blocks) is self.running
            and not record.pins[tier]
            and not copies.hung.holds(tier, slot)
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

    is_cached = True

    def __init__(self, copies: Copies, tier: Tier) -> None:
        self._copies, self._tier = copies, tier
        self._idle = Evictable(copies, tier, running=False)

    @property
    def most(self) -> int:
        return self._copies.num_cached[self._tier]

    def __contains__(self, block: object) -> bool:
        copies = self._copies
        record = copies.residency.get(block)  # type: ignore[arg-type]  # as above
        if record is None or record.holders != 1 or record.is_pinned or block in copies.pinned:
            return False
        return block in copies.prefixes and block in self._idle


class CachedLeaf(Cached):
    """Those of them that no other block in the index continues."""

    def __contains__(self, block: object) -> bool:
        return super().__contains__(block) and self._copies.prefixes.is_leaf(block)  # type: ignore[arg-type]
