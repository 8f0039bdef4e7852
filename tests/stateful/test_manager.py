"""The tier manager against a plain model: batches of rows, each a list of columns and a list of shared blocks."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from kvtier.batch import Batch
from kvtier.block_table import Made, Span
from kvtier.errors import BlockLostError, CapacityError, IntegrityError, TransferTimeoutError
from kvtier.labels import Labels, at_once
from kvtier.losses import Compute, Losses
from kvtier.origin import Origin, Sealed
from kvtier.prefix import Miss
from kvtier.recomputable import Past
from kvtier.residency import BlockState
from kvtier.sequences import Beginning
from kvtier.step import NewColumns, RowStep, Step
from kvtier.types import BlockId, MovePurpose, Tier
from tests.sample import rounds
from tests.small_tiers import BROKEN_POLICIES, POLICIES, Everything, FakeModel, House, build, columns
from tests.stateful.machine import Machine, run

BLOCK_TOKENS = 4
MAX_BATCHES = 6
MAX_ROWS = 9  # of all batches together
# tests/mutants.py finds its bugs in 150. It wants a failure fast, a person wants it small.
NUM_EXAMPLES = int(os.environ.get("KVTIER_TEST_EXAMPLES", rounds(500, 200)))
PHASES = [Phase.generate] if "KVTIER_TEST_FAST" in os.environ else [Phase.generate, Phase.shrink]
EXPECTED = (CapacityError, BlockLostError, TransferTimeoutError)


def span_made(span: Span) -> Made:
    return Made.COUNTED if span.positions is None else Made.PLACED


SALTS = (b"", b"", b"", b"another")
MAX_PROMPTS = 8

indexes = st.integers(0, 1 << 16)
counts = st.integers(1, 3 * BLOCK_TOKENS)
row_counts = st.sampled_from([1, 1, 2, 3, 4])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of warnings of moves that fail on purpose are of no use to anyone."""
    logger = logging.getLogger("kvtier")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@dataclass(frozen=True)
class Token:
    """One token. `cell` stands for its K and V: another one for every other past, position, or padding in the past."""

    token_id: int | None
    """None: fed as an embedding."""
    position: int
    cell: int


@dataclass(eq=False)
class ModelBlock:
    """One block as the design has it: shared by forks and equal rows, final once sealed."""

    sealed: bool = False


