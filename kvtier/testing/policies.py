"""The conformance suites for eviction and prefetch policies. Need pytest."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod

import pytest

from kvtier.types import BlockId, EvictionPolicy, PrefetchPolicy, SequenceId


class Everything:
    """An `evictable` that counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __contains__(self, block: object) -> bool:
        self.num_asked += 1
        return True


class EvictionPolicyContract(ABC):
    """What every eviction policy promises. Derive a `Test…` class and give `make_policy`."""

    @abstractmethod
    def make_policy(self) -> EvictionPolicy:
        """A new policy that was told nothing yet."""

    @pytest.fixture
    def policy(self) -> EvictionPolicy:
        return self.make_policy()

    def test_has_the_interface(self, policy: EvictionPolicy) -> None:
        assert isinstance(policy, EvictionPolicy)

    def test_knows_nothing_at_first(self, policy: EvictionPolicy) -> None:
        assert policy.victims(3, Everything()) == []
        policy.removed(BlockId(1))
        policy.touched([BlockId(1), BlockId(2)])
        assert policy.victims(3, Everything()) == []

    def test_names_everything_evictable_if_asked_for_enough(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=3, num_blocks=8)
        for num_blocks in (len(blocks), 10 * len(blocks)):
            assert sorted(policy.victims(num_blocks, set(blocks))) == sorted(blocks)

    def test_names_as_many_as_asked(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=2, num_blocks=10)
        for num_blocks in range(1, len(blocks) + 1):
            assert len(policy.victims(num_blocks, set(blocks))) == num_blocks

    def test_asking_for_more_does_not_change_who_goes_first(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=2, num_blocks=10)
        everyone = policy.victims(len(blocks), set(blocks))
        for num_blocks in range(1, len(blocks)):
            assert policy.victims(num_blocks, set(blocks)) == everyone[:num_blocks]

    def test_never_names_what_must_stay(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=2, num_blocks=10)
        evictable = set(blocks[::3])
        assert set(policy.victims(len(blocks), evictable)) == evictable
        assert policy.victims(5, set()) == []
        assert policy.victims(5, {BlockId(10_000)}) == []

    def test_victims_change_nothing(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=2, num_blocks=10)
        first = policy.victims(7, set(blocks))
        policy.victims(20, set(blocks[:3]))
        assert policy.victims(7, set(blocks)) == first
        first.clear()  # the list is the caller's
        assert len(policy.victims(7, set(blocks))) == 7

    def test_removed_blocks_are_forgotten(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=2, num_blocks=10)
        gone = blocks[1::2]
        for block in gone:
            policy.removed(block)
            policy.removed(block)
        policy.touched(gone)
        assert sorted(policy.victims(100, Everything())) == sorted(blocks[::2])

    def test_a_block_may_come_back(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=1, num_blocks=6)
        policy.removed(blocks[2])
        policy.inserted(blocks[2], SequenceId(5), 0)  # block ids may be reused for another sequence
        assert sorted(policy.victims(100, Everything())) == sorted(blocks)

    def test_touching_unknown_blocks_adds_none(self, policy: EvictionPolicy) -> None:
        blocks = fill(policy, num_sequences=1, num_blocks=4)
        policy.touched([BlockId(900), blocks[0], BlockId(901), blocks[0]])
        policy.touched(iter(blocks))  # any iterable, once
        assert sorted(policy.victims(100, Everything())) == sorted(blocks)

    @pytest.mark.parametrize("seed", range(5))
    def test_random_histories_agree_with_a_set(self, seed: int) -> None:
        policy, chance, held = self.make_policy(), random.Random(seed), set[BlockId]()
        for _ in range(1500):
            block = BlockId(chance.randrange(60))
            action = chance.random()
            if action < 0.4 and block not in held:
                policy.inserted(block, SequenceId(chance.randrange(4)), chance.randrange(12))
                held.add(block)
            elif action < 0.6:
                policy.touched([BlockId(chance.randrange(60)) for _ in range(chance.randrange(8))])
            elif action < 0.8:
                policy.removed(block)
                held.discard(block)
            else:
                evictable = {BlockId(i) for i in range(60) if chance.random() < chance.choice((0.1, 0.5, 1.0))}
                num_blocks = chance.randint(1, 70)
                named = policy.victims(num_blocks, evictable)
                assert len(named) == len(set(named)) == min(num_blocks, len(held & evictable))
                assert set(named) <= held & evictable

    def test_few_victims_of_many_blocks_ask_little(self, policy: EvictionPolicy) -> None:
        fill(policy, num_sequences=10, num_blocks=500)
        everything = Everything()
        assert len(policy.victims(4, everything)) == 4
        assert everything.num_asked < 500  # not one question for each of 5000 blocks


class PrefetchPolicyContract(ABC):
    """What every prefetch policy promises. Derive a `Test…` class and give `make_policy`."""

    depths: tuple[int, ...] = (0, 1, 2, 7)

    @abstractmethod
    def make_policy(self, depth: int) -> PrefetchPolicy:
        """A new policy of this depth."""

    def test_names_valid_layers_once_nearest_first(self) -> None:
        for depth in self.depths:
            policy = self.make_policy(depth)
            assert isinstance(policy, PrefetchPolicy)
            for num_layers in (1, 2, 30):
                for layer in range(num_layers):
                    ahead = list(policy.layers_ahead(layer, num_layers))
                    assert len(ahead) <= depth
                    assert len(set(ahead)) == len(ahead)
                    assert all(layer < other < num_layers for other in ahead), "itself is implied; no wrapping"
                    assert ahead == sorted(ahead)

    def test_the_same_question_gets_the_same_answer(self) -> None:
        for depth in self.depths:
            policy = self.make_policy(depth)
            assert list(policy.layers_ahead(3, 30)) == list(policy.layers_ahead(3, 30))


def fill(policy: EvictionPolicy, num_sequences: int, num_blocks: int) -> list[BlockId]:
    """Tell the policy of `num_blocks` blocks for each sequence, interleaved, and of some reads; names the blocks."""
    blocks: list[BlockId] = []
    for index in range(num_blocks):
        for sequence in range(num_sequences):
            block = BlockId(len(blocks))
            policy.inserted(block, SequenceId(sequence), index)
            blocks.append(block)
    policy.touched(blocks[:: num_sequences + 1])
    return blocks
