"""Which blocks are to lie in files that outlive the process, before they have to leave memory. Part of the manager.

Works on ids; touches no tensor. One thread at a time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence, Set
from itertools import islice

from kvtier.errors import CapacityError
from kvtier.origin import Sealed
from kvtier.placement import Placement
from kvtier.types import BlockId, MovePurpose, Slot, Tier


class Keeper:
    """Copies blocks down to labelled nvme slots, in the background or at once.

    A block is *kept* while a later process could find its copy there.
    """

    MAX_AT_ONCE = 8
    """Writes in flight: enough to keep a disk busy."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        # Bounded: a block that is forgotten here is kept when it is demoted, or not at all.
        self._wanted: deque[BlockId] = deque(maxlen=4096)

    @property
    def is_on(self) -> bool:
        """Whether anything outlives the process."""
        placement = self._placement
        return placement.labels is not None and placement.labels.outlives and Tier.NVME in placement.pools

    def want(self, block: BlockId) -> None:
        """The block is worth keeping, when there is time."""
        if self.is_on and not self._placement.is_labelled(block):
            self._wanted.append(block)

    def run(self, max_moves: int) -> None:
        """Start some of what is wanted; waits for nothing."""
        placement = self._placement
        if placement.unlabelled:
            self.label_late(self.MAX_AT_ONCE)
        while self._wanted and len(placement.moves) < max_moves and placement.takes(Tier.NVME, early=True):
            block = self._wanted.popleft()
            record = placement.residency.get(block)
            if record is not None and record.move is None and not self._start(block, record.sealed):
                return

    def label_late(self, most: int) -> None:
        """Label the slots of blocks that were not proven when they were written, and are now: `most` of them at most.

        If the oldest of them is not, the model is hashed beside the steps for their sake, and their time comes later.
        """
        placement = self._placement
        if not placement.unlabelled or placement.label_slot is None or not placement.is_readable(Tier.NVME):
            return
        for block in list(islice(placement.unlabelled, most)):
            record = placement.residency[block]
            sealed, slot, labels = record.sealed, record.nvme_slot, placement.labels
            if sealed is None or slot is None or labels is None or sealed.is_refuted or placement.is_labelled(block):
                del placement.unlabelled[block]
                continue
            if labels.label_if_proven(sealed) is None:
                labels.prove_beside(sealed)
                return
            if not placement.writes.allows():
                return  # a header is written too: its time comes with that of older writes' end
            label = placement.label_of(sealed, waits=False)  # None: its salt has as much as it may
            if label and not placement.is_held(Tier.NVME, slot) and placement.label_slot(slot, label):
                placement.note_labelled(block)
            else:
                del placement.unlabelled[block]

    def keep(
        self, blocks: Sequence[BlockId], tails: Mapping[BlockId, Sealed | None], *, makes_room: bool = True
    ) -> int:
        """See to it that these blocks are kept, and wait; how many of them are, counted from the first on.

        Args:
            tails: what those of them are labelled with that are not full.
            makes_room: whether cached blocks are given up for them.

        Of blocks that were computed twice the one in the index is kept: two slots of one label would be one too many,
        and the older one in nobody's hands. A block that cannot be written now (no room, a limit, a disk that fails or
        hangs) ends it, as does one that has no label. Raises TransferTimeoutError: as `Mover.wait`.
        """
        placement = self._placement
        if not self.is_on:
            return 0
        blocks = [placement.indexed(block) for block in blocks]
        for block in blocks:  # what only the index holds could be given up for the others
            placement.hold(block)
        try:
            self._keep(blocks, tails, makes_room)
        finally:
            for block in blocks:
                placement.release(block)
        num_kept = next((n for n, block in enumerate(blocks) if not placement.is_labelled(block)), len(blocks))
        placement.hold_kept(blocks[:num_kept])
        return num_kept

    def _keep(self, blocks: Sequence[BlockId], tails: Mapping[BlockId, Sealed | None], makes_room: bool) -> None:
        placement = self._placement
        todo, own = deque(block for block in blocks if not placement.is_labelled(block)), set(blocks)
        while todo:
            block = todo[0]
            placement.settle(block)
            if self._num_writing(own) >= self.MAX_AT_ONCE:
                placement.wait()
                continue
            record = placement.residency[block]
            if not placement.is_labelled(block):
                if not placement.takes(Tier.NVME) or not self._bring_up(block):
                    break
                if makes_room and not placement.pools[Tier.NVME].num_free:  # not in place of one of theirs
                    placement.hold_kept([each for each in blocks if placement.is_labelled(each)])
                if not self._start(block, tails.get(block, record.sealed), makes_room):
                    break
            todo.popleft()
        while self._num_writing(own):
            placement.wait()

    def _bring_up(self, block: BlockId) -> bool:
        """What lies in files alone, and without a label, is written again from memory; whether it is there."""
        placement = self._placement
        if placement.residency[block].fastest is not Tier.NVME:
            return True
        tier = next(tier for tier in reversed(Tier) if tier is not Tier.NVME and tier in placement.pools)
        try:
            placement.make_room(tier, 1)
        except CapacityError:
            return False
        slot = placement.pools[tier].take()
        if slot is None:
            return False
        placement.start(block, MovePurpose.PROMOTE, Tier.NVME, tier, slot)
        placement.settle(block)
        return True

    def keep_cached(self, timeout_s: float) -> None:
        """Keep what is in the prefix index, the newest first, each prefix from its beginning, while there is room.

        Ends after about that time.
        """
        placement = self._placement
        if not self.is_on:
            return
        deadline_s = time.monotonic() + timeout_s
        num_left = -1
        while num_left != len(placement.unlabelled) and time.monotonic() < deadline_s:
            num_left = len(placement.unlabelled)
            self.label_late(self.MAX_AT_ONCE)
        for block in reversed(placement.prefixes.blocks()):
            if block not in placement.prefixes or placement.is_labelled(block):
                continue
            chain = placement.prefixes.chain(block)
            if time.monotonic() > deadline_s or self.keep(chain, {}, makes_room=False) < len(chain):
                return

    def _num_writing(self, blocks: Set[BlockId]) -> int:
        """How many of them are being written. O(moves in flight)."""
        return sum(move.dest is Tier.NVME and move.block in blocks for move in self._placement.moves.values())

    def _start(self, block: BlockId, sealed: Sealed | None, makes_room: bool = True) -> bool:
        """Start writing a block under its label; whether it was."""
        placement = self._placement
        record = placement.residency[block]
        if placement.label_of(sealed) is None:
            return False
        if record.nvme_slot is not None:  # without a label
            if record.fastest is Tier.NVME or record.pins[Tier.NVME]:
                return False
            placement.drop_copy(block, Tier.NVME)
        source = record.fastest
        slot = None if source is None else self._slot(makes_room)
        if source is None or slot is None:
            return False
        placement.start(block, MovePurpose.WRITE_BEHIND, source, Tier.NVME, slot, sealed)
        return True

    def _slot(self, makes_room: bool) -> Slot | None:
        placement, pool = self._placement, self._placement.pools[Tier.NVME]
        if makes_room and not pool.num_free and not placement.give_up(Tier.NVME, 1, early=True):
            placement.evict_cached(Tier.NVME, 1)
        return pool.take()
