"""Keeps each sequence's first and most recent blocks; gives up the middle first."""

from __future__ import annotations

import enum
from bisect import bisect_left, insort
from collections.abc import Container, Iterable, Iterator
from itertools import islice

from kvtier.types import BlockId, SequenceId


class Part(enum.IntEnum):
    """Where in its sequence a block stands, in the order of giving up."""

    MIDDLE = 0
    RECENT = 1
    FIRST = 2


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
        self._sequences: dict[SequenceId, list[tuple[int, BlockId]]] = {}
        """Each sorted by position. Two blocks may claim one position."""
        self._having: dict[Part, dict[SequenceId, None]] = {part: {} for part in Part}
        """Those that have blocks of a part, the least recently touched first: nobody looks through the others."""

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        self.removed(block)
        self._places[block] = (sequence, index)
        insort(self._sequences.setdefault(sequence, []), (index, block))
        self._note(sequence)

    def touched(self, blocks: Iterable[BlockId]) -> None:
        latest: SequenceId | None = None
        for block in blocks:
            place = self._places.get(block)
            if place is not None and place[0] != latest:
                latest = place[0]
                for sequences in self._having.values():
                    if latest in sequences:
                        del sequences[latest]
                        sequences[latest] = None

    def removed(self, block: BlockId) -> None:
        place = self._places.pop(block, None)
        if place is None:
            return
        sequence, index = place
        held = self._sequences[sequence]
        del held[bisect_left(held, (index, block))]
        if not held:
            del self._sequences[sequence]
        self._note(sequence)

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        """Middle, recent, first. Cost: O(num_blocks + held blocks skipped + log blocks of a sequence)."""
        return list(islice(filter(evictable.__contains__, self._in_order()), num_blocks))

    def _in_order(self) -> Iterator[BlockId]:
        for part, sequences in self._having.items():
            for sequence in sequences:
                held = self._sequences[sequence]
                places = self._parts(held)[part]
                yield from (held[i][1] for i in (reversed(places) if part is Part.FIRST else places))

    def _parts(self, held: list[tuple[int, BlockId]]) -> dict[Part, range]:
        """Which of a sequence's blocks are of which part."""
        middle = bisect_left(held, (self.first_blocks,))
        recent = max(middle, len(held) - self.recent_blocks)
        return {
            Part.MIDDLE: range(middle, recent), Part.RECENT: range(recent, len(held)), Part.FIRST: range(middle)
        }  # fmt: skip

    def _note(self, sequence: SequenceId) -> None:
        """List the sequence with the parts that it has, where it is not yet, and not with others."""
        held = self._sequences.get(sequence, [])
        for part, places in self._parts(held).items():
            if not places:
                self._having[part].pop(sequence, None)
            elif sequence not in self._having[part]:
                self._having[part][sequence] = None
