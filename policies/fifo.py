"""First in, first out: gives up what has been in the tier longest."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

from kvtier.types import BlockId, SequenceId


class FIFO:
    """Ignores reads. The baseline that costs nothing, and the order in which a conversation's blocks were made.

    Source: Belady, "A study of replacement algorithms for a virtual-storage computer", IBM Systems Journal 5(2), 1966.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockId, None] = {}  # oldest first: a dict keeps the order of insertion

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        self._blocks.pop(block, None)
        self._blocks[block] = None

    def touched(self, blocks: Iterable[BlockId]) -> None:
        pass

    def removed(self, block: BlockId) -> None:
        self._blocks.pop(block, None)

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        """Oldest stay first. Cost: O(num_blocks + held blocks skipped)."""
        return list(islice(filter(evictable.__contains__, self._blocks), num_blocks))
