"""Which bytes are where: the one record of every block's valid copies, holders, pins and the move in flight.

Only the tier manager writes it. It moves no bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, cast

from kvtier.errors import IntegrityError
from kvtier.origin import Sealed
from kvtier.types import CPU, GPU, NVME, BlockId, Move, SequenceId, Slot, Tier


class BlockState(enum.Enum):
    """Where a block is in its life."""

    OPEN = "open"
    """A tail, or full but not sealed: its sequence may still append to it or crop it."""
    SEALED = "sealed"
    """Full and final. Never reopened: appending after a crop into it copies it first."""


OPEN: Final = BlockState.OPEN
SEALED: Final = BlockState.SEALED
"""By plain names, as the tiers."""


_ZERO_PINS = dict.fromkeys(Tier, 0)
NO_PINS = cast(dict[Tier, int], MappingProxyType(_ZERO_PINS))
"""The pins of a block that has none: nearly all of them, so that they share it. Nobody can write it."""


@dataclass(slots=True)
class BlockRecord:
    """One block. There are millions: a field for each tier's slot takes a tenth of a dict.

    `generation` rises with every append to a tail. `pins` are counted by tier.
    """

    sequence: SequenceId
    index: int
    gpu_slot: Slot | None = None
    """Where its valid copy on that tier lies, if it has one there. Written by the table alone; so are the next two."""
    cpu_slot: Slot | None = None
    nvme_slot: Slot | None = None
    pins: dict[Tier, int] = field(default_factory=lambda: NO_PINS)
    holders: int = 1
    generation: int = 0
    state: BlockState = BlockState.OPEN
    move: Move | None = None
    sealed: Sealed | None = None
    """What the block is labelled with where files outlive the process. Of its bytes, however its sequences go on."""

    @property
    def copies(self) -> dict[Tier, Slot]:
        """Its valid copies, fastest first: made anew, to be looked at. One of them alone: `slot`, which is faster."""
        copies = {}
        if self.gpu_slot is not None:
            copies[GPU] = self.gpu_slot
        if self.cpu_slot is not None:
            copies[CPU] = self.cpu_slot
        if self.nvme_slot is not None:
            copies[NVME] = self.nvme_slot
        return copies

    def slot(self, tier: Tier) -> Slot | None:
        """Where its valid copy on that tier lies; None: it has none there."""
        if tier is GPU:
            return self.gpu_slot
        return self.cpu_slot if tier is CPU else self.nvme_slot

    @property
    def fastest(self) -> Tier | None:
        """The fastest tier with a valid copy; None for a block that was dropped."""
        if self.gpu_slot is not None:
            return GPU
        if self.cpu_slot is not None:
            return CPU
        return None if self.nvme_slot is None else NVME

    @property
    def is_pinned(self) -> bool:
        """Whether it is pinned to any tier."""
        return self.pins is not NO_PINS

    def is_clean(self, tier: Tier) -> bool:
        """Whether a slower tier holds the same bytes, so that evicting from `tier` is free."""
        if self.nvme_slot is not None and tier is not NVME:
            return True
        return self.cpu_slot is not None and tier is GPU

    def is_redundant(self, tier: Tier) -> bool:
        """Whether a faster tier holds the same bytes, so that the copy in `tier` is only a convenience."""
        fastest = self.fastest
        return fastest is not None and fastest < tier and self.slot(tier) is not None


_SLOT_ON = {tier: f"{tier.label}_slot" for tier in Tier}
"""The record's field for each tier."""


