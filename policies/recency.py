"""Keeps each sequence's first and most recent blocks; gives up the middle first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from itertools import islice

from kvtier.types import BlockId, SequenceId


class Recency:
    """Position within the sequence decides, not use: an exact step reads every block, so use says nothing.

    Order of giving up, over all sequences of the tier, the least recently touched sequence first within each round:

    1. middle blocks, oldest position first;
    2. recent blocks (the last `recent_blocks` positions that the tier holds), oldest position first;
    3. first blocks (positions below `first_blocks`), so that block 0 is the very last to go.

    The first tokens (attention sinks) and the last ones draw most of the attention. Nothing is dropped here: the middle
    only moves to a slower tier, and tokens stay exact.

    Source: Xiao et al., "Efficient streaming language models with attention sinks" (StreamingLLM), 2023, section 3.
    """

    def __init__(self, first_blocks: int = 1, recent_blocks: int = 4) -> None:
        if first_blocks < 0 or recent_blocks < 0:
            raise ValueError(f"recency: first_blocks {first_blocks} and recent_blocks {recent_blocks} must be >= 0")
        self.first_blocks = first_blocks
        self.recent_blocks = recent_blocks
        self._places: dict[BlockId, tuple[SequenceId, int]] = {}
        # Least recently touched sequence first; each sorted by position. Two blocks may claim one position.
        self._sequences: dict[SequenceId, list[tuple[int, BlockId]]] = {}

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        self.removed(block)
        self._places[block] = (sequence, index)
        insort(self._sequences.setdefault(sequence, []), (index, block))

    def touched(self, blocks: Iterable[BlockId]) -> None:
        latest: SequenceId | None = None
        for block in blocks:
            place = self._places.get(block)
            if place is not None and place[0] != latest:
                latest = place[0]
                self._sequences[latest] = self._sequences.pop(latest)

    def removed(self, block: BlockId) -> None:
        place = self._places.pop(block, None)
        if place is None:
            return
        sequence, index = place
        held = self._sequences[sequence]
        del held[bisect_left(held, (index, block))]
        if not held:
            del self._sequences[sequence]

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        """Middle, recent, first. Cost: O(num_blocks + held blocks skipped + sequences x log blocks)."""
        return list(islice((block for block in self._in_order() if block in evictable), num_blocks))

    def _in_order(self) -> Iterator[BlockId]:
        # (blocks of one sequence, where its middle starts, where its recent part starts)
        parts = []
        for held in self._sequences.values():
            middle = bisect_left(held, (self.first_blocks,))
            parts.append((held, middle, max(middle, len(held) - self.recent_blocks)))
        for held, middle, recent in parts:
            yield from (held[i][1] for i in range(middle, recent))
        for held, _, recent in parts:
            yield from (held[i][1] for i in range(recent, len(held)))
        for held, middle, _ in parts:
            yield from (held[i][1] for i in reversed(range(middle)))
