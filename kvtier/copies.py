"""The copies of every block, and the slots that they lie in. Writes residency on the tier manager's behalf."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kvtier.errors import IntegrityError, TransferTimeoutError
from kvtier.hung_moves import HungMoves
from kvtier.metrics import Metrics
from kvtier.origin import Sealed
from kvtier.policy import GuardedPolicy
from kvtier.prefix import Miss, PrefixIndex
from kvtier.quota import Quota
from kvtier.reads import Reads
from kvtier.residency import BlockRecord, BlockState, ResidencyTable
from kvtier.running import RunningBlocks
from kvtier.slots import SlotPool
from kvtier.types import GPU, NVME, BlockId, EvictionPolicy, SequenceId, Slot, SlotLabel, Tier


class Copies:
    """Which blocks live, and what each has on which tier. One thread at a time. A tier that is absent has no pool."""

    def __init__(
        self, pools: Mapping[Tier, SlotPool], policies: Mapping[Tier, EvictionPolicy], metrics: Metrics
    ) -> None:
        self.pools = dict(pools)
        self.policies = {tier: GuardedPolicy(policy, tier.label) for tier, policy in policies.items()}
        self.cached_policies = {tier: policy.untold() for tier, policy in self.policies.items()}
        """Told of cached blocks alone: they are few, or go first, and nobody looks for them among all the others."""
        self.reads = Reads(self.policies)
        self.metrics = metrics
        self.residency = ResidencyTable()
        self.prefixes = PrefixIndex()
        """Holds each of its blocks once. A block that nobody else holds is *cached*: it is given up when there is no
        other room."""
        self.quota: Quota | None = None
        """What one salt may keep; None: as much as there is room for."""
        self.forget_slot: Callable[[Slot], None] | None = None
        """Sees to it that no process finds again what lies in an nvme slot; None where nothing is found there."""
        self.label_slot: Callable[[Slot, SlotLabel], bool] | None = None
        """Labels an nvme slot as it is; whether it could be. None where slots are labelled when they are written."""
        self.leave_slot: Callable[[Tier, Slot], None] | None = None
        """Sees to it that nothing is read from a slot any more; None where nothing is read between steps."""
        self._labelled: set[BlockId] = set()
        self.unlabelled: dict[BlockId, None] = {}
        """Blocks in nvme slots that have no label yet and may get one, oldest first."""
        self.bare: dict[Slot, SlotLabel] = {}
        """By nvme slot, whose bytes may still lie there without a header, owned by a block or not: for erasing."""
        self.reserved: set[Slot] = set()
        """Slots of the nvme tier that are handed out to nobody, for the sake of what lies in them."""
        self.kept: dict[BlockId, None] = {}
        """Blocks whose copy in files is worth more than its slot while there is other room, oldest first."""
        self.pinned: set[BlockId] = set()
        """Blocks of pinned sessions: they are never given up, nor is their copy in files."""
        self.running_blocks = RunningBlocks(self.residency)
        """Of rows that run: they are demoted last and come back first."""
        self.num_cached: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Copies on each tier of cached blocks."""
        self.unreadable: set[BlockId] = set()
        """Blocks of which no copy can be read: a promotion failed to, or all were dropped to make room. Reading them
        raises; they are not tried again in the background, and computed again before the next step that needs them."""
        self.hung = HungMoves()
        """Of the nvme tier."""

    def add_copy(self, block: BlockId, tier: Tier, slot: Slot) -> None:
        """A valid copy appears: residency and the tier's policy learn of it together."""
        record = self.residency.add_copy(block, tier, slot)
        if self.running_blocks.has(block):
            self.running_blocks.copied(block, tier)
        if record.holders == 1 and block in self.prefixes:  # it is cached
            self._cache(block, record, tier)
        self.policies[tier].inserted(block, record.sequence, record.index)

    def drop_copy(self, block: BlockId, tier: Tier) -> None:
        """A copy goes, and its slot is free, or once the move that hangs over it has ended."""
        record = self.residency.records[block]
        if self.leave_slot is not None and (leaving := record.slot(tier)) is not None:
            self.leave_slot(tier, leaving)
        slot = self._lose_copy(block, record, tier)
        if tier is NVME:
            self._labelled.discard(block)
            self.unlabelled.pop(block, None)
            self.kept.pop(block, None)
        if not self.hung.moves or not self.hung.keep(tier, slot):
            self.pools[tier].give_back(slot)

    def _lose_copy(self, block: BlockId, record: BlockRecord, tier: Tier) -> Slot:
        """All but the slot, which is returned, learn that the copy has gone."""
        slot = self.residency.drop_copy(block, tier)
        if self.running_blocks.has(block):
            self.running_blocks.dropped(block, tier)
        if record.holders == 1 and block in self.prefixes:  # it is cached
            self._uncache(block, tier)
        self.policies[tier].removed(block)
        return slot

    def hand_over(self, source: BlockId, block: BlockId, sealed: Sealed | None) -> None:
        """The gpu copy of `source` becomes the only copy of `block`, which has the same tokens; `source` has none left.

        Neither may be pinned or moving. `sealed` is what the block is labelled with from now on: what was proven of it
        was of another computation.
        """
        bad = self.residency[block].nvme_slot
        for tier in list(self.residency[block].copies):
            self.drop_copy(block, tier)
        if bad is not None and self.forget_slot is not None:
            self.forget_slot(bad)
        slot = self._lose_copy(source, self.residency[source], GPU)  # nothing is streamed from there
        self.add_copy(block, GPU, slot)
        self.residency[block].sealed = sealed
        self.unreadable.discard(block)
        if sealed is None:
            self.unindex(block, Miss.CORRUPT)
        elif block in self.prefixes:
            self.prefixes.reseal(block, sealed)

    # -- blocks that others may come to share -------------------------------------------------------------------------

    def index(self, block: BlockId) -> None:
        """Enter a sealed block in the prefix index, which holds it from now on. Nothing is done if it has no label, or
        another block of the same tokens is there already."""
        record = self.residency[block]
        if record.sealed is None:
            return
        refuted = self.prefixes.refuted(record.sealed.label.identity)
        if refuted is not None:
            self.unindex(refuted, Miss.NAMESPACE)
        if self.quota is not None and not self.quota.admits(self, record.sealed, self._may_go):
            return
        if self.prefixes.add(block, record.sealed):
            record.holders += 1  # two at least: it is not cached

    def _may_go(self, block: BlockId) -> bool:
        is_free = self.is_cached(block) and block not in self.pinned and not self.residency[block].is_pinned
        return is_free and self.prefixes.is_leaf(block)

    def unindex(self, block: BlockId, why: Miss) -> None:
        """Take a block out of the prefix index, if it is in; without another holder it goes."""
        if self.prefixes.remove(block, why):
            record = self.residency.records[block]
            if record.holders == 1:  # it was cached
                self._uncache(block, *record.copies)
            self.release(block)

    def is_labelled(self, block: BlockId) -> bool:
        """Whether a later process can find the block's copy on the nvme tier."""
        return block in self._labelled

    def note_labelled(self, block: BlockId) -> None:
        """The block's nvme slot has a label, by which it is found."""
        self._labelled.add(block)
        self.unlabelled.pop(block, None)
        slot = self.residency[block].nvme_slot
        if slot is not None:
            self.bare.pop(slot, None)

    def bare_slots(self, labels: Iterable[SlotLabel]) -> list[Slot]:
        """Slots in which one of these blocks may lie without a header. O(slots written without one)."""
        wanted = {(label.namespace, label.identity) for label in labels}
        return [slot for slot, label in self.bare.items() if (label.namespace, label.identity) in wanted]

    def note_unlabelled(self, block: BlockId) -> None:
        """The block was written to the nvme tier without a label, and may get one."""
        if self.residency[block].sealed is not None:
            self.unlabelled[block] = None

    def hold_kept(self, blocks: Iterable[BlockId]) -> None:
        """The nvme copies of these blocks, where they have one that can be found, are worth their slots, though faster
        tiers have them too."""
        for block in blocks:
            self.kept.pop(block, None)
            if block in self._labelled:
                self.kept[block] = None

    def indexed(self, block: BlockId) -> BlockId:
        """The block that stands for this one in the index: another, where the same tokens were computed twice."""
        sealed = self.residency[block].sealed
        found = None if sealed is None else self.prefixes.find(sealed.label)
        return block if found is None else found

    def is_cached(self, block: BlockId) -> bool:
        """Whether nothing but the prefix index holds the block."""
        return self._is_cached(block, self.residency[block])

    def _is_cached(self, block: BlockId, record: BlockRecord) -> bool:
        return record.holders == 1 and block in self.prefixes

    def _cache(self, block: BlockId, record: BlockRecord, *tiers: Tier) -> None:
        """The block, which is cached, lies on these tiers from now on, or is cached from now on."""
        for tier in tiers:
            self.num_cached[tier] += 1
            self.cached_policies[tier].inserted(block, record.sequence, record.index)

    def _uncache(self, block: BlockId, *tiers: Tier) -> None:
        """It lies there no longer, or is cached no longer."""
        for tier in tiers:
            self.num_cached[tier] -= 1
            self.cached_policies[tier].removed(block)

    def hold(self, block: BlockId) -> None:
        """One holder more."""
        record = self.residency[block]
        if self._is_cached(block, record):
            self._uncache(block, *record.copies)
        record.holders += 1

    def adopt(self, sequence: SequenceId, index: int, sealed: Sealed, slot: Slot) -> BlockId | None:
        """A cached block from an nvme slot that was found to hold it; None if the slot is not to be had."""
        was_reserved = slot in self.reserved
        if not self._claim(slot):
            return None
        block = self.residency.create(sequence, index)
        record = self.residency[block]
        record.state, record.sealed = BlockState.SEALED, sealed
        self.add_copy(block, NVME, slot)
        self.note_labelled(block)
        self.index(block)
        self.release(block)  # by whoever made it: the index holds it
        if block not in self.prefixes:
            return None  # a collision of identities
        if was_reserved:  # a pinned session's, whoever asks for it
            self.pinned.add(block)
            self.hold_kept([block])
        return block

    def _claim(self, slot: Slot) -> bool:
        if slot in self.reserved:
            self.reserved.discard(slot)
            return True
        return not self.is_held(NVME, slot) and self.pools[NVME].claim(slot)

    def reserve(self, slot: Slot) -> None:
        """Nobody is handed this nvme slot, until its block is adopted or the slot is `free_reserved`. Nothing is done
        where a block lies in it."""
        if slot not in self.reserved and self._claim(slot):
            self.reserved.add(slot)

    def free_reserved(self, slot: Slot) -> None:
        """Take `reserve` back."""
        if slot in self.reserved:
            self.reserved.discard(slot)
            self.pools[NVME].give_back(slot)

    def erase(self, slot: Slot, erase: Callable[[Slot], None]) -> bool:
        """Have an nvme slot emptied that no block is in; whether it was had. Raises what `erase` does."""
        if not self._claim(slot):
            return False
        try:
            erase(slot)
        except TransferTimeoutError:
            self.reserved.add(slot)  # it may still be emptied: nobody may write there
            raise
        except BaseException:  # a Ctrl-C too: the slot has an owner
            self.pools[NVME].give_back(slot)
            raise
        self.bare.pop(slot, None)
        self.pools[NVME].give_back(slot)
        return True

    def adopt_tail(self, sequence: SequenceId, index: int, slot: Slot) -> BlockId | None:
        """A tail from an nvme slot that was found to hold it, held once; None if the slot is not to be had."""
        if not self._claim(slot):
            return None
        block = self.residency.create(sequence, index)
        self.add_copy(block, NVME, slot)
        self.note_labelled(block)
        return block

    def release(self, block: BlockId) -> None:
        """One holder fewer. Without holders the block goes, at once or when its move has ended."""
        record = self.residency.records[block]
        record.holders -= 1
        if record.holders < 0:
            raise IntegrityError(f"block {block} was released too often")
        if record.holders == 0:
            if record.move is None:
                self._forget(block)
        elif self._is_cached(block, record):
            self._cache(block, record, *record.copies)

    def _forget(self, block: BlockId) -> None:
        for tier in self.residency.records[block].copies:
            self.drop_copy(block, tier)
        self.unreadable.discard(block)
        self.pinned.discard(block)
        self.residency.delete(block)

    def is_held(self, tier: Tier, slot: Slot) -> bool:
        """Whether a move that hangs may still read or write this slot: it must not change, nor be given up."""
        return self.hung.holds(tier, slot)

    def num_held(self, tier: Tier) -> int:
        """Slots of `tier` that moves hold which hang."""
        return self.hung.num_held(tier)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless copies and what is known of them agree."""
        self.residency.check_integrity()
        self.prefixes.check_integrity()
        known = {block for block in self.residency.blocks() if self.residency[block].nvme_slot is not None}
        if not self._labelled <= known or not self.kept.keys() <= known or not self.unlabelled.keys() <= known:
            raise IntegrityError("a block without an nvme copy is listed as found there, or to be")
        if self._labelled & self.unlabelled.keys():
            raise IntegrityError("a block that has a label is to get one")
        if any(self.residency.get(block) is None for block in self.prefixes.blocks()):
            raise IntegrityError("a dead block is in the prefix index")
        cached = [block for block in self.residency.blocks() if self.is_cached(block)]
        num_cached = {tier: sum(self.residency[each].slot(tier) is not None for each in cached) for tier in Tier}
        if num_cached != self.num_cached:
            raise IntegrityError(f"{num_cached} copies of cached blocks, {self.num_cached} were counted")
        for block in self.residency.blocks():
            record = self.residency[block]
            if not record.copies and record.move is None and block not in self.unreadable:
                raise IntegrityError(f"block {block} has no copy and none in flight, and was not dropped")
        if any(self.residency.get(block) is None for block in self.unreadable):
            raise IntegrityError("a dead block is listed as unreadable")
