"""The copies of every block and the moves between them: what the tier manager does to single blocks.

Writes residency on the manager's behalf and touches no tensor: an engine does the moving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvtier.breaker import Breaker, Clock, Regrowth
from kvtier.errors import BlockLostError, IntegrityError, TransferTimeoutError
from kvtier.labels import Labels
from kvtier.log import logger
from kvtier.metrics import Metrics, SequenceMetrics
from kvtier.policy import GuardedPolicy
from kvtier.residency import ResidencyTable
from kvtier.slots import SlotPool
from kvtier.types import (
    BlockId,
    Engine,
    EvictionPolicy,
    Move,
    MovePurpose,
    MoveResult,
    MoveStatus,
    SequenceId,
    Slot,
    Tier,
)
from kvtier.wear import WriteMeter


def _is_of_nvme(move: Move) -> bool:
    return Tier.NVME in (move.source, move.dest)


def _slots(move: Move) -> set[tuple[Tier, Slot]]:
    return {(move.source, move.source_slot), (move.dest, move.dest_slot)}


class Mover:
    """Slots, copies and moves of every block. One thread at a time.

    A tier that is absent has no pool. Every started move is in `moves` until its result has been committed: copy, check
    (by the store), commit, free.
    """

    def __init__(
        self,
        pools: Mapping[Tier, SlotPool],
        policies: Mapping[Tier, EvictionPolicy],
        engine: Engine,
        metrics: Metrics,
        *,
        block_bytes: int,
        io_timeout_s: float,
        labels: Labels | None = None,
        nvme_room: Callable[[], int] | None = None,
        nvme_writes: WriteMeter | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Args:
        labels: None where no block outlives the process.
        nvme_room: how many slots of the nvme tier, from 0, can be had now; None: what a full disk took stays gone.
        nvme_writes: what is written to the nvme tier; None: nobody counts it.
        """
        self.labels = labels
        self.pools = dict(pools)
        self.breakers: dict[Tier, Breaker] = {t: Breaker(t.label, clock) for t in pools if t is not Tier.GPU}
        """By destination of the moves down that they judge."""
        self._clock = clock
        self.regrowth: dict[Tier, Regrowth] = {}
        if nvme_room is not None and Tier.NVME in pools:
            self.regrowth[Tier.NVME] = Regrowth(Tier.NVME.label, pools[Tier.NVME], nvme_room, clock)
        self.writes = WriteMeter() if nvme_writes is None else nvme_writes
        self.policies = {tier: GuardedPolicy(policy, tier.label) for tier, policy in policies.items()}
        self.engine = engine
        self.metrics = metrics
        self.block_bytes = block_bytes
        self.io_timeout_s = io_timeout_s
        self.residency = ResidencyTable()
        self.running_blocks: set[BlockId] = set()
        self.sequence_metrics: dict[SequenceId, SequenceMetrics] = {}
        self.moves: dict[int, Move] = {}
        self.unreadable: set[BlockId] = set()
        """Blocks of which no copy can be read: a promotion failed to, or all were dropped to make room. Reading them
        raises; they are not tried again in the background, and computed again before the next step that needs them."""
        self.hung: dict[int, Move] = {}
        """Moves of the nvme tier that have passed their deadline and have not ended. Nobody waits for them, nor uses
        what comes of them; the slots that they read and write stay theirs."""
        self._held: set[tuple[Tier, Slot]] = set()
        """Those slots."""
        self._orphans: set[tuple[Tier, Slot]] = set()
        """Those of them that no block owns: they go back when the move has ended."""
        self._nvme_ended_s = 0.0
        """When a move of the nvme tier ended last, or the first of those in flight began."""
        self._abandoned: set[int] = set()
        """Tail copies whose waiter gave up: their slot goes back when they end."""
        self._outcomes: dict[int, MoveStatus | None] = {}
        """Moves that somebody waits for, and how those ended that have."""
        self._leaving: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._next_move = 0
        self._last_error = ""

    # -- copies -----------------------------------------------------------------------------------------------------

    def add_copy(self, block: BlockId, tier: Tier, slot: Slot) -> None:
        """A valid copy appears: residency and the tier's policy learn of it together."""
        self.residency.add_copy(block, tier, slot)
        record = self.residency[block]
        self.policies[tier].inserted(block, record.sequence, record.index)
        self._note_only_copies()

    def _note_only_copies(self) -> None:
        self.metrics.only_copy_peak_blocks = max(self.metrics.only_copy_peak_blocks, self.residency.num_only_nvme)

    def drop_copy(self, block: BlockId, tier: Tier) -> None:
        """A copy goes, and its slot is free, or once the move that hangs over it has ended."""
        slot = self.residency.drop_copy(block, tier)
        if (tier, slot) in self._held:
            self._orphans.add((tier, slot))
        else:
            self.pools[tier].give_back(slot)
        self.policies[tier].removed(block)
        self._note_only_copies()

    def hand_over(self, source: BlockId, block: BlockId) -> None:
        """The gpu copy of `source` becomes the only copy of `block`, which has the same tokens; `source` has none left.

        Neither may be pinned or moving. The block is no longer labelled: what it was proven of is another computation.
        """
        for tier in list(self.residency[block].copies):
            self.drop_copy(block, tier)
        slot = self.residency.drop_copy(source, Tier.GPU)
        self.policies[Tier.GPU].removed(source)
        self.add_copy(block, Tier.GPU, slot)
        self.residency[block].sealed = None
        self.unreadable.discard(block)

    def release(self, block: BlockId) -> None:
        """One holder fewer. Without holders the block goes, at once or when its move has ended."""
        record = self.residency[block]
        record.holders -= 1
        if record.holders < 0:
            raise IntegrityError(f"block {block} was released too often")
        if record.holders == 0:
            self.running_blocks.discard(block)
            if record.move is None:
                self._forget(block)

    def _forget(self, block: BlockId) -> None:
        for tier in list(self.residency[block].copies):
            self.drop_copy(block, tier)
        self.unreadable.discard(block)
        self.residency.delete(block)

    def takes(self, tier: Tier, *, early: bool = False) -> bool:
        """Whether a move down into `tier` may start now: it does not hang, is not out of use after failures, and its
        limit is not reached.

        `early`: the move is not needed yet.
        """
        return self.breakers[tier].allows and (tier is not Tier.NVME or self.writes.allows(early=early))

    def is_readable(self, tier: Tier) -> bool:
        """Whether what lies in `tier` may be read now: it does not hang."""
        return tier not in self.breakers or not self.breakers[tier].is_hanging

    def is_held(self, tier: Tier, slot: Slot) -> bool:
        """Whether a move that hangs may still read or write this slot: it must not change, nor be given up."""
        return (tier, slot) in self._held

    def num_held(self, tier: Tier) -> int:
        """Slots of `tier` that moves hold which hang."""
        return sum(each is tier for each, _ in self._held)

    def check_readable(self, blocks: Mapping[BlockId, int], tier: Tier) -> None:
        """Raise BlockLostError, naming all of these blocks of `tier`, if it hangs. They are given with their index."""
        if blocks and not self.is_readable(tier):
            raise BlockLostError(
                f"block {next(iter(blocks.values()))} cannot be read from {tier.label}: the tier hangs: "
                f"{self.breakers[tier].overdue_error}",
                tuple(blocks),
            )

    # -- moves ------------------------------------------------------------------------------------------------------

    def start(self, block: BlockId, purpose: MovePurpose, source: Tier, dest: Tier, dest_slot: Slot) -> Move:
        """Queue a copy of `block` into a slot that was taken for it. O(1), but for `Labels.label` towards nvme."""
        record = self.residency[block]
        if record.move is not None:
            raise IntegrityError(f"block {block} is moving already")
        label = self.labels.label(record.sealed) if self.labels is not None and dest is Tier.NVME else None
        move = Move(self._next_move, block, purpose, source, record.copies[source], dest, dest_slot, label)
        self._next_move += 1
        record.move = move
        self.moves[move.move_id] = move
        if purpose is MovePurpose.DEMOTE:
            self._leaving[source] += 1
        if source < dest:
            self.breakers[dest].started(move.move_id)
        if _is_of_nvme(move) and not any(_is_of_nvme(each) for each in self.moves.values() if each is not move):
            self._nvme_ended_s = self._clock()
        if dest is Tier.NVME:
            self.writes.begin()
        self.engine.start([move])
        return move

    def commit_arrived(self) -> None:
        """Commit every move that has ended, without waiting."""
        for result in self.engine.finished():
            self._commit(result)
        for breaker in self.breakers.values():
            breaker.look()
        if not self.is_readable(Tier.NVME) or self._clock() - self._nvme_ended_s >= self.io_timeout_s:
            self._pass_deadline()

    def wait(self) -> None:
        """Wait for at least one result and commit what has arrived.

        If none has within `io_timeout_s`, or the tier hangs already, moves of the nvme tier are in `moves` no longer:
        they hang, and their blocks are where they were.

        Raises:
            TransferTimeoutError: nothing ended in twice that time, and no move is of the nvme tier. The moves keep
                their slots.
        """
        if not self.is_readable(Tier.NVME) and self._pass_deadline():
            return
        started_s = time.monotonic()
        results = self.engine.wait(self.io_timeout_s)
        has_nvme = any(_is_of_nvme(move) for move in self.moves.values())
        if not results and not has_nvme:  # memory does not hang: it is busy, or the process was stopped meanwhile
            results = self.engine.wait(self.io_timeout_s)
        self.metrics.stall_s += time.monotonic() - started_s
        for result in results:
            self._commit(result)
        if not results and not self._pass_deadline():
            raise TransferTimeoutError(
                f"no transfer within memory ended in {2 * self.io_timeout_s:g} s ({len(self.moves)} in flight): the "
                "machine is overloaded or swaps; raise io_timeout_s, or lower the budgets"
            )

    def settle(self, block: BlockId) -> None:
        """Wait until `block` has no move in flight. Raises as `wait`."""
        while (record := self.residency.get(block)) is not None and record.move is not None:
            self.wait()

    def _pass_deadline(self) -> bool:
        """Wait no longer for moves of the nvme tier, and start no others until they have ended; whether there were any.

        Those that have not begun are taken back.
        """
        late = [move for move in self.moves.values() if _is_of_nvme(move)]
        for result in self.engine.withdraw([move.move_id for move in late]):
            self._commit(result)
        error = f"a transfer took longer than io_timeout_s ({self.io_timeout_s:g} s)"
        for move in late:
            if self.moves.pop(move.move_id, None) is not None:
                self.hung[move.move_id] = move
                self._held.update(_slots(move))
                self._orphans.add((move.dest, move.dest_slot))
                self._let_go(move)
                self.breakers[Tier.NVME].overdue(move.move_id, error)
        if late:
            self._last_error = error
            self.breakers[Tier.NVME].look()
        return bool(late)

    def _let_go(self, move: Move) -> None:
        """The block is no longer part of the move, which hangs."""
        record = self.residency[move.block]
        record.move = None
        if move.purpose is MovePurpose.DEMOTE:
            self._leaving[move.source] -= 1
        if move.source < move.dest:
            self.breakers[move.dest].undecided(move.move_id)
        self._abandoned.discard(move.move_id)
        if record.holders == 0:
            self._forget(move.block)

    def _end_hung(self, result: MoveResult) -> None:
        """A move that hung is over. Its slots are free, but for a source that its block still has."""
        move = result.move
        if move.dest is Tier.NVME:
            self.writes.end()
        self._held = {slot for other in self.hung.values() for slot in _slots(other)}
        if result.status is MoveStatus.DONE:
            self.metrics.bytes_moved[(move.source, move.dest)] += self.block_bytes
        elif move.source < move.dest:
            self._note_failure(result)
        else:
            self.metrics.moves_failed += 1
        for tier, slot in self._orphans - self._held:
            self._orphans.discard((tier, slot))
            if (tier, slot) == (move.dest, move.dest_slot):
                self._put_back(result)
            else:
                self.pools[tier].give_back(slot)
        self.breakers[Tier.NVME].ended(move.move_id)

    def _commit(self, result: MoveResult) -> None:
        if self.hung.pop(result.move.move_id, None) is not None:
            self._end_hung(result)
            return
        move = self.moves.pop(result.move.move_id, None)
        if move is None:
            raise IntegrityError(f"a result arrived for move {result.move.move_id}, which is not in flight")
        if move.move_id in self._outcomes:
            self._outcomes[move.move_id] = result.status
        if move.dest is Tier.NVME:
            self.writes.end()
        record = self.residency[move.block]
        record.move = None
        if _is_of_nvme(move):
            self._nvme_ended_s = self._clock()
        if move.purpose is MovePurpose.DEMOTE:
            self._leaving[move.source] -= 1
        if result.status is MoveStatus.DONE:
            self.metrics.bytes_moved[(move.source, move.dest)] += self.block_bytes
            if move.source < move.dest:
                self.breakers[move.dest].succeeded()
            if move.dest in self.regrowth:
                self.regrowth[move.dest].written(move.dest_slot)
            if move.source is Tier.NVME:
                self.metrics.nvme_sole_reads += len(record.copies) == 1
                if record.sequence in self.sequence_metrics:  # not when it was dropped and its block lives on, or moves
                    self.sequence_metrics[record.sequence].nvme_read_bytes += self.block_bytes
        elif result.status is not MoveStatus.WITHDRAWN:
            self._note_failure(result)
        elif move.source < move.dest:
            self.breakers[move.dest].undecided(move.move_id)
        abandoned = move.move_id in self._abandoned
        self._abandoned.discard(move.move_id)
        if record.holders == 0:  # released while it moved
            self._put_back(result)
            self._forget(move.block)
            return
        if result.status is not MoveStatus.DONE or abandoned:
            self._put_back(result)
        elif move.purpose is not MovePurpose.COPY_TAIL:
            self.add_copy(move.block, move.dest, move.dest_slot)
            if move.purpose is MovePurpose.DEMOTE and not record.pins[move.source]:
                self.drop_copy(move.block, move.source)

    def _put_back(self, result: MoveResult) -> None:
        """The destination's slot is not needed, or not to be had."""
        pool, slot = self.pools[result.move.dest], result.move.dest_slot
        if result.status is MoveStatus.NO_SPACE and result.retires_slot:
            pool.retire(slot)
        else:
            pool.give_back(slot)

    def _note_failure(self, result: MoveResult) -> None:
        move = result.move
        self.metrics.moves_failed += 1
        self._last_error = result.error
        if result.status is MoveStatus.NO_SPACE:
            self._note_no_space(result)
        elif move.source < move.dest:  # the block stays where it is: nothing to warn of before the tier rests
            logger.info("%s to %s of block %d failed: %s", move.source.label, move.dest.label, move.block, result.error)
            self.breakers[move.dest].failed(move.move_id, result.error)
        else:
            if move.dest < move.source:
                self.unreadable.add(move.block)
            logger.warning(
                "%s to %s of block %d failed: %s", move.source.label, move.dest.label, move.block, result.error
            )

    def _note_no_space(self, result: MoveResult) -> None:
        move, pool = result.move, self.pools[result.move.dest]
        before = pool.ceiling
        pool.lower_ceiling(result.available_slots)
        if move.source < move.dest:
            # A file system that allocates anew at each write: the slot has backing and would be tried again.
            if move.dest_slot < pool.ceiling and not result.retires_slot:
                self.breakers[move.dest].failed(move.move_id, result.error)
            else:
                self.breakers[move.dest].undecided(move.move_id)
        if pool.ceiling == before and not result.retires_slot:
            return
        growth = self.regrowth.get(move.dest)
        if growth is not None and not growth.lowered():
            logger.info(
                "the %s tier has room for %d blocks after all (%s)", move.dest.label, pool.ceiling, result.error
            )
            return
        logger.warning(
            "the %s tier has room for %d blocks instead of %d (%s); going on with that",
            move.dest.label, pool.ceiling - result.retires_slot, pool.num_slots, result.error,
        )  # fmt: skip

    def copy_now(self, block: BlockId, purpose: MovePurpose, dest_slot: Slot) -> None:
        """Copy `block` from its fastest tier into a taken gpu slot and wait. PROMOTE adds the copy, COPY_TAIL not.

        Raises:
            BlockLostError: the block could not be read; the slot has been given back, or is when the move has ended.
            TransferTimeoutError: as `wait`; the slot stays with the move and is given back when it ends.
        """
        record = self.residency[block]
        source = record.fastest
        if source is None or not self.is_readable(source):
            self.pools[Tier.GPU].give_back(dest_slot)
            if source is not None:
                self.check_readable({block: record.index}, source)
            raise BlockLostError(f"block {block} was dropped to make room", (block,))
        move = self.start(block, purpose, source, Tier.GPU, dest_slot)
        self._outcomes[move.move_id] = None
        try:
            while move.move_id in self.moves:
                self.wait()
        except BaseException:  # a Ctrl-C too: the slot must have an owner
            if purpose is MovePurpose.COPY_TAIL and move.move_id in self.moves:
                self._abandoned.add(move.move_id)
            elif purpose is MovePurpose.COPY_TAIL and self._outcomes[move.move_id] is MoveStatus.DONE:
                self.pools[Tier.GPU].give_back(dest_slot)  # interrupted just behind the commit: nobody will own it
            raise
        finally:
            outcome = self._outcomes.pop(move.move_id)
        if outcome is not MoveStatus.DONE:
            raise BlockLostError(f"block {block} cannot be read from {source.label}: {self._last_error}", (block,))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, copies, moves and policies agree."""
        self.residency.check_integrity()
        used: dict[Tier, set[Slot]] = {tier: set() for tier in self.pools}
        if self._held != {slot for move in self.hung.values() for slot in _slots(move)} or self._orphans - self._held:
            raise IntegrityError("slots are held for other moves than those that hang")
        for block in self.residency.blocks():
            record = self.residency[block]
            if not record.copies and record.move is None and block not in self.unreadable:
                raise IntegrityError(f"block {block} has no copy and none in flight, and was not dropped")
            for tier, slot in record.copies.items():
                used[tier].add(slot)
        if any(self.residency.get(block) is None for block in self.unreadable):
            raise IntegrityError("a dead block is listed as unreadable")
        for move in self.moves.values():
            record = self.residency[move.block]
            if record.move is not move:
                raise IntegrityError(f"block {move.block} has two transfers")
            if move.dest_slot in used[move.dest]:
                raise IntegrityError(f"{move.dest.label} slot {move.dest_slot} is both owned and a destination")
            used[move.dest].add(move.dest_slot)
        for tier, slot in self._orphans:
            if slot in used[tier]:
                raise IntegrityError(f"{tier.label} slot {slot} has an owner, and a move that hangs has it alone")
            used[tier].add(slot)
        for tier, slot in self._held:
            if slot not in used[tier]:
                raise IntegrityError(f"{tier.label} slot {slot} is free, and a move that hangs uses it")
        for tier, pool in self.pools.items():
            pool.check_integrity()
            if pool.num_used != len(used[tier]):
                raise IntegrityError(f"{tier.label}: {pool.num_used} slots in use, {len(used[tier])} have an owner")
