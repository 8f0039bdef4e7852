"""Which sequences live, which of them run, and when their full blocks are sealed and joined. Part of the tier manager.

Works on ids; touches no tensor. One thread at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.batch import Batch
from kvtier.block_table import BlockTable, Made, Padding
from kvtier.errors import IntegrityError
from kvtier.metrics import SequenceMetrics
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
            self.placement.residency[block].holders += 1
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
                self.placement.residency[block].holders += 1
            padding = min(begin.padding, length)
            table.append(
                len(begin.token_ids), begin.token_ids, begin.blocks, positions=range(len(begin.token_ids)),
                padding=[Padding(0, padding)] if padding else [], made=Made.PLACED,
            )  # fmt: skip
        self.truncate(batch, length)
        self._rebuild_running()

    def extend(self, batch: Batch, token_ids: Sequence[int], blocks: Sequence[BlockId]) -> None:
        """Let a row of full blocks alone go on with blocks that are there already, shared by count."""
        self.seal(batch)  # a sealed block behind them would hide those that are not
        (table,) = batch.tables
        for block in blocks:
            self.placement.residency[block].holders += 1
        first = table.num_tokens
        table.append(
            len(token_ids), token_ids, blocks, positions=range(first, first + len(token_ids)), made=Made.PLACED
        )
        self._rebuild_running()

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
        self._rebuild_running()

    def restore(self, batch: Batch, backup: Batch) -> None:
        """Make `batch` what `backup`, a fork of it, still is; the backup is used up."""
        tables, backup.tables = backup.tables, []
        for table in tables:
            self.placement.sequence_metrics[table.sequence] = batch.metrics
        self._replace(batch, tables)

    def truncate(self, batch: Batch, length: int) -> None:
        """Keep the first `length` columns of each row, on every tier. O(blocks dropped)."""
        for table in batch.tables:
            self._release(table.truncate(length))

    def mask_end(self, batch: Batch, row: int, num_columns: int) -> None:
        """The row's last columns become padding; their tokens are dropped."""
        self._release(batch.tables[row].mask_end(num_columns))

    def _release(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self.placement.release(block)

    def drop(self, batch: Batch) -> None:
        """Free everything that only this batch holds. Idempotent."""
        self._running.pop(batch, None)
        if self._last is batch:
            self._last = None
        for table in batch.tables:
            self._drop_row(table)
        self._rebuild_running()

    def _drop_row(self, table: BlockTable) -> None:
        if self.tables.pop(table.sequence, None) is None:
            return
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
        self._rebuild_running()

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
        self._rebuild_running()

    def make_last(self, batch: Batch) -> None:
        """A step of this batch begins: one that is not in `enter` … `leave` runs until another batch's step."""
        if self._last is batch:
            return
        if self._last is not None and self._last not in self._running:
            self.seal(self._last)  # it goes idle
        self._last = batch
        self._rebuild_running()

    def running(self) -> list[BlockTable]:
        """The rows that run."""
        last = [] if self._last is None or self._last in self._running else [self._last]
        return [table for batch in (*self._running, *last) for table in batch.tables if table.sequence in self.tables]

    def _rebuild_running(self) -> None:
        # In place: evictable views hold this very set.
        running = self.placement.running_blocks
        running.clear()
        for table in self.running():
            running.update(table.blocks)

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
        for batch in (*self._running, *([] if self._last is None else [self._last])):
            batch.check_integrity()
