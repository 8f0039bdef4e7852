"""Which blocks of a tier may leave it: views that eviction policies are handed. They hold no facts of their own."""

from __future__ import annotations

from collections.abc import Container

from kvtier.copies import Copies
from kvtier.residency import BlockRecord
from kvtier.types import BlockId, Tier


class Evictable(Container[BlockId]):
    """Blocks that may leave a tier now, of running sequences or of idle ones.

    Attributes:
        running: whether they are of running sequences.
        is_cached: whether only the prefix index holds them.
        num_looked_at: how often it was asked for a block.
        granted: the blocks that it was asked for and contains, in that order. They are still contained: one of these is
            made for each question to a policy, and nothing changes meanwhile.
    """

    is_cached = False
    num_looked_at = 0

    def __init__(self, copies: Copies, tier: Tier, running: bool = False) -> None:
        self._copies, self._tier, self.running = copies, tier, running
        self.granted: list[BlockId] = []

    @property
    def most(self) -> int:
        """At least as many as it contains: a policy need not be asked for what is not there. O(1)."""
        num_running = self._copies.running_blocks.num_copies[self._tier]
        return num_running if self.running else self._copies.residency.num_copies[self._tier] - num_running

    def __contains__(self, block: object) -> bool:
        self.num_looked_at += 1
        copies, tier = self._copies, self._tier
        record = copies.residency.get(block)  # type: ignore[arg-type]  # Container promises only `object`
        if record is None or record.move is not None or (slot := record.slot(tier)) is None:
            return False
        may_go = (
            copies.running_blocks.has(block) is self.running
            and not record.pins[tier]
            and not (copies.hung.moves and copies.hung.holds(tier, slot))
            and self._is_meant(block, record)  # type: ignore[arg-type]  # it has a record
        )
        if may_go:
            self.granted.append(block)  # type: ignore[arg-type]  # as above
        return may_go

    def _is_meant(self, block: BlockId, record: BlockRecord) -> bool:
        """Whether the block, which may leave the tier, is of those that this is about."""
        return True


class Droppable(Evictable):
    """Idle blocks on a tier that may lose every copy: they can be computed again."""

    def __init__(self, copies: Copies, tier: Tier, recomputable: Container[BlockId]) -> None:
        super().__init__(copies, tier)
        self._recomputable = recomputable

    def _is_meant(self, block: BlockId, record: BlockRecord) -> bool:
        return not record.is_pinned and block in self._recomputable and block not in self._copies.pinned


class Cached(Evictable):
    """Blocks on a tier that only the prefix index holds."""

    is_cached = True

    @property
    def most(self) -> int:
        return self._copies.num_cached[self._tier]

    def _is_meant(self, block: BlockId, record: BlockRecord) -> bool:
        copies = self._copies
        if record.holders != 1 or record.is_pinned or block in copies.pinned:
            return False
        return self._is_indexed(block)

    def _is_indexed(self, block: BlockId) -> bool:
        return block in self._copies.prefixes


class CachedLeaf(Cached):
    """Those of them that no other block in the index continues."""

    def _is_indexed(self, block: BlockId) -> bool:
        return self._copies.prefixes.is_leaf(block)
