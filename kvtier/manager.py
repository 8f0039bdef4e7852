"""How a step gets its slots, and what is due between steps. With what it builds on, the only writer of residency.

Works on ids and slots; touches no tensor. One thread at a time: the wrapper serialises steps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.errors import CapacityError, IntegrityError
from kvtier.metrics import Stall
from kvtier.placement import Placement
from kvtier.plan import Plans, StepPlan
from kvtier.recomputable import Past
from kvtier.residency import BlockState
from kvtier.sequences import Sequences
from kvtier.step import NewColumns, RowStep, Step, StepState, Write
from kvtier.types import BlockId, MovePurpose, Slot, Tier


class _Tail(enum.Enum):
    """What a row's tail needs before the step."""

    NONE = "none"
    IN_PLACE = "in place"
    PROMOTE = "promote"
    COPY = "copy"
    """It is shared or sealed, or a move that hangs reads it, and the row is going to append to it."""


@dataclass(slots=True)
class _Reserved:
    """What `begin_step` has taken so far."""

    pinned: list[BlockId] = field(default_factory=list)
    created: list[BlockId] = field(default_factory=list)


class TierManager(Sequences):
    """Sequences, their steps, and what happens between steps.

    Between steps (`poll`) finished transfers are committed, dropped caches freed, tiers above `high` demoted to `low`,
    sealed blocks copied down early, and running sequences' blocks promoted while there is room.
    """

    def __init__(
        self,
        placement: Placement,
        block_tokens: int,
        same_bytes: Callable[[Slot, Slot], bool],
        past: Past = Past.BLOCKS,
    ) -> None:
        """As `Sequences`."""
        super().__init__(placement, block_tokens, same_bytes, past)
        self._plans = Plans(placement.residency)

    @property
    def residency_len(self) -> int:
        """Live blocks."""
        return len(self.placement.residency)

    @property
    def num_gpu_slots(self) -> int:
        """Slots of the gpu tier that can be used: not those of moves that hang."""
        return self.placement.pools[Tier.GPU].ceiling - self.placement.num_held(Tier.GPU)

    # -- steps ------------------------------------------------------------------------------------------------------

    def max_new_tokens(self, batch: Batch) -> int:
        """The most new tokens a row that one step of this batch can ever reserve slots for; 0: not even one."""
        each, tails = self.block_tokens, [table.tail_tokens for table in batch.tables]
        left = self.placement.pools[Tier.GPU].ceiling - sum(tail > 0 for tail in tails)
        if left < 0 or not tails:
            return 0
        # Each row takes one more slot in any `each` tokens that follow one another: at the first that its tail,
        # or where it has none its last block, has no room for.
        rounds, left = divmod(left, len(tails))
        takes = sorted(-tail % each for tail in tails)
        return rounds * each + takes[left]

    def begin_step(self, batch: Batch, new: Sequence[NewColumns]) -> Step:
        """Reserve gpu slots for the new tokens of every row, tails included, all or nothing.

        Args:
            new: what each row gets, all of one number of columns. Padding takes no slot.

        Raises:
            CapacityError: no tier takes a block.
            BlockLostError: a tail cannot be read.
            TransferTimeoutError: the device hangs.
            After each of them the batch is as before, and nothing is pinned.
        """
        if any(table.sequence not in self.tables for table in batch.tables) or not 0 < len(new) == batch.num_rows:
            raise IntegrityError(f"a step of {len(new)} rows on a batch of {batch.num_rows}, or of a dropped one")
        self.make_last(batch)
        self.poll()
        self.seal(batch)
        reserved = _Reserved()
        try:
            tails = [self._tail_needs(*row, reserved) for row in zip(batch.tables, new, strict=True)]
            self._reserve_room(batch, new, tails)
            rows = [self._begin_row(*row, reserved) for row in zip(batch.tables, new, tails, strict=True)]
        except BaseException:  # a Ctrl-C too: no pin and no slot is left
            for block in reserved.pinned:
                self.placement.residency.unpin(block, Tier.GPU)
            self._release(reserved.created)
            raise
        return Step(batch, batch.length, new[0].num_columns, tuple(rows))

    def _num_new_blocks(self, table: BlockTable, new: NewColumns) -> int:
        return -(-(table.num_tokens + new.num_tokens) // self.block_tokens) - len(table.blocks)

    def _tail_needs(self, table: BlockTable, new: NewColumns, reserved: _Reserved) -> _Tail:
        tail = table.tail
        if tail is None:
            return _Tail.NONE
        self.placement.settle(tail, Stall.TAIL)
        record = self.placement.residency[tail]
        slot = record.gpu_slot
        is_held = slot is not None and self.placement.is_held(Tier.GPU, slot)  # what is being written must not change
        if new.num_tokens and (record.holders > 1 or record.state is BlockState.SEALED or is_held):
            return _Tail.COPY
        if slot is None:
            return _Tail.PROMOTE
        self._pin(tail, reserved)
        return _Tail.IN_PLACE

    def _reserve_room(self, batch: Batch, new: Sequence[NewColumns], tails: Sequence[_Tail]) -> None:
        num_new_blocks = sum(self._num_new_blocks(table, row) for table, row in zip(batch.tables, new, strict=True))
        wanted = num_new_blocks + sum(tail in (_Tail.COPY, _Tail.PROMOTE) for tail in tails)
        ceiling = self.placement.pools[Tier.GPU].ceiling
        if wanted + tails.count(_Tail.IN_PLACE) > ceiling:
            raise CapacityError(
                f"{new[0].num_columns} new tokens in {batch.num_rows} rows need {wanted + tails.count(_Tail.IN_PLACE)} "
                f"gpu slots (tails {len(tails) - tails.count(_Tail.NONE)}, new blocks {num_new_blocks}), the gpu tier "
                f"has {ceiling}: raise tiers.gpu.budget, lower prefill_chunk, or use fewer rows"
            )
        self.placement.make_room(Tier.GPU, wanted)

    def _begin_row(self, table: BlockTable, new: NewColumns, needs: _Tail, reserved: _Reserved) -> RowStep:
        placement, tail, tail_copy = self.placement, table.tail, None
        if tail is not None and needs is not _Tail.IN_PLACE:
            placement.settle(tail, Stall.TAIL)  # it may itself have been demoted to make this room
        if tail is not None and needs is _Tail.PROMOTE:
            if placement.residency[tail].gpu_slot is None:  # two rows may wait for one tail
                placement.copy_now(tail, MovePurpose.PROMOTE, self._take())
            self._pin(tail, reserved)
        if tail is not None and needs is _Tail.COPY:
            slot = self._take()
            placement.copy_now(tail, MovePurpose.COPY_TAIL, slot)
            tail_copy = self._create(table, len(table.blocks) - 1, slot, reserved)
        residency = self.placement.residency
        tail_block = tail_copy if tail_copy is not None else tail
        tail_slot = None if tail_block is None else residency[tail_block].gpu_slot
        before = residency[table.blocks[-1]].gpu_slot if tail is None and table.blocks else tail_slot
        slots = [] if tail_slot is None else [tail_slot]
        first, num_new, new_blocks = len(table.blocks), self._num_new_blocks(table, new), list[BlockId]()
        for number in range(num_new):
            before = self._take(before, num_new - number)
            slots.append(before)
            new_blocks.append(self._create(table, first + number, before, reserved))
        writes = self._writes(slots, table.tail_tokens, new.num_tokens)
        return RowStep(table, new, table.num_tokens, writes, tuple(new_blocks), tail_slot, tail_copy)

    def _take(self, before: Slot | None = None, num_slots: int = 1) -> Slot:
        """Neighbours where there are any: attention reads a run of slots in one call."""
        pool = self.placement.pools[Tier.GPU]
        if not pool.num_free:  # what make_room found may be gone by now: a full disk lowers the ceiling
            self.placement.make_room(Tier.GPU, 1)
        slot = pool.take_near(before, num_slots)
        if slot is None:
            raise IntegrityError("make_room promised a gpu slot that is not there")
        return slot

    def _pin(self, block: BlockId, reserved: _Reserved) -> None:
        self.placement.residency.pin(block, Tier.GPU)
        reserved.pinned.append(block)

    def _create(self, table: BlockTable, index: int, slot: Slot, reserved: _Reserved) -> BlockId:
        block = self.placement.residency.create(table.sequence, index)
        self.placement.add_copy(block, Tier.GPU, slot)
        reserved.created.append(block)
        self._pin(block, reserved)
        return block

    def _writes(self, slots: Sequence[Slot], start: int, num_new: int) -> tuple[Write, ...]:
        writes: list[Write] = []
        offset = 0
        for slot in slots:
            count = min(self.block_tokens - start, num_new - offset)
            if count:
                writes.append(Write(slot, start, offset, count))
            offset, start = offset + count, 0
        return tuple(writes)

    def plan(self, batch: Batch, host_frac: float = 0.0) -> StepPlan:
        """Where each full block lies now; valid until the next call of this manager. As `Plans.get`.

        Raises:
            BlockLostError: a block has no copy, or its only one is on a tier that hangs: then all such are named.
        """
        plan = self._plans.get(batch, host_frac)
        for tier in self.placement.breakers:
            blocks = {source.block: source.index for source in plan.streamed if source.tier is tier}
            self.placement.check_readable(blocks, tier)
        return plan

    def commit_step(self, step: Step) -> None:
        """Make the step's columns part of the batch. Lower copies of tails that grew are stale from here on and go."""
        for row in step.rows:
            self._unpin(row)
            self._commit_row(row)
        self.placement.reads.note(step.batch)
        step.state = StepState.COMMITTED
        self.placement.metrics.steps += 1
        self.placement.metrics.tokens += sum(row.new.num_tokens for row in step.rows)

    def _commit_row(self, row: RowStep) -> None:
        table, new, placement = row.table, row.new, self.placement
        tail = table.tail
        if row.tail_copy is not None:
            old = table.replace_tail(row.tail_copy)
            placement.running_blocks.gained(table.sequence, (row.tail_copy,))
            self._let_go(table, (old,))
        elif tail is not None and new.num_tokens:
            record = placement.residency[tail]
            record.generation += 1
            for tier in [tier for tier in record.copies if tier is not Tier.GPU]:
                placement.drop_copy(tail, tier)
        table.append(
            new.num_tokens,
            new.token_ids,
            row.new_blocks,
            positions=new.positions,
            padding=new.padding(),
            made=new.made,
        )
        if row.new_blocks:
            placement.running_blocks.gained(table.sequence, row.new_blocks)

    def abort_step(self, step: Step) -> None:
        """Forget the step: its slots are free, the batch is as before."""
        if step.state is not StepState.OPEN:
            return
        for row in step.rows:
            self._unpin(row)
            self._release([*(() if row.tail_copy is None else (row.tail_copy,)), *row.new_blocks])
        step.state = StepState.ABORTED
        self.placement.metrics.steps_aborted += 1

    def _unpin(self, row: RowStep) -> None:
        residency = self.placement.residency
        if row.table.tail is not None and row.tail_copy is None:
            residency.unpin(row.table.tail, Tier.GPU)
        for block in (*(() if row.tail_copy is None else (row.tail_copy,)), *row.new_blocks):
            residency.unpin(block, Tier.GPU)

    # -- between steps ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Do what is due between steps; waits for nothing. O(moves finished and started)."""
        self.drain_left()
        self.drain_dropped()
        self.upkeep.run()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every fact agrees with every other, and blocks are held exactly by the tables."""
        self.placement.check_integrity()
        super().check_integrity()
