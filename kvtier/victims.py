"""Which blocks of a tier are given up: those that its policy names, and that may go."""

from __future__ import annotations

from itertools import islice

from kvtier.evictable import Evictable
from kvtier.log import logger
from kvtier.mover import Mover
from kvtier.residency import BlockRecord
from kvtier.types import NVME, BlockId, Tier


class Victims(Mover):
    """The mover, and whom it may take the slots of. Changes nothing."""

    MAX_PASSED = 32
    """Blocks that a policy may look at in vain before it is told what steps have read meanwhile."""

    _oldest_first = False
    """Blocks that may go but that no policy names are given up too."""

    def _has_evictable(self, tier: Tier) -> bool:
        """Whether any block may leave the tier, whether or not its policy names one."""
        views = [Evictable(self, tier, running) for running in (False, True)]
        return any(self._victims(tier, 1, view) for view in views) or any(
            block in view for view in views if view.most for block in self.residency.blocks()
        )

    def _is_clean(self, block: BlockId, tier: Tier) -> bool:
        """Whether a slower tier that can be read has the block too."""
        record = self.residency.records[block]
        return record.is_clean(tier) and any(other > tier and self.is_readable(other) for other in record.copies)

    def _redundant(self, tier: Tier, num_blocks: int) -> list[BlockId]:
        free = (
            block
            for block in self.residency.redundant[tier]
            if self._is_free(self.residency[block], tier) and (tier is not NVME or block not in self.kept)
        )
        return list(islice(free, num_blocks))

    def _is_free(self, record: BlockRecord, tier: Tier) -> bool:
        """Whether nothing holds the block's copy on `tier`, if it has one there."""
        slot = record.slot(tier)
        return slot is not None and record.move is None and not record.pins[tier] and not self.is_held(tier, slot)

    def _victims(self, tier: Tier, num_blocks: int, evictable: Evictable) -> list[BlockId]:
        """Up to that many blocks that may go. Nobody is asked for more than there can be: a policy would walk through
        the whole tier to find that there are no others."""
        most = evictable.most
        num_blocks = num_blocks if num_blocks < most else most
        if num_blocks < 1:
            return []
        if evictable.is_cached:
            names = self.cached_policies[tier].victims(num_blocks, evictable)
        else:
            if evictable.running:
                self.reads.tell_all()
            names = self.policies[tier].victims(num_blocks, evictable)
            if evictable.num_looked_at > self.MAX_PASSED + 2 * num_blocks:
                # Running blocks stood in the way: what was read goes to the end, with most policies.
                self.reads.tell_all()
        if names == evictable.granted:  # it has asked for each of them: they are not looked at twice
            good = names
        else:
            good = [block for block in names if block in evictable]
            if len(good) != len(names):
                # A user's policy may be wrong; it must not be able to lose a block or to stop the house.
                logger.warning(
                    "the %s eviction policy named blocks that may not go: %s", tier.label, set(names) - set(good)
                )
        if self._oldest_first and len(good) < num_blocks:
            unnamed = (block for block in self.residency.blocks() if block in evictable and block not in good)
            oldest = list(islice(unnamed, num_blocks - len(good)))
            if oldest:
                logger.warning(
                    "the %s eviction policy names too few blocks; giving up the oldest: %s", tier.label, oldest
                )
            good += oldest
        return good
