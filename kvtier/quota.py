"""The most that is kept under one salt, in memory and in files: at the limit a tenant's own oldest blocks go first.

Works on ids; touches no tensor. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvtier.errors import StoreError, TransferTimeoutError
from kvtier.log import logger
from kvtier.origin import Sealed
from kvtier.prefix import Miss, PrefixIndex
from kvtier.types import BlockId, Slot


class SharedBlocks(Protocol):
    """The blocks that are kept, as far as a quota needs them."""

    prefixes: PrefixIndex
    reserved: set[Slot]

    def unindex(self, block: BlockId, why: Miss) -> None:
        """Take a block out of the index."""
        ...

    def erase(self, slot: Slot, erase: Callable[[Slot], None]) -> bool:
        """Have an nvme slot emptied that no block is in; whether it was had."""
        ...


class LabelledSlots(Protocol):
    """What a store knows of the slots in which blocks can be found."""

    def num_in(self, namespace: bytes) -> int:
        """How many are of a namespace."""
        ...

    def slots_of(self, namespace: bytes) -> Sequence[Slot]:
        """Those of a namespace, the oldest first. O(labelled slots)."""
        ...

    def erase(self, slot: Slot) -> None:
        """Empty a slot. Raises StoreError."""
        ...


class Quota:
    """Counts by salt; who names no salt is not limited.

    Blocks of conversations that run or live in this process do not count as long as nobody else can find them.
    """

    def __init__(self, num_blocks: int, files: LabelledSlots | None = None) -> None:
        """`num_blocks`: the most in the prefix index, and apart from that the most that can be found in files."""
        self.num_blocks, self._files = num_blocks, files

    def admits(self, copies: SharedBlocks, sealed: Sealed, may_go: Callable[[BlockId], bool]) -> bool:
        """Whether a block may enter the prefix index; cached ones of its salt are evicted for it."""
        salt, prefixes = sealed.origin.salt, copies.prefixes
        if not salt or prefixes.find(sealed.label) is not None:
            return True
        while prefixes.num_of_salt(salt) >= self.num_blocks:
            victim = next((block for block in prefixes.of_salt(salt) if may_go(block)), None)
            if victim is None:
                return False
            copies.unindex(victim, Miss.EVICTED)
        return True

    def admits_file(self, copies: SharedBlocks, sealed: Sealed, num_writing: int) -> bool:
        """Whether a block may be written under its label; older ones of its salt, in no use, are erased for it.

        `num_writing`: blocks of its namespace that are being written.
        """
        files, namespace = self._files, sealed.label.namespace
        if not sealed.origin.salt or files is None or files.num_in(namespace) + num_writing < self.num_blocks:
            return True
        for slot in files.slots_of(namespace):
            try:
                if slot not in copies.reserved and copies.erase(slot, files.erase):
                    return True
            except (StoreError, TransferTimeoutError) as error:
                logger.info("%s", error)
        return False
