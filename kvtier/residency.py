"""Which bytes are where: the one record of every block's valid copies, holders, pins and the move in flight.

Only the tier manager writes it. It moves no bytes.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from kvtier.errors import IntegrityError
from kvtier.labels import Sealed
from kvtier.types import BlockId, Move, SequenceId, Slot, Tier


class BlockState(enum.Enum):
    """Where a block is in its life."""

    OPEN = "open"
    """A tail, or full but not sealed: its sequence may still append to it or crop it."""
    SEALED = "sealed"
    """Full and final. Never reopened: appending after a crop into it copies it first."""


@dataclass(slots=True)
class BlockRecord:
    """One block. `copies` names valid copies only; `generation` rises with every append to a tail."""

    sequence: SequenceId
    index: int
    copies: dict[Tier, Slot] = field(default_factory=dict)
    pins: Counter[Tier] = field(default_factory=Counter)
    holders: int = 1
    generation: int = 0
    state: BlockState = BlockState.OPEN
    move: Move | None = None
    sealed: Sealed | None = None
    """What the block is labelled with where files outlive the process. Of its bytes, however its sequences go on."""

    @property
    def fastest(self) -> Tier | None:
        """The fastest tier with a valid copy; None for a block that was dropped."""
        return min(self.copies, default=None)

    def is_clean(self, tier: Tier) -> bool:
        """Whether a slower tier holds the same bytes, so that evicting from `tier` is free."""
        return any(other > tier for other in self.copies)

    def is_redundant(self, tier: Tier) -> bool:
        """Whether a faster tier holds the same bytes, so that the copy in `tier` is only a convenience."""
        return tier in self.copies and any(other < tier for other in self.copies)


class ResidencyTable:
    """Every live block's record. O(1) for each operation."""

    def __init__(self) -> None:
        self._records: dict[BlockId, BlockRecord] = {}
        self._next_block = 0
        self.redundant: dict[Tier, dict[BlockId, None]] = {tier: {} for tier in Tier}
        """Blocks of each tier that a faster tier holds too, oldest first."""
        self.num_only_nvme = 0
        """Blocks whose only valid copy is on the nvme tier."""
        self.version = 0
        """Rises with every copy that comes or goes."""

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, block: BlockId) -> BlockRecord:
        return self._records[block]

    def get(self, block: BlockId) -> BlockRecord | None:
        """The record, or None when the block is no more."""
        return self._records.get(block)

    def blocks(self) -> list[BlockId]:
        """Every live block, oldest first. O(blocks)."""
        return list(self._records)

    def create(self, sequence: SequenceId, index: int) -> BlockId:
        """A new block without copies, held once. Ids are never used again."""
        block = BlockId(self._next_block)
        self._next_block += 1
        self._records[block] = BlockRecord(sequence, index)
        return block

    def delete(self, block: BlockId) -> None:
        """Forget a block that has no holder, copy, pin or move left."""
        record = self._records[block]
        if record.holders or record.copies or record.move or any(record.pins.values()):
            raise IntegrityError(f"block {block} was deleted while in use: {record}")
        del self._records[block]

    def add_copy(self, block: BlockId, tier: Tier, slot: Slot) -> None:
        """`slot` of `tier` now holds the block's bytes."""
        record = self._records[block]
        if tier in record.copies:
            raise IntegrityError(f"block {block} has a copy on {tier.label} already")
        before = record.fastest
        self.version += 1
        record.copies[tier] = slot
        self._note(block, record, before)

    def drop_copy(self, block: BlockId, tier: Tier) -> Slot:
        """The copy in `tier` is no more; returns its slot, which the caller gives back."""
        record = self._records[block]
        if record.pins[tier]:
            raise IntegrityError(f"block {block} is pinned to {tier.label}")
        before = record.fastest
        self.version += 1
        slot = record.copies.pop(tier)
        self.redundant[tier].pop(block, None)
        self._note(block, record, before)
        return slot

    def _note(self, block: BlockId, record: BlockRecord, fastest_before: Tier | None) -> None:
        # Kept by difference, so that neither set is ever searched for.
        fastest = record.fastest
        self.num_only_nvme += (fastest is Tier.NVME) - (fastest_before is Tier.NVME)
        for tier in record.copies:
            if fastest is not None and tier > fastest:
                self.redundant[tier][block] = None
            else:
                self.redundant[tier].pop(block, None)

    def pin(self, block: BlockId, tier: Tier) -> None:
        """The block may not leave `tier` until unpinned as often."""
        if tier not in self._records[block].copies:
            raise IntegrityError(f"block {block} cannot be pinned to {tier.label}: it is not there")
        self._records[block].pins[tier] += 1

    def unpin(self, block: BlockId, tier: Tier) -> None:
        """Take back one pin."""
        record = self._records[block]
        if record.pins[tier] < 1:
            raise IntegrityError(f"block {block} is not pinned to {tier.label}")
        record.pins[tier] -= 1

    def check_integrity(self) -> None:
        """Raise IntegrityError if two blocks share a slot, a block is neither held nor leaving, or a counter is off."""
        owners: dict[tuple[Tier, Slot], BlockId] = {}
        only_nvme = 0
        for block, record in self._records.items():
            if record.holders < 0 or (record.holders == 0 and record.move is None):
                raise IntegrityError(f"block {block} is held by no one and not leaving")
            for tier, slot in record.copies.items():
                if owners.setdefault((tier, slot), block) != block:
                    raise IntegrityError(f"{tier.label} slot {slot} has two owners")
                if record.is_redundant(tier) != (block in self.redundant[tier]):
                    raise IntegrityError(f"block {block} is wrongly listed as redundant on {tier.label}")
            if any(count < 0 or (count and tier not in record.copies) for tier, count in record.pins.items()):
                raise IntegrityError(f"block {block} is pinned where it is not")
            only_nvme += record.fastest is Tier.NVME
        if only_nvme != self.num_only_nvme:
            raise IntegrityError(f"{only_nvme} blocks are only on nvme, the counter says {self.num_only_nvme}")
        if any(block not in self._records for listed in self.redundant.values() for block in listed):
            raise IntegrityError("a dead block is listed as redundant")
