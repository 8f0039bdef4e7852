"""Blocks that nobody but the prefix index holds: how they are found, and when they are given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.batch import Batch
from kvtier.errors import CapacityError, IntegrityError
from kvtier.labels import Labels, at_once
from kvtier.losses import Losses
from kvtier.origin import Origin, Sealed
from kvtier.prefix import Miss
from kvtier.prefix_cache import Match
from kvtier.sequences import Beginning
from kvtier.types import BlockId, MovePurpose, SequenceId, Slot, SlotLabel, Tier
from tests.small_tiers import BROKEN_POLICIES, FakeModel, House, build, columns
from tests.unit.test_losses import chunk, opener

EACH = 4
ALL = list(range(100, 148))


class Sharing:
    """A house whose blocks are shared by those who have the same salt."""

    def __init__(self, *, outlives: bool = False, **values: Any) -> None:
        self.model = FakeModel()
        self.labels = Labels(self.model, lambda: 0.0, outlives=outlives, beside=at_once)
        self.house: House = build(
            **{"gpu": 8, "cpu": 4, "nvme": 8, "low_frac": 0.0, **values}, labels=self.labels, shares=True
        )
        self.placement, self.manager, self.cache = self.house.placement, self.house.manager, self.house.prefix_cache

    def origin(self, salt: bytes = b"", mark: int = 1) -> Origin:
        origin = self.labels.origin(mark, b"modules", salt)
        assert origin is not None
        return origin

    def match(self, ids: Sequence[int], salt: bytes = b"", mark: int = 1) -> Match:
        found = self.cache.match(self.origin(salt, mark), ids, SequenceId(0))
        self.manager.check_integrity()
        return found

    def begin(self, ids: Sequence[int], salt: bytes = b"", length: int | None = None) -> Batch:
        """A conversation that begins with what is found of `ids`, all but the last token at most."""
        batch = self.manager.new_batch()
        batch.origin = self.origin(salt)
        match = self.match(ids, salt)
        length = min(len(ids) - 1, EACH * len(match.blocks)) if length is None else length
        self.manager.attach(batch, [Beginning(0, ids[: EACH * len(match.blocks)], match.blocks)], length)
        self.manager.check_integrity()
        return batch

    def filled(self, ids: Sequence[int], salt: bytes = b"") -> Batch:
        """An idle conversation of those tokens, which were all computed."""
        batch = self.manager.new_batch()
        batch.origin = self.origin(salt)
        for start in range(0, len(ids), EACH):
            self.house.append(batch, list(ids[start : start + EACH]))
        self.manager.leave(batch)
        return batch

    def cached(self, ids: Sequence[int], salt: bytes = b"") -> list[BlockId]:
        """The blocks that a conversation of these tokens leaves behind."""
        batch = self.filled(ids, salt)
        blocks = list(batch.tables[0].blocks)
        self.manager.drop(batch)
        return blocks

    def demote(self, tier: Tier = Tier.GPU, count: int = 100) -> None:
        self.placement.give_up(tier, count)
        self.house.drain()

    def hang(self, block: BlockId, purpose: MovePurpose, source: Tier, dest: Tier) -> None:
        """A move of the block begins, and hangs with the nvme tier."""
        engine, slot = self.house.engine, self.placement.pools[dest].take()
        assert slot is not None
        engine.nvme_hangs, engine.withdraw = True, lambda ids: []  # type: ignore[method-assign]
        self.placement.start(block, purpose, source, dest, slot)
        self.placement.wait()
        assert self.placement.hung.moves

    def evict(self, tier: Tier, count: int) -> list[BlockId]:
        """What `evict_cached` gives up, in the order of their numbers."""
        before = self.placement.prefixes.blocks()
        done = self.placement.evict_cached(tier, count)
        after = set(self.placement.prefixes.blocks())
        self.manager.check_integrity()
        gone = [block for block in before if block not in after]
        assert len(gone) == done
        return gone


# -- finding ----------------------------------------------------------------------------------------------------------


def test_the_longest_run_from_the_beginning_is_found() -> None:
    sharing = Sharing()
    blocks = sharing.cached(ALL[:14])[:3]
    assert sharing.match(ALL[:14]) == Match(tuple(blocks), None)
    assert sharing.match(ALL[:12]) == Match(tuple(blocks), None)
    assert sharing.match(ALL[:20]) == Match(tuple(blocks), Miss.UNKNOWN)
    assert sharing.match([*ALL[:8], 7, 7, 7, 7, 7]) == Match(tuple(blocks[:2]), Miss.UNKNOWN)
    assert sharing.match([7, *ALL[1:12]]).blocks == ()
    assert sharing.match(ALL[4:12]).blocks == (), "the same tokens behind nothing are others"
    assert sharing.match(ALL[:3]) == Match((), Miss.TOO_SHORT)


def test_equal_prompts_of_two_who_were_computed_at_once_are_found_once() -> None:
    sharing = Sharing()
    first, second = sharing.filled(ALL[:9]), sharing.filled(ALL[:13])
    held = first.tables[0].blocks[:2], second.tables[0].blocks[2:3]
    assert sharing.match(ALL[:13]).blocks == (*held[0], *held[1])
    sharing.manager.drop(first)
    assert sharing.begin(ALL[:13]).tables[0].blocks == [*held[0], *held[1]]


def test_why_nothing_more_is_found() -> None:
    sharing = Sharing(gpu=8, cpu=0, nvme=0)
    assert sharing.match(ALL[:9]).miss is Miss.UNKNOWN, "nothing is kept of anything"
    sharing.cached(ALL[:9], b"alice")
    assert sharing.match(ALL[:9], b"bob").miss is Miss.SALT
    assert sharing.match(ALL[:9]).miss is Miss.SALT
    assert sharing.match(ALL[20:30], b"bob").miss is Miss.SALT, "whichever tokens it asks for"
    assert sharing.match(ALL[:9], b"alice", mark=2).miss is Miss.NAMESPACE
    assert sharing.match(ALL[20:30], b"alice").miss is Miss.UNKNOWN
    (last,) = sharing.evict(Tier.GPU, 1)
    assert sharing.match(ALL[:9], b"alice") == Match((BlockId(last - 1),), Miss.EVICTED)
    sharing.evict(Tier.GPU, 1)
    assert sharing.match(ALL[:9], b"alice").miss is Miss.EVICTED, "nothing is kept of anything, and this is remembered"


def test_a_block_that_cannot_be_read_is_a_miss_and_goes() -> None:
    sharing = Sharing()
    blocks = sharing.cached(ALL[:12])
    sharing.placement.unreadable.add(blocks[1])
    assert sharing.match(ALL[:12]) == Match((blocks[0],), Miss.CORRUPT)
    assert blocks[1] not in sharing.placement.prefixes and sharing.placement.residency.get(blocks[1]) is None
    assert sharing.match(ALL[:12]) == Match((blocks[0],), Miss.CORRUPT), "it is remembered"


def test_nothing_is_adopted_from_a_tier_that_hangs_and_what_is_known_there_stays() -> None:
    """Found wrong: each look-up while the nvme tier hung threw what lay there out of the index, as corrupt."""
    sharing = Sharing(cpu=0, outlives=True)
    blocks = sharing.cached(ALL[:12])
    sharing.demote()
    sharing.hang(blocks[2], MovePurpose.PROMOTE, Tier.NVME, Tier.GPU)
    assert not sharing.placement.is_readable(Tier.NVME)
    assert sharing.match(ALL[:12]) == Match((), Miss.SLOWER)
    assert sharing.placement.prefixes.blocks() == blocks
    sharing.house.engine.nvme_hangs = False
    sharing.house.drain()
    assert sharing.match(ALL[:12]) == Match(tuple(blocks), None)


def test_what_was_evicted_is_adopted_from_its_slot_until_that_is_written_again() -> None:
    sharing = Sharing(gpu=8, cpu=0, nvme=4, outlives=True)
    blocks = sharing.cached(ALL[:12])
    sharing.demote()
    assert len(sharing.evict(Tier.NVME, 3)) == 3 and not sharing.manager.residency_len
    found = sharing.match(ALL[:12])
    assert len(found.blocks) == 3 and not set(found.blocks) & set(blocks), "blocks of other numbers, with the same KV"
    assert sharing.match(ALL[:12]) == found, "once"
    assert sharing.house.used() == {"gpu": 0, "nvme": 3}
    assert sharing.house.read(sharing.begin(ALL[:12], length=12)) == ALL[:12]
    assert not [block for block in sharing.evict(Tier.NVME, 3) if block in found.blocks], "they are held"
    for table in list(sharing.manager.tables.values()):
        sharing.manager._drop_row(table)
    sharing.evict(Tier.NVME, 3)
    others = sharing.cached(ALL[20:28])
    sharing.demote()  # into the lowest slots, which held the first two
    assert sharing.house.used()["nvme"] == len(others) == 2
    assert sharing.match(ALL[:12]) == Match((), Miss.EVICTED)


def test_a_slot_that_is_in_use_again_is_not_adopted() -> None:
    sharing = Sharing(gpu=4, cpu=0, nvme=4, outlives=True)
    sharing.cached(ALL[:4])
    sharing.demote()
    sharing.evict(Tier.NVME, 1)
    (other,) = sharing.cached(ALL[20:24])
    slot = sharing.placement.pools[Tier.NVME].take()
    sharing.placement.start(other, MovePurpose.DEMOTE, Tier.GPU, Tier.NVME, slot)
    assert slot in sharing.house.engine.files.labels, "the label is there until the move writes"
    assert sharing.match(ALL[:5]) == Match((), Miss.EVICTED)
    sharing.house.drain()
    assert sharing.match(ALL[:5]) == Match((), Miss.EVICTED)


def test_a_block_whose_identity_is_taken_is_not_adopted() -> None:
    """Found wrong: a collision of identities gave the number of a block that was gone again."""
    sharing = Sharing(gpu=4, cpu=0, nvme=4, outlives=True)
    origin = sharing.origin()
    (content,) = sharing.cache.contents(ALL[:4])
    label = sharing.labels.name(origin, None, content)
    (other,) = sharing.cached(ALL[20:24])
    prefixes = sharing.placement.prefixes
    del prefixes._blocks[prefixes._sealed[other].label.identity]
    prefixes._blocks[label.identity], prefixes._leaves = other, {label.identity}
    prefixes._sealed[other] = Sealed(SlotLabel(label.namespace, label.identity, b"other"), None, origin, 0)
    sharing.house.engine.files.labels[Slot(3)] = label
    assert sharing.match(ALL[:5]).blocks == ()
    assert sharing.house.used() == {"gpu": 1, "nvme": 0}


# -- beginning with them ----------------------------------------------------------------------------------------------


def test_those_who_share_a_block_append_to_copies_of_it() -> None:
    sharing = Sharing()
    blocks = sharing.cached(ALL[:12])
    twins = [sharing.begin(ALL[:12]) for _ in range(2)]
    for number, twin in enumerate(twins):
        assert twin.tables[0].blocks == blocks and twin.length == 11
        sharing.house.append(twin, [number, number, number])
        assert sharing.house.read(twin) == [*ALL[:11], number, number, number]
        assert twin.tables[0].blocks[:2] == blocks[:2] and twin.tables[0].blocks[2] != blocks[2]
    assert sharing.house.read(sharing.begin([*ALL[:12], 1])) == ALL[:12], "what they share is as it was"
    for twin in twins:
        sharing.manager.drop(twin)
    sharing.manager.check_integrity()


def test_a_batch_that_holds_something_takes_no_beginning() -> None:
    sharing = Sharing()
    sharing.cached(ALL[:4])
    batch = sharing.begin(ALL[:5])
    with pytest.raises(IntegrityError, match="1 beginnings for 1 rows of 4"):
        sharing.manager.attach(batch, [Beginning(0, [], [])], 0)
    with pytest.raises(IntegrityError, match="0 beginnings"):
        sharing.manager.attach(sharing.manager.new_batch(), [], 0)


def test_a_block_of_which_only_some_tokens_were_recomputed_is_no_longer_found() -> None:
    """Found wrong: a row that was cropped into a lost block computed its first tokens again, and others were served
    the rest of it, which was whatever the slot held."""
    sharing = Sharing(gpu=8, cpu=0, nvme=4, outlives=True)
    blocks = sharing.cached(ALL[:12])
    sharing.demote()
    row = sharing.begin(ALL[:12])
    assert row.tables[0].tail_tokens == 3
    sharing.placement.unreadable.add(blocks[2])
    losses = Losses(sharing.manager, row, [columns([7])], opener(sharing.house), chunk(2))
    losses.mend(losses.known(), "known")
    losses.close()
    assert sharing.house.read(row) == ALL[:11], "it has all that it knows of"
    found = sharing.match([*ALL[:12], 1])
    assert found == Match(tuple(blocks[:2]), Miss.CORRUPT)
    sharing.demote()
    assert all(sharing.house.cells(Tier.NVME, slot) != () for slot in sharing.house.engine.files.labels)
    assert len(sharing.house.engine.files.labels) == 2, "nor by a later process"


def test_a_block_that_was_recomputed_whole_is_found_and_is_to_be_proven_again() -> None:
    sharing = Sharing(gpu=8, cpu=0, nvme=4, outlives=True)
    blocks = sharing.cached(ALL[:12])
    sharing.demote()
    row = sharing.begin([*ALL[:12], 1])
    before = sharing.placement.residency[blocks[2]].sealed
    sharing.placement.unreadable.add(blocks[2])
    losses = Losses(sharing.manager, row, [columns([7])], opener(sharing.house), chunk(2))
    losses.mend(losses.known(), "known")
    losses.close()
    sealed = sharing.placement.residency[blocks[2]].sealed
    assert sealed is not None and before is not None and sealed.label == before.label and sealed.number > before.number
    assert sharing.placement.prefixes.sealed(blocks[2]) is sealed
    assert sharing.match(ALL[:12]) == Match(tuple(blocks), None)
    assert len(sharing.house.engine.files.labels) == 2, "the copy that could not be read is forgotten"


# -- giving them up ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", Tier)
def test_the_last_of_a_prefix_goes_first_on_each_tier(tier: Tier) -> None:
    sharing = Sharing(gpu=8, cpu=8, nvme=8)
    trunk = sharing.cached(ALL[:12])
    branch = sharing.cached([*ALL[:8], 1, 1, 1, 1])
    if tier is not Tier.GPU:
        sharing.demote()
    if tier is Tier.NVME:
        sharing.demote(Tier.CPU)
    assert all(list(sharing.placement.residency[block].copies) == [tier] for block in (*trunk, branch[2]))
    (first,) = sharing.evict(tier, 1)
    assert first in (trunk[2], branch[2]) and (first == trunk[2] or tier is not Tier.GPU), "the one that came first"
    (second,) = sharing.evict(tier, 1)
    assert {first, second} == {trunk[2], branch[2]}
    assert sharing.evict(tier, 1) == [trunk[1]] and sharing.evict(tier, 5) == [trunk[0]]
    assert sharing.house.used() == {"gpu": 0, "cpu": 0, "nvme": 0}


def test_only_cached_blocks_go_and_none_that_is_pinned_or_moves() -> None:
    sharing = Sharing(gpu=10, cpu=4, nvme=0)
    held = sharing.filled(ALL[:8])
    pinned, moving, free = (sharing.cached(ALL[at : at + 4])[0] for at in (20, 24, 28))
    sharing.placement.residency.pin(pinned, Tier.GPU)
    slot = sharing.placement.pools[Tier.CPU].take()
    sharing.placement.start(moving, MovePurpose.WRITE_BEHIND, Tier.GPU, Tier.CPU, slot)
    assert sharing.evict(Tier.GPU, 10) == [free]
    sharing.house.drain()
    sharing.placement.residency.unpin(pinned, Tier.GPU)
    assert sharing.evict(Tier.GPU, 10) == [pinned, moving]
    assert sharing.house.read(held) == ALL[:8]
    sharing.manager.drop(held)
    assert len(sharing.evict(Tier.GPU, 10)) == 2


def test_a_block_that_is_pinned_on_another_tier_stays_with_all_its_copies() -> None:
    sharing = Sharing(gpu=4, cpu=4, nvme=0)
    (block,) = sharing.cached(ALL[:4])
    slot = sharing.placement.pools[Tier.CPU].take()
    sharing.placement.start(block, MovePurpose.WRITE_BEHIND, Tier.GPU, Tier.CPU, slot)
    sharing.house.drain()
    sharing.placement.residency.pin(block, Tier.CPU)
    assert sharing.evict(Tier.GPU, 1) == []
    sharing.placement.residency.unpin(block, Tier.CPU)
    assert sharing.evict(Tier.GPU, 1) == [block]


def test_a_block_whose_slot_a_hanging_move_holds_stays() -> None:
    sharing = Sharing(gpu=4, cpu=0, nvme=4)
    (block,) = sharing.cached(ALL[:4])
    sharing.hang(block, MovePurpose.DEMOTE, Tier.GPU, Tier.NVME)
    assert sharing.evict(Tier.GPU, 1) == []
    sharing.house.engine.nvme_hangs = False
    sharing.house.drain()
    assert sharing.evict(Tier.GPU, 1) == [block]


@pytest.mark.parametrize("tiers", [(6, 0, 0), (3, 3, 0), (3, 0, 3), (2, 2, 2)], ids=str)
def test_room_is_made_of_cached_blocks_and_of_no_conversation(tiers: tuple[int, int, int]) -> None:
    gpu, cpu, nvme = tiers
    sharing = Sharing(gpu=gpu, cpu=cpu, nvme=nvme)
    held = sharing.filled(ALL[:8])
    for at in range(16, 40, 8):
        sharing.cached(ALL[at : at + 8])
    grows = sharing.filled(ALL[40:48])
    assert sharing.house.read(held) == ALL[:8] and sharing.house.read(grows) == ALL[40:48]
    sharing.manager.check_integrity()
    assert sharing.placement.metrics.dropped_blocks == 0


@pytest.mark.parametrize("tiers", [(4, 0, 4), (4, 4, 0), (4, 4, 4)], ids=str)
def test_full_tiers_make_room_between_steps_and_no_step_waits_for_it(
    tiers: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lowest one kept all it had until a step needed room on the first: that step waited for every tier."""
    gpu, cpu, nvme = tiers
    sharing = Sharing(gpu=gpu, cpu=cpu, nvme=nvme, high_frac=0.7, low_frac=0.5)
    for at in range(0, 4 * sum(tiers), 4):
        sharing.cached(ALL[at : at + 4])
    assert len(sharing.placement.prefixes) >= sum(tiers) - 4
    for _ in range(4):  # as between the steps of other sequences: what goes down goes from tier to tier
        sharing.manager.poll()
        sharing.house.drain()
    monkeypatch.setattr(sharing.placement, "wait", lambda: pytest.fail("it waits"))
    sharing.house.append(sharing.manager.new_batch(), list(range(8)))
    sharing.manager.check_integrity()
    assert len(sharing.placement.prefixes) >= sum(tiers) - 5, "and no more goes than has to"


