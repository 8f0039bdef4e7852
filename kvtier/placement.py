"""Moving blocks between tiers: making room, copying down and up, and committing what has arrived.

The tier manager's hands. It writes residency on the manager's behalf and touches no tensor: an engine does the moving.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from kvtier.errors import BlockLostError, CapacityError, IntegrityError, TransferTimeoutError
from kvtier.metrics import Metrics, SequenceMetrics
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

logger = logging.getLogger("kvtier")


@dataclass(frozen=True, slots=True)
class Watermark:
    """Used fractions of a tier: above `high_frac` demotion starts, it stops at `low_frac`."""

    high_frac: float
    low_frac: float


class _Evictable(Container[BlockId]):
    """Blocks that may leave a tier now, of running sequences or of idle ones."""

    def __init__(self, placement: Placement, tier: Tier, running: bool) -> None:
        self._residency = placement.residency
        self._running_blocks = placement.running_blocks
        self._tier = tier
        self._running = running

    def __contains__(self, block: object) -> bool:
        record = self._residency.get(block)  # type: ignore[arg-type]  # Container promises only `object`
        return (
            record is not None
            and self._tier in record.copies
            and record.move is None
            and not record.pins[self._tier]
            and (block in self._running_blocks) is self._running
        )


class _Guarded(EvictionPolicy):
    """A policy that may be a user's: what it raises is logged, once a method, and costs its advice, never a block."""

    def __init__(self, policy: EvictionPolicy, tier: Tier) -> None:
        self._policy, self._tier = policy, tier
        self._logged: set[str] = set()

    @contextmanager
    def _guard(self, method: str) -> Iterator[None]:
        try:
            yield
        except Exception:
            if method not in self._logged:
                self._logged.add(method)
                logger.exception("the %s eviction policy's %s raised; going on without it", self._tier.label, method)

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        with self._guard("inserted"):
            self._policy.inserted(block, sequence, index)

    def touched(self, blocks: Iterable[BlockId]) -> None:
        with self._guard("touched"):
            self._policy.touched(iter(blocks))  # not the block table's own list

    def removed(self, block: BlockId) -> None:
        with self._guard("removed"):
            self._policy.removed(block)

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        names: list[BlockId] = []
        with self._guard("victims"):
            names = list(dict.fromkeys(self._policy.victims(num_blocks, evictable)))[:num_blocks]
        return names


