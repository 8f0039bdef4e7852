"""Which blocks run, and what policies are told of reads."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kvtier.errors import ConfigError, IntegrityError
from kvtier.policies.lru import LRU
from kvtier.policy import GuardedPolicy
from kvtier.running import RunningBlocks
from kvtier.types import BlockId, SequenceId, Tier
from tests.small_tiers import House, build


class Told(LRU):
    """Remembers what it was told of reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[int]] = []

    def touched(self, blocks: Iterable[BlockId]) -> None:
        blocks = list(blocks)
        self.reads.append([int(block) for block in blocks])
        super().touched(blocks)


def told(house: House, tier: Tier = Tier.GPU) -> list[list[int]]:
    policy = house.placement.policies[tier]._policy
    assert isinstance(policy, Told)
    return policy.reads


def test_steps_are_told_when_the_batch_goes_idle_and_once() -> None:
    house = build(gpu=8, policies={tier: Told() for tier in Tier})
    batch = house.manager.new_batch()
    for token in range(10):
        house.append(batch, [token])
    assert told(house) == []
    house.manager.leave(batch)
    assert told(house) == told(house, Tier.NVME) == [batch.tables[0].blocks]
    house.manager.leave(batch)
    assert len(told(house)) == 1


def test_steps_are_told_in_the_order_of_the_last_ones_before_running_blocks_are_named() -> None:
    house = build(gpu=4, cpu=4, policies={tier: Told() for tier in Tier})
    first, second = house.manager.new_batch(), house.manager.new_batch()
    for batch in (first, second):
        house.manager.enter(batch)
        house.append(batch, [1, 2, 3, 4])
    house.append(first, [5])  # read last
    order = [second.tables[0].blocks, first.tables[0].blocks]
    house.append(second, [6])
    assert told(house) == []  # there was room
    house.append(first, [7])
    wanted = [list(second.tables[0].blocks), list(first.tables[0].blocks)]
    house.placement.give_up(Tier.GPU, 1)
    assert told(house) == wanted
    assert house.placement.residency[order[0][0]].move is not None  # the one whose row was read first


def test_a_policy_that_passes_many_running_blocks_is_told_what_was_read() -> None:
    house = build(gpu=200, cpu=200, policies={tier: Told() for tier in Tier})
    running = house.manager.new_batch()
    house.manager.enter(running)
    house.append(running, list(range(400)))
    idle = house.filled(4, 1000)
    reads = len(told(house))
    assert house.placement.give_up(Tier.GPU, 1, idle_only=True) == 1
    assert told(house)[reads:] == [running.tables[0].blocks]
    assert house.placement.residency[idle.tables[0].blocks[0]].move is not None


def test_the_last_reads_of_what_is_dropped_count_for_who_goes_on_with_it() -> None:
    house = build(gpu=8, policies={tier: Told() for tier in Tier})
    batch = house.manager.new_batch()
    house.append(batch, [1, 2, 3, 4, 5])
    twin, blocks = house.manager.fork(batch), list(batch.tables[0].blocks)
    house.manager.drop(batch)
    assert told(house) == [blocks]
    assert house.read(twin) == [1, 2, 3, 4, 5]


def test_what_runs_is_counted_by_rows() -> None:
    house = build(gpu=8)
    batch = house.manager.new_batch()
    house.append(batch, [1, 2, 3, 4, 5])
    twin, running = house.manager.fork(batch), house.placement.running_blocks
    house.manager.enter(twin)
    house.manager.leave(batch)
    assert running == set(twin.tables[0].blocks)
    house.manager.truncate(twin, 4)
    assert running == {twin.tables[0].blocks[0]}
    assert (running.num_copies[Tier.GPU], house.placement.residency.num_copies[Tier.GPU]) == (1, 2)
    house.check()
    house.manager.drop(twin)
    assert not running and running.num_copies[Tier.GPU] == 0
    house.check()


def test_blocks_below_are_listed_as_they_come_and_go() -> None:
    house = build(gpu=4, cpu=4, nvme=4, low_frac=0.0)
    batch = house.filled(12)
    running, placement = house.placement.running_blocks, house.placement
    placement.give_up(Tier.GPU, 2)
    house.drain()
    placement.give_up(Tier.CPU, 1)
    house.drain()
    house.manager.enter(batch)
    blocks = batch.tables[0].blocks
    low, middle = ([b for b in blocks if placement.residency[b].fastest is tier] for tier in (Tier.NVME, Tier.CPU))
    assert (len(low), len(middle)) == (1, 1)
    assert (running.num_below(Tier.GPU), running.num_below(Tier.CPU), running.num_below(Tier.NVME)) == (2, 1, 0)
    assert list(running.below(Tier.GPU, lambda tier: True)) == low + middle
    assert list(running.below(Tier.GPU, lambda tier: tier is not Tier.NVME)) == middle
    assert list(running.below(Tier.CPU, lambda tier: True)) == low
    house.append(batch, [1])
    house.check()
    house.manager.leave(batch)
    assert running.num_below(Tier.GPU) == 0
    house.check()


def test_integrity_sees_what_is_wrongly_listed() -> None:
    house = build(gpu=4)
    batch = house.filled(8)
    residency, row, blocks = house.placement.residency, SequenceId(1), batch.tables[0].blocks
    for damage, message in (
        (lambda r: r._rows.clear(), "other rows"),
        (lambda r: r._num_rows.update({blocks[0]: 2}), "are not those"),
        (lambda r: r._below_gpu[Tier.CPU].update({blocks[0]: 0}), "wrongly listed on cpu"),
        (lambda r: r.num_copies.update({Tier.GPU: 9}), "miscounted"),
        (lambda r: r._below_gpu[Tier.CPU].update({BlockId(99): 0}), "miscounted"),
    ):
        running = RunningBlocks(residency)
        running.start(row, blocks)
        running.start(row, blocks)
        running.check_integrity({row: blocks})
        damage(running)
        with pytest.raises(IntegrityError, match=message):
            running.check_integrity({row: blocks})


class Uncopyable(LRU):
    def __deepcopy__(self, memo: object) -> LRU:
        raise TypeError("it has a lock")


def test_a_policy_that_cannot_be_copied_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"eviction\.gpu: Uncopyable cannot be copied: it has a lock"):
        GuardedPolicy(Uncopyable(), "gpu").untold()


@pytest.mark.parametrize("tails", [(0,), (1,), (3,), (0, 0), (0, 1), (3, 3), (1, 2, 3), (0, 0, 3, 1)])
@pytest.mark.parametrize("slots", [1, 2, 3, 4, 7])
def test_the_most_new_tokens_are_the_most_for_which_there_are_slots(tails: tuple[int, ...], slots: int) -> None:
    house = build(gpu=slots, cpu=8)
    batch = house.manager.new_batch(len(tails))
    for table, tail in zip(batch.tables, tails, strict=True):
        table.append(tail, range(tail), [BlockId(-1 - table.sequence)] if tail else [])
    fitting = [m for m in range(1, 4 * slots + 1) if sum(-(-(tail + m) // 4) for tail in tails) <= slots]
    assert house.manager.max_new_tokens(batch) == max(fitting, default=0)
