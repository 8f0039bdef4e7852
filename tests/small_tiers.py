"""A tier manager over a handful of slots and an engine without tensors, for tests that need every tier full."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.block_table import BlockTable
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.placement import Placement, Watermark
from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from kvtier.policies.mru import MRU
from kvtier.policies.recency import Recency
from kvtier.slots import SlotPool
from kvtier.step import Write
from kvtier.testing import FakeEngine
from kvtier.types import BlockId, Engine, EvictionPolicy, Move, MoveResult, MoveStatus, SequenceId, Slot, Tier

POLICIES: dict[str, type[EvictionPolicy]] = {"fifo": FIFO, "lru": LRU, "mru": MRU, "recency": Recency}


class Everything:
    """Contains every block."""

    def __contains__(self, block: object) -> bool:
        return True


class NamesNothing(LRU):
    """A user's policy that never gives anything up."""

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        return []


class NamesWrong(LRU):
    """A user's policy that ignores `evictable`, and names some blocks twice and some that never were."""

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        held = super().victims(1000, Everything())
        return [BlockId(10_000), *held[:1], *held[:1], BlockId(-1), *held]


class Raises:
    """A user's policy that is not finished."""

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        raise RuntimeError("not finished")

    def touched(self, blocks: Iterable[BlockId]) -> None:
        raise RuntimeError("not finished")

    def removed(self, block: BlockId) -> None:
        raise RuntimeError("not finished")

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        raise RuntimeError("not finished")


class HandEngine(Engine):
    """Ends one move a wait, the one that `first` ranks lowest, and as `status` says; `finished` ends none."""

    def __init__(self) -> None:
        self.flying: list[Move] = []
        self.first: Callable[[Move], int] = lambda move: move.move_id
        self.status: Callable[[Move], MoveStatus] = lambda move: MoveStatus.DONE

    def start(self, moves: Sequence[Move]) -> None:
        self.flying += moves

    def finished(self) -> list[MoveResult]:
        return []

    def wait(self, timeout_s: float) -> list[MoveResult]:
        if not self.flying:
            return []
        move = min(self.flying, key=self.first)
        self.flying.remove(move)
        return [MoveResult(move, self.status(move), "by hand")]

    def in_flight(self) -> int:
        return len(self.flying)


BROKEN_POLICIES: dict[str, type[EvictionPolicy]] = {"nothing": NamesNothing, "wrong": NamesWrong, "raises": Raises}


class HangingEngine(FakeEngine):
    """A FakeEngine whose device can hang: while `hanging`, no move ends and every wait times out."""

    hanging = False

    def finished(self) -> list[MoveResult]:
        return [] if self.hanging else super().finished()

    def wait(self, timeout_s: float) -> list[MoveResult]:
        return [] if self.hanging else super().wait(timeout_s)


@dataclass
class House:
    """A manager, what it stands on, and the bytes that steps write: one cell a token, the token's id."""

    manager: TierManager
    placement: Placement
    engine: HangingEngine

    def write(self, write: Write, token_ids: list[int]) -> None:
        """Put a step's tokens in its gpu slot, as the attention layers do: in place, before the commit."""
        at = (Tier.GPU, write.slot)
        cells = list(self.cells(*at))
        cells[write.start : write.start + write.count] = token_ids[write.offset : write.offset + write.count]
        self.engine.bytes_by_slot[at] = tuple(cells)

    def cells(self, tier: Tier, slot: Slot) -> tuple[int, ...]:
        """What a slot holds; garbage where nothing was written."""
        found = self.engine.bytes_by_slot.get((tier, slot))
        return found if isinstance(found, tuple) else (-1,) * self.manager.block_tokens

    def append(self, table: BlockTable, token_ids: list[int]) -> None:
        """One whole step."""
        step = self.manager.begin_step(table, len(token_ids))
        for write in step.writes:
            self.write(write, token_ids)
        self.manager.commit_step(step, token_ids)

    def read(self, table: BlockTable) -> list[int]:
        """Every committed token: full blocks where the plan says, the tail in its fastest tier."""
        plan = self.manager.plan(table)
        parts = {block.index: self.cells(Tier.GPU, block.slot) for block in plan.resident}
        parts.update({source.index: self.cells(source.tier, source.slot) for source in plan.streamed})
        assert sorted(parts) == list(range(table.num_full_blocks))
        assert sum(run.count for run in plan.runs) == len(plan.resident)
        read = [cell for index in sorted(parts) for cell in parts[index]]
        if table.tail is not None:
            record = self.placement.residency[table.tail]
            assert record.fastest is not None
            read += self.cells(record.fastest, record.copies[record.fastest])[: table.tail_tokens]
        return read

    def tiers_of(self, table: BlockTable) -> list[str]:
        """Where each block's valid copies are, fastest first: `gpu`, `gpu+cpu`, …"""
        residency = self.placement.residency
        return ["+".join(tier.label for tier in sorted(residency[block].copies)) for block in table.blocks]

    def drain(self) -> None:
        """Wait for every move."""
        while self.placement.moves:
            self.placement.wait()

    def used(self) -> dict[str, int]:
        """Slots in use, by tier."""
        return {tier.label: pool.num_used for tier, pool in self.placement.pools.items()}


def build(
    gpu: int = 4,
    cpu: int = 4,
    nvme: int = 8,
    *,
    block_tokens: int = 4,
    policies: Mapping[Tier, EvictionPolicy] | None = None,
    high_frac: float = 1.0,
    low_frac: float = 1.0,
    seed: int = 1,
    max_delay: int = 2,
    fail_frac: float = 0.0,
) -> House:
    """Tiers of that many slots; 0 leaves a tier out. With the default watermarks nothing moves before it must."""
    slots = {Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: nvme}
    pools = {tier: SlotPool(num_slots) for tier, num_slots in slots.items() if num_slots}
    engine = HangingEngine(seed, fail_frac, max_delay)
    placement = Placement(
        pools,
        {tier: (policies or {}).get(tier) or LRU() for tier in pools},
        engine,
        Metrics(),
        block_bytes=100,
        watermarks={tier: Watermark(high_frac, low_frac) for tier in (Tier.GPU, Tier.CPU)},
        io_timeout_s=0.01,
    )
    return House(TierManager(placement, block_tokens), placement, engine)