class Placement:
    """Slots, copies and moves of every block. One thread at a time.

    A tier that is absent has no pool. Every started move is in `moves` until its result has been committed.
    """

    # A lower tier that fails this many moves in one search for room is not going to take the next one either.
    MAX_FAILURES = 3

    def __init__(
        self,
        pools: Mapping[Tier, SlotPool],
        policies: Mapping[Tier, EvictionPolicy],
        engine: Engine,
        metrics: Metrics,
        *,
        block_bytes: int,
        watermarks: Mapping[Tier, Watermark],
        io_timeout_s: float,
    ) -> None:
        self.pools = dict(pools)
        self.policies = {tier: _Guarded(policy, tier) for tier, policy in policies.items()}
        self.engine = engine
        self.metrics = metrics
        self.block_bytes = block_bytes
        self.watermarks = dict(watermarks)
        self.io_timeout_s = io_timeout_s
        self.residency = ResidencyTable()
        self.running_blocks: set[BlockId] = set()
        self.sequence_metrics: dict[SequenceId, SequenceMetrics] = {}
        self.moves: dict[int, Move] = {}
        self.unreadable: set[BlockId] = set()
        """Blocks that a promotion failed to read: not tried again in the background. Reading them raises."""
        self._abandoned: set[int] = set()
        """Tail copies whose waiter gave up: their slot goes back when they end."""
        self._watched = -1
        self._watched_status = MoveStatus.DONE
        self._leaving: dict[Tier, int] = dict.fromkeys(Tier, 0)
        self._next_move = 0
        self._failures = 0
        self._last_error = ""
        self._oldest_first = False
        """Blocks that may go but that no policy names are given up too."""

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
        """A copy goes, and its slot is free."""
        self.pools[tier].give_back(self.residency.drop_copy(block, tier))
        self.policies[tier].removed(block)
        self._note_only_copies()

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

    # -- moves ------------------------------------------------------------------------------------------------------

    def start(self, block: BlockId, purpose: MovePurpose, source: Tier, dest: Tier, dest_slot: Slot) -> Move:
        """Queue a copy of `block` into a slot that was taken for it. O(1)."""
        record = self.residency[block]
        if record.move is not None:
            raise IntegrityError(f"block {block} is moving already")
        move = Move(self._next_move, block, purpose, source, record.copies[source], dest, dest_slot)
        self._next_move += 1
        record.move = move
        self.moves[move.move_id] = move
        if purpose is MovePurpose.DEMOTE:
            self._leaving[source] += 1
        self.engine.start([move])
        return move

    def commit_arrived(self) -> None:
        """Commit every move that has ended, without waiting."""
        for result in self.engine.finished():
            self._commit(result)

    def wait(self) -> None:
        """Wait for at least one result and commit what has arrived.

        Raises:
            TransferTimeoutError: nothing ended within `io_timeout_s`. The moves stay in flight and keep their slots.
        """
        started_s = time.monotonic()
        results = self.engine.wait(self.io_timeout_s)
        self.metrics.stall_s += time.monotonic() - started_s
        for result in results:
            self._commit(result)
        if not results:
            raise TransferTimeoutError(
                f"no transfer ended within {self.io_timeout_s:g} s ({len(self.moves)} in flight): the disk hangs "
                "or is overloaded; raise io_timeout_s or check it"
            )

    def settle(self, block: BlockId) -> None:
        """Wait until `block` has no move in flight. Raises as `wait`."""
        while (record := self.residency.get(block)) is not None and record.move is not None:
            self.wait()

    def _commit(self, result: MoveResult) -> None:
        move = self.moves.pop(result.move.move_id, None)
        if move is None:
            raise IntegrityError(f"a result arrived for move {result.move.move_id}, which is not in flight")
        if move.move_id == self._watched:
            self._watched_status = result.status
        record = self.residency[move.block]
        record.move = None
        if move.purpose is MovePurpose.DEMOTE:
            self._leaving[move.source] -= 1
        if result.status is MoveStatus.DONE:
            self.metrics.bytes_moved[(move.source, move.dest)] += self.block_bytes
            if move.source is Tier.NVME:
                self.metrics.nvme_sole_reads += len(record.copies) == 1
                if record.sequence in self.sequence_metrics:  # not when it was dropped and its block lives on, or moves
                    self.sequence_metrics[record.sequence].nvme_read_bytes += self.block_bytes
        else:
            self._note_failure(result)
        if record.holders == 0:  # released while it moved
            self.pools[move.dest].give_back(move.dest_slot)
            self._forget(move.block)
            return
        if result.status is not MoveStatus.DONE or move.move_id in self._abandoned:
            self._abandoned.discard(move.move_id)
            self.pools[move.dest].give_back(move.dest_slot)
        elif move.purpose is not MovePurpose.COPY_TAIL:
            self.add_copy(move.block, move.dest, move.dest_slot)
            if move.purpose is MovePurpose.DEMOTE and not record.pins[move.source]:
                self.drop_copy(move.block, move.source)

    def _note_failure(self, result: MoveResult) -> None:
        move = result.move
        self.metrics.moves_failed += 1
        self._failures += 1
        self._last_error = result.error
        if result.status is MoveStatus.NO_SPACE:
            pool = self.pools[move.dest]
            pool.lower_ceiling(result.available_slots)
            logger.warning(
                "the %s tier has room for %d blocks instead of %d (%s); going on with that",
                move.dest.label, pool.ceiling, pool.num_slots, result.error,
            )  # fmt: skip
        else:
            if move.dest < move.source:
                self.unreadable.add(move.block)
            logger.warning(
                "%s to %s of block %d failed: %s", move.source.label, move.dest.label, move.block, result.error
            )

    # -- room -------------------------------------------------------------------------------------------------------

    def lower(self, tier: Tier) -> Tier | None:
        """The next slower tier that exists."""
        return next((other for other in Tier if other > tier and other in self.pools), None)

    def leaving(self, tier: Tier) -> int:
        """Blocks that are being demoted from `tier` now."""
        return self._leaving[tier]

    def make_room(self, tier: Tier, num_slots: int) -> None:
        """Wait until `num_slots` slots of `tier` are free: evict clean copies, demote the rest.

        Raises:
            CapacityError: no tier takes a block. Logically nothing has changed.
            TransferTimeoutError: as `wait`.
        """
        pool = self.pools[tier]
        self._failures = 0
        while pool.num_free < num_slots:
            short = num_slots - pool.num_free - self._leaving[tier]
            if short > 0 and self._failures < self.MAX_FAILURES:
                self.give_up(tier, short)
                if not self.moves and pool.num_free < num_slots:
                    self._give_up_oldest(tier, num_slots - pool.num_free)
            if pool.num_free >= num_slots:
                return
            if not self.moves:
                raise CapacityError(self._no_room(tier, num_slots))
            self.wait()

    def _give_up_oldest(self, tier: Tier, num_slots: int) -> None:
        """The last resort before CapacityError: a policy that names too few blocks must not stop the house."""
        self._oldest_first = True
        try:
            self.give_up(tier, num_slots)
        finally:
            self._oldest_first = False

    def _no_room(self, tier: Tier, num_slots: int) -> str:
        state = ", ".join(
            f"{t.label} {pool.num_used}/{pool.ceiling} blocks ({self.residency_pins(t)} pinned)"
            for t, pool in self.pools.items()
        )
        cause = f"; last error: {self._last_error}" if self._failures else ""
        return (
            f"no tier takes another block: {num_slots} slots of {self.block_bytes} bytes are needed on {tier.label}; "
            f"{state}{cause}. Raise a tier's budget, close caches that are done with, or shorten the prompt"
        )

    def residency_pins(self, tier: Tier) -> int:
        """How many blocks are pinned to `tier`. O(blocks): for messages."""
        return sum(1 for block in self.residency.blocks() if self.residency[block].pins[tier])

    def give_up(self, tier: Tier, num_slots: int, *, idle_only: bool = False) -> int:
        """Evict or start demoting up to `num_slots` blocks of `tier`; returns how many. Does not wait.

        Copies that a faster tier has too go first, then blocks of idle sequences, then those of running ones.
        """
        done = 0
        for block in self._redundant(tier, num_slots):
            self.drop_copy(block, tier)
            done += 1
        for running in (False,) if idle_only else (False, True):
            for block in self._victims(tier, num_slots - done, running):
                if self.residency[block].is_clean(tier):
                    self.drop_copy(block, tier)
                elif (place := self._take_below(tier, num_slots - done, idle_only)) is not None:
                    self.start(block, MovePurpose.DEMOTE, tier, *place)
                else:
                    return done
                done += 1
        return done

    def _redundant(self, tier: Tier, num_blocks: int) -> list[BlockId]:
        records = ((block, self.residency[block]) for block in self.residency.redundant[tier])
        free = (block for block, record in records if record.move is None and not record.pins[tier])
        return list(islice(free, num_blocks))

    def _victims(self, tier: Tier, num_blocks: int, running: bool) -> list[BlockId]:
        if num_blocks < 1:
            return []
        evictable = _Evictable(self, tier, running)
        names = self.policies[tier].victims(num_blocks, evictable)
        good = [block for block in names if block in evictable]
        if len(good) != len(names):
            # A user's policy may be wrong; it must not be able to lose a block or to stop the house.
            logger.warning(
                "the %s eviction policy named blocks that may not go: %s", tier.label, set(names) - set(good)
            )
        if self._oldest_first and len(good) < num_blocks:
            unnamed = (block for block in self.residency.blocks() if block in evictable and block not in good)
            oldest = list(islice(unnamed, num_blocks - len(good)))
            if oldest:
                logger.warning(
                    "the %s eviction policy names too few blocks; giving up the oldest: %s", tier.label, oldest
                )
            good += oldest
        return good

    def _take_below(self, tier: Tier, num_wanted: int, idle_only: bool) -> tuple[Tier, Slot] | None:
        """A slot on the next slower tier that has one, or None; then something below was started or all is full."""
        below = self.lower(tier)
        while below is not None:
            pool = self.pools[below]
            slot = pool.take()
            if slot is None and self._leaving[below] < num_wanted:
                self.give_up(below, num_wanted - self._leaving[below], idle_only=idle_only)
                slot = pool.take()
            if slot is not None:
                return below, slot
            if self._leaving[below]:
                return None  # one will be free soon
            below = self.lower(below)
        return None

    def copy_now(self, block: BlockId, purpose: MovePurpose, dest_slot: Slot) -> None:
        """Copy `block` from its fastest tier into a taken gpu slot and wait. PROMOTE adds the copy, COPY_TAIL not.

        Raises:
            BlockLostError: the block could not be read; the slot has been given back.
            TransferTimeoutError: as `wait`; the slot stays with the move and is given back when it ends.
        """
        source = self.residency[block].fastest
        if source is None:
            self.pools[Tier.GPU].give_back(dest_slot)
            raise BlockLostError(f"block {block} has no copy on any tier")
        move = self.start(block, purpose, source, Tier.GPU, dest_slot)
        self._watched = move.move_id
        try:
            while move.move_id in self.moves:
                self.wait()
        except BaseException:
            if purpose is MovePurpose.COPY_TAIL:
                self._abandoned.add(move.move_id)
            raise
        if self._watched_status is not MoveStatus.DONE:
            raise BlockLostError(f"block {block} cannot be read from {source.label}: {self._last_error}")

    def check_integrity(self) -> None:
        """Raise IntegrityError unless slots, copies, moves and policies agree."""
        self.residency.check_integrity()
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
        for tier, pool in self.pools.items():
            pool.check_integrity()
            if pool.num_used != len(used[tier]):
                raise IntegrityError(f"{tier.label}: {pool.num_used} slots in use, {len(used[tier])} have an owner")
