"""Which tiers are in use, as far as their moves and reads have gone well."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from kvtier.breaker import Breaker, Clock, Regrowth
from kvtier.copies import Copies
from kvtier.errors import BlockLostError
from kvtier.log import logger
from kvtier.metrics import Metrics
from kvtier.slots import SlotPool
from kvtier.types import GPU, NVME, BlockId, EvictionPolicy, MoveResult, MoveStatus, Tier
from kvtier.wear import WriteMeter


class TierUse(Copies):
    """Copies, and which tiers may be read and written: not one that hangs, rests, is full or has its limit reached."""

    def __init__(
        self,
        pools: Mapping[Tier, SlotPool],
        policies: Mapping[Tier, EvictionPolicy],
        metrics: Metrics,
        nvme_room: Callable[[], int] | None = None,
        nvme_writes: WriteMeter | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """Args:
        nvme_room: how many slots of the nvme tier, from 0, can be had now; None: what a full disk took stays gone.
        nvme_writes: what is written to the nvme tier; None: nobody counts it.
        """
        super().__init__(pools, policies, metrics)
        self.breakers: dict[Tier, Breaker] = {t: Breaker(t.label, clock) for t in pools if t is not GPU}
        """By destination of the moves down that they judge."""
        self.regrowth: dict[Tier, Regrowth] = {}
        if nvme_room is not None and NVME in pools:
            self.regrowth[NVME] = Regrowth(NVME.label, pools[NVME], nvme_room, clock)
        self.writes = WriteMeter() if nvme_writes is None else nvme_writes
        self._clock = clock
        self._last_error = ""

    def takes(self, tier: Tier, *, early: bool = False) -> bool:
        """Whether a move down into `tier` may start now: it does not hang, is not out of use after failures, and its
        limit is not reached.

        `early`: the move is not needed yet.
        """
        return self.breakers[tier].allows and (tier is not NVME or self.writes.allows(early=early))

    def is_readable(self, tier: Tier) -> bool:
        """Whether what lies in `tier` may be read now: it does not hang."""
        return tier not in self.breakers or not self.breakers[tier].is_hanging

    def check_readable(self, blocks: Mapping[BlockId, int], tier: Tier) -> None:
        """Raise BlockLostError, naming all of these blocks of `tier`, if it hangs. They are given with their index."""
        if blocks and not self.is_readable(tier):
            raise BlockLostError(
                f"block {next(iter(blocks.values()))} cannot be read from {tier.label}: the tier hangs: "
                f"{self.breakers[tier].overdue_error}",
                tuple(blocks),
            )

    # -- moves that have failed ---------------------------------------------------------------------------------------

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
