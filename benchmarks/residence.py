"""Puts a conversation on one tier, so that resuming from there can be measured without filling the others first."""

from __future__ import annotations

from kvtier import TieredKV
from kvtier.session import Session
from kvtier.types import MovePurpose, Tier


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
            placement.settle(block)
            record = placement.residency[block]
            source = record.fastest
            if source is not None and tier not in record.copies:
                slot = placement.pools[tier].take()
                if slot is None:
                    raise RuntimeError(f"the {tier.label} tier has no slot left for the conversation")
                purpose = MovePurpose.PROMOTE if tier < source else MovePurpose.DEMOTE
                placement.start(block, purpose, source, tier, slot)
                placement.settle(block)
            if tier not in record.copies:
                raise RuntimeError(f"the {tier.label} tier did not take a block")
            for faster in [each for each in record.copies if each < tier]:
                placement.drop_copy(block, faster)
