"""The prefix index: what is in it, what is found of it, what is remembered of what went."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvtier.errors import IntegrityError
from kvtier.labels import Labels
from kvtier.origin import Fingerprint, Origin, Sealed, namespace_of
from kvtier.prefix import Miss, PrefixIndex
from kvtier.types import BlockId, SlotLabel


def origin(salt: bytes = b"", model: bytes = b"model") -> Origin:
    return Origin(Fingerprint(model, namespace_of(model, b"", salt)), salt)


PLAIN = origin()


def chain(contents: bytes, of: Origin = PLAIN, number: int = 0) -> list[Sealed]:
    """Sealed blocks one behind the other, each of one byte of content."""
    found: list[Sealed] = []
    for content in contents:
        parent = found[-1].label.identity if found else None
        found.append(Sealed(Labels.name(of, parent, bytes([content])), parent, of, number + len(found)))
    return found


def filled(sealed: list[Sealed], first: int = 0) -> PrefixIndex:
    index = PrefixIndex()
    for number, each in enumerate(sealed):
        assert index.add(BlockId(first + number), each)
        index.check_integrity()
    return index


def test_what_is_entered_is_found_by_its_label_until_it_is_removed() -> None:
    blocks = chain(b"abc")
    index = filled(blocks, 7)
    assert (len(index), index.blocks()) == (3, [7, 8, 9])
    assert [index.find(each.label) for each in blocks] == [7, 8, 9]
    assert [index.sealed(BlockId(block)) for block in (7, 8, 9, 10)] == [*blocks, None]
    assert BlockId(8) in index and BlockId(10) not in index
    index.remove(BlockId(8), Miss.EVICTED)
    index.remove(BlockId(8), Miss.CORRUPT)
    index.remove(BlockId(99), Miss.CORRUPT)
    index.check_integrity()
    assert [index.find(each.label) for each in blocks] == [7, None, 9]
    assert [index.miss(each.label.identity) for each in blocks] == [Miss.UNKNOWN, Miss.EVICTED, Miss.UNKNOWN]
    assert index.sealed(BlockId(8)) is None and index.blocks() == [7, 9]


def test_a_second_block_of_one_identity_and_a_block_that_is_in_are_refused() -> None:
    blocks = chain(b"ab")
    index = filled(blocks)
    assert not index.add(BlockId(5), blocks[0]) and not index.add(BlockId(0), chain(b"z")[0])
    index.check_integrity()
    assert index.blocks() == [0, 1] and index.find(blocks[0].label) == 0
    index.remove(BlockId(0), Miss.EVICTED)
    assert index.add(BlockId(5), blocks[0]), "its place is free"
    assert index.miss(blocks[0].label.identity) is Miss.UNKNOWN, "it is there again"
    index.check_integrity()


def test_another_content_or_namespace_under_the_same_identity_is_not_found() -> None:
    """A collision of hashes, which nobody can make."""
    (sealed,) = chain(b"a")
    index = filled([sealed])
    label = sealed.label
    for other in (
        SlotLabel(label.namespace, label.identity, b"b"),
        SlotLabel(origin(b"salt").fingerprint.namespace, label.identity, label.content),
    ):
        assert index.find(other) is None
        assert not index.add(BlockId(1), Sealed(other, None, PLAIN, 1))
        index.check_integrity()
    assert index.find(chain(b"a", origin())[0].label) == 0, "equal, not the same object"


def test_a_leaf_is_a_block_that_no_other_in_the_index_continues() -> None:
    trunk = chain(b"abc")
    branch = chain(b"abd")[2]
    index = filled([*trunk, branch])
    assert [index.is_leaf(BlockId(block)) for block in range(5)] == [False, False, True, True, False]
    index.remove(BlockId(2), Miss.EVICTED)
    assert not index.is_leaf(BlockId(1)), "the other branch goes on from it"
    index.remove(BlockId(3), Miss.EVICTED)
    assert index.is_leaf(BlockId(1)) and not index.is_leaf(BlockId(0))
    index.remove(BlockId(1), Miss.EVICTED)
    assert index.is_leaf(BlockId(0))
    index.check_integrity()


def test_a_block_whose_parent_is_not_there_counts_for_the_one_that_takes_its_place() -> None:
    blocks = chain(b"abc")
    index = filled(blocks)
    index.remove(BlockId(1), Miss.CORRUPT)
    assert index.is_leaf(BlockId(0)) and index.is_leaf(BlockId(2))
    assert index.add(BlockId(9), blocks[1])
    assert not index.is_leaf(BlockId(0)) and not index.is_leaf(BlockId(9)), "number 2 goes on from it again"
    index.check_integrity()


def test_blocks_are_counted_by_namespace_and_by_model_whatever_the_salt() -> None:
    alice, bob, other = origin(b"alice"), origin(b"bob"), origin(model=b"other")
    index = filled([*chain(b"ab", alice), *chain(b"a", bob), *chain(b"a", other)])
    spaces = [each.fingerprint.namespace for each in (alice, bob, other, PLAIN)]
    assert [index.num_in(space) for space in spaces] == [2, 1, 1, 0]
    assert index.num_of_model(PLAIN.fingerprint.model) == 3 and index.num_of_model(other.fingerprint.model) == 1
    for block in list(index.blocks()):
        index.remove(block, Miss.EVICTED)
        index.check_integrity()
    assert not any(index.num_in(space) for space in spaces) and not len(index)
    assert index.num_of_model(PLAIN.fingerprint.model) == 0
    assert not index._in_namespace and not index._of_model and not index._leaves | index._others.keys()


def test_tokens_of_another_salt_are_not_found() -> None:
    index = filled(chain(b"abc", origin(b"alice")))
    for other in (PLAIN, origin(b"bob"), origin(b"alice", b"other")):
        assert [index.find(each.label) for each in chain(b"abc", other)] == [None] * 3
    assert [index.find(each.label) for each in chain(b"abc", origin(b"alice"))] == [0, 1, 2]


def test_what_a_changed_model_may_have_made_is_not_found() -> None:
    of = origin()
    blocks = chain(b"abc", of)
    index = filled(blocks)
    of.num_proven, of.is_stale = 2, True
    assert [index.find(each.label) for each in blocks] == [0, 1, None]
    assert [index.refuted(each.label.identity) for each in blocks] == [None, None, 2]
    assert index.refuted(b"?" * 32) is None
    again = Sealed(blocks[2].label, blocks[2].parent, of, -1)
    index.reseal(BlockId(2), again)
    assert index.find(again.label) == 2 and index.sealed(BlockId(2)) is again
    index.check_integrity()


def test_what_went_is_remembered_up_to_a_number_the_latest_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixIndex, "MAX_GONE", 3)
    blocks = chain(b"abcde")
    index = filled(blocks)
    for block in range(4):
        index.remove(BlockId(block), Miss.EVICTED)
    index.note_gone(blocks[1].label.identity, Miss.CORRUPT)  # the latest now
    index.remove(BlockId(4), Miss.EVICTED)
    kinds = [index.miss(each.label.identity) for each in blocks]
    assert kinds == [Miss.UNKNOWN, Miss.CORRUPT, Miss.UNKNOWN, Miss.EVICTED, Miss.EVICTED]
    assert len(index._gone) == 3


@pytest.mark.parametrize("seed", range(20))
def test_random_histories_agree_with_a_dict(seed: int) -> None:
    """Chains that branch, of two salts; which blocks are leaves is searched for."""
    rng = random.Random(seed)
    tails = [bytes(rng.choice(b"ab") for _ in range(rng.randint(1, 5))) for _ in range(6)]
    pool = {each.label.identity: each for salt in (b"", b"s") for tail in tails for each in chain(tail, origin(salt))}
    index, held = PrefixIndex(), dict[BlockId, Sealed]()
    for number in range(200):
        if rng.random() < 0.6:
            sealed = rng.choice(list(pool.values()))
            is_new = sealed.label.identity not in {each.label.identity for each in held.values()}
            assert index.add(BlockId(number), sealed) is is_new
            if is_new:
                held[BlockId(number)] = sealed
        elif held:
            block = rng.choice(list(held))
            index.remove(block, Miss.EVICTED)
            gone = held.pop(block)
            assert index.miss(gone.label.identity) is Miss.EVICTED
        index.check_integrity()
        assert index.blocks() == list(held)
        parents = {each.parent for each in held.values()}
        for block, sealed in held.items():
            assert index.find(sealed.label) == block
            assert index.is_leaf(block) is (sealed.label.identity not in parents)


DAMAGES: list[tuple[Callable[[PrefixIndex], object], str]] = [
    (lambda index: index._blocks.update({b"?": BlockId(9)}), "prefixes for"),
    (lambda index: index._sealed.update({BlockId(0): index._sealed[BlockId(1)]}), "not its own"),
    (lambda index: index._by_salt.update({b"salt": {BlockId(0): None}}), "whose its blocks are"),
    (lambda index: index._others.update({b"?": 1}), "lost count"),
    (lambda index: index._leaves.clear(), "lost count"),
    (lambda index: index._in_namespace.clear(), "lost count"),
    (lambda index: index._of_model.clear(), "lost count"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_integrity_sees_what_is_miscounted(damage: Callable[[PrefixIndex], object], message: str) -> None:
    index = filled(chain(b"ab"))
    damage(index)
    with pytest.raises(IntegrityError, match=message):
        index.check_integrity()
