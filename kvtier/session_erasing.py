"""What of a conversation has to go when it is deleted or said anew: out of the index, and out of files."""

from __future__ import annotations

import errno
from collections.abc import Container, Sequence

from kvtier.errors import StoreError, TransferTimeoutError
from kvtier.log import logger
from kvtier.placement import Placement
from kvtier.prefix import Miss
from kvtier.timed_files import TimedFiles
from kvtier.types import SequenceId, Slot, SlotLabel, Tier


class SessionErasing:
    """Erases blocks that no conversation has any more. With the turn held."""

    def __init__(self, placement: Placement, files: TimedFiles | None) -> None:
        """`files`: None where no conversation outlives the process."""
        self._placement, self._files = placement, files
        self._to_erase: set[Slot] = set()
        """Slots of deleted sessions that the disk would not erase."""

    def left_by(self, sequences: Container[SequenceId]) -> list[SlotLabel]:
        """Of blocks that these rows made, first to last."""
        placement = self._placement
        blocks = [each for each in placement.prefixes.blocks() if placement.residency[each].sequence in sequences]
        return [sealed.label for block in blocks if (sealed := placement.prefixes.sealed(block)) is not None]

    def let_go(
        self, labels: Sequence[SlotLabel], others: Container[bytes], *, is_chain: bool = True
    ) -> list[SlotLabel]:
        """Take blocks that nobody holds or continues, and no other session has, out of the index; which those are.

        Last first. `is_chain`: where one stays, so do all before it.
        """
        placement, gone = self._placement, list[SlotLabel]()
        for label in reversed(labels):
            block = placement.prefixes.find(label)
            is_others = label.identity in others
            if is_others or (
                block is not None and not (placement.is_cached(block) and placement.prefixes.is_leaf(block))
            ):
                if is_chain:
                    break
                continue
            if block is not None:
                placement.settle(block)
                placement.unindex(block, Miss.UNKNOWN)
            gone.append(label)
        return gone

    def erase(self, slots: Sequence[Slot]) -> None:
        """Whatever lies in these slots, unless a block does. Raises StoreError: the next call tries again."""
        placement, files = self._placement, self._files
        self._to_erase.update(slots)
        if files is None or not placement.is_readable(Tier.NVME):
            return
        for slot in sorted(self._to_erase):
            try:
                placement.erase(slot, files.erase)
            except TransferTimeoutError as error:
                raise StoreError(errno.ETIMEDOUT, str(error)) from error
            self._to_erase.discard(slot)

    def erase_tail(self, slot: Slot) -> None:
        """As `erase`, of a tail that a newer one has taken the place of: whether the disk does it or not."""
        try:
            self.erase([slot])
        except StoreError as error:  # it is overwritten when its slot is
            logger.info("%s", error)
