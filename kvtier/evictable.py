"""Which blocks of a tier may leave it: views that eviction policies are handed. They hold no facts of their own."""

from __future__ import annotations

from collections.abc import Container

from kvtier.copies import Copies
from kvtier.types import BlockId, Tier


class Evictable(Container[BlockId]):
    """Blocks that may leave a tier now, of running sequences or of idle ones."""

    def __init__(self, copies: Copies, tier: Tier, running: bool) -> None:
        self._copies, self._residency = copies, copies.residency
        self._running_blocks = copies.running_blocks
        self._tier = tier
        self._running = running

    def __contains__(self, block: object) -> bool:
        record = self._residency.get(block)  # type: ignore[arg-type]  # Container promises only `object`
        return (
            record is not None
            and self._tier in record.copies
            and record.move is None
            and not record.pins[self._tier]
            and not self._copies.is_held(self._tier, record.copies[self._tier])
            and (block in self._running_blocks) is self._running
        )


class Droppable(Container[BlockId]):
    """Idle blocks on a tier that may lose every copy: they can be computed again."""

    def __init__(self, copies: Copies, tier: Tier, recomputable: Container[BlockId]) -> None:
        self._residency, self._recomputable, self._pinned = copies.residency, recomputable, copies.pinned
        self._idle = Evictable(copies, tier, running=False)

    def __contains__(self, block: object) -> bool:
        if block not in self._idle:
            return False
        pins = self._residency[block].pins  # type: ignore[index]  # it is in `_idle`, so it is a block
        return not any(pins.values()) and block in self._recomputable and block not in self._pinned


class Cached(Container[BlockId]):
    """Blocks on a tier that only the prefix index holds."""

    def __init__(self, copies: Copies, tier: Tier) -> None:
        self._copies = copies
        self._idle = Evictable(copies, tier, running=False)

    def __contains__(self, block: object) -> bool:
        copies = self._copies
        if block not in copies.prefixes or block not in self._idle or block in copies.pinned:
            return False
        record = copies.residency[block]  # type: ignore[index]  # it is in the index, so it is a block
        return record.holders == 1 and not any(record.pins.values())


class CachedLeaf(Cached):
    """Those of them that no other block in the index continues."""

    def __contains__(self, block: object) -> bool:
        return super().__contains__(block) and self._copies.prefixes.is_leaf(block)  # type: ignore[arg-type]
