"""Most recently used: gives up what was read last."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

from kvtier.types import BlockId, SequenceId


class MRU:
    """Right for loops larger than the tier: what was read last is needed last.

    On a loop of n blocks through a tier of k it keeps about k of them, where LRU keeps none that is read again in time.
    Wrong for sessions: it gives up the one that was just talking.

    Source: Chou & DeWitt, "An evaluation of buffer management strategies for relational database systems", VLDB 1985.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockId, None] = {}  # most recently used last

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        self._blocks.pop(block, None)
        self._blocks[block] = None

    def touched(self, blocks: Iterable[BlockId]) -> None:
        for block in blocks:
            if block in self._blocks:
                del self._blocks[block]
                self._blocks[block] = None

    def removed(self, block: BlockId) -> None:
        self._blocks.pop(block, None)

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        """Most recently used first. Cost: O(num_blocks + held blocks skipped)."""
        return list(islice(filter(evictable.__contains__, reversed(self._blocks)), num_blocks))