class ResidencyTable:
    """Every live block's record. O(1) for each operation."""

    def __init__(self) -> None:
        self.records: dict[BlockId, BlockRecord] = {}
        """By block, to be read: `[]` for what a step does many times."""
        self.get: Callable[[BlockId], BlockRecord | None] = self.records.get
        """The record, or None when the block is no more. It is asked for every block that a policy looks at."""
        self._next_block = 0
        self.redundant: dict[Tier, dict[BlockId, None]] = {tier: {} for tier in Tier}
        """Blocks of each tier that a faster tier holds too, oldest first."""
        self.num_only_nvme = 0
        """Blocks whose only valid copy is on the nvme tier."""
        self.peak_only_nvme = 0
        """The most there were."""
        self.version = 0
        """Rises with every copy that comes or goes."""
        self.num_copies: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Valid copies on each tier."""

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, block: BlockId) -> BlockRecord:
        return self.records[block]

    def blocks(self) -> list[BlockId]:
        """Every live block, oldest first. O(blocks)."""
        return list(self.records)

    def create(self, sequence: SequenceId, index: int) -> BlockId:
        """A new block without copies, held once. Ids are never used again."""
        block = BlockId(self._next_block)
        self._next_block += 1
        self.records[block] = BlockRecord(sequence, index)
        return block

    def delete(self, block: BlockId) -> None:
        """Forget a block that has no holder, copy, pin or move left."""
        record = self.records[block]
        if record.holders or record.fastest is not None or record.move or record.pins is not NO_PINS:
            raise IntegrityError(f"block {block} was deleted while in use: {record}")
        del self.records[block]

    def add_copy(self, block: BlockId, tier: Tier, slot: Slot) -> BlockRecord:
        """`slot` of `tier` now holds the block's bytes. Its record."""
        record = self.records[block]
        if record.slot(tier) is not None:
            raise IntegrityError(f"block {block} has a copy on {tier.label} already")
        before = record.fastest
        self.version += 1
        setattr(record, _SLOT_ON[tier], slot)
        self.num_copies[tier] += 1
        if before is None:
            if tier is NVME:
                self._count_only_nvme(1)
        elif tier < before:
            self.redundant[before][block] = None
            if before is NVME:
                self._count_only_nvme(-1)
        else:
            self.redundant[tier][block] = None
        return record

    def drop_copy(self, block: BlockId, tier: Tier) -> Slot:
        """The copy in `tier` is no more; returns its slot, which the caller gives back."""
        record = self.records[block]
        if record.pins[tier]:
            raise IntegrityError(f"block {block} is pinned to {tier.label}")
        slot = record.slot(tier)
        if slot is None:
            raise IntegrityError(f"block {block} has no copy on {tier.label}")
        self.version += 1
        setattr(record, _SLOT_ON[tier], None)
        self.num_copies[tier] -= 1
        fastest = record.fastest
        if fastest is None:
            if tier is NVME:
                self._count_only_nvme(-1)
        elif tier < fastest:
            del self.redundant[fastest][block]
            if fastest is NVME:
                self._count_only_nvme(1)
        else:
            del self.redundant[tier][block]
        return slot

    def _count_only_nvme(self, change: int) -> None:
        self.num_only_nvme += change
        self.peak_only_nvme = max(self.peak_only_nvme, self.num_only_nvme)

    def pin(self, block: BlockId, tier: Tier) -> None:
        """The block may not leave `tier` until unpinned as often."""
        record = self.records[block]
        if record.slot(tier) is None:
            raise IntegrityError(f"block {block} cannot be pinned to {tier.label}: it is not there")
        pins = record.pins
        if pins is NO_PINS:
            pins = record.pins = _ZERO_PINS.copy()
        pins[tier] += 1

    def unpin(self, block: BlockId, tier: Tier) -> None:
        """Take back one pin."""
        record = self.records[block]
        pins = record.pins
        if pins[tier] < 1:
            raise IntegrityError(f"block {block} is not pinned to {tier.label}")
        pins[tier] -= 1
        if pins == _ZERO_PINS:
            record.pins = NO_PINS

    def check_integrity(self) -> None:
        """Raise IntegrityError if two blocks share a slot, a block is neither held nor leaving, or a counter is off."""
        owners: dict[tuple[Tier, Slot], BlockId] = {}
        only_nvme = 0
        for block, record in self.records.items():
            if record.holders < 0 or (record.holders == 0 and record.move is None):
                raise IntegrityError(f"block {block} is held by no one and not leaving")
            for tier, slot in record.copies.items():
                if owners.setdefault((tier, slot), block) != block:
                    raise IntegrityError(f"{tier.label} slot {slot} has two owners")
                if record.is_redundant(tier) != (block in self.redundant[tier]):
                    raise IntegrityError(f"block {block} is wrongly listed as redundant on {tier.label}")
            if any(count < 0 or (count and tier not in record.copies) for tier, count in record.pins.items()):
                raise IntegrityError(f"block {block} is pinned where it is not")
            if record.is_pinned is not any(record.pins.values()):
                raise IntegrityError(f"block {block} has no pins of its own, or none but those")
            only_nvme += record.fastest is NVME
        num_copies = {tier: sum(each is tier for each, _ in owners) for tier in Tier}
        if num_copies != self.num_copies:
            raise IntegrityError(f"{num_copies} copies, {self.num_copies} were counted")
        if only_nvme != self.num_only_nvme:
            raise IntegrityError(f"{only_nvme} blocks are only on nvme, the counter says {self.num_only_nvme}")
        if any(block not in self.records for listed in self.redundant.values() for block in listed):
            raise IntegrityError("a dead block is listed as redundant")
