"""A tier manager over a handful of slots and an engine without tensors, for tests that need every tier full."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.batch import Batch
from kvtier.block_table import BlockTable
from kvtier.identity import digest
from kvtier.labels import Labels
from kvtier.manager import TierManager
from kvtier.metrics import Metrics, SequenceMetrics
from kvtier.origin import Fingerprint, namespace_of
from kvtier.placement import Placement, Watermark
from kvtier.plan import StepPlan
from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from kvtier.policies.mru import MRU
from kvtier.policies.recency import Recency
from kvtier.prefix_cache import PrefixCache
from kvtier.recomputable import Past
from kvtier.slots import SlotPool
from kvtier.step import NewColumns, Run, Write
from kvtier.testing import FakeEngine
from kvtier.types import (
    BlockId,
    Engine,
    EvictionPolicy,
    Move,
    MoveResult,
    MoveStatus,
    SequenceId,
    Slot,
    SlotLabel,
    Tier,
)

POLICIES: dict[str, type[EvictionPolicy]] = {"fifo": FIFO, "lru": LRU, "mru": MRU, "recency": Recency}


Columns = Sequence[int | None]
"""New columns of one row: token ids, and None where there is padding."""


def columns(ids: Columns, positions: list[int] | None = None) -> NewColumns:
    """What a row gets in a step. `positions` are those of the tokens."""
    runs: list[Run] = []
    for column, token_id in enumerate(ids):
        if token_id is None:
            continue
        if runs and runs[-1].first + runs[-1].count == column:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(column, 1))
    return NewColumns(len(ids), tuple(runs), [token_id for token_id in ids if token_id is not None], positions)


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

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        return []

    def in_flight(self) -> int:
        return len(self.flying)


BROKEN_POLICIES: dict[str, type[EvictionPolicy]] = {"nothing": NamesNothing, "wrong": NamesWrong, "raises": Raises}


class FakeModel:
    """A model that is a number, and an adapter that is another."""

    def __init__(self) -> None:
        self.weights, self.adapter, self.plain = 1, 0, True
        self.num_hashed = 0
        self.error: Exception | None = None
        self.hashing: Callable[[], None] = lambda: None
        """What happens while it is hashed."""

    def fingerprint(self) -> Fingerprint | None:
        self.num_hashed += 1
        self.hashing()
        if self.error is not None:
            raise self.error
        weights = digest("weights", [("", b"%d" % self.weights)])
        adapters = b"%d" % self.adapter
        return Fingerprint(weights, namespace_of(weights, adapters, b""), adapters)

    def begin_fingerprint(self) -> Callable[[], Fingerprint | None]:
        return self.fingerprint

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        return self.plain

    def structure(self) -> bytes | None:
        return b"structure"

    def seen(self) -> bytes | None:
        return b"modules"


class FakeFiles:
    """What the nvme store knows of labelled blocks: each until its slot is written again, or it is forgotten."""

    def __init__(self) -> None:
        self.labels: dict[Slot, SlotLabel] = {}
        """The latest last."""

    @property
    def num_found(self) -> int:
        return len(self.labels)

    def num_in(self, namespace: bytes) -> int:
        return sum(label.namespace == namespace for label in self.labels.values())

    def find(self, label: SlotLabel) -> Slot | None:
        return next((slot for slot, each in reversed(self.labels.items()) if each == label), None)

    def forget(self, slot: Slot) -> None:
        self.labels.pop(slot, None)

    def put_label(self, slot: Slot, label: SlotLabel) -> bool:
        self.labels[slot] = label
        return True


class HangingEngine(FakeEngine):
    """A FakeEngine whose devices can hang: while one does, no move of its ends; a wait for nothing else times out."""

    hanging = False
    """Everything."""
    nvme_hangs = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.files = FakeFiles()

    def _end(self, flight: Any) -> MoveResult:
        result, move = super()._end(flight), flight.move
        if move.dest is Tier.NVME:
            self.files.labels.pop(move.dest_slot, None)
            if result.status is MoveStatus.DONE and move.label is not None:
                self.files.labels[move.dest_slot] = move.label
        return result

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        results = super().withdraw(move_ids)
        for result in results:  # here, unlike on a disk, the slot holds garbage since the move was started
            if result.move.dest is Tier.NVME:
                self.files.forget(result.move.dest_slot)
        return results

    def _tick(self) -> list[MoveResult]:
        if not self.nvme_hangs:
            return super()._tick()
        stuck = [flight for flight in self._flights if Tier.NVME in (flight.move.source, flight.move.dest)]
        self._flights = [flight for flight in self._flights if flight not in stuck]
        ended = super()._tick()
        self._flights += stuck
        return ended

    def finished(self) -> list[MoveResult]:
        return [] if self.hanging else super().finished()

    def wait(self, timeout_s: float) -> list[MoveResult]:
        results: list[MoveResult] = []
        for _ in range(0 if self.hanging else self.max_delay + 1):
            results = results or self._tick()
        return results

    def uses(self, tier: Tier, slot: Slot) -> bool:
        """Whether a move that is in flight reads or writes the slot."""
        moves = [flight.move for flight in self._flights]
        return any((tier, slot) in ((m.source, m.source_slot), (m.dest, m.dest_slot)) for m in moves)


@dataclass
class FakeClock:
    """Time stands still unless a test moves it."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class House:
    """A manager, what it stands on, and the bytes that steps write: one cell a token, the token's id."""

    manager: TierManager
    placement: Placement
    engine: HangingEngine
    clock: FakeClock
    prefix_cache: PrefixCache

    def write(self, write: Write, cells: Sequence[int]) -> None:
        """Put a row's new tokens in its gpu slot, as the attention layers do: in place, before the commit."""
        at = (Tier.GPU, write.slot)
        assert not self.engine.uses(*at), "a step writes to a slot that a move still reads or writes"
        held = list(self.cells(*at))
        held[write.start : write.start + write.num_tokens] = cells[write.offset : write.offset + write.num_tokens]
        self.engine.bytes_by_slot[at] = tuple(held)

    def cells(self, tier: Tier, slot: Slot) -> tuple[int, ...]:
        """What a slot holds; garbage where nothing was written."""
        found = self.engine.bytes_by_slot.get((tier, slot))
        return found if isinstance(found, tuple) else (-1,) * self.manager.block_tokens

    def append(self, batch: Batch, ids: Columns | Sequence[Columns]) -> None:
        """One whole step: a row's new columns, or those of each row. None is a padding column."""
        rows = [ids] if isinstance(ids[0], int | None) else ids
        step = self.manager.begin_step(batch, [columns(row) for row in rows])  # type: ignore[arg-type]
        for row in step.rows:
            for write in row.writes:
                self.write(write, row.new.token_ids or [])
        self.manager.commit_step(step)

    def read(self, batch: Batch, row: int = 0) -> list[int]:
        """Every committed token of a row."""
        return self.read_rows(batch)[row]

    def read_rows(self, batch: Batch) -> list[list[int]]:
        """Every committed token, by row: full blocks where the plan says, the tail in its fastest tier."""
        plan = StepPlan.build(batch, self.placement.residency)  # whether or not a tier can be read now
        assert len({source.block for source in plan.streamed}) == len(plan.streamed)
        read: list[list[int]] = []
        for number, (table, row) in enumerate(zip(batch.tables, plan.rows, strict=True)):
            parts = {block.index: self.cells(Tier.GPU, block.slot) for block in row.resident}
            streamed = [source for source in plan.streamed if number in source.rows]
            parts.update({source.index: self.cells(source.tier, source.slot) for source in streamed})
            assert len(parts) == len(row.resident) + len(streamed)
            assert sorted(parts) == list(range(table.num_full_blocks))
            slots = [slot for run in row.runs for slot in range(run.first, run.first + run.count)]
            assert slots == sorted(block.slot for block in row.resident)
            read.append([cell for index in sorted(parts) for cell in parts[index]])
            if table.tail is not None:
                record = self.placement.residency[table.tail]
                assert record.fastest is not None
                read[-1] += self.cells(record.fastest, record.copies[record.fastest])[: table.tail_tokens]
        return read

    def read_alone(self, table: BlockTable) -> list[int]:
        """`read` of a row whatever batch it is in."""
        return self.read(Batch([table], SequenceMetrics()))

    def tiers_of(self, batch: Batch, row: int = 0) -> list[str]:
        """Where each block's valid copies are, fastest first: `gpu`, `gpu+cpu`, …"""
        residency = self.placement.residency
        return ["+".join(tier.label for tier in sorted(residency[block].copies)) for block in batch.tables[row].blocks]

    def filled(self, num_tokens: int, first_id: int = 0) -> Batch:
        """A new idle batch of one row with that many tokens, in steps of one block, its full blocks sealed."""
        batch = self.manager.new_batch()
        for start in range(0, num_tokens, 4):
            self.append(batch, list(range(first_id + start, first_id + min(start + 4, num_tokens))))
        self.manager.leave(batch)
        return batch

    def check(self) -> None:
        """Everything agrees, and every row reads as the tokens that were written."""
        self.manager.check_integrity()
        for table in self.manager.tables.values():
            assert self.read_alone(table) == table.token_ids()

    def drain(self) -> None:
        """Wait for every move, those that hung too."""
        while self.placement.moves or self.placement.hung.moves:
            self.placement.wait()
        self.placement.commit_arrived()

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
    labels: Labels | None = None,
    past: Past = Past.BLOCKS,
    drops: bool = False,
    shares: bool = False,
    labels_late: bool = False,
) -> House:
    """Tiers of that many slots; 0 leaves a tier out. With the default watermarks nothing moves before it must.

    `drops`: idle blocks that can be computed again are dropped when there is no room. `shares`: sealed blocks enter the
    prefix index. `labels_late`: slots may get their label when a block has been in them for some time.
    """
    slots = {Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: nvme}
    pools = {tier: SlotPool(num_slots) for tier, num_slots in slots.items() if num_slots}
    engine, clock = HangingEngine(seed, fail_frac, max_delay), FakeClock()
    placement = Placement(
        pools,
        {tier: (policies or {}).get(tier) or LRU() for tier in pools},
        engine,
        Metrics(),
        block_bytes=100,
        watermarks={tier: Watermark(high_frac, low_frac) for tier in (Tier.GPU, Tier.CPU)},
        io_timeout_s=0.01,
        labels=labels,
        nvme_room=lambda: engine.nvme_available_slots,
        clock=clock,
    )

    def same_bytes(slot: Slot, other: Slot) -> bool:
        cells = [engine.bytes_by_slot.get((Tier.GPU, each)) for each in (slot, other)]
        return cells[0] is not None and cells[0] == cells[1]

    manager = TierManager(placement, block_tokens, same_bytes, past)
    manager.sealer.indexes = shares
    if drops:
        placement.droppable = lambda: manager.recomputable
    files = engine.files if labels is not None and labels.outlives and nvme else None
    if files is not None:
        placement.forget_slot = files.forget
        placement.label_slot = files.put_label if labels_late else None
    return House(manager, placement, engine, clock, PrefixCache(placement, block_tokens, files))
