"""Which sequences live, which of them run, and when their full blocks are sealed and joined. Part of the tier manager.

Works on ids; touches no tensor. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvtier.batch import Batch
from kvtier.block_table import BlockTable, Made
from kvtier.errors import IntegrityError
from kvtier.metrics import SequenceMetrics
from kvtier.padding import Padding
from kvtier.placement import Placement
from kvtier.recomputable import Past, Recomputable
from kvtier.sealing import Sealer
from kvtier.types import BlockId, SequenceId, Slot
from kvtier.upkeep import Upkeep


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a row of an empty batch begins with: padding, then the tokens of full blocks that are there already."""

    padding: int
    token_ids: Sequence[int]
    blocks: Sequence[BlockId]


class Sequences:
    """The batches of all caches. Rows share blocks by count; equal full blocks of a batch are joined when sealed."""

    def __init__(
        self,
        placement: Placement,
        block_tokens: int,
        same_bytes: Callable[[Slot, Slot], bool],
        past: Past = Past.BLOCKS,
    ) -> None:
        """Args:
        same_bytes: whether two gpu slots hold the same bytes: blocks are joined on nothing less.
        past: what the model needs to compute a block again.
        """
        self.placement = placement
        self.upkeep = Upkeep(placement)
        self.block_tokens = block_tokens
        self.tables: dict[SequenceId, BlockTable] = {}
        self.recomputable = Recomputable(self.tables, placement.residency, block_tokens, past)
        self.sealer = Sealer(placement, self.upkeep, same_bytes, past)
        self.dropped: deque[Batch] = deque()
        """Batches whose cache was garbage-collected. Finalizers append here and take no lock."""
        self.left: deque[Batch] = deque()
        """Batches whose call has ended; appended without the turn, which a Ctrl-C may keep a call from getting."""
        self._running: dict[Batch, int] = {}
        self._last: Batch | None = None
        self._next_sequence = 0

    # -- rows -------------------------------------------------------------------------------------------------------

    def new_batch(self, num_rows: int = 1) -> Batch:
        """Empty rows."""
        metrics = SequenceMetrics()
        return Batch(
            [self._add(BlockTable(self._new_id(metrics), self.block_tokens)) for _ in range(num_rows)], metrics
        )

    def _new_id(self, metrics: SequenceMetrics) -> SequenceId:
        self._next_sequence += 1
        sequence = SequenceId(self._next_sequence)
        self.placement.sequence_metrics[sequence] = metrics
        return sequence

    def _add(self, table: BlockTable) -> BlockTable:
        self.tables[table.sequence] = table
        return table

    def _fork_row(self, table: BlockTable, metrics: SequenceMetrics) -> BlockTable:
        twin = table.fork(self._new_id(metrics))
        for block in twin.blocks:
            self.placement.hold(block)
        return self._add(twin)

    def fork(self, batch: Batch) -> Batch:
        """A batch of its own that shares every block by count; tails are copied when either side appends to them."""
        metrics = SequenceMetrics()
        return Batch([self._fork_row(table, metrics) for table in batch.tables], metrics, batch.origin)

    def fork_row(self, table: BlockTable) -> Batch:
        """A batch of one row that shares every block of `table` by count."""
        metrics = SequenceMetrics()
        return Batch([self._fork_row(table, metrics)], metrics)

    def attach(self, batch: Batch, begins: Sequence[Beginning], length: int) -> None:
        """Give an empty batch the beginnings of its rows, up to `length` columns: blocks that are shared by count.

        Each has at least as many; what it was given beyond them is not used.
        """
        if batch.length or len(begins) != batch.num_rows:
            raise IntegrityError(f"{len(begins)} beginnings for {batch.num_rows} rows of {batch.length} columns")
        for table, begin in zip(batch.tables, begins, strict=True):
            for block in begin.blocks:
                self.placement.hold(block)
            padding = min(begin.padding, length)
            table.append(
                len(begin.token_ids), begin.token_ids, begin.blocks, positions=range(len(begin.token_ids)),
                padding=[Padding(0, padding)] if padding else [], made=Made.PLACED,
            )  # fmt: skip
            self._share_ids(table, 0, begin.blocks)
            self.placement.running_blocks.gained(table.sequence, begin.blocks)
        self.truncate(batch, length)

    def extend(self, batch: Batch, token_ids: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Let a row of full blocks alone go on with blocks that are there already, shared by count."""
        self.seal(batch)  # a sealed block behind them would hide those that are not
        (table,) = batch.tables
        for block in blocks:
            self.placement.hold(block)
        first = table.num_tokens
        table.append(
            len(token_ids), token_ids, blocks, positions=range(first, first + len(token_ids)), made=Made.PLACED
        )
        self._share_ids(table, first // self.block_tokens, blocks)
        self.placement.running_blocks.gained(table.sequence, blocks)

    def _share_ids(self, table: BlockTable, first_block: int, blocks: Sequence[BlockId]) -> None:
        """What these full blocks are labelled with need not be kept by the row too."""
        labelled = (self.placement.residency[block].sealed for block in blocks)
        table.share_ids(first_block, [each.label.content for each in takewhile(bool, labelled) if each is not None])

    def seal(self, batch: Batch) -> None:
        """As `Sealer.seal`."""
        self.sealer.seal(batch)

    def share(self, table: BlockTable, index: int, block: BlockId) -> None:
        """As `Sealer.share`."""
        self.sealer.share(table, index, block)

    def resize(self, batch: Batch, num_rows: int) -> None:
        """Give an empty batch another number of rows."""
        if batch.length:
            raise IntegrityError(f"a batch of {batch.length} columns cannot be resized")
        fresh = [BlockTable(self._new_id(batch.metrics), self.block_tokens) for _ in range(num_rows)]
        self._replace(batch, [self._add(table) for table in fresh])

    def select(self, batch: Batch, rows: Sequence[int]) -> None:
        """Make row `i` what row `rows[i]` was; rows not named are dropped, those named twice share their blocks.

        O(blocks of rows that are forked or dropped): a permutation moves nothing.

        Raises:
            IndexError: there is no such row; nothing changed.
        """
        if any(not 0 <= row < batch.num_rows for row in rows):
            raise IndexError(f"rows {list(rows)[:8]} of {batch.num_rows}")
        tables = [batch.tables[row] for row in rows]
        kept: set[SequenceId] = set()
        selected: list[BlockTable] = []
        for table in tables:
            selected.append(self._fork_row(table, batch.metrics) if table.sequence in kept else table)
            kept.add(table.sequence)
        self._replace(batch, selected)

    def _replace(self, batch: Batch, tables: list[BlockTable]) -> None:
        staying = {table.sequence for table in tables}
        old, batch.tables = batch.tables, tables
        for table in old:
            if table.sequence not in staying:
                self._drop_row(table)
        self._note_running(batch)

    def restore(self, batch: Batch, backup: Batch) -> None:
        """Make `batch` what `backup`, a fork of it, still is; the backup is used up."""
        tables, backup.tables = backup.tables, []
        for table in tables:
            self.placement.sequence_metrics[table.sequence] = batch.metrics
        self._replace(batch, tables)

    def truncate(self, batch: Batch, length: int) -> None:
        """Keep the first `length` columns of each row, on every tier. O(blocks dropped)."""
        if not length:
            self.placement.reads.tell(batch)  # others may go on with its blocks
        for table in batch.tables:
            self._let_go(table, table.truncate(length))

    def mask_end(self, batch: Batch, row: int, num_columns: int) -> None:
        """The row's last columns become padding; their tokens are dropped."""
        table = batch.tables[row]
        self._let_go(table, table.mask_end(num_columns))

    def _let_go(self, table: BlockTable, blocks: Sequence[BlockId]) -> None:
        """The row does not hold these any more."""
        self.placement.running_blocks.lost(table.sequence, blocks)
        self._release(blocks)

    def _release(self, blocks: Sequence[BlockId]) -> None:
        # Those of them that stay cached go in this order, and the last block of a prefix must be first.
        for block in reversed(blocks):
            self.placement.release(block)

    def drop(self, batch: Batch) -> None:
        """Free everything that only this batch holds. Idempotent."""
        self._running.pop(batch, None)
        if self._last is batch:
            self._last = None
        self.placement.reads.tell(batch)  # others may go on with its blocks
        for table in batch.tables:
            self._drop_row(table)

    def _drop_row(self, table: BlockTable) -> None:
        if self.tables.pop(table.sequence, None) is None:
            return
        self.placement.running_blocks.stop(table.sequence, table.blocks)
        self._release(table.truncate(0))
        self.placement.sequence_metrics.pop(table.sequence, None)

    def drain_dropped(self) -> None:
        """Drop what finalizers have left."""
        while self.dropped:
            self.drop(self.dropped.popleft())

    def drain_left(self) -> None:
        """Take back the `enter`s of calls that have ended."""
        while self.left:
            self.leave(self.left.popleft())

    # -- running and idle -------------------------------------------------------------------------------------------

    def enter(self, batch: Batch) -> None:
        """The batch runs until as many `leave`s: its blocks are demoted last and come back first."""
        self._running[batch] = self._running.get(batch, 0) + 1
        self._note_running(batch)

    def leave(self, batch: Batch) -> None:
        """Take back one `enter`; the last one makes the batch idle, which seals its full blocks."""
        count = self._running.get(batch, 0) - 1
        if count > 0:
            self._running[batch] = count
            return
        self._running.pop(batch, None)
        if self._last is batch:
            self._last = None
        self.seal(batch)
        self._note_running(batch)

    def make_last(self, batch: Batch) -> None:
        """A step of this batch begins: one that is not in `enter` … `leave` runs until another batch's step.

        O(1) unless a batch comes to run, or ceases to: then O(its blocks).
        """
        if self._last is batch:
            return
        before, self._last = self._last, batch
        if before is not None and before not in self._running:
            self.seal(before)  # it goes idle
            self._note_running(before)
        self._note_running(batch)

    def _runs(self, batch: Batch) -> bool:
        return batch is self._last or batch in self._running

    def _note_running(self, batch: Batch) -> None:
        """The batch has come to run, or ceased to, or has other rows. O(its rows that have, and their blocks)."""
        running, runs = self.placement.running_blocks, self._runs(batch)
        if not runs:
            self.placement.reads.tell(batch)
        for table in batch.tables:
            if runs and table.sequence in self.tables:
                running.start(table.sequence, table.blocks)
            else:
                running.stop(table.sequence, table.blocks)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless blocks are held exactly by the tables."""
        holders: dict[BlockId, int] = {}
        for table in self.tables.values():
            table.check_integrity()
            for block in table.blocks:
                holders[block] = holders.get(block, 0) + 1
        for block in self.placement.prefixes.blocks():
            holders[block] = holders.get(block, 0) + 1
        residency = self.placement.residency
        for block in residency.blocks():
            if residency[block].holders != holders.pop(block, 0):
                raise IntegrityError(
                    f"block {block} counts {residency[block].holders} holders, the tables say otherwise"
                )
        if holders:
            raise IntegrityError(f"tables hold blocks that are no more: {sorted(holders)[:8]}")
        running = {*self._running, *([] if self._last is None else [self._last])}
        for batch in running:
            batch.check_integrity()
        rows = [table for batch in running for table in batch.tables if table.sequence in self.tables]
        self.placement.running_blocks.check_integrity({table.sequence: table.blocks for table in rows})