def test_a_step_of_the_largest_size_finds_room_although_no_tier_is_nearly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = Sharing(gpu=8, cpu=8, nvme=0, high_frac=1.0, low_frac=0.5)
    sharing.manager.upkeep.step_slots = 3
    sharing.cached(ALL[:28])
    held = sharing.filled(ALL[28:32])
    sharing.manager.poll()
    sharing.house.drain()
    assert sharing.placement.pools[Tier.GPU].num_free == 3, "as many as a step takes, and no more"
    monkeypatch.setattr(sharing.placement, "wait", lambda: pytest.fail("it waits"))
    sharing.house.append(sharing.manager.new_batch(), list(range(12)))
    assert sharing.house.tiers_of(held) == ["gpu"]
    sharing.manager.check_integrity()


def test_no_running_block_goes_ahead_of_need() -> None:
    sharing = Sharing(gpu=4, cpu=8, nvme=0, high_frac=1.0, low_frac=0.5)
    sharing.manager.upkeep.step_slots = 2
    batch = sharing.filled(ALL[:16])
    sharing.manager.enter(batch)
    sharing.manager.poll()
    assert {move.purpose for move in sharing.placement.moves.values()} == {MovePurpose.WRITE_BEHIND}


def test_nothing_is_given_up_early_for_a_tier_that_takes_nothing() -> None:
    sharing = Sharing(gpu=4, cpu=0, nvme=4, high_frac=0.7, low_frac=0.5)
    for at in range(0, 32, 4):
        sharing.cached(ALL[at : at + 4])
    sharing.house.drain()
    sharing.house.engine.nvme_available_slots = 0
    num_cached = len(sharing.placement.prefixes)
    sharing.placement.takes = lambda tier, early=False: False  # type: ignore[method-assign]
    sharing.placement.evict_below(Tier.GPU, 4)
    assert len(sharing.placement.prefixes) == num_cached


