"""Making room: which blocks of a tier are evicted or demoted, and where to."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise

from kvtier.breaker import Clock
from kvtier.errors import CapacityError
from kvtier.evictable import Cached, CachedLeaf, Droppable, Evictable
from kvtier.labels import Labels
from kvtier.log import logger
from kvtier.metrics import Metrics, Stall
from kvtier.prefix import Miss
from kvtier.size import size_and_bytes
from kvtier.slots import SlotPool
from kvtier.types import DEMOTE, NVME, BlockId, Engine, EvictionPolicy, Slot, Tier
from kvtier.victims import Victims
from kvtier.wear import WriteMeter


@dataclass(frozen=True, slots=True)
class Watermark:
    """Used fractions of a tier: above `high_frac` demotion starts, it stops at `low_frac`."""

    high_frac: float
    low_frac: float


class Placement(Victims):
    """Room on every tier: copies that are not needed go first, then blocks of idle sequences, then of running ones.

    When no tier takes a block, cached ones go, the last of each prefix first; then idle blocks that can be computed
    again are dropped.
    """

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
        labels: Labels | None = None,
        nvme_room: Callable[[], int] | None = None,
        nvme_writes: WriteMeter | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        super().__init__(
            pools, policies, engine, metrics, block_bytes=block_bytes, io_timeout_s=io_timeout_s, labels=labels,
            nvme_room=nvme_room, nvme_writes=nvme_writes, clock=clock,
        )  # fmt: skip
        self.watermarks = dict(watermarks)
        self.droppable: Callable[[], Container[BlockId]] | None = None
        """The blocks that the model could compute again, as it is now. None: lost blocks are never computed again."""
        tiers = sorted(self.pools)
        self._lower = dict(pairwise(tiers))

    def lower(self, tier: Tier) -> Tier | None:
        """The next slower tier that exists."""
        return self._lower.get(tier)

    def leaving(self, tier: Tier) -> int:
        """Blocks that are being demoted from `tier` now."""
        return self._leaving[tier]

    def make_room(self, tier: Tier, num_slots: int) -> None:
        """Wait until `num_slots` slots of `tier` are free: evict clean copies, demote the rest; then evict cached
        blocks, and last, drop idle ones.

        A lower tier that is out of use takes nothing: then this fails at once, and does not wait for the tier.

        Raises:
            CapacityError: no tier takes a block, and idle blocks that can be computed again are too few. Logically
                nothing has changed.
            TransferTimeoutError: as `wait`.
        """
        pool = self.pools[tier]
        self._last_error = ""
        while pool.num_free < num_slots:
            short = num_slots - pool.num_free - self._leaving[tier]
            if short > 0:
                self.give_up(tier, short)
                if not self.moves and pool.num_free < num_slots:
                    self._give_up_oldest(tier, num_slots - pool.num_free)
            if pool.num_free >= num_slots:
                return
            if self.moves:
                self.wait(Stall.ROOM)
            elif not self._evict_cached(tier, num_slots - pool.num_free) and not self._drop_idle(
                tier, num_slots - pool.num_free
            ):
                raise CapacityError(self._no_room(tier, num_slots))

    def _give_up_oldest(self, tier: Tier, num_slots: int) -> None:
        """The last resort before CapacityError: a policy that names too few blocks must not stop the house."""
        # `give_up` stops at a block that has no place; a clean one behind it needs none.
        for running in (False, True):
            num_slots -= self._drop_clean(tier, num_slots, running, self._is_clean)
        if num_slots:
            self._oldest_first = True
            try:
                num_slots -= self.give_up(tier, num_slots)
            finally:
                self._oldest_first = False
        # The tier below hangs: they are read when it answers again, or recomputed.
        self._drop_clean(tier, num_slots, False, lambda block, tier: self.residency[block].is_clean(tier))

    def _drop_clean(self, tier: Tier, num_slots: int, running: bool, is_clean: Callable[[BlockId, Tier], bool]) -> int:
        evictable = Evictable(self, tier, running)
        if num_slots < 1 or not evictable.most:
            return 0
        # What is clean on this tier is redundant on a slower one: these are few where most blocks have one copy.
        listed = (block for slower in Tier if slower > tier for block in self.residency.redundant[slower])
        clean = dict.fromkeys(block for block in listed if block in evictable and is_clean(block, tier))
        for block in list(clean)[:num_slots]:
            self.drop_copy(block, tier)
        return min(num_slots, len(clean))

    def _evict_cached(self, tier: Tier, num_slots: int) -> bool:
        """Evict up to that many cached blocks, the slowest tier's first; whether any went, and it will help.

        A block that goes further down makes room for one of this tier.
        """
        if not len(self.prefixes) and not self.kept:
            return False
        below = [other for other in self.pools if other > tier and self.takes(other)]
        if below and not self._has_evictable(tier):
            below = []
        done = 0
        for other in [*sorted(below, reverse=True), tier]:
            done += self.evict_cached(other, num_slots - done)
            if other is NVME:
                done += self._give_up_kept(num_slots - done)
        if not done:
            for other in [*sorted(below, reverse=True), tier]:
                done += self._evict_last(other, num_slots - done)
        return done > 0

    def _evict_last(self, tier: Tier, num_blocks: int) -> int:
        """As `evict_cached`, of blocks that others continue which cannot go, or that the policy does not name.

        Those furthest from the beginning of their prefix first. O(cached blocks).
        """
        cached = Cached(self, tier)
        found = [block for block in self.prefixes.blocks() if block in cached] if cached.most else []
        found.sort(key=lambda block: self.residency[block].index, reverse=True)
        for block in found[:num_blocks]:
            self.unindex(block, Miss.EVICTED)
        return len(found[:num_blocks])

    def _give_up_kept(self, num_blocks: int) -> int:
        """Drop copies in files of blocks that faster tiers have too, oldest first; returns how many."""
        free = (
            block
            for block in self.kept
            if block not in self.pinned
            and (record := self.residency[block]).is_redundant(NVME)
            and self._is_free(record, NVME)
        )
        gone = list(islice(free, max(0, num_blocks)))
        for block in gone:
            self.drop_copy(block, NVME)
        return len(gone)

    def evict_cached(self, tier: Tier, num_blocks: int) -> int:
        """Give up to that many cached blocks of `tier` up, with all their copies; returns how many.

        In the policy's order, but each after those that continue it.
        """
        done = 0
        while done < num_blocks:
            leaves = self._victims(tier, num_blocks - done, CachedLeaf(self, tier))
            for block in leaves:
                self.unindex(block, Miss.EVICTED)
            if not leaves:
                break
            done += len(leaves)
        return done

    def evict_below(self, tier: Tier, most: int, *, idle_only: bool = False) -> None:
        """Where every tier below is full, give up cached blocks of the slowest, so that demotion need not wait later.

        Up to `most` of its slots are then free, for as many blocks of `tier` as may leave it. Arguments: as `give_up`.
        """
        below = [other for other in self.pools if other > tier and self.takes(other, early=True)]
        if not below or any(self.pools[other].num_free or self._leaving[other] for other in below):
            return
        views = [Evictable(self, tier, running) for running in ((False,) if idle_only else (False, True))]
        self.evict_cached(max(below), sum(len(self._victims(tier, most, view)) for view in views))

    def _drop_idle(self, tier: Tier, num_slots: int) -> bool:
        """Drop that many idle blocks, so that as many slots of `tier` can be had. False, and nothing done: too few.

        Those of the slowest tier first, into whose slots blocks of `tier` can then be demoted.
        """
        if self.droppable is None:
            return False
        recomputable = self.droppable()
        self._oldest_first = True
        try:
            # A block that is dropped further down helps only where one of this tier may go.
            may_go = sum(len(self._victims(tier, num_slots, Evictable(self, tier, each))) for each in (False, True))
            below = [other for other in self.pools if other > tier and self.takes(other)]
            found: dict[BlockId, None] = {}
            for other in [*sorted(below, reverse=True), tier]:
                droppable = Droppable(self, other, recomputable)
                found |= dict.fromkeys(self._victims(other, num_slots - len(found), droppable))
        finally:
            self._oldest_first = False
        if min(may_go, len(found)) < num_slots:
            return False
        for block in found:
            self.drop(block)
        logger.warning(
            "no tier takes another block: %d blocks of idle conversations were dropped, and will be recomputed from "
            "their tokens when those go on. Raise a tier's budget, or drop or reset() caches that are done with",
            len(found),
        )
        return True

    def drop(self, block: BlockId) -> None:
        """The block's copies go, all of them: it must be computed again before it is read."""
        for tier in list(self.residency[block].copies):
            self.drop_copy(block, tier)
        self.unreadable.add(block)
        self.unindex(block, Miss.EVICTED)
        self.metrics.dropped_blocks += 1

    def _no_room(self, tier: Tier, num_slots: int) -> str:
        state = ", ".join(
            f"{t.label} {pool.num_used}/{pool.ceiling} blocks ({self.residency_pins(t)} pinned)"
            for t, pool in self.pools.items()
        )
        cause = "".join(
            f"; the {each.label} tier takes none for now, {each.num_failed} moves to it failed: {each.last_error}"
            for each in self.breakers.values()
            if each.is_resting
        )
        cause += "".join(
            f"; the {each.label} tier hangs: {each.overdue_error}" for each in self.breakers.values() if each.is_hanging
        )
        if NVME in self.pools and self.writes.is_used_up:
            cause += (
                f"; the nvme tier takes none for now: tiers.nvme.max_writes, {self.writes.limit}, is used up; raise "
                "it, or wait until older writes are out of that time"
            )
        if not cause and self._last_error:
            cause = f"; last error: {self._last_error}"
        wanted = f"{num_slots} slot{'s' * (num_slots != 1)}"
        return (
            f"no tier takes another block: {wanted} of {size_and_bytes(self.block_bytes)} needed on {tier.label}; "
            f"{state}{cause}. Raise a tier's budget, {'unpin() sessions, ' * bool(self.pinned)}drop or "
            "reset() caches that are done with, or shorten the prompt"
        )

    def residency_pins(self, tier: Tier) -> int:
        """How many blocks of `tier` are pinned, by a step or as a pinned session's. O(blocks): for messages."""
        records = ((block in self.pinned, self.residency[block]) for block in self.residency.blocks())
        return sum(bool(each.pins[tier] or (kept and each.slot(tier) is not None)) for kept, each in records)

    def give_up(self, tier: Tier, num_slots: int, *, idle_only: bool = False, early: bool = False) -> int:
        """Evict or start demoting up to `num_slots` blocks of `tier`; returns how many. Does not wait.

        `early`: nobody needs the slots yet.

        Copies that a faster tier has too go first, then blocks of idle sequences, then those of running ones.
        """
        done = 0
        if self.residency.redundant[tier]:
            for block in self._redundant(tier, num_slots):
                self.drop_copy(block, tier)
                done += 1
        for running in (False,) if idle_only else (False, True):
            if done >= num_slots:
                break
            for block in self._victims(tier, num_slots - done, Evictable(self, tier, running)):
                if self._is_clean(block, tier):
                    self.drop_copy(block, tier)
                elif (place := self._take_below(tier, num_slots - done, idle_only, early)) is not None:
                    self.start(block, DEMOTE, tier, *place)
                else:
                    return done
                done += 1
        return done

    def _take_below(self, tier: Tier, num_wanted: int, idle_only: bool, early: bool) -> tuple[Tier, Slot] | None:
        """A slot on the next slower tier that has one, or None; then something below was started or all is full."""
        below = self._lower.get(tier)
        while below is not None:
            pool, slot = self.pools[below], None
            if self.takes(below, early=early):
                slot = pool.take()
                if slot is None and self._leaving[below] < num_wanted:
                    self.give_up(below, num_wanted - self._leaving[below], idle_only=idle_only, early=early)
                    slot = pool.take()
            if slot is not None:
                return below, slot
            if self._leaving[below]:
                return None  # one will be free soon
            below = self._lower.get(below)
        return None
