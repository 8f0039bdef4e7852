"""Least recently used: gives up what was read longest ago."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import islice

from kvtier.types import BlockId, SequenceId


class LRU:
    """Right for which session or prefix comes back next, where recent use foretells use.

    Within one sequence's scan, which reads every block at every step, it hits 0 % once the scan exceeds the tier: that
    is why a running scan is planned and streamed, not cached.

    Source: Mattson et al., "Evaluation techniques for storage hierarchies", IBM Systems Journal 9(2), 1970.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockId, None] = {}  # least recently used first: a dict keeps the order of insertion

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
        """Least recently used first. Cost: O(num_blocks + held blocks skipped)."""
        return list(islice(filter(evictable.__contains__, self._blocks), num_blocks))
