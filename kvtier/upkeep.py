"""What is due between steps: demotion above the watermarks, early copies down, and promotion while there is room."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

from kvtier.keeping import Keeper
from kvtier.placement import Placement
from kvtier.types import CPU, GPU, BlockId, MovePurpose, Slot, Tier


class Upkeep:
    """The tier manager's background work. Starts moves and waits for none."""

    # Background moves in flight at most: enough to keep the threads busy, few enough to stay out of a step's way.
    MAX_BACKGROUND = 4

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.keeper = Keeper(placement)
        self._emptied = [tier for tier in (GPU, CPU) if tier in placement.pools and placement.lower(tier)]
        """Tiers whose blocks can go further down."""
        self.step_slots = 0
        """Slots of the gpu tier that a step of one row takes at most: as many are made free ahead, within `low`."""
        self.reads_in_place = False
        """Attention reads the cpu tier where it lies, as fast as the gpu tier: coming up from there gains but room."""
        self._last_promoted: dict[Tier, Slot] = {}
        """Where the last block came up to: the next is put beside it, for a run of slots is one call of attention."""
        # Bounded: a block that is forgotten here is copied down when it is demoted.
        self._to_copy_down: deque[BlockId] = deque(maxlen=4096)
        self._at_rest: int | None = None
        """Of copies and moves, as many changes as there had been when tiers were within their watermarks and nothing
        was to be copied down: until there is another, that is so."""

    def sealed(self, block: BlockId) -> None:
        """A block became final: it may be copied down early."""
        self._to_copy_down.append(block)
        self._at_rest = None

    def run(self) -> None:
        """One round. O(moves finished and started)."""
        placement = self._placement
        placement.commit_arrived()
        for tier, growth in placement.regrowth.items():
            if placement.is_readable(tier):  # asking a disk that hangs would hang too
                growth.look()
        num_changes = placement.residency.version + placement.num_started
        if num_changes != self._at_rest:
            is_due = [*map(self._demote_to_low, self._emptied), self._copy_down()]
            rests = not any(is_due) and not placement.moves and not placement.hung.moves
            self._at_rest = num_changes if rests else None
        if not placement.running_blocks.are_all_on_gpu:
            self._promote()
        self.keeper.run(self.MAX_BACKGROUND)

    def _demote_to_low(self, tier: Tier) -> bool:
        """Whether the tier held more than it should."""
        placement = self._placement
        pool, mark = placement.pools[tier], placement.watermarks[tier]
        is_ahead = pool.used_frac <= mark.high_frac
        if is_ahead and tier is not GPU:
            return False
        leaving = placement.leaving(tier)
        surplus = pool.num_used - leaving - int(mark.low_frac * pool.ceiling)
        if is_ahead:  # of nobody's need yet: a step that has to wait for room waits for one tier after the other
            surplus = min(surplus, self.step_slots - pool.num_free - leaving)
        if surplus > 0:
            done = placement.give_up(tier, surplus, idle_only=is_ahead, early=True)
            if done < surplus:
                placement.evict_below(tier, surplus - done, idle_only=is_ahead)
        return surplus > 0

    def _copy_down(self) -> bool:
        """Write-behind: sealed blocks go to the cpu tier while it has room below its low watermark.

        Whether some wait although it has.
        """
        placement = self._placement
        pool = placement.pools.get(CPU)
        if pool is None:
            self._to_copy_down.clear()
            return False
        limit = int(placement.watermarks[CPU].low_frac * pool.ceiling)
        while (
            self._to_copy_down
            and len(placement.moves) < self.MAX_BACKGROUND
            and pool.num_used < limit
            and placement.takes(CPU)
        ):
            block = self._to_copy_down.popleft()
            record = placement.residency.get(block)
            if record is None or record.move is not None or record.fastest is not GPU or record.is_clean(GPU):
                continue
            slot = pool.take()
            if slot is None:
                return True
            placement.start(block, MovePurpose.WRITE_BEHIND, GPU, CPU, slot)
        return bool(self._to_copy_down) and pool.num_used < limit

    def _promote(self) -> None:
        """Bring running sequences' blocks up while there is room below `low`; idle sequences' blocks make room.

        A slot goes to the block that is most expensive where it lies: each is read once at every token, so all of one
        tier are worth the same.
        """
        placement = self._placement
        for tier in (GPU, CPU):
            if not placement.running_blocks.num_below(tier):
                continue
            pool = placement.pools.get(tier)
            spilled = list(islice(self._spilled(tier), max(0, self.MAX_BACKGROUND - len(placement.moves))))
            if pool is None or not spilled:
                continue
            staying = pool.num_used - placement.leaving(tier)
            room = int(placement.watermarks[tier].low_frac * pool.ceiling) - staying
            if room <= 0:
                room = placement.give_up(tier, len(spilled), idle_only=True, early=True)
            coming = spilled[: max(0, room)]
            for number, block in enumerate(coming):
                record = placement.residency[block]
                if record.move is not None:  # itself demoted to make this room
                    continue
                fastest = record.fastest
                before = self._last_promoted.get(tier)
                slot = None if fastest is None else pool.take_near(before, len(coming) - number)
                if fastest is None or slot is None:
                    break
                self._last_promoted[tier] = slot
                placement.start(block, MovePurpose.PROMOTE, fastest, tier, slot)

    def _spilled(self, tier: Tier) -> Iterator[BlockId]:
        """Running blocks that had better come up to `tier`, the most worthwhile first."""
        placement = self._placement
        for block in placement.running_blocks.below(tier, self._is_worth_leaving):
            if placement.residency[block].move is None and block not in placement.unreadable:
                yield block

    def _is_worth_leaving(self, tier: Tier) -> bool:
        placement = self._placement
        if not placement.is_readable(tier):
            return False
        pool, mark = placement.pools[tier], placement.watermarks.get(tier)
        return tier is not CPU or not self.reads_in_place or mark is None or pool.used_frac > mark.low_frac