def test_nothing_is_evicted_below_where_no_block_could_go_down() -> None:
    sharing = Sharing(gpu=2, cpu=0, nvme=2)
    sharing.cached(ALL[:8])
    sharing.demote()
    running = sharing.manager.new_batch()
    sharing.house.append(running, [1, 2])
    for block in running.tables[0].blocks:
        sharing.placement.residency.pin(block, Tier.GPU)
    with pytest.raises(CapacityError):
        sharing.placement.make_room(Tier.GPU, 2)
    assert len(sharing.placement.prefixes) == 2


def test_a_cached_head_goes_when_what_continues_it_is_held_by_others() -> None:
    """Found wrong: it was no leaf, so that nothing could go, and a step was refused beside an unused block."""
    sharing = Sharing(gpu=4, cpu=0, nvme=0)
    first = sharing.manager.new_batch()
    second = sharing.manager.new_batch()
    for batch in (first, second):  # at once: neither finds the other's
        batch.origin = sharing.origin()
        sharing.house.append(batch, ALL[:4])
        sharing.manager.seal(batch)
    sharing.house.append(second, ALL[4:8])
    sharing.manager.leave(second)
    sharing.manager.drop(first)
    assert [sharing.placement.is_cached(block) for block in sharing.placement.prefixes.blocks()] == [True, False]
    sharing.house.append(second, ALL[8:16])
    assert sharing.house.read(second) == ALL[:16]


