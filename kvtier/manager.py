"""How a step gets its slots, and what is due between steps. With what it builds on, the only writer of residency.

Works on ids and slots; touches no tensor. One thread at a time: the wrapper serialises steps.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.errors import CapacityError, IntegrityError
from kvtier.metrics import Stall
from kvtier.placement import Placement
from kvtier.plan import Plans, StepPlan
from kvtier.recomputable import Past
from kvtier.residency import SEALED
from kvtier.sequences import Sequences
from kvtier.step import NewColumns, RowStep, Step, StepState, Write
from kvtier.types import GPU, BlockId, MovePurpose, Slot


class _Tail(enum.Enum):
    """What a row's tail needs before the step."""

    NONE = "none"
    IN_PLACE = "in place"
    PROMOTE = "promote"
    COPY = "copy"
    """It is shared or sealed, or a move that hangs reads it, and the row is going to append to it."""


_NONE, _IN_PLACE, _PROMOTE, _COPY = _Tail  # by plain names, as the tiers


_Needs = tuple[int, _Tail, int]
"""A row's new tokens, what its tail needs, and how many slots must be found for it."""


class _Reserved:
    """What `begin_step` has taken so far."""

    __slots__ = ("created", "pinned")

    def __init__(self) -> None:
        self.pinned: list[BlockId] = []
        self.created: list[BlockId] = []


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
        return self.placement.pools[GPU].ceiling - self.placement.num_held(GPU)

    # -- steps ------------------------------------------------------------------------------------------------------

    def max_new_tokens(self, batch: Batch) -> int:
        """The most new tokens a row that one step of this batch can ever reserve slots for; 0: not even one."""
        each, tails = self.block_tokens, [table.tail_tokens for table in batch.tables]
        left = self.placement.pools[GPU].ceiling - sum(tail > 0 for tail in tails)
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
        tables = batch.tables
        if len(new) != len(tables) or not new:
            raise IntegrityError(f"a step of {len(new)} rows on a batch of {len(tables)}")
        for table in tables:
            if table.sequence not in self.tables:
                raise IntegrityError(f"a step of {len(new)} rows on a batch of {len(tables)}, a dropped one")
        self.make_last(batch)
        self.poll()
        self.sealer.seal(batch)
        reserved = _Reserved()
        needs: list[_Needs] = []
        rows: list[RowStep] = []
        try:
            num_slots = 0
            for table, columns in zip(tables, new, strict=True):
                row_needs = self._needs(table, columns, reserved)
                needs.append(row_needs)
                _, _, num_row_slots = row_needs
                num_slots += num_row_slots
            if num_slots:
                self._reserve_room(batch, new, needs)
            for table, columns, row_needs in zip(tables, new, needs, strict=True):
                rows.append(self._begin_row(table, columns, row_needs, reserved))
        except BaseException:  # a Ctrl-C too: no pin and no slot is left
            for block in reserved.pinned:
                self.placement.residency.unpin(block, GPU)
            self._release(reserved.created)
            raise
        return Step(batch, tables[0].length, new[0].num_columns, tuple(rows))

    def _needs(self, table: BlockTable, new: NewColumns, reserved: _Reserved) -> _Needs:
        """Slots must be found for new blocks, and for a tail that is not in place. One that is gets pinned there."""
        placement, num_tokens, blocks, each = self.placement, new.num_tokens, table.blocks, self.block_tokens
        num_new_blocks = -(-(table.num_tokens + num_tokens) // each) - len(blocks)
        if not table.num_tokens % each:
            return num_tokens, _NONE, num_new_blocks
        tail = blocks[-1]
        record = placement.residency.records[tail]
        if record.move is not None:
            placement.settle(tail, Stall.TAIL)
        slot = record.gpu_slot
        # What is being written must not change.
        is_held = bool(placement.hung.moves) and slot is not None and placement.hung.holds(GPU, slot)
        if num_tokens and (record.holders > 1 or record.state is SEALED or is_held):
            return num_tokens, _COPY, num_new_blocks + 1
        if slot is None:
            return num_tokens, _PROMOTE, num_new_blocks + 1
        self._pin(tail, reserved)
        return num_tokens, _IN_PLACE, num_new_blocks

    def _reserve_room(self, batch: Batch, new: Sequence[NewColumns], needs: Sequence[_Needs]) -> None:
        tails, wanted = [tail for _, tail, _ in needs], sum(num_slots for _, _, num_slots in needs)
        in_all, ceiling = wanted + tails.count(_IN_PLACE), self.placement.pools[GPU].ceiling
        if in_all > ceiling:
            num_tails = len(tails) - tails.count(_NONE)
            raise CapacityError(
                f"{new[0].num_columns} new tokens in {batch.num_rows} rows need {in_all} gpu slots (tails {num_tails}, "
                f"new blocks {in_all - num_tails}), the gpu tier has {ceiling}: raise tiers.gpu.budget, lower "
                "prefill_chunk, or use fewer rows"
            )
        self.placement.make_room(GPU, wanted)

    def _begin_row(self, table: BlockTable, new: NewColumns, needs: _Needs, reserved: _Reserved) -> RowStep:
        num_tokens, tail_needs, num_new = needs
        records, blocks, committed = self.placement.residency.records, table.blocks, table.num_tokens
        pinned: list[BlockId] = []
        slots: list[Slot] = []
        tail_slot, tail_copy = None, None
        if tail_needs is not _NONE:
            tail = blocks[-1]
            if tail_needs is not _IN_PLACE:
                tail_copy = self._bring_tail(table, tail, tail_needs, reserved)
                num_new -= 1
            pinned.append(tail if tail_copy is None else tail_copy)
            tail_slot = records[pinned[0]].gpu_slot
            if tail_slot is None:
                raise IntegrityError(f"block {tail} was brought to the gpu tier, and is not there")
            slots.append(tail_slot)
        if num_new:
            before = records[blocks[-1]].gpu_slot if blocks and not slots else tail_slot
            for number in range(num_new):
                before = self._take(before, num_new - number)
                slots.append(before)
                pinned.append(self._create(table, len(blocks) + number, before, reserved))
        writes = self._writes(slots, committed % self.block_tokens, num_tokens)
        return RowStep(table, new, num_tokens, committed, writes, tuple(pinned), tail_slot, tail_copy)

    def _bring_tail(self, table: BlockTable, tail: BlockId, needs: _Tail, reserved: _Reserved) -> BlockId | None:
        """The tail comes to the gpu tier, or a copy of it, which is returned."""
        placement = self.placement
        placement.settle(tail, Stall.TAIL)  # it may itself have been demoted to make this room
        if needs is _COPY:
            slot = self._take()
            placement.copy_now(tail, MovePurpose.COPY_TAIL, slot)
            return self._create(table, len(table.blocks) - 1, slot, reserved)
        if placement.residency[tail].gpu_slot is None:  # two rows may wait for one tail
            placement.copy_now(tail, MovePurpose.PROMOTE, self._take())
        self._pin(tail, reserved)
        return None

    def _take(self, before: Slot | None = None, num_slots: int = 1) -> Slot:
        """Neighbours where there are any: attention reads a run of slots in one call."""
        pool = self.placement.pools[GPU]
        if not pool.num_free:  # what make_room found may be gone by now: a full disk lowers the ceiling
            self.placement.make_room(GPU, 1)
        slot = pool.take_near(before, num_slots)
        if slot is None:
            raise IntegrityError("make_room promised a gpu slot that is not there")
        return slot

    def _pin(self, block: BlockId, reserved: _Reserved) -> None:
        self.placement.residency.pin(block, GPU)
        reserved.pinned.append(block)

    def _create(self, table: BlockTable, index: int, slot: Slot, reserved: _Reserved) -> BlockId:
        block = self.placement.residency.create(table.sequence, index)
        self.placement.add_copy(block, GPU, slot)
        reserved.created.append(block)
        self._pin(block, reserved)
        return block

    def _writes(self, slots: Sequence[Slot], start: int, num_new: int) -> tuple[Write, ...]:
        if num_new and len(slots) == 1:
            return (Write(slots[0], start, 0, num_new),)
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
        metrics = self.placement.metrics
        unpin = self.placement.residency.unpin
        for row in step.rows:
            for block in row.pinned:
                unpin(block, GPU)
            self._commit_row(row)
            metrics.tokens += row.num_tokens
        self.placement.reads.note(step.batch)
        step.state = StepState.COMMITTED
        metrics.steps += 1

    def _commit_row(self, row: RowStep) -> None:
        table, new, num_tokens, placement = row.table, row.new, row.num_tokens, self.placement
        new_blocks = row.new_blocks
        if row.tail_copy is not None:
            old = table.replace_tail(row.tail_copy)
            placement.running_blocks.gained(table.sequence, (row.tail_copy,))
            self._let_go(table, (old,))
        elif row.tail_slot is not None and num_tokens:
            tail = row.pinned[0]
            record = placement.residency.records[tail]
            record.generation += 1
            if record.is_clean(GPU):
                for tier in [tier for tier in record.copies if tier is not GPU]:
                    placement.drop_copy(tail, tier)
        padding = () if num_tokens == new.num_columns else new.padding()
        table.append(num_tokens, new.token_ids, new_blocks, positions=new.positions, padding=padding, made=new.made)
        if new_blocks:
            placement.running_blocks.gained(table.sequence, new_blocks)

    def abort_step(self, step: Step) -> None:
        """Forget the step: its slots are free, the batch is as before."""
        if step.state is not StepState.OPEN:
            return
        for row in step.rows:
            for block in row.pinned:
                self.placement.residency.unpin(block, GPU)
            self._release(row.new_blocks if row.tail_copy is None else row.pinned)
        step.state = StepState.ABORTED
        self.placement.metrics.steps_aborted += 1

    # -- between steps ----------------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Do what is due between steps; waits for nothing. O(moves finished and started)."""
        if self.left:
            self.drain_left()
        if self.dropped:
            self.drain_dropped()
        self.upkeep.run()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless every fact agrees with every other, and blocks are held exactly by the tables."""
        self.placement.check_integrity()
        super().check_integrity()