@dataclass
class ModelRow:
    """What one row must hold. None is a padding column."""

    columns: list[Token | None] = field(default_factory=list)
    blocks: list[ModelBlock] = field(default_factory=list)

    @property
    def tokens(self) -> list[Token]:
        return [column for column in self.columns if column is not None]

    @property
    def num_tokens(self) -> int:
        return len(self.columns) - self.columns.count(None)

    @property
    def tail_tokens(self) -> int:
        return self.num_tokens % BLOCK_TOKENS

    @property
    def num_full(self) -> int:
        return self.num_tokens // BLOCK_TOKENS

    def copy(self) -> ModelRow:
        return ModelRow(list(self.columns), list(self.blocks))

    def keep(self, length: int) -> None:
        del self.columns[length:]
        del self.blocks[-(-self.num_tokens // BLOCK_TOKENS) :]


@dataclass(eq=False)
class ModelBatch:
    """What one batch must hold."""

    batch: Batch
    rows: list[ModelRow]
    entered: int = 0

    @property
    def length(self) -> int:
        return len(self.rows[0].columns)

    def seal(self) -> bool:
        """Full blocks are final. Whether any are new: they may be joined."""
        new = False
        for row in self.rows:
            for block in row.blocks[: row.num_full]:
                new |= not block.sealed
                block.sealed = True
        return new

    def follow(self) -> None:
        """Blocks that were joined must be equal, with equal pasts; from here on they are one.

        Which equal ones are joined depends on where they lie: tests/unit/test_batch.py says when they must be.
        """
        for index in range(max((row.num_full for row in self.rows), default=0)):
            kept: dict[BlockId, tuple[int, ModelBlock]] = {}
            for row, table in zip(self.rows, self.batch.tables, strict=True):
                if index < row.num_full:
                    past = row.tokens[: (index + 1) * BLOCK_TOKENS]
                    cell, block = kept.setdefault(table.blocks[index], (past[-1].cell, row.blocks[index]))
                    assert cell == past[-1].cell, "blocks of different pasts were joined"
                    if block is not row.blocks[index]:
                        assert all(token.token_id is not None for token in past), "unknown tokens were joined"
                        assert block.sealed and row.blocks[index].sealed
                    row.blocks[index] = block


@dataclass(frozen=True)
class Fill:
    """How a step's new columns are made."""

    masks: tuple[int, ...] = (-1,) * 4
    """By row, a bit for each column: whether it is a token. -1: all of them."""
    same_ids: bool = False
    by_column: bool = False
    """Positions are those of the columns; otherwise they are counted on from the tokens held."""
    embeds: bool = False


masks = st.sampled_from([-1, -1, -1, 0, 0b10, 0b111000]) | st.integers(0, 0xFFF)
fills = st.builds(
    Fill,
    masks=st.just((-1,) * 4) | st.tuples(*[masks] * 4),
    same_ids=st.booleans(),
    by_column=st.sampled_from([False, False, True]),
    embeds=st.sampled_from([False] * 7 + [True]),
)
PLAIN = Fill()


class NotingLabels(Labels):
    """Labels that remember what every identity stands for."""

    def __init__(self, outlives: bool) -> None:
        super().__init__(FakeModel(), lambda: 0.0, outlives=outlives, beside=at_once)
        self.meanings: dict[bytes, tuple[bytes | None, bytes]] = {}
        """By identity, that of the block before it and its content."""

    def seal(self, origin: Origin, parent: Sealed | None, content: bytes, *, is_first: bool) -> Sealed | None:
        sealed = super().seal(origin, parent, content, is_first=is_first)
        if sealed is not None:
            self.meanings[sealed.label.identity] = sealed.parent, content
        return sealed


def tokens_of(content: bytes) -> list[tuple[int, int]]:
    """Ids and positions that `token_content` encoded."""
    parts = []
    while content:
        length = int.from_bytes(content[:8], "little")
        parts.append(content[8 : 8 + length])
        content = content[8 + length :]
    ids, runs = array("i", parts[1]), array("i", parts[3])
    positions = [first + each for first, count in zip(runs[::2], runs[1::2], strict=True) for each in range(count)]
    return list(zip(ids, positions, strict=True))


class ManagerMachine(Machine):
    """Every rule is something the wrapper, a finalizer, a full disk or a failing device does."""

    house: House
    totals: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[ModelBatch] = []
        self.pins: list[tuple[BlockId, Tier]] = []
        self.token_ids = itertools.count(1)
        self.cells: dict[tuple[int, int, int, int], int] = {}
        self.started = False
        self.last: ModelBatch | None = None  # whose step was the last: another one's step makes it idle
        self.labels: NotingLabels | None = None  # blocks are shared by those who have the same tokens
        self.prompts: list[list[int]] = []
        """Ids that rows have begun with."""

    @initialize(
        gpu=st.integers(2, 8),
        cpu=st.integers(0, 6),
        nvme=st.integers(0, 8),
        policy_names=st.tuples(*[st.sampled_from([*POLICIES, *POLICIES, *BROKEN_POLICIES])] * 3),
        marks=st.sampled_from([(1.0, 1.0), (0.9, 0.7), (0.6, 0.3), (0.5, 0.0)]),
        seed=st.integers(0, 1000),
        max_delay=st.integers(0, 4),
        lengths=st.lists(st.tuples(st.integers(1, 14), row_counts), min_size=1, max_size=5),
        num_spare=st.integers(0, 6),
        drops=st.booleans(),
        past=st.sampled_from(Past),
        sharing=st.sampled_from(["none", "none", "none", "process", "files", "late", "late"]),
    )
    def fill_every_tier(
        self,
        gpu: int,
        cpu: int,
        nvme: int,
        policy_names: tuple[str, str, str],
        marks: tuple[float, float],
        seed: int,
        max_delay: int,
        lengths: list[tuple[int, int]],
        num_spare: int,
        drops: bool,
        past: Past,
        sharing: str,
    ) -> None:
        known = POLICIES | BROKEN_POLICIES
        policies = {tier: known[name]() for tier, name in zip(Tier, policy_names, strict=True)}
        self.good_policies = {tier for tier, name in zip(Tier, policy_names, strict=True) if name in POLICIES}
        shares = sharing != "none"
        past = Past.BLOCKS if shares else past  # where layers need more than blocks, none are shared
        self.labels = NotingLabels(sharing in ("files", "late")) if shares else None
        self.house = build(
            gpu, cpu, nvme, block_tokens=BLOCK_TOKENS, policies=policies, labels=self.labels, shares=shares,
            high_frac=marks[0], low_frac=marks[1], seed=seed, max_delay=max_delay, drops=drops, past=past,
            labels_late=sharing == "late",
        )  # fmt: skip
        self.manager, self.placement, self.engine = self.house.manager, self.house.placement, self.house.engine
        self.manager.upkeep.step_slots = seed % 4
        self.started = True
        for length, num_rows in itertools.cycle(lengths):
            if self.num_blocks_held() >= gpu + cpu + nvme - num_spare:
                break
            if self.has_room_for(num_rows):
                self.new_batch(min(num_rows, gpu))
            batch = self.batches[length % len(self.batches)]
            length = min(length, self.manager.max_new_tokens(batch.batch))
            if not length or not self.step(batch, length, Fill(same_ids=length % 2 == 0)):
                break

    def num_blocks_held(self) -> int:
        return len({id(block) for row in self.rows() for block in row.blocks})

    def rows(self) -> list[ModelRow]:
        return [row for batch in self.batches for row in batch.rows]

    def has_room_for(self, num_rows: int) -> bool:
        return len(self.batches) < MAX_BATCHES and len(self.rows()) + num_rows <= MAX_ROWS

    def pick(self, index: int) -> ModelBatch:
        return self.batches[index % len(self.batches)]

    def holders(self, block: ModelBlock) -> int:
        return sum(block in row.blocks for row in self.rows())

    def seal(self, batch: ModelBatch) -> None:
        if batch.seal():
            self.unpin_all()  # nobody reads a block of a batch that is being sealed

    @staticmethod
    def follow(*batches: ModelBatch | None) -> None:
        for batch in batches:
            if batch is not None:
                batch.follow()

    # -- steps ------------------------------------------------------------------------------------------------------

    def new_columns(self, batch: ModelBatch, num_new: int, fill: Fill) -> list[list[Token | None]]:
        """By row. Rows of equal ids, positions and padding hold equal cells."""
        base = list(itertools.islice(self.token_ids, num_new))
        return [self.new_row(row, num_new, fill, mask, base) for row, mask in zip(batch.rows, fill.masks, strict=False)]

    def new_row(self, row: ModelRow, num_new: int, fill: Fill, mask: int, base: list[int]) -> list[Token | None]:
        tokens, new = row.tokens, []
        past, position = (tokens[-1].cell if tokens else 0), len(tokens)
        num_pads = next((i for i, column in enumerate(reversed(row.columns)) if column is not None), len(row.columns))
        for column in range(num_new):
            if not mask >> column & 1:
                new.append(None)
                num_pads += 1
                continue
            token_id = base[column] if fill.same_ids else next(self.token_ids)
            place = len(row.columns) + column if fill.by_column else position
            known = next(self.token_ids) if fill.embeds else token_id
            past = self.cells.setdefault(self.key(past, num_pads, known, place), len(self.cells) + 1)
            new.append(Token(None if fill.embeds else token_id, place, past))
            position, num_pads = position + 1, 0
        return new

    def key(self, past: int, num_pads: int, token_id: int, position: int) -> tuple[int, int, int, int]:
        """What K and V of a token depend on. Where blocks are shared, no layer is told of padding."""
        return past, num_pads if self.labels is None else 0, token_id, position

    def begin(self, batch: ModelBatch, new: list[list[Token | None]], fill: Fill) -> Step | None:
        """A step, or None when there was no room, a loss or a hang: then the batch must be as before."""
        num_failed = self.placement.metrics.moves_failed
        given = [self.given(row, fill) for row in new]
        if self.placement.unreadable and not self.mend(batch, given):
            return None
        before = self.last if self.last is not None and self.last is not batch and not self.last.entered else None
        if before is not None:
            self.seal(before)
        self.last = batch
        self.seal(batch)
        try:
            step = self.manager.begin_step(batch.batch, given)
        except EXPECTED as error:
            self.follow(before, batch)
            note(f"begin_step: {error!r}")
            self.check_pins()
            if isinstance(error, BlockLostError):
                is_late = self.engine.nvme_hangs or not self.placement.is_readable(Tier.NVME)
                is_late |= "took longer" in str(error)  # it was taken back, or has ended since
                assert self.placement.metrics.moves_failed > num_failed or is_late
            if isinstance(error, TransferTimeoutError):
                assert self.engine.hanging
            if isinstance(error, CapacityError) and self.placement.metrics.moves_failed == num_failed:
                self.check_no_room(batch, new)
            return None
        self.follow(before, batch)
        assert (step.committed, step.num_new, len(step.rows)) == (batch.length, len(new[0]), len(batch.rows))
        for row, row_step, row_new in zip(batch.rows, step.rows, new, strict=True):
            self.check_begun(row, row_step, row_new)
        slots = [write.slot for row_step in step.rows for write in row_step.writes]
        assert len(set(slots)) == len(slots), "two rows write to one slot"
        return step

    def mend(self, batch: ModelBatch, new: list[NewColumns]) -> bool:
        """As the wrapper: before its step, what a batch lacks is computed again. Whether that could be done."""
        num_failed, last = self.placement.metrics.moves_failed, self.last
        self.unpin_all()
        self.seal(batch)
        losses = Losses(self.manager, batch.batch, new, self.open_row, lambda row: 2 * BLOCK_TOKENS)
        try:
            known = losses.known()
            if not known:
                return True
            assert self.placement.droppable is not None or num_failed
            if last is not None and not last.entered:
                self.seal(last)  # a temporary row has the last step, if there is one
            losses.mend(known, "known")
        except EXPECTED as error:
            note(f"mend: {error!r}")
            if isinstance(error, BlockLostError) and not isinstance(error.__cause__, CapacityError):
                assert self.placement.metrics.moves_failed > num_failed
            return False
        finally:
            losses.close()
            self.last = self.last if self.manager._last is not None else None
            self.follow(last, batch)
            self.check_pins()
        assert not any(block in self.placement.unreadable for block in known)
        return True

    @contextmanager
    def open_row(self, batch: Batch) -> Iterator[Compute]:
        """A model that is given the row's past, ids and positions, and makes the very cells that they stand for."""

        def compute(span: Span) -> None:
            (table,) = batch.tables
            cells, position, ids = self.house.read(batch), table.num_tokens, []
            num_held = len(span.mask) - len(span.ids)
            assert batch.length == num_held
            for column in range(num_held, len(span.mask)):
                if not span.mask[column]:
                    continue
                num_pads = next((i for i in range(column) if span.mask[column - 1 - i]), column)
                if span.positions is not None:
                    position = span.positions[column - num_held]
                key = self.key(cells[-1] if cells else 0, num_pads, span.ids[column - num_held], position)
                cells.append(self.cells[key])
                ids.append(span.ids[column - num_held])
                position += 1
            mask = span.mask[num_held:]
            given = columns([1 if is_token else None for is_token in mask])
            positions = [] if span.positions is None else [p for p, t in zip(span.positions, mask, strict=True) if t]
            new = NewColumns(given.num_columns, given.runs, ids, positions or None, span_made(span))
            step = self.manager.begin_step(batch, [new])
            self.house.read(batch)  # it attends to all of its past
            for write in step.rows[0].writes:
                self.house.write(write, cells[len(cells) - len(ids) :])
            self.manager.commit_step(step)

        yield compute

    def given(self, new: list[Token | None], fill: Fill) -> NewColumns:
        positions = [token.position for token in new if token is not None] if fill.by_column else None
        given = columns([None if token is None else token.cell for token in new], positions)
        ids = [token.token_id for token in new if token is not None and token.token_id is not None]
        made = Made.PLACED if fill.by_column else Made.COUNTED
        return NewColumns(given.num_columns, given.runs, None if fill.embeds else ids, positions, made)

    def check_begun(self, row: ModelRow, step: RowStep, new: list[Token | None]) -> None:
        num_new = len(new) - new.count(None)
        assert sum(write.num_tokens for write in step.writes) == num_new
        assert step.is_full is (num_new == len(new))
        assert (step.tail_slot is None) is (row.tail_tokens == 0)
        if step.tail_slot is not None:
            tail = [token.cell for token in row.tokens[row.num_tokens - row.tail_tokens :]]
            assert list(self.house.cells(Tier.GPU, step.tail_slot)[: len(tail)]) == tail
            expected = num_new > 0 and (self.copies_tail(row) or self.tail_is_held(step))
            assert (step.tail_copy is not None) is expected

    def tail_is_held(self, step: RowStep) -> bool:
        """Whether a move that hangs may still read the tail's slot, so that nothing may be appended there."""
        assert step.table.tail is not None
        slot = self.placement.residency[step.table.tail].copies.get(Tier.GPU)
        return slot is not None and self.placement.is_held(Tier.GPU, slot)

    def copies_tail(self, row: ModelRow) -> bool:
        return row.blocks[-1].sealed or self.holders(row.blocks[-1]) > 1

    def check_no_room(self, batch: ModelBatch, new: list[list[Token | None]]) -> None:
        """A CapacityError is the truth: nothing that may leave the gpu tier had a place to go to."""
        ceiling = self.placement.pools[Tier.GPU].ceiling
        counts = [len(columns) - columns.count(None) for columns in new]
        needed = sum(-(-(row.tail_tokens + n) // BLOCK_TOKENS) for row, n in zip(batch.rows, counts, strict=True))
        if needed > ceiling:
            assert max(1, *counts) > self.manager.max_new_tokens(batch.batch)  # not even one: their tails take all
            return
        residency, lower = self.placement.residency, [t for t in self.placement.pools if t is not Tier.GPU]
        pinned = {block for block, _ in self.pins}
        places = [Tier.GPU, *(tier for tier in lower if self.placement.takes(tier))]
        for row, table, num_new in zip(batch.rows, batch.batch.tables, counts, strict=True):
            if row.tail_tokens and not (num_new and self.copies_tail(row)):
                pinned.add(table.blocks[-1])
        movable = {block for block in self.free_to_go(Tier.GPU) if block not in pinned}
        if not movable:
            return
        cached = {block for tier in places for block in self.free_to_go(tier) if self.placement.is_cached(block)}
        assert all(any(self.is_held(block, tier) for tier in Tier) for block in cached), [
            (block, residency[block], block in self.placement.running_blocks, block in movable) for block in cached
        ]
        if self.placement.droppable is not None:
            idle = {block for tier in places for block in self.free_to_go(tier)} - pinned
            idle -= self.placement.running_blocks
            assert min(len(movable), sum(b in self.manager.recomputable for b in idle)) < needed
        readable = [tier for tier in lower if self.placement.is_readable(tier)]
        for block in movable:
            assert not any(tier in residency[block].copies for tier in readable)
            assert block in self.placement.running_blocks or not residency[block].is_clean(Tier.GPU)
        for tier in lower:
            assert self.placement.pools[tier].num_free == 0 or not self.placement.takes(tier)
            assert not self.placement.takes(tier) or not set(residency.redundant[tier]) & self.free_to_go(tier) - pinned

    def is_held(self, block: BlockId, tier: Tier) -> bool:
        """Whether a move that hangs uses the block's slot."""
        slot = self.placement.residency[block].copies.get(tier)
        return slot is not None and self.placement.is_held(tier, slot)

    def free_to_go(self, tier: Tier) -> set[BlockId]:
        """Blocks of a tier that no move uses which hangs."""
        records = {block: self.placement.residency[block] for block in self.placement.residency.blocks()}
        return {
            block
            for block, record in records.items()
            if tier in record.copies and not self.placement.is_held(tier, record.copies[tier])
        }

    def step(self, batch: ModelBatch, num_new: int, fill: Fill = PLAIN) -> bool:
        new = self.new_columns(batch, num_new, fill)
        step = self.begin(batch, new, fill)
        if step is None:
            return False
        self.write_and_commit(batch, step, new)
        return True

    def write(self, step: Step, new: list[list[Token | None]]) -> None:
        for row, row_new in zip(step.rows, new, strict=True):
            for write in row.writes:
                self.house.write(write, [token.cell for token in row_new if token is not None])

    def write_and_commit(self, batch: ModelBatch, step: Step, new: list[list[Token | None]]) -> None:
        self.write(step, new)
        residency = self.placement.residency
        still = [(row.table.tail, residency[row.table.tail].generation) for row in step.rows
                 if row.table.tail is not None and not row.new.num_tokens]  # fmt: skip
        self.manager.commit_step(step)
        for block, generation in still:
            assert residency[block].generation == generation, "a tail that did not grow is as it was"
        for row, row_step, row_new in zip(batch.rows, step.rows, new, strict=True):
            if row_step.tail_copy is not None:
                row.blocks[-1] = ModelBlock()
            row.columns += row_new
            while len(row.blocks) * BLOCK_TOKENS < row.num_tokens:
                row.blocks.append(ModelBlock())

    @precondition(lambda self: self.batches)
    @rule(
        index=indexes,
        num_new=counts,
        ending=st.sampled_from(["commit", "commit", "abort", "work"]),
        other=indexes,
        fill=fills,
    )
    def prefill(self, index: int, num_new: int, ending: str, other: int, fill: Fill) -> None:
        batch = self.pick(index)
        new = self.new_columns(batch, num_new, fill)
        step = self.begin(batch, new, fill)
        if step is None:
            return
        if ending == "commit":
            self.write_and_commit(batch, step, new)
        elif ending == "abort":
            self.write(step, new)  # layers had appended already
            self.manager.abort_step(step)
            self.manager.abort_step(step)
        else:
            self.work_during(step, batch, new, self.pick(other))

    def work_during(self, step: Step, batch: ModelBatch, new: list[list[Token | None]], other: ModelBatch) -> None:
        """Statistics are asked for while a step is open, and another cache is dropped."""
        self.write(step, new)
        if other is not batch:
            self.drop(self.batches.index(other), by_finalizer=True)
        self.manager.poll()
        for row, row_new in zip(step.rows, new, strict=True):  # pinned copies stay
            cells = [token.cell for token in row_new if token is not None]
            for write in row.writes:
                found = self.house.cells(Tier.GPU, write.slot)[write.start : write.start + write.num_tokens]
                assert list(found) == cells[write.offset : write.offset + write.num_tokens]
        self.placement.check_integrity()
        self.write_and_commit(batch, step, new)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, num_steps=st.integers(1, 6), finished=st.sampled_from([0, 0, 1, 2, 6]), same=st.booleans())
    def decode(self, index: int, num_steps: int, finished: int, same: bool) -> None:
        """Rows that are finished get padding."""
        fill = Fill(tuple(0 if finished >> row & 1 else -1 for row in range(4)), same_ids=same)
        for _ in range(num_steps):
            self.step(self.pick(index), 1, fill)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, num_rejected=st.integers(1, 2 * BLOCK_TOKENS), num_new=st.integers(1, BLOCK_TOKENS))
    def reject_drafts(self, index: int, num_rejected: int, num_new: int) -> None:
        batch = self.pick(index)
        self.crop(batch, max(0, batch.length - num_rejected))
        self.step(batch, num_new, Fill(same_ids=True))

    # -- batches ----------------------------------------------------------------------------------------------------

    @rule(num_rows=row_counts)
    def new_batch(self, num_rows: int) -> None:
        if self.has_room_for(num_rows):
            batch = ModelBatch(self.manager.new_batch(num_rows), [ModelRow() for _ in range(num_rows)])
            batch.batch.origin = self.origin(len(self.batches))
            self.batches.append(batch)

    def origin(self, number: int) -> Origin | None:
        """Whose KV a new batch's is."""
        return None if self.labels is None else self.labels.origin(1, b"modules", SALTS[number % len(SALTS)])

    @precondition(lambda self: self.labels is not None and (self.batches or self.prompts))
    @rule(
        rows=st.lists(st.tuples(indexes, indexes), min_size=1, max_size=3),
        salt=st.integers(0, len(SALTS) - 1),
        num_steps=st.integers(0, 3),
        own=st.lists(st.integers(1, 2), max_size=3),
    )
    def begin_with_what_is_found(self, rows: list[tuple[int, int]], salt: int, num_steps: int, own: list[int]) -> None:
        """Prompts that other rows have begun with come again, as the rows of a padded batch."""
        for other in self.batches:
            if not other.entered:  # as at the end of a call: what it holds is sealed
                self.manager.enter(other.batch)
                self.seal(other)
                self.last = None if self.last is other else self.last
                self.manager.leave(other.batch)
                self.follow(other)
        known = [list(ids) for ids in self.prompts] + [ids for row in self.rows() if (ids := self.counted_ids(row))]
        if not self.has_room_for(len(rows)) and self.batches:
            self.drop(salt, by_finalizer=False)
        if not known or not self.has_room_for(len(rows)):
            return
        known = [ids for ids in known if len(ids) > BLOCK_TOKENS] or known
        prompts = [known[which % len(known)] for which, _ in rows]
        prompts = [
            ids[: max(1, len(ids) - cut % BLOCK_TOKENS)] + own for ids, (_, cut) in zip(prompts, rows, strict=True)
        ]
        origin, batch = self.origin(salt), self.manager.new_batch(len(rows))
        assert origin is not None
        batch.origin = origin
        self.placement.commit_arrived()
        total = max(map(len, prompts))
        begins = []
        for ids, table in zip(prompts, batch.tables, strict=True):
            match = self.house.prefix_cache.match(origin, ids, table.sequence)
            self.check_match(match.blocks, ids, match.miss)
            begins.append(Beginning(total - len(ids), ids[: BLOCK_TOKENS * len(match.blocks)], match.blocks))
        length = min(total - 1, *(each.padding + len(each.token_ids) for each in begins))
        model = ModelBatch(batch, [ModelRow() for _ in rows])
        if any(each.padding < length for each in begins):
            self.manager.attach(batch, begins, length)
            self.totals["attached"] += sum(len(table.blocks) for table in batch.tables)
        else:
            length = 0
        whole = [[None] * (total - len(ids)) + self.of_ids(ids) for ids in prompts]
        known_blocks = {
            block: model_block
            for other in self.batches
            for row, table in zip(other.rows, other.batch.tables, strict=True)
            for block, model_block in zip(table.blocks, row.blocks, strict=True)
        }
        for row, table, tokens in zip(model.rows, batch.tables, whole, strict=True):
            row.columns = tokens[:length]
            row.blocks = [known_blocks.setdefault(block, ModelBlock(True)) for block in table.blocks]
            assert all(block.sealed for block in row.blocks)
        self.batches.append(model)
        for _ in range(num_steps):
            num_new = min(total - model.length, self.manager.max_new_tokens(batch), 2 * BLOCK_TOKENS)
            if num_new < 1:
                break
            new = [tokens[model.length : model.length + num_new] for tokens in whole]
            step = self.begin(model, new, PLAIN)
            if step is None:
                break
            self.write_and_commit(model, step, new)

    def counted_ids(self, row: ModelRow) -> list[int]:
        """The ids of a row up to the first token that is unknown or placed elsewhere."""
        tokens = enumerate(row.tokens)
        good = itertools.takewhile(lambda each: each[1].token_id is not None and each[1].position == each[0], tokens)
        return [token.token_id for _, token in good if token.token_id is not None]

    def of_ids(self, ids: list[int]) -> list[Token | None]:
        tokens: list[Token | None] = []
        past = 0
        for position, token_id in enumerate(ids):
            past = self.cells.setdefault(self.key(past, 0, token_id, position), len(self.cells) + 1)
            tokens.append(Token(token_id, position, past))
        return tokens

    def check_match(self, blocks: tuple[BlockId, ...], ids: list[int], miss: Miss | None) -> None:
        """What is found is what these tokens give, sealed and held by the index."""
        cells = [token.cell for token in self.of_ids(ids) if token is not None]
        assert len(blocks) <= len(ids) // BLOCK_TOKENS and (miss is None) <= (len(blocks) == len(ids) // BLOCK_TOKENS)
        assert all(block in self.placement.prefixes for block in blocks)
        self.check_every_copy(list(blocks), cells)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, steps=st.lists(st.tuples(st.booleans(), st.integers(1, BLOCK_TOKENS), fills), max_size=3))
    def fork(self, index: int, steps: list[tuple[bool, int, Fill]]) -> None:
        batch = self.pick(index)
        if not self.has_room_for(len(batch.rows)):
            return
        twin = ModelBatch(self.manager.fork(batch.batch), [row.copy() for row in batch.rows])
        self.batches.append(twin)
        for of_twin, num_new, fill in steps:
            self.step(twin if of_twin else batch, num_new, fill)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, rows=st.lists(st.integers(0, 3), min_size=1, max_size=4), missing=st.booleans())
    def select(self, index: int, rows: list[int], missing: bool) -> None:
        """Beams are reordered, a prompt gets copies, finished rows go."""
        batch = self.pick(index)
        rows = [row % len(batch.rows) for row in rows]
        if len(self.rows()) - len(batch.rows) + len(rows) > MAX_ROWS:
            return
        if missing:
            with pytest.raises(IndexError):
                self.manager.select(batch.batch, [*rows, len(batch.rows)])
            return
        self.unpin_all()
        started = len(self.engine.started)
        self.manager.select(batch.batch, rows)
        assert len(self.engine.started) == started, "selecting rows moves nothing"
        batch.rows = [batch.rows[row].copy() for row in rows]

    @precondition(lambda self: self.batches)
    @rule(index=indexes, num_rows=row_counts)
    def resize(self, index: int, num_rows: int) -> None:
        batch = self.pick(index)
        if batch.length:
            with pytest.raises(IntegrityError):
                self.manager.resize(batch.batch, num_rows)
        elif len(self.rows()) - len(batch.rows) + num_rows <= MAX_ROWS:
            self.manager.resize(batch.batch, num_rows)
            batch.rows = [ModelRow() for _ in range(num_rows)]

    @precondition(lambda self: self.batches)
    @rule(index=indexes, length=st.one_of(st.just(0), indexes))
    def truncate(self, index: int, length: int) -> None:
        batch = self.pick(index)
        self.crop(batch, length % (batch.length + 1))

    def crop(self, batch: ModelBatch, length: int) -> None:
        self.unpin_all()
        self.manager.truncate(batch.batch, length)
        for row in batch.rows:
            row.keep(length)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, row=indexes, num_columns=st.integers(0, 2 * BLOCK_TOKENS))
    def mask_end(self, index: int, row: int, num_columns: int) -> None:
        """A row is finished, and what it held last is padding now."""
        batch = self.pick(index)
        self.mask_row(batch, row % len(batch.rows), min(num_columns, batch.length))

    def mask_row(self, batch: ModelBatch, row: int, num_columns: int) -> None:
        self.unpin_all()
        self.manager.mask_end(batch.batch, row, num_columns)
        batch.rows[row].keep(batch.length - num_columns)
        batch.rows[row].columns += [None] * num_columns

    @precondition(lambda self: self.batches)
    @rule(
        index=indexes,
        row=indexes,
        num_columns=st.integers(1, 2 * BLOCK_TOKENS),
        steps=st.lists(st.tuples(st.integers(1, BLOCK_TOKENS), fills), max_size=2),
        undo=st.booleans(),
    )
    def mask_and_step(self, index: int, row: int, num_columns: int, steps: list[tuple[int, Fill]], undo: bool) -> None:
        """One call of the model: if it fails the batch is what it was at entry."""
        batch = self.pick(index)
        self.unpin_all()
        backup = ModelBatch(self.manager.fork(batch.batch), [each.copy() for each in batch.rows])
        self.batches.append(backup)  # it holds blocks too
        self.mask_row(batch, row % len(batch.rows), min(num_columns, batch.length))
        for num_new, fill in steps:
            self.step(batch, num_new, fill)
        self.unpin_all()
        self.batches.remove(backup)
        if undo:
            self.manager.restore(batch.batch, backup.batch)
            batch.rows = backup.rows
        self.manager.drop(backup.batch)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, by_finalizer=st.booleans())
    def drop(self, index: int, by_finalizer: bool) -> None:
        self.unpin_all()
        batch = self.batches.pop(index % len(self.batches))
        if self.labels is not None:
            self.prompts = [*self.prompts, *filter(None, map(self.counted_ids, batch.rows))][-MAX_PROMPTS:]
        self.last = None if self.last is batch else self.last
        if by_finalizer:
            self.manager.dropped.append(batch.batch)
            self.manager.poll()
        else:
            self.manager.drop(batch.batch)
            self.manager.drop(batch.batch)

    @precondition(lambda self: self.batches)
    @rule(index=indexes, entering=st.booleans())
    def enter_or_leave(self, index: int, entering: bool) -> None:
        batch = self.pick(index)
        if entering:
            self.manager.enter(batch.batch)
            batch.entered += 1
            return
        batch.entered = max(0, batch.entered - 1)
        if not batch.entered:
            self.seal(batch)
            self.last = None if self.last is batch else self.last
        self.manager.leave(batch.batch)
        self.follow(batch)

    # -- between steps ----------------------------------------------------------------------------------------------

    @rule(num_polls=st.integers(0, 4))
    def poll(self, num_polls: int) -> None:
        self.placement.commit_arrived()
        for _ in range(num_polls):
            self.manager.poll()

    @rule(index=indexes)
    def pin_or_unpin(self, index: int) -> None:
        """Somebody reads a full block, or has read it."""
        residency = self.placement.residency
        tails = {table.tail for batch in self.batches for table in batch.batch.tables}
        blocks = [block for block in residency.blocks() if residency[block].holders and block not in tails]
        blocks = [block for block in blocks if residency[block].copies and not self.placement.is_cached(block)]
        if self.pins or not blocks:
            self.unpin_all()
            return
        block = blocks[index % len(blocks)]
        tier = sorted(residency[block].copies)[index % len(residency[block].copies)]
        residency.pin(block, tier)
        self.pins.append((block, tier))

    def unpin_all(self) -> None:
        for block, tier in self.pins:
            self.placement.residency.unpin(block, tier)
        self.pins.clear()

    # -- misfortune -------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 60.0, 300.0]))
    def time_passes(self, seconds: float) -> None:
        self.house.clock.now_s += seconds

    @rule(num_slots=counts)
    def disk_has_room_again(self, num_slots: int) -> None:
        if self.engine.nvme_available_slots < sys.maxsize:
            self.engine.nvme_available_slots += num_slots

    @rule(
        misfortune=st.sampled_from(
            ["none", "none", "some fail", "all fail", "hang", "disk full", "bytes short", *["nvme hangs"] * 2]
        ),
        num_slots=counts,
    )
    def misfortune(self, misfortune: str, num_slots: int) -> None:
        self.engine.retire_frac = 0.3 if misfortune == "bytes short" else 0.0
        self.engine.fail_frac = {"some fail": 0.2, "all fail": 1.0}.get(misfortune, 0.0)
        self.engine.hanging, self.engine.nvme_hangs = misfortune == "hang", misfortune == "nvme hangs"
        if misfortune == "disk full" and Tier.NVME in self.placement.pools:
            num_slots = self.placement.pools[Tier.NVME].num_used + num_slots % 3
            self.engine.nvme_available_slots = min(self.engine.nvme_available_slots, num_slots)

    @precondition(lambda self: self.batches and Tier.NVME in self.placement.pools)
    @rule(index=indexes, up=st.booleans(), waits=st.booleans())
    def moves_hang(self, index: int, up: bool, waits: bool) -> None:
        """A block is on its way to or from nvme when the tier hangs: until the next misfortune."""
        if self.engine.hanging or not self.placement.takes(Tier.NVME):
            return
        residency, pools = self.placement.residency, self.placement.pools
        source, dest = (Tier.NVME, Tier.GPU) if up else (min(Tier.CPU, self.placement.lower(Tier.GPU)), Tier.NVME)
        source = source if up or index % 2 else Tier.GPU
        free = [
            block
            for block in self.free_to_go(source)
            if residency[block].move is None and dest not in residency[block].copies and residency[block].holders
            and not residency[block].pins[source]
        ]  # fmt: skip
        slot = pools[dest].take() if free else None
        if slot is None:
            return
        purpose = MovePurpose.PROMOTE if up else MovePurpose.DEMOTE
        self.placement.start(free[index % len(free)], purpose, source, dest, slot)
        self.engine.nvme_hangs = True
        if waits:
            with contextlib.suppress(TransferTimeoutError):
                self.placement.wait()

    @precondition(lambda self: self.labels is not None)
    @rule(index=indexes, count=st.integers(1, 4))
    def reading_fails(self, index: int, count: int) -> None:
        """A promotion could not read some blocks: they are not tried again, and computed before they are needed."""
        residency = self.placement.residency
        blocks = [
            block
            for block in residency.blocks()
            if residency[block].copies and Tier.GPU not in residency[block].copies and residency[block].move is None
            if not any(residency[block].pins.values()) and not any(self.is_held(block, tier) for tier in Tier)
            if self.placement.is_cached(block) or block in self.manager.recomputable
        ]
        for block in blocks[index % max(1, len(blocks)) :][:count]:
            self.placement.unreadable.add(block)
            self.placement.metrics.moves_failed += 1

    # -- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def everything_agrees(self) -> None:
        if not self.started:
            return
        self.manager.check_integrity()
        residency = self.placement.residency
        ids: dict[ModelBlock, BlockId] = {}
        for batch in self.batches:
            batch.batch.check_integrity()
            assert batch.batch.length == batch.length
            assert batch.batch.is_padded is any(None in row.columns for row in batch.rows)
            whole = all(residency[block].copies for table in batch.batch.tables for block in table.blocks)
            read = self.house.read_rows(batch.batch) if whole else None
            for number, (row, table) in enumerate(zip(batch.rows, batch.batch.tables, strict=True)):
                tokens = row.tokens
                cells = [token.cell for token in tokens]
                assert read is None or read[number] == cells
                known = all(token.token_id is not None for token in tokens)
                assert table.token_ids() == ([token.token_id for token in tokens] if known else [])
                places = [column + i for column, _, count in table.pieces(0, len(tokens)) for i in range(count)]
                assert places == [column for column, token in enumerate(row.columns) if token is not None]
                for model_block, block in zip(row.blocks, table.blocks, strict=True):
                    assert ids.setdefault(model_block, block) == block
                    if not residency[block].copies:
                        assert self.placement.droppable is not None, "a live block has no valid copy"
                        assert block in self.placement.unreadable
                        assert block in self.manager.recomputable
                    assert (residency[block].state is BlockState.SEALED) is model_block.sealed
                self.check_every_copy(table.blocks, cells)
        assert len(set(ids.values())) == len(ids)
        held = {block for block in residency.blocks() if residency[block].holders}
        assert {block for block in held if not self.placement.is_cached(block)} == set(ids.values())
        self.check_index()
        self.check_pins()
        for tier in self.good_policies & set(self.placement.policies):
            believed = set(self.placement.policies[tier].victims(10_000, Everything()))
            assert believed == {block for block in residency.blocks() if tier in residency[block].copies}
        assert len(self.manager.tables) == len(self.placement.sequence_metrics) == len(self.rows())

    def check_index(self) -> None:
        """What may be found is final, and is what its tokens give: nobody has written there since."""
        prefixes, residency = self.placement.prefixes, self.placement.residency
        assert not len(prefixes) or self.labels is not None
        for block in prefixes.blocks():
            sealed, record = prefixes.sealed(block), residency[block]
            assert record.state is BlockState.SEALED and sealed is not None and record.sealed is sealed
            expected = self.cells_of(sealed.label.identity)[-BLOCK_TOKENS:]
            for tier, slot in record.copies.items():
                assert list(self.house.cells(tier, slot)) == expected
        for slot, label in self.engine.files.labels.items():
            if self.engine.uses(Tier.NVME, slot) and slot not in self.readable_slots():
                continue  # a move is going to write there: nobody else gets the slot
            assert list(self.house.cells(Tier.NVME, slot)) == self.cells_of(label.identity)[-BLOCK_TOKENS:]

    def readable_slots(self) -> set[int]:
        """Of nvme: those that blocks own."""
        residency = self.placement.residency
        slots = (residency[block].copies.get(Tier.NVME) for block in residency.blocks())
        return {slot for slot in slots if slot is not None}

    def cells_of(self, identity: bytes) -> list[int]:
        """What the block of that identity and all before it hold."""
        assert self.labels is not None
        parent, content = self.labels.meanings[identity]
        cells = [] if parent is None else self.cells_of(parent)
        for token_id, position in tokens_of(content):
            cells.append(self.cells[self.key(cells[-1] if cells else 0, 0, token_id, position)])
        return cells

    def check_pins(self) -> None:
        residency = self.placement.residency
        for block, tier in self.pins:
            assert tier in residency[block].copies, "a pinned copy has gone"
        assert sum(sum(residency[block].pins.values()) for block in residency.blocks()) == len(self.pins)

    def check_every_copy(self, blocks: list[BlockId], cells: list[int]) -> None:
        for index, block in enumerate(blocks):
            expected = cells[index * BLOCK_TOKENS :][:BLOCK_TOKENS]
            for tier, slot in self.placement.residency[block].copies.items():
                assert list(self.house.cells(tier, slot)[: len(expected)]) == expected

    def check_end(self) -> None:
        if not self.started:
            return
        self.totals["dropped"] += self.placement.metrics.dropped_blocks
        self.totals["recomputed"] += self.placement.metrics.recomputed_blocks
        self.engine.hanging = self.engine.nvme_hangs = False
        self.unpin_all()
        while self.batches:
            self.drop(0, by_finalizer=len(self.batches) % 2 == 0)
        self.house.drain()
        self.manager.poll()
        self.manager.check_integrity()
        self.house.drain()  # of cached blocks that are copied down
        self.evict_all()
        assert self.house.used() == dict.fromkeys(self.house.used(), 0)
        assert all(pool.num_free == pool.ceiling for pool in self.placement.pools.values())
        assert not self.manager.residency_len
        assert not self.placement.sequence_metrics
        assert not self.placement.running_blocks
        assert not self.engine.in_flight()

    def evict_all(self) -> None:
        """Only cached blocks are left, and each goes after those that continue it."""
        placement, unindex = self.placement, self.placement.unindex

        def checked(block: BlockId, why: Miss) -> None:
            assert placement.prefixes.is_leaf(block) and placement.is_cached(block)
            unindex(block, why)

        placement.unindex = checked  # type: ignore[method-assign]
        self.totals["cached"] += len(placement.prefixes)
        while any(placement.evict_cached(tier, 2) for tier in placement.pools):
            self.manager.check_integrity()
        named = all(tier in self.good_policies for tier in placement.pools)
        lost = [block for block in placement.prefixes.blocks() if not placement.residency[block].copies]
        assert not named or not placement.prefixes.blocks() or lost
        placement.unindex = unindex  # type: ignore[method-assign]
        for block in placement.prefixes.blocks():  # a policy that is not finished names none
            placement.unindex(block, Miss.EVICTED)


@pytest.mark.timeout(600)
def test_manager() -> None:
    ManagerMachine.totals.clear()
    run(
        ManagerMachine,
        settings(
            max_examples=NUM_EXAMPLES,
            stateful_step_count=40,
            phases=PHASES,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    totals = ManagerMachine.totals
    assert totals["attached"] > NUM_EXAMPLES / 3 and totals["cached"] > NUM_EXAMPLES / 2, totals
    assert totals["dropped"] > NUM_EXAMPLES / 2 and totals["recomputed"] > NUM_EXAMPLES / 4, totals