@pytest.mark.parametrize("by_crop", [True, False])
def test_what_a_running_row_no_longer_holds_can_be_evicted(by_crop: bool) -> None:
    """Found wrong: a block that a running row was cropped out of, or had copied, counted as its own for ever."""
    sharing = Sharing(gpu=4, cpu=0, nvme=0)
    blocks = sharing.cached(ALL[:12])
    row = sharing.begin(ALL[:12])
    sharing.manager.enter(row)
    if by_crop:
        sharing.manager.truncate(row, 8)
    sharing.house.append(row, [1])
    assert sharing.placement.is_cached(blocks[2])
    sharing.house.append(row, [2, 3, 4, 5])
    assert sharing.house.read(row)[-5:] == [1, 2, 3, 4, 5] and sharing.house.used()["gpu"] == 4
    sharing.manager.leave(row)


@pytest.mark.parametrize("name", BROKEN_POLICIES)
def test_a_policy_that_names_nothing_keeps_no_cached_block(name: str) -> None:
    """Found wrong: with one, a step was refused beside blocks that nobody held."""
    policies = {tier: BROKEN_POLICIES[name]() for tier in Tier}
    sharing = Sharing(gpu=3, cpu=0, nvme=2, policies=policies)
    for at in range(0, 40, 8):
        sharing.cached(ALL[at : at + 8])
    sharing.manager.check_integrity()
    assert sharing.placement.metrics.dropped_blocks == 0


def test_a_tier_that_takes_nothing_does_not_keep_what_begins_there() -> None:
    """Found wrong: heads on the gpu tier were no leaves while their ends lay on a tier that was out of use."""
    sharing = Sharing(gpu=4, cpu=0, nvme=4, max_delay=0)
    sharing.cached(ALL[:16])
    for block in sharing.placement.prefixes.blocks()[2:]:
        slot = sharing.placement.pools[Tier.NVME].take()
        sharing.placement.start(block, MovePurpose.DEMOTE, Tier.GPU, Tier.NVME, slot)
    sharing.house.drain()
    while sharing.placement.takes(Tier.NVME):
        sharing.placement.breakers[Tier.NVME].failed(0, "on purpose")
    batch = sharing.filled(ALL[20:36])
    assert sharing.house.read(batch) == ALL[20:36]
