"""The operations of the control plane, each on a house of many blocks, and put back as it was."""

from __future__ import annotations

import random
from collections.abc import Callable

from kvtier.batch import Batch
from kvtier.benchmarks.scale_house import House, Meter, only_row
from kvtier.evictable import Evictable
from kvtier.policy import load_eviction
from kvtier.sequences import Beginning
from kvtier.step import NewColumns
from kvtier.types import BlockId, EvictionPolicy, Tier

POLICIES = ("fifo", "lru", "mru", "recency")
RUNNING_BLOCKS = 40
"""Of a conversation that runs."""
NUM_IN_TURN = 20
"""Conversations that take turns."""


def create_and_release(house: House, meter: Meter, count: int) -> None:
    """Blocks appear on the gpu tier, are pinned to it, come to another tier, and go again."""
    placement, residency = house.placement, house.placement.residency
    sequence, created = only_row(house.idle[0]).sequence, list[BlockId]()
    with meter("create a block", count):
        for index in range(count):
            block = residency.create(sequence, index)
            placement.add_copy(block, Tier.GPU, house.take(Tier.GPU))
            created.append(block)
    with meter("pin", count):
        for block in created:
            residency.pin(block, Tier.GPU)
    with meter("unpin", count):
        for block in created:
            residency.unpin(block, Tier.GPU)
    with meter("add a copy", count):
        for block in created:
            placement.add_copy(block, Tier.NVME, house.take(Tier.NVME))
    with meter("drop a copy", count):
        for block in created:
            placement.drop_copy(block, Tier.GPU)
    with meter("release a block", count):
        for block in created:
            placement.release(block)


def seal_and_look_up(house: House, meter: Meter, count: int) -> None:
    """A new conversation of full blocks becomes final and enters the index; a prompt that begins alike finds it, and
    begins with it; both go."""
    manager, count = house.manager, min(count, 200)
    batch = manager.new_batch()
    batch.origin = house.origin
    table = only_row(batch)
    num_tokens = count * manager.block_tokens
    ids, blocks = house.tokens(num_tokens), list[BlockId]()
    for index in range(count):
        blocks.append(house.placement.residency.create(table.sequence, index))
        house.placement.add_copy(blocks[-1], Tier.GPU, house.take(Tier.GPU))
    table.append(num_tokens, ids, blocks)
    with meter("seal and index a block", count):
        manager.seal(batch)
    other = manager.new_batch()
    with meter("look a block up", count):
        match = house.prefix_cache.match(house.origin, ids, only_row(other).sequence)
    if match.blocks != tuple(blocks):
        raise RuntimeError(f"{len(match.blocks)} of {count} blocks were found")
    with meter("attach a found block", count):
        manager.attach(other, [Beginning(0, ids, match.blocks)], num_tokens)
    with meter("come to run, a block", count):
        manager.enter(other)
    with meter("go idle, a block", count):
        manager.leave(other)
    with meter("fork a block", count):
        fork = manager.fork(other)
    with meter("drop a shared block", count):
        manager.drop(fork)
    manager.drop(other)
    manager.drop(batch)
    _settle(house)
    with meter("evict a cached block", count):
        for _ in range(count):
            house.placement.evict_cached(Tier.GPU, 1)
    _evict_all_cached(house)


def move(house: House, meter: Meter, count: int) -> None:
    """Blocks of the gpu tier are demoted, and come back."""
    placement, done = house.placement, 0
    gone = placement.policies[Tier.GPU].victims(count, Evictable(placement, Tier.GPU, running=False))
    count = len(gone)  # a small house has fewer
    with meter("demote a block and commit", count):
        for _ in range(count):
            done += placement.give_up(Tier.GPU, 1)
            placement.commit_arrived()
    if done != count:
        raise RuntimeError(f"{done} of {count} blocks were demoted")
    for block in gone:  # the house is as it was
        placement.add_copy(block, Tier.GPU, house.take(Tier.GPU))
        placement.drop_copy(block, Tier.CPU)


def step(house: House, meter: Meter, count: int) -> None:
    """One conversation goes on by single tokens while all others are idle; then as many take turns."""
    manager = house.manager
    batches = [_running(house) for _ in range(NUM_IN_TURN)]
    batch = batches[0]
    for each in batches:  # what they filled becomes final, and is copied down
        _steps(house, each, 1)
    _settle(house)
    length = batch.length
    with meter("poll with nothing due", count):
        for _ in range(count):
            manager.poll()
    with meter("the most new tokens", count):
        for _ in range(count):
            manager.max_new_tokens(batch)
    new = [NewColumns.of(1, [7])]
    with meter("begin a step of one token", count):
        for _ in range(count):
            manager.abort_step(manager.begin_step(batch, new))
    with meter("a step of one token", count):
        for _ in range(count):
            manager.commit_step(manager.begin_step(batch, new))
    with meter("crop by a token", count):
        for _ in range(count):
            manager.truncate(batch, batch.length - 1)
    manager.truncate(batch, length)
    with meter(f"a step, {NUM_IN_TURN} in turn", count // NUM_IN_TURN * NUM_IN_TURN):
        for _ in range(count // NUM_IN_TURN):
            for each in batches:
                manager.commit_step(manager.begin_step(each, new))
    for each in batches:
        manager.leave(each)
        manager.drop(each)
    _settle(house)
    _evict_all_cached(house)


def _settle(house: House) -> None:
    """Until nothing is due."""
    house.manager.poll()
    while house.placement.moves:
        house.manager.poll()


def _evict_all_cached(house: House) -> None:
    for tier in Tier:
        while house.placement.evict_cached(tier, 1000):
            pass


def _running(house: House) -> Batch:
    """A conversation on the gpu tier that runs, as between two of its steps."""
    manager = house.manager
    batch = manager.new_batch()
    batch.origin = house.origin
    manager.enter(batch)
    _steps(house, batch, RUNNING_BLOCKS * manager.block_tokens)
    return batch


def _steps(house: House, batch: Batch, num_tokens: int) -> None:
    new = [NewColumns.of(num_tokens, house.tokens(max(2, num_tokens))[:num_tokens])]
    house.manager.commit_step(house.manager.begin_step(batch, new))


def policies(house: House, meter: Meter, count: int) -> None:
    """Each policy, told of every block of the house: it is asked for victims among the idle ones, and told of reads."""
    residency = house.placement.residency
    evictable = Evictable(house.placement, Tier.NVME, running=False)
    held = [block for block in residency.blocks() if residency[block].nvme_slot is not None]
    for name in POLICIES:
        policy = load_eviction(name, "policy")
        for block in held:
            policy.inserted(block, residency[block].sequence, residency[block].index)
        _policy(house, meter, random.Random(7).choices(held, k=count), name, policy, evictable)


def _policy(
    house: House, meter: Meter, blocks: list[BlockId], name: str, policy: EvictionPolicy, evictable: Evictable
) -> None:
    count, residency = len(blocks), house.placement.residency
    with meter(f"name a victim, {name}", count):
        for _ in range(count):
            policy.victims(1, evictable)
    with meter(f"a block was read, {name}", count):
        for block in blocks:
            policy.touched((block,))
    with meter(f"a block comes and goes, {name}", count):
        for block in blocks:
            policy.removed(block)
            policy.inserted(block, residency[block].sequence, residency[block].index)


OPERATIONS: tuple[Callable[[House, Meter, int], None], ...] = (
    create_and_release, seal_and_look_up, move, step, policies,
)  # fmt: skip
