"""The moves between the copies of blocks: what the tier manager does to single blocks.

Touches no tensor: an engine does the moving.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvtier.breaker import Clock
from kvtier.errors import BlockLostError, IntegrityError, TransferTimeoutError
from kvtier.labels import Labels
from kvtier.metrics import Metrics, SequenceMetrics, Stall
from kvtier.origin import Sealed
from kvtier.residency import BlockRecord
from kvtier.slots import SlotPool
from kvtier.tier_use import TierUse
from kvtier.types import (
    COPY_TAIL,
    DEMOTE,
    GPU,
    MOVE_DONE,
    NVME,
    BlockId,
    Engine,
    EvictionPolicy,
    Move,
    MovePurpose,
    MoveResult,
    MoveStatus,
    SequenceId,
    Slot,
    SlotLabel,
    Tier,
)
from kvtier.wear import WriteMeter


def _is_of_nvme(move: Move) -> bool:
    return NVME in (move.source, move.dest)


class Mover(TierUse):
    """Copies, and the moves that make them. One thread at a time.

    Every started move is in `moves` until its result has been committed: copy, check (by the store), commit, free; or
    until it has passed its deadline, and then in `hung`.
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
        nvme_room, nvme_writes: as `TierUse`.
        """
        super().__init__(pools, policies, metrics, nvme_room, nvme_writes, clock)
        self.labels = labels
        self.engine = engine
        self.block_bytes = block_bytes
        self.io_timeout_s = io_timeout_s
        self.sequence_metrics: dict[SequenceId, SequenceMetrics] = {}
        self.moves: dict[int, Move] = {}
        self._nvme_ended_s = 0.0
        """When a move of the nvme tier ended last, or the first of those in flight began."""
        self._abandoned: set[int] = set()
        """Tail copies whose waiter gave up: their slot goes back when they end."""
        self._outcomes: dict[int, MoveStatus | None] = {}
        """Moves that somebody waits for, and how those ended that have."""
        self._leaving: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self.num_started = 0
        """Moves so far."""

    # -- moves ------------------------------------------------------------------------------------------------------

    def start(
        self, block: BlockId, purpose: MovePurpose, source: Tier, dest: Tier, dest_slot: Slot, as_: Sealed | None = None
    ) -> Move:
        """Queue a copy of `block` into a slot that was taken for it. O(1), but for `Labels.label` towards nvme.

        `as_`: what a tail is labelled with, as it is now.
        """
        record = self.residency.records[block]
        if record.move is not None:
            raise IntegrityError(f"block {block} is moving already")
        source_slot, label = record.slot(source), None
        if source_slot is None:
            raise IntegrityError(f"block {block} has no copy on {source.label} to be moved")
        if dest is NVME:
            # What only has to leave is not worth waiting for a hash of the model: it may be labelled where it lies.
            waits = purpose is not DEMOTE or self.label_slot is None
            label = self.label_of(record.sealed if as_ is None else as_, waits=waits)
        move_id = self.num_started
        move = Move(move_id, block, purpose, source, source_slot, dest, dest_slot, label)
        if (source is NVME or dest is NVME) and not any(map(_is_of_nvme, self.moves.values())):
            self._nvme_ended_s = self._clock()
        self.num_started += 1
        record.move = move
        self.moves[move_id] = move
        if purpose is DEMOTE:
            self._leaving[source] += 1
        if source < dest:
            self.breakers[dest].started(move_id)
        if dest is NVME:
            self.writes.begin()
        self.engine.start([move])
        return move

    def label_of(self, sealed: Sealed | None, *, waits: bool = True) -> SlotLabel | None:
        """The label that a block is written under now; None: it cannot be found later.

        As `Labels.label`; as `Labels.label_if_proven` unless it `waits`.
        """
        if sealed is None or self.labels is None:
            return None
        if self.quota is not None:
            moves = (*self.moves.values(), *self.hung.moves.values())
            labels = [move.label for move in moves if move.label is not None]
            num_writing = sum(label.namespace == sealed.label.namespace for label in labels)
            if not self.quota.admits_file(self, sealed, num_writing):
                return None
        return self.labels.label(sealed) if waits else self.labels.label_if_proven(sealed)

    def commit_arrived(self) -> None:
        """Commit every move that has ended, without waiting."""
        for result in self.engine.finished():
            self._commit(result)
        for breaker in self.breakers.values():
            if breaker.overdue_calls or breaker.is_hanging:
                breaker.look()
        if self.moves and (not self.is_readable(NVME) or self._clock() - self._nvme_ended_s >= self.io_timeout_s):
            self._pass_deadline()

    def wait(self, cause: Stall = Stall.OTHER) -> None:
        """Wait for at least one result and commit what has arrived. `cause`: what for.

        If none has within `io_timeout_s`, or the tier hangs already, moves of the nvme tier are in `moves` no longer:
        they hang, and their blocks are where they were.

        Raises:
            TransferTimeoutError: nothing ended in twice that time, and no move is of the nvme tier. The moves keep
                their slots.
        """
        if not self.is_readable(NVME) and self._pass_deadline():
            return
        started_s = time.monotonic()
        results = self.engine.wait(self.io_timeout_s)
        has_nvme = any(_is_of_nvme(move) for move in self.moves.values())
        if not results and not has_nvme:  # memory does not hang: it is busy, or the process was stopped meanwhile
            results = self.engine.wait(self.io_timeout_s)
        self.metrics.stalls[cause] += time.monotonic() - started_s
        for result in results:
            self._commit(result)
        if not results and not self._pass_deadline():
            raise TransferTimeoutError(
                f"no transfer within memory ended in {2 * self.io_timeout_s:g} s ({len(self.moves)} in flight): the "
                "machine is overloaded or swaps; raise io_timeout_s, or lower the budgets"
            )

    def settle(self, block: BlockId, cause: Stall = Stall.OTHER) -> None:
        """Wait until `block` has no move in flight. As `wait`."""
        while (record := self.residency.get(block)) is not None and record.move is not None:
            self.wait(cause)

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
                self.hung.add(move)
                self._let_go(move)
                self.breakers[NVME].overdue(move.move_id, error)
        if late:
            self._last_error = error
            self.breakers[NVME].look()
        return bool(late)

    def _let_go(self, move: Move) -> None:
        """The block is no longer part of the move, which hangs."""
        record = self.residency[move.block]
        record.move = None
        if move.purpose is DEMOTE:
            self._leaving[move.source] -= 1
        if move.source < move.dest:
            self.breakers[move.dest].undecided(move.move_id)
        self._abandoned.discard(move.move_id)
        if record.holders == 0:
            self._forget(move.block)

    def _end_hung(self, result: MoveResult) -> None:
        """A move that hung is over. Its slots are free, but for a source that its block still has."""
        move = result.move
        if move.move_id not in self.hung.moves:
            raise IntegrityError(f"a result arrived for move {move.move_id}, which is not in flight")
        if move.dest is NVME:
            self.writes.end()
        if result.status is MOVE_DONE:
            self.metrics.bytes_moved[(move.source, move.dest)] += self.block_bytes
        elif move.source < move.dest:
            self._note_failure(result)
        else:
            self.metrics.moves_failed += 1
        for tier, slot in self.hung.remove(move):
            if (tier, slot) == (move.dest, move.dest_slot):
                self._put_back(result)
            else:
                self.pools[tier].give_back(slot)
        self.breakers[NVME].ended(move.move_id)

    def _commit(self, result: MoveResult) -> None:
        move_id, is_done = result.move.move_id, result.status is MOVE_DONE
        move = self.moves.pop(move_id, None)
        if move is None:
            self._end_hung(result)
            return
        block, purpose, source, dest = move.block, move.purpose, move.source, move.dest
        if move_id in self._outcomes:
            self._outcomes[move_id] = result.status
        record = self.residency.records[block]
        record.move = None
        is_demotion = purpose is DEMOTE
        if is_demotion:
            self._leaving[source] -= 1
        if source is NVME or dest is NVME:
            self._note_of_nvme(move, record, is_done)
        if is_done:
            self.metrics.bytes_moved[(source, dest)] += self.block_bytes
            if source < dest:
                self.breakers[dest].succeeded()
        elif result.status is not MoveStatus.WITHDRAWN:
            self._note_failure(result)
        elif source < dest:
            self.breakers[dest].undecided(move_id)
        if not is_done or record.holders == 0 or move_id in self._abandoned:  # nobody wants what came of it
            self._abandoned.discard(move_id)
            self._put_back(result)
            if record.holders == 0:  # released while it moved
                self._forget(block)
        elif purpose is not COPY_TAIL:
            self.add_copy(block, dest, move.dest_slot)
            self.unreadable.discard(block)  # it could be read after all
            if move.label is not None:
                self.note_labelled(block)
            elif dest is NVME and self.label_slot is not None:
                self.note_unlabelled(block)
            if is_demotion and not record.pins[source]:
                self.drop_copy(block, source)

    def _note_of_nvme(self, move: Move, record: BlockRecord, is_done: bool) -> None:
        """A move from or to the nvme tier has ended; its block's copies are as they were."""
        self._nvme_ended_s = self._clock()
        if move.dest is NVME:
            self.writes.end()
        if not is_done:
            return
        if move.dest is NVME:
            if NVME in self.regrowth:
                self.regrowth[NVME].written(move.dest_slot)
            self.bare.pop(move.dest_slot, None)
            if move.label is None and record.sealed is not None:
                self.bare[move.dest_slot] = record.sealed.label
        else:
            self.metrics.nvme_sole_reads += record.fastest is NVME
            if record.sequence in self.sequence_metrics:  # not when it was dropped and its block lives on, or moves
                self.sequence_metrics[record.sequence].nvme_read_bytes += self.block_bytes

    def copy_now(self, block: BlockId, purpose: MovePurpose, dest_slot: Slot) -> None:
        """Copy `block` from its fastest tier into a taken gpu slot and wait. PROMOTE adds the copy, COPY_TAIL not.

        Raises:
            BlockLostError: the block could not be read; the slot has been given back, or is when the move has ended.
            TransferTimeoutError: as `wait`; the slot stays with the move and is given back when it ends.
        """
        record = self.residency[block]
        source = record.fastest
        if source is None or not self.is_readable(source):
            self.pools[GPU].give_back(dest_slot)
            if source is not None:
                self.check_readable({block: record.index}, source)
            raise BlockLostError(f"block {block} was dropped to make room", (block,))
        move = self.start(block, purpose, source, GPU, dest_slot)
        self._outcomes[move.move_id] = None
        try:
            while move.move_id in self.moves:
                self.wait(Stall.TAIL)
        except BaseException:  # a Ctrl-C too: the slot must have an owner
            if purpose is COPY_TAIL and move.move_id in self.moves:
                self._abandoned.add(move.move_id)
            elif purpose is COPY_TAIL and self._outcomes[move.move_id] is MOVE_DONE:
                self.pools[GPU].give_back(dest_slot)  # interrupted just behind the commit: nobody will own it
            raise
        finally:
            outcome = self._outcomes.pop(move.move_id)
        if outcome is not MOVE_DONE:
            raise BlockLostError(f"block {block} cannot be read from {source.label}: {self._last_error}", (block,))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, copies, moves and policies agree."""
        super().check_integrity()
        used: dict[Tier, set[Slot]] = {tier: set() for tier in self.pools}
        for block in self.residency.blocks():
            for tier, slot in self.residency[block].copies.items():
                used[tier].add(slot)
        for move in self.moves.values():
            record = self.residency[move.block]
            if record.move is not move:
                raise IntegrityError(f"block {move.block} has two transfers")
            if move.dest_slot in used[move.dest]:
                raise IntegrityError(f"{move.dest.label} slot {move.dest_slot} is both owned and a destination")
            used[move.dest].add(move.dest_slot)
        self.hung.claim(used)
        if self.reserved:
            if self.reserved & used[NVME]:
                raise IntegrityError("a slot of the nvme tier is reserved, and a block lies in it")
            used[NVME] |= self.reserved
        for tier, pool in self.pools.items():
            pool.check_integrity()
            if pool.num_used != len(used[tier]):
                raise IntegrityError(f"{tier.label}: {pool.num_used} slots in use, {len(used[tier])} have an owner")
