"""Blocks that can no longer be read: which can be computed again, in what order, and what takes their place.

Works on ids; touches no tensor. What computes a row's K and V is given to it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import partial

from kvtier.batch import Batch
from kvtier.block_table import BlockTable, Span
from kvtier.errors import BlockLostError, BudgetError, CapacityError, UnsupportedError
from kvtier.log import logger
from kvtier.manager import TierManager
from kvtier.recomputable import Past
from kvtier.residency import BlockState
from kvtier.step import NewColumns
from kvtier.types import BlockId, Tier

Compute = Callable[[Span], None]
"""Appends a span to the row that it belongs to, by the model's own forward, in steps that commit."""


class Losses:
    """The losses that one step of a batch meets. `mend` makes their blocks whole, on the gpu tier, under their own ids.

    A block of the batch that was mended stays on the gpu tier until `close`, as far as the step leaves slots: a disk
    on which every read fails is then read less with every attempt. Every loss is counted, so that it ends.
    """

    MAX_AGAIN = 16
    """How often, beside once a block, a block that was mended in this step may be lost again before that is an error:
    together no more than computing the whole batch twice."""

    def __init__(
        self,
        manager: TierManager,
        batch: Batch,
        new: Sequence[NewColumns],
        open_row: Callable[[Batch], AbstractContextManager[Compute]],
        chunk: Callable[[Batch], int],
    ) -> None:
        """Args:
        new: what the step appends: its slots are not taken.
        open_row: makes a cache over a batch of one row, for as long as the context lasts.
        chunk: the most columns that the next step of such a batch takes.
        """
        self._manager, self._batch, self._open_row = manager, batch, open_row
        self._placement, self._recomputable = manager.placement, manager.recomputable
        each = manager.block_tokens
        num_slots = sum(-(-(t.tail_tokens + n.num_tokens) // each) for t, n in zip(batch.tables, new, strict=True))
        self._max_kept = manager.num_gpu_slots - max(num_slots, 1)
        self._kept: deque[BlockId] = deque()
        self._lost: set[BlockId] = set()
        self._num_again = 0
        self._chunk, self._max_run = chunk, manager.num_gpu_slots
        """The most blocks that are computed in one step; fewer, once there was no room for so many."""

    # -- which blocks -------------------------------------------------------------------------------------------------

    def known(self) -> list[BlockId]:
        """Blocks of the batch that a promotion failed to read, or that were dropped, and that can be recomputed."""
        if not self._placement.unreadable:
            return []
        self._manager.seal(self._batch)  # as the step will: equal blocks become one before any of them is pinned
        held = dict.fromkeys(block for table in self._batch.tables for block in table.blocks)
        residency, unreadable = self._placement.residency, self._placement.unreadable
        lost = [block for block in held if block in unreadable and Tier.GPU not in residency[block].copies]
        return [block for block in lost if self._recomputable.obstacle(block) is None]

    # -- mending ------------------------------------------------------------------------------------------------------

    def mend(self, lost: Iterable[int], why: str) -> None:
        """Recompute these blocks, and those before them that turn out to be lost meanwhile, earliest first.

        Args:
            why: the message of the error that told of them.

        Raises:
            BlockLostError: one of them cannot be recomputed, is lost again and again, or there is no room to; says why.
            CapacityError, BudgetError: there is no room for blocks that were themselves dropped to make some.
            TransferTimeoutError: the device hangs.
            After each of them the batch holds the tokens that it held; blocks that were mended before stay so.
        """
        self._manager.enter(self._batch)  # it runs: none of its blocks is dropped to compute another one
        try:
            self._mend(lost, why)
        finally:
            self._manager.leave(self._batch)

    def _mend(self, lost: Iterable[int], why: str) -> None:
        wanted: dict[BlockId, str] = {}
        self._note(lost, why, wanted)
        while wanted:
            first = min(wanted, key=lambda block: self._placement.residency[block].index)
            cause = wanted[first]
            # Asked before: an attempt that fails half-way may have mended some of them.
            were_dropped = not any(self._placement.residency[block].copies for block in wanted)
            try:
                self.with_room(partial(self._recompute, first, wanted))
            except BlockLostError as error:
                # A block of the temporary row is gone with it: that is one more failure of the one that it was for.
                found, why = [block if self._is_held(block) else first for block in error.blocks], str(error)
            except (CapacityError, BudgetError, UnsupportedError) as error:
                if were_dropped and not isinstance(error, UnsupportedError):
                    raise  # nothing is broken: there is no room for it now
                raise BlockLostError(f"{cause}; recomputing it failed: {error}", (first,)) from error
            else:
                continue
            self._note(found, why, wanted)

    def _is_held(self, block: int) -> bool:
        record = self._placement.residency.get(BlockId(block))
        return record is not None and record.holders > 0

    def _note(self, lost: Iterable[int], why: str, wanted: dict[BlockId, str]) -> None:
        """Count losses; those for which no other copy is left are wanted."""
        placement, blocks = self._placement, [BlockId(block) for block in lost]
        if not blocks:
            raise BlockLostError(why)
        for block in blocks:
            self._num_again += block in self._lost
            self._lost.add(block)
            if self._num_again > self.MAX_AGAIN + len({b for table in self._batch.tables for b in table.blocks}):
                raise BlockLostError(
                    f"{why}; in this step, blocks that were recomputed were lost again {self._num_again} times: check "
                    "the disk",
                    (block,),
                )
            record = placement.residency[block]
            bad = record.fastest
            placement.settle(block)
            if block in wanted or record.fastest != bad:  # or a promotion has just read it
                continue
            if bad is not None and record.is_clean(bad):
                placement.drop_copy(block, bad)  # a slower tier has the bytes too: they are read from there
                placement.unreadable.discard(block)
                continue
            obstacle = self._recomputable.obstacle(block)
            if obstacle is not None:
                raise BlockLostError(f"{why}; it cannot be recomputed: {obstacle}", (block,))
            wanted[block] = why

    def with_room(self, act: Callable[[], object]) -> object:
        """What `act` returns. Should it find no room, it is tried again without the blocks that are kept."""
        try:
            return act()
        except CapacityError:
            if not self._kept:
                raise
        self.close()
        return act()

    def _recompute(self, block: BlockId, wanted: dict[BlockId, str]) -> None:
        """Mend `block` and wanted neighbours behind it; with layers that start over, all wanted blocks of its row."""
        table = self._recomputable.holder(block)
        if table is None:
            raise BlockLostError(f"{wanted[block]}; no conversation holds it", (block,))
        manager, num_tokens = self._manager, self._manager.block_tokens
        first = last = self._placement.residency[block].index
        # But for a tail of which another row holds more: it is that row's to mend.
        if self._recomputable.past is not Past.BLOCKS:
            mine = [each for each in wanted if self._recomputable.is_holder(table, each)]
            first, last = 0, max(self._placement.residency[each].index for each in mine)
        else:
            for each in table.blocks[first + 1 : first + self._max_run]:
                if each not in wanted or not self._recomputable.is_holder(table, each):
                    break
                last += 1
        row = manager.fork_row(table)  # other caches may be dropped meanwhile: this keeps the blocks
        whole = row.tables[0]
        past = manager.fork_row(table)
        try:
            manager.truncate(row, whole.column(self._recomputable.end(whole, last)))
            manager.enter(row)  # nor are they dropped to make room
            manager.truncate(past, whole.column(first * num_tokens))
            with self._open_row(past) as compute:
                index = first
                while index <= last:
                    index = self._advance(compute, whole, past, index, last, wanted)
        finally:
            manager.drop(past)
            manager.drop(row)

    def _advance(
        self, compute: Compute, whole: BlockTable, past: Batch, index: int, last: int, wanted: dict[BlockId, str]
    ) -> int:
        """Compute blocks from number `index` on, in one step if they are several; returns the number of the next."""
        count, held = self._run_length(whole, index, last, self._chunk(past)), past.length
        if count > 1:
            self._leave_slots(count)
        try:
            for span in whole.spans(index * whole.block_tokens, self._recomputable.end(whole, index + count - 1)):
                compute(span)
        except (CapacityError, BudgetError):
            if past.length > held or (count == 1 and not self._kept):
                raise
            if count > 1:
                self._max_run = count // 2
            else:
                self.close()
            return index
        past.origin = None  # it seals blocks that it did not compute: no label may come of that
        for each in range(index, index + count):
            self._put(whole.blocks[each], past.tables[0], each, wanted)
        return index + count

    def _run_length(self, whole: BlockTable, index: int, last: int, chunk: int) -> int:
        """How many blocks from number `index` to `last` one step computes: a second one might move or seal the first.

        A block that takes more than a step goes alone.
        """
        last = min(last, index + max(1, min(self._max_run, chunk // whole.block_tokens)) - 1)
        ends = [whole.column(self._recomputable.end(whole, each)) for each in range(index, last + 1)]
        start = index * whole.block_tokens
        span = next(whole.spans(start, self._recomputable.end(whole, last)))
        most = min(whole.column(start) + chunk, len(span.mask))
        return max(1, sum(end <= most for end in ends))

    def _put(self, block: BlockId, row: BlockTable, index: int, wanted: dict[BlockId, str]) -> None:
        """The block takes over what was computed, if it is wanted, and its place in the row.

        Raises BlockLostError, with nothing done, if what was computed is no longer on the gpu tier, or final.
        """
        placement, computed = self._placement, row.blocks[index]
        copies = placement.residency[block].copies
        if block in wanted or not copies:
            placement.settle(block)  # the last wait: what follows is done as a whole
            if Tier.GPU not in copies and not self._is_as_computed(computed):
                self._max_run = 1
                raise BlockLostError(f"block {block} was recomputed, and moved before it was handed over", (block,))
            if not copies:
                logger.info("a block that was dropped to make room was recomputed from its tokens")
            elif Tier.GPU not in copies:
                logger.warning("a block was recomputed from its tokens: %s", wanted[block])
            if Tier.GPU not in copies:  # else a promotion has read it after all
                # A row that was cropped into the block knew its first tokens only: it is not what its label says.
                sealed = placement.residency[block].sealed if index < row.num_full_blocks else None
                labels = placement.labels
                placement.hand_over(computed, block, None if labels is None else labels.reseal(sealed))
                placement.metrics.recomputed_blocks += 1
            wanted.pop(block, None)
            self._keep(block)
        self._manager.share(row, index, block)

    def _is_as_computed(self, block: BlockId) -> bool:
        record = self._placement.residency[block]
        return record.state is BlockState.OPEN and Tier.GPU in record.copies and record.move is None

    # -- what stays on the gpu tier -----------------------------------------------------------------------------------

    def _keep(self, block: BlockId) -> None:
        # Not a tail: the step replaces one that it had to copy. Full blocks it holds to its end.
        is_full = any(block in table.blocks[: table.num_full_blocks] for table in self._batch.tables)
        if self._max_kept < 1 or not is_full:
            return
        while len(self._kept) >= self._max_kept:
            self._placement.residency.unpin(self._kept.popleft(), Tier.GPU)
        self._placement.residency.pin(block, Tier.GPU)
        self._kept.append(block)

    def _leave_slots(self, num_slots: int) -> None:
        """Let go of the oldest that are kept, as far as they leave less than that many slots."""
        while self._kept and len(self._kept) > self._manager.num_gpu_slots - num_slots:
            self._placement.residency.unpin(self._kept.popleft(), Tier.GPU)

    def close(self) -> None:
        """Let go of the blocks that were kept on the gpu tier. Idempotent."""
        while self._kept:
            self._placement.residency.unpin(self._kept.popleft(), Tier.GPU)
