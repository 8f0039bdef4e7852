"""Which blocks the model can compute again, and from which row's tokens. Knows no tiers."""

from __future__ import annotations

import enum
from collections.abc import Container, Mapping

from kvtier.block_table import BlockTable
from kvtier.residency import ResidencyTable
from kvtier.types import BlockId, SequenceId


class Past(enum.Enum):
    """What a layer needs of the tokens before those that it computes."""

    BLOCKS = "blocks"
    """Their blocks: every layer is tiered."""
    WINDOWS = "windows"
    """Windows beside the blocks, which have moved on: it starts over from token 0."""
    STATES = "states"
    """States of linear attention, likewise. Whether padding has left a trace in them, no mask can tell."""


class Recomputable(Container[BlockId]):
    """The blocks whose tokens say enough to compute them again. Whether the model is still the one that made them, it
    cannot say."""

    def __init__(
        self, tables: Mapping[SequenceId, BlockTable], residency: ResidencyTable, block_tokens: int, past: Past
    ) -> None:
        self.past = past
        self._tables, self._residency, self._block_tokens = tables, residency, block_tokens

    def __contains__(self, block: object) -> bool:
        record = self._residency.get(block)  # type: ignore[arg-type]  # Container promises only `object`
        return record is not None and self.obstacle(block) is None  # type: ignore[arg-type]

    def holder(self, block: BlockId) -> BlockTable | None:
        """The row that has the most tokens of the block: one that was cropped knows only the first of them.

        O(1) for a block of one row, O(rows) for one that is shared.
        """
        record = self._residency[block]
        index, maker = record.index, self._tables.get(record.sequence)
        if record.holders == 1 and maker is not None and maker.blocks[index : index + 1] == [block]:
            return maker
        holders = [table for table in self._tables.values() if table.blocks[index : index + 1] == [block]]
        return max(holders, key=lambda table: self.end(table, index), default=None)

    def is_holder(self, table: BlockTable, block: BlockId) -> bool:
        """Whether no row has more tokens of the block than this one."""
        index, best = self._residency[block].index, self.holder(block)
        holds = table.blocks[index : index + 1] == [block]
        return holds and best is not None and self.end(table, index) == self.end(best, index)

    def end(self, table: BlockTable, index: int) -> int:
        """How many tokens of the row end with block number `index`."""
        return min(table.num_tokens, (index + 1) * self._block_tokens)

    def obstacle(self, block: BlockId) -> str | None:
        """Why the block's tokens do not say enough to compute it again; None when they do."""
        table = self.holder(block)
        if table is None:
            return "no conversation holds it"
        index = self._residency[block].index
        end = self.end(table, index)
        if self.past is Past.STATES and any(padding.at < end for padding in table.padding):
            return "padding stands before it, and may have left a trace in the states of linear attention"
        return table.obstacle(index * self._block_tokens if self.past is Past.BLOCKS else 0, end)
