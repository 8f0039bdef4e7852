"""Puts a conversation on tiers as a benchmark wants it, so that it can be measured without filling them first."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier import TieredKV
from kvtier.hf import TieredCache
from kvtier.placement import Placement
from kvtier.session import Session
from kvtier.types import BlockId, MovePurpose, Slot, Tier


def put_on(tiered: TieredKV, chat: Session, tier: Tier) -> None:
    """Have every block of a conversation on `tier`, and on no faster one, as if others had needed the room there.

    The moves are the tier manager's own; a slower copy that is there already stays. Blocks must not be shared by a
    conversation that runs. Raises RuntimeError: the tier has too little room, or does not take a block.
    """
    runtime = tiered._runtime
    placement = runtime.placement
    with runtime.turn:
        runtime.manager.poll()
        for block in chat.cache.state.batch.tables[0].blocks:
            if _copy(placement, block, tier, None) is None:
                raise RuntimeError(f"the {tier.label} tier has no slot left for the conversation")
            for faster in [each for each in placement.residency[block].copies if each < tier]:
                placement.drop_copy(block, faster)


def spread(tiered: TieredKV, cache: TieredCache, num_blocks: Mapping[Tier, int]) -> None:
    """Have the full blocks of a cache of one row lie on the tiers in these numbers, each on one tier alone.

    The oldest blocks on the slowest tier, as demotion leaves them; neighbours in neighbouring slots where they are to
    be had. The tail stays where it is. Raises RuntimeError: the numbers are not those of the blocks, or a tier has too
    little room: one slot more than its blocks somewhere, to move them through.
    """
    runtime = tiered._runtime
    placement, table = runtime.placement, cache.state.batch.tables[0]
    blocks = table.blocks[: table.num_full_blocks]
    if sum(num_blocks.values()) != len(blocks):
        raise RuntimeError(f"{dict(num_blocks)} blocks are asked for, the cache has {len(blocks)}")
    tiers = [tier for tier in sorted(num_blocks, reverse=True) for _ in range(num_blocks[tier])]
    with runtime.turn:
        runtime.manager.poll()
        left = dict(zip(blocks, tiers, strict=True))
        while left:
            last: dict[Tier, Slot] = {}
            done = []
            for block, tier in left.items():
                slot = _copy(placement, block, tier, last.get(tier))
                if slot is not None:
                    last[tier] = slot
                    done.append(block)
                    for other in [each for each in placement.residency[block].copies if each is not tier]:
                        placement.drop_copy(block, other)
            if not done:
                raise RuntimeError(f"no room to move {len(left)} blocks through: raise a tier's budget")
            for block in done:
                del left[block]


def residence(cache: TieredCache) -> list[Tier | None]:
    """The fastest tier of each full block of a cache of one row, in the row's order; None for a lost one."""
    table, placement = cache.state.batch.tables[0], cache.state.runtime.placement
    return [placement.residency[block].fastest for block in table.blocks[: table.num_full_blocks]]


def _copy(placement: Placement, block: BlockId, tier: Tier, before: Slot | None) -> Slot | None:
    """The block's slot on `tier`, behind `before` if it can be; None: the tier is full."""
    placement.settle(block)
    record = placement.residency[block]
    source = record.fastest
    if source is not None and tier not in record.copies:
        slot = placement.pools[tier].take_near(before, 1)
        if slot is None:
            return None
        purpose = MovePurpose.PROMOTE if tier < source else MovePurpose.DEMOTE
        placement.start(block, purpose, source, tier, slot)
        placement.settle(block)
    if tier not in record.copies:
        raise RuntimeError(f"the {tier.label} tier did not take a block")
    return record.copies[tier]
