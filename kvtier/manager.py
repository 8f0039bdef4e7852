"""When blocks are promoted, demoted and evicted, and how a step gets its slots. The only writer of residency.

Works on ids and slots; touches no tensor. One thread at a time: the wrapper serialises steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvtier.block_table import BlockTable
from kvtier.errors import CapacityError, IntegrityError
from kvtier.metrics import SequenceMetrics
from kvtier.placement import Placement
from kvtier.plan import StepPlan
from kvtier.residency import BlockState
from kvtier.step import Step, StepState, Write
from kvtier.types import BlockId, MovePurpose, SequenceId, Slot, Tier
from kvtier.upkeep import Upkeep


class TierManager:
    """Sequences, their steps, and what happens between steps.

    Between steps (`poll`) finished transfers are committed, dropped caches freed, tiers above `high` demoted to `low`,
    sealed blocks copied down early, and running sequences' blocks promoted while there is room.
    """

    def __init__(self, placement: Placement, block_tokens: int) -> None:
        self.placement = placement
        self.upkeep = Upkeep(placement)
        self.block_tokens = block_tokens
        self.tables: dict[SequenceId, BlockTable] = {}
        self.dropped: deque[SequenceId] = deque()
        """Sequences whose cache was garbage-collected. Finalizers append here and take no lock."""
        self._running: dict[SequenceId, int] = {}
        self._last: SequenceId | None = None
        self._next_sequence = 0

    @property
    def residency_len(self) -> int:
        """Live blocks."""
        return len(self.placement.residency)

    # -- sequences --------------------------------------------------------------------------------------------------

    def new_sequence(self) -> BlockTable:
        """An empty sequence."""
        table = BlockTable(self._new_id(), self.block_tokens)
        self.tables[table.sequence] = table
        return table

    def _new_id(self) -> SequenceId:
        self._next_sequence += 1
        sequence = SequenceId(self._next_sequence)
        self.placement.sequence_metrics[sequence] = SequenceMetrics()
        return sequence

    def fork(self, table: BlockTable) -> BlockTable:
        """A sequence of its own that shares every block by count; the tail is copied when either side appends to it."""
        twin = table.fork(self._new_id())
        for block in twin.blocks:
            self.placement.residency[block].holders += 1
        self.tables[twin.sequence] = twin
        return twin

    def truncate(self, table: BlockTable, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens, on every tier. O(blocks dropped)."""
        for block in table.truncate(num_tokens):
            self.placement.release(block)

    def drop_sequence(self, sequence: SequenceId) -> None:
        """Free everything that only this sequence holds. Idempotent."""
        table = self.tables.pop(sequence, None)
        if table is None:
            return
        self._running.pop(sequence, None)
        if self._last == sequence:
            self._last = None
        for block in table.truncate(0):
            self.placement.release(block)
        self.placement.sequence_metrics.pop(sequence, None)
        self._rebuild_running()

    def enter(self, table: BlockTable) -> None:
        """The sequence runs until as many `leave`s: its blocks are demoted last and come back first."""
        self._running[table.sequence] = self._running.get(table.sequence, 0) + 1
        self._rebuild_running()

    def leave(self, table: BlockTable) -> None:
        """Take back one `enter`; the last one makes the sequence idle, which seals its full blocks."""
        count = self._running.get(table.sequence, 0) - 1
        if count > 0:
            self._running[table.sequence] = count
            return
        self._running.pop(table.sequence, None)
        if self._last == table.sequence:
            self._last = None
        self._seal(table)
        self._rebuild_running()

    def metrics_of(self, sequence: SequenceId) -> SequenceMetrics:
        """The sequence's counters."""
        return self.placement.sequence_metrics.setdefault(sequence, SequenceMetrics())

    def _rebuild_running(self) -> None:
        # In place: evictable views hold this very set.
        running = self.placement.running_blocks
        running.clear()
        for sequence in self._running_sequences():
            running.update(self.tables[sequence].blocks)

    def _running_sequences(self) -> list[SequenceId]:
        last = [] if self._last is None or self._last in self._running else [self._last]
        return [sequence for sequence in (*self._running, *last) if sequence in self.tables]

    def _seal(self, table: BlockTable) -> None:
        # From the end: all blocks before a sealed one are sealed, so this is O(newly sealed).
        for block in reversed(table.blocks[: table.num_full_blocks]):
            record = self.placement.residency[block]
            if record.state is BlockState.SEALED:
                return
            record.state = BlockState.SEALED
            self.upkeep.sealed(block)

    # -- steps ------------------------------------------------------------------------------------------------------

    def max_new_tokens(self, table: BlockTable) -> int:
        """The most new tokens that one step of this sequence can ever reserve slots for."""
        return self.placement.pools[Tier.GPU].ceiling * self.block_tokens - table.tail_tokens

    def begin_step(self, table: BlockTable, num_new: int) -> Step:
        """Reserve gpu slots for `num_new` tokens, tail included, all or nothing.

        Raises:
            CapacityError: no tier takes a block.
            BlockLostError: the tail cannot be read.
            TransferTimeoutError: the device hangs.
            After each of them the sequence is as before, and nothing is pinned.
        """
        if table.sequence not in self.tables:
            raise IntegrityError(f"sequence {table.sequence} is unknown")
        if self._last != table.sequence:
            if self._last in self.tables and self._last not in self._running:
                self._seal(self.tables[self._last])  # it goes idle
            self._last = table.sequence
            self._rebuild_running()
        self.poll()
        self._seal(table)
        placement, residency, pool = self.placement, self.placement.residency, self.placement.pools[Tier.GPU]
        tail = table.tail
        num_new_blocks = -(-(table.num_tokens + num_new) // self.block_tokens) - len(table.blocks)
        copies_tail = promotes_tail = False
        if tail is not None:
            placement.settle(tail)
            record = residency[tail]
            copies_tail = record.holders > 1 or record.state is BlockState.SEALED
            promotes_tail = not copies_tail and Tier.GPU not in record.copies
        wanted = num_new_blocks + copies_tail + promotes_tail
        if wanted > pool.ceiling:
            raise CapacityError(
                f"{num_new} new tokens need {wanted} gpu slots, the gpu tier has {pool.ceiling}: raise "
                "tiers.gpu.budget or lower prefill_chunk"
            )
        pinned: list[BlockId] = []
        created: list[BlockId] = []
        tail_copy: BlockId | None = None
        try:
            if tail is not None and not copies_tail and Tier.GPU in residency[tail].copies:
                self._pin(tail, pinned)
            placement.make_room(Tier.GPU, wanted)
            if tail is not None:
                placement.settle(tail)  # it may itself have been demoted to make this room
            if tail is not None and promotes_tail:
                placement.copy_now(tail, MovePurpose.PROMOTE, self._take())
                self._pin(tail, pinned)
            if tail is not None and copies_tail:
                slot = self._take()
                placement.copy_now(tail, MovePurpose.COPY_TAIL, slot)
                tail_copy = self._create(table, len(table.blocks) - 1, slot, created, pinned)
            placement.make_room(Tier.GPU, num_new_blocks)
            for index in range(len(table.blocks), len(table.blocks) + num_new_blocks):
                self._create(table, index, self._take(), created, pinned)
        except BaseException:
            self._undo(created, pinned)
            raise
        tail_block = tail_copy if tail_copy is not None else tail
        tail_slot = None if tail_block is None else residency[tail_block].copies[Tier.GPU]
        new_blocks = created[1:] if tail_copy is not None else created
        slots = ([] if tail_slot is None else [tail_slot]) + [residency[b].copies[Tier.GPU] for b in new_blocks]
        writes = self._writes(slots, table.tail_tokens, num_new)
        return Step(table, table.num_tokens, num_new, writes, tuple(new_blocks), tail_slot, tail_copy)

    def _take(self) -> Slot:
        slot = self.placement.pools[Tier.GPU].take()
        if slot is None:
            raise IntegrityError("make_room promised a gpu slot that is not there")
        return slot

    def _pin(self, block: BlockId, pinned: list[BlockId]) -> None:
        self.placement.residency.pin(block, Tier.GPU)
        pinned.append(block)

    def _create(
        self, table: BlockTable, index: int, slot: Slot, created: list[BlockId], pinned: list[BlockId]
    ) -> BlockId:
        block = self.placement.residency.create(table.sequence, index)
        self.placement.add_copy(block, Tier.GPU, slot)
        created.append(block)
        self._pin(block, pinned)
        self.placement.running_blocks.add(block)
        return block

    def _undo(self, created: Sequence[BlockId], pinned: Sequence[BlockId]) -> None:
        for block in pinned:
            self.placement.residency.unpin(block, Tier.GPU)
        for block in created:
            self.placement.release(block)

    def _writes(self, slots: Sequence[Slot], start: int, num_new: int) -> tuple[Write, ...]:
        writes: list[Write] = []
        offset = 0
        for slot in slots:
            count = min(self.block_tokens - start, num_new - offset)
            writes.append(Write(slot, start, offset, count))
            offset, start = offset + count, 0
        return tuple(writes)

    def plan(self, table: BlockTable) -> StepPlan:
        """Where each full block lies now; valid until the next call of this manager."""
        return StepPlan.build(table, self.placement.residency)

    def commit_step(self, step: Step, token_ids: Sequence[int] | None) -> None:
        """Make the step's tokens part of the sequence. Lower copies of the tail are stale from here on and go."""
        table, placement = step.table, self.placement
        tail = table.tail
        self._unpin(step, tail)
        if step.tail_copy is not None:
            placement.release(table.replace_tail(step.tail_copy))
        elif tail is not None:
            record = placement.residency[tail]
            record.generation += 1
            for tier in [tier for tier in record.copies if tier is not Tier.GPU]:
                placement.drop_copy(tail, tier)
        table.append(step.num_new, token_ids, step.new_blocks)
        for policy in placement.policies.values():
            policy.touched(table.blocks)
        step.state = StepState.COMMITTED
        placement.metrics.steps += 1
        placement.metrics.tokens += step.num_new

    def abort_step(self, step: Step) -> None:
        """Forget the step: its slots are free, the sequence is as before."""
        if step.state is not StepState.OPEN:
            return
        self._unpin(step, step.table.tail)
        for block in (*(() if step.tail_copy is None else (step.tail_copy,)), *step.new_blocks):
            self.placement.release(block)
        step.state = StepState.ABORTED
        self.placement.metrics.steps_aborted += 1

    def _unpin(self, step: Step, tail: BlockId | None) -> None:
        residency = self.placement.residency
        if tail is not None and step.tail_copy is None:
            residency.unpin(tail, Tier.GPU)
        for block in (*(() if step.tail_copy is None else (step.tail_copy,)), *step.new_blocks):
            residency.unpin(block, Tier.GPU)

    # -- between steps ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Do what is due between steps; waits for nothing. O(moves finished + blocks of running sequences)."""
        while self.dropped:
            self.drop_sequence(self.dropped.popleft())
        self.upkeep.run([self.tables[sequence] for sequence in self._running_sequences()])

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every fact agrees with every other, and blocks are held exactly by the tables."""
        self.placement.check_integrity()
        holders: dict[BlockId, int] = {}
        for table in self.tables.values():
            table.check_integrity()
            for block in table.blocks:
                holders[block] = holders.get(block, 0) + 1
        residency = self.placement.residency
        for block in residency.blocks():
            if residency[block].holders != holders.pop(block, 0):
                raise IntegrityError(
                    f"block {block} counts {residency[block].holders} holders, the tables say otherwise"
                )
        if holders:
            raise IntegrityError(f"tables hold blocks that are no more: {sorted(holders)[:8]}")
