"""The orders that the policies promise."""

from __future__ import annotations

import pytest

from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from kvtier.policies.mru import MRU
from kvtier.policies.next_layers import NextLayers
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.policies.recency import Recency
from kvtier.types import BlockId, EvictionPolicy, SequenceId


def order(policy: EvictionPolicy, evictable: range = range(1000)) -> list[int]:
    return [int(block) for block in policy.victims(1000, evictable)]


def insert(policy: EvictionPolicy, sequence: int, first_id: int, indexes: range) -> None:
    for index in indexes:
        policy.inserted(BlockId(first_id + index), SequenceId(sequence), index)


def touch(policy: EvictionPolicy, *blocks: int) -> None:
    policy.touched([BlockId(block) for block in blocks])


def test_lru_names_what_was_read_longest_ago() -> None:
    policy = LRU()
    insert(policy, 0, 0, range(5))
    touch(policy, 1, 0, 3)
    assert order(policy) == [2, 4, 1, 0, 3]
    assert order(policy, range(1, 4)) == [2, 1, 3]


def test_fifo_ignores_reads() -> None:
    policy = FIFO()
    insert(policy, 0, 0, range(4))
    touch(policy, 0, 1)
    policy.removed(BlockId(1))
    policy.inserted(BlockId(1), SequenceId(0), 1)
    assert order(policy) == [0, 2, 3, 1]


def test_mru_names_what_was_read_last() -> None:
    policy = MRU()
    insert(policy, 0, 0, range(5))
    touch(policy, 1, 0, 3)
    assert order(policy) == [3, 0, 1, 4, 2]


def test_recency_gives_up_the_middle_first_and_the_first_block_last() -> None:
    policy = Recency(first_blocks=2, recent_blocks=3)
    insert(policy, 0, 0, range(10))
    assert order(policy) == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]
    touch(policy, 4, 2, 5)  # use does not matter within a sequence
    assert order(policy) == [2, 3, 4, 5, 6, 7, 8, 9, 1, 0]


def test_recency_goes_by_position_not_by_arrival() -> None:
    policy = Recency(first_blocks=1, recent_blocks=1)
    for index in (5, 0, 3, 9, 1):
        policy.inserted(BlockId(100 - index), SequenceId(0), index)
    assert order(policy) == [99, 97, 95, 91, 100]


def test_recency_starts_with_the_sequence_touched_longest_ago() -> None:
    policy = Recency(first_blocks=1, recent_blocks=1)
    insert(policy, 0, 0, range(4))
    insert(policy, 1, 10, range(4))
    touch(policy, 0)
    assert order(policy) == [11, 12, 1, 2, 13, 3, 10, 0]


def test_recency_of_a_short_sequence_has_no_middle() -> None:
    policy = Recency(first_blocks=2, recent_blocks=3)
    insert(policy, 0, 0, range(4))
    assert order(policy) == [2, 3, 1, 0]
    policy.removed(BlockId(0))
    policy.removed(BlockId(1))
    assert order(policy) == [2, 3]


def test_recency_refuses_negative_sizes() -> None:
    with pytest.raises(ValueError, match="recent_blocks -1"):
        Recency(recent_blocks=-1)


def test_next_layers_stops_at_the_last_layer() -> None:
    policy = NextLayers(depth=3)
    assert list(policy.layers_ahead(0, 6)) == [1, 2, 3]
    assert list(policy.layers_ahead(4, 6)) == [5]
    assert list(policy.layers_ahead(5, 6)) == []
    assert list(NextLayers(depth=0).layers_ahead(0, 6)) == []
    with pytest.raises(ValueError, match="depth"):
        NextLayers(depth=-1)


def test_no_prefetch_fetches_nothing_and_refuses_a_depth() -> None:
    assert list(NoPrefetch().layers_ahead(0, 6)) == []
    with pytest.raises(ValueError, match="next_layers"):
        NoPrefetch(depth=2)
