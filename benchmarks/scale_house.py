"""A tier manager of many blocks without tensors: what scale.py measures, and what tests count the visits of."""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.identity import digest
from kvtier.labels import Labels
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.origin import Fingerprint, Origin, namespace_of
from kvtier.placement import Placement, Watermark
from kvtier.policy import load_eviction
from kvtier.prefix_cache import PrefixCache
from kvtier.slots import SlotPool
from kvtier.testing import InstantEngine
from kvtier.types import BlockId, Slot, Tier

SHARE = {Tier.GPU: 0.2, Tier.CPU: 0.3, Tier.NVME: 0.5}
"""Of the blocks, how many lie on each tier."""
CONVERSATION_BLOCKS = 50


class NoModel:
    """Where a model is asked for that is never computed with."""

    def fingerprint(self) -> Fingerprint | None:
        weights = digest("weights", [])
        return Fingerprint(weights, namespace_of(weights, b"", b""))

    def structure(self) -> bytes | None:
        return b""

    def seen(self) -> bytes | None:
        return b""

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        return True


@dataclass
class House:
    """A manager, what it stands on, and idle conversations of `CONVERSATION_BLOCKS` full blocks each."""

    manager: TierManager
    placement: Placement
    prefix_cache: PrefixCache
    origin: Origin
    idle: list[Batch] = field(default_factory=list)
    next_token: int = 0

    @property
    def num_blocks(self) -> int:
        """Live blocks."""
        return self.manager.residency_len

    def tokens(self, num_tokens: int) -> list[int]:
        """Token ids that begin like nobody else's."""
        first, self.next_token = self.next_token, self.next_token + 1
        return [first % 50_000, first // 50_000, *range(num_tokens - 2)]

    def add_idle(self, num_blocks: int) -> Batch:
        """One more idle conversation of so many full blocks, sealed and in the prefix index. Its first blocks lie on
        the slowest tier, its last ones on the gpu tier, as they would after a while."""
        manager, placement = self.manager, self.placement
        batch = manager.new_batch()
        batch.origin = self.origin
        table = batch.tables[0]
        blocks: list[BlockId] = []
        for index in range(num_blocks):
            place = (index + 0.5) / num_blocks
            tier = Tier.NVME if place < SHARE[Tier.NVME] else Tier.CPU if place < 1 - SHARE[Tier.GPU] else Tier.GPU
            block = placement.residency.create(table.sequence, index)
            placement.add_copy(block, tier, self.take(tier))
            blocks.append(block)
        num_tokens = num_blocks * manager.block_tokens
        table.append(num_tokens, self.tokens(num_tokens), blocks)
        manager.seal(batch)
        self.idle.append(batch)
        return batch

    def take(self, tier: Tier) -> Slot:
        """A slot, of which the house has enough."""
        slot = self.placement.pools[tier].take()
        if slot is None:
            raise RuntimeError(f"the house was built with too few slots on {tier.label}")
        return slot

    def check(self) -> None:
        """Raise IntegrityError unless every fact agrees with every other. O(blocks)."""
        self.manager.check_integrity()


def build(num_blocks: int, block_tokens: int = 16, policy: str = "lru", *, indexes: bool = True) -> House:
    """`num_blocks` blocks, spread over three tiers that have half as much room again.

    `indexes`: whether their prefixes can be found, and who holds blocks knows their tokens by name.
    """
    room = 2048 + num_blocks // 2
    pools = {tier: SlotPool(int(share * num_blocks) + room) for tier, share in SHARE.items()}
    labels = Labels(NoModel(), outlives=False)
    placement = Placement(
        pools,
        {tier: load_eviction(policy, "policy") for tier in pools},
        InstantEngine(),
        Metrics(),
        block_bytes=1 << 20,
        watermarks={tier: Watermark(0.95, 0.02) for tier in (Tier.GPU, Tier.CPU)},  # nothing is copied down early
        io_timeout_s=30.0,
        labels=labels,
    )
    manager = TierManager(placement, block_tokens, lambda slot, other: False)
    manager.sealer.indexes = indexes
    origin = labels.origin(0, b"")
    if origin is None:
        raise RuntimeError("labels did not take the model that there is not")
    house = House(manager, placement, PrefixCache(placement, block_tokens), origin)
    while (left := num_blocks - house.num_blocks) > 0:
        house.add_idle(min(left, CONVERSATION_BLOCKS))
    house.manager.poll()
    if placement.moves:
        raise RuntimeError("something is due in a house that should be at rest")
    return house


class Meter:
    """What operations take, by name: an operation's number each time that it is measured."""

    def __init__(self) -> None:
        self.found: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str, count: int) -> Iterator[None]:
        """Measure what runs in it, `count` operations of that name."""
        self._start()
        try:
            yield
        finally:
            self.found[name].append(self._stop() / count)

    def _start(self) -> None:
        raise NotImplementedError

    def _stop(self) -> float:
        raise NotImplementedError


class Stopwatch(Meter):
    """Microseconds of an operation, by this thread's processor time: it waits for nothing, and what others do on the
    machine meanwhile is not its cost."""

    def _start(self) -> None:
        self._started_ns = time.thread_time_ns()

    def _stop(self) -> float:
        return (time.thread_time_ns() - self._started_ns) / 1e3


class Instructions(Meter):
    """Instructions of Python that an operation executes, calls included: the same in every run, on every machine.

    Loops in C (`list(d)`, `sorted`) count as one: those a stopwatch finds, at a million entries.
    """

    def _start(self) -> None:
        self._count = 0
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._count += event == "opcode"
        return self._trace

    def _stop(self) -> float:
        sys.settrace(self._before)
        return self._count


def only_row(batch: Batch) -> BlockTable:
    """The row of a batch that has one."""
    (table,) = batch.tables
    return table
