"""When full blocks become final: what they are labelled with, which are joined, and that others may find them.

Part of the tier manager. Works on ids; touches no tensor.
"""

from __future__ import annotations

from collections.abc import Callable

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.origin import Origin
from kvtier.placement import Placement
from kvtier.recomputable import Past
from kvtier.residency import OPEN, SEALED
from kvtier.types import BlockId, Slot
from kvtier.upkeep import Upkeep


class Sealer:
    """Seals blocks of batches, and lets rows share them."""

    def __init__(
        self, placement: Placement, upkeep: Upkeep, same_bytes: Callable[[Slot, Slot], bool], past: Past
    ) -> None:
        """As `Sequences`."""
        self.placement, self.upkeep, self._same_bytes, self._past = placement, upkeep, same_bytes, past
        self.indexes = False
        """Whether sealed blocks enter the prefix index."""

    def seal(self, batch: Batch) -> None:
        """Make full blocks final, and equal ones of different rows one. O(newly sealed blocks x rows)."""
        residency = self.placement.residency
        first_new: int | None = None
        for table in batch.tables:
            blocks = table.blocks
            # From the end: all blocks before a sealed one are sealed.
            first = num_full = table.num_tokens // table.block_tokens
            while first and (record := residency.records[blocks[first - 1]]).state is OPEN:
                first -= 1
                record.state = SEALED
                self.upkeep.sealed(blocks[first])
            if first < num_full:
                first_new = first if first_new is None else min(first_new, first)
                self._label(table, batch.origin, first)
        if first_new is not None and batch.num_rows > 1:
            self._join(batch, first_new)

    def _label(self, table: BlockTable, origin: Origin | None, first: int) -> None:
        """Note what newly sealed blocks are labelled with, while their tokens are at hand: a crop may drop them.

        Where padding stands plays no part in what a layer of full attention makes of tokens and their positions.
        """
        labels, residency = self.placement.labels, self.placement.residency
        if labels is None or origin is None:
            return
        contents: list[bytes] = []
        parent = residency[table.blocks[first - 1]].sealed if first else None
        with_padding = self._past is not Past.BLOCKS
        for index in range(first, table.num_full_blocks):
            content = table.content(index, with_padding=with_padding)
            if content is None:  # fed as embeddings: this one and all behind it
                break
            block = table.blocks[index]
            residency[block].sealed = parent = labels.seal(origin, parent, content, is_first=index == 0)
            if parent is None:  # and those behind it have none either
                break
            contents.append(content)
            if self.indexes:
                self.placement.index(block)
        table.share_ids(first, contents)

    def _join(self, batch: Batch, first: int) -> None:
        """Equal tokens are not enough: a hook, an adapter or token types may have given rows other KV for them."""
        for index in range(first, max(table.num_full_blocks for table in batch.tables)):
            known: dict[tuple[BlockId | None, bytes], list[BlockId]] = {}
            for table in batch.tables:
                content = table.content(index) if index < table.num_full_blocks else None
                if content is None:
                    continue
                block = table.blocks[index]
                candidates = known.setdefault((table.blocks[index - 1] if index else None, content), [])
                kept = next((other for other in candidates if self._are_equal(block, other)), None)
                if kept is None:
                    candidates.append(block)
                elif kept != block:
                    self.share(table, index, kept)

    def _are_equal(self, block: BlockId, other: BlockId) -> bool:
        slots = [self.placement.residency[each].gpu_slot for each in (block, other)]
        if block == other or slots[0] is None or slots[1] is None:  # bytes that have gone down are not fetched for it
            return block == other
        return self._same_bytes(slots[0], slots[1])

    def share(self, table: BlockTable, index: int, block: BlockId) -> None:
        """Put `block`, which holds the same tokens, in the place of block number `index`, by count."""
        running = self.placement.running_blocks
        self.placement.hold(block)
        old = table.replace(index, block)
        running.gained(table.sequence, (block,))
        running.lost(table.sequence, (old,))
        self.placement.release(old)
