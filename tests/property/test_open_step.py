"""A step over rows, padding and tiers equals attention over plain lists of columns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.batch import Batch
from kvtier.errors import UnsupportedError
from kvtier.host_attention import HostAttender, HostShare
from kvtier.open_step import OpenStep, StepMemory
from kvtier.plan import Source
from kvtier.ring import Group
from kvtier.step import StepState
from kvtier.stores.gpu import GpuStore
from kvtier.stores.slab import LayerViews, joins
from kvtier.types import (
    AttentionMode,
    BlockShape,
    Engine,
    HostAttention,
    LayerGroup,
    Move,
    MoveResult,
    MoveStatus,
    Tier,
)
from tests.small_tiers import build, columns

LAYERS, KV_HEADS, HEADS, BLOCK_TOKENS, KEY_DIM = (1, 4), 2, 4, 4, 8
NUM_SLOTS = {Tier.GPU: 24, Tier.CPU: 24}

Column = tuple[torch.Tensor, torch.Tensor] | None
"""K and V of a token, `[layers, kv_heads, dim]`, or padding."""
Masks = tuple[int, int, int]


class TensorEngine(Engine):
    """Copies between two slabs, at once."""

    def __init__(self, stores: dict[Tier, GpuStore]) -> None:
        self.stores = stores
        self.ended: list[MoveResult] = []

    def start(self, moves: Sequence[Move]) -> None:
        for move in moves:
            source, dest = self.stores[move.source], self.stores[move.dest]
            for layer in range(len(LAYERS)):
                dest.keys[layer][move.dest_slot] = source.keys[layer][move.source_slot]
                dest.values[layer][move.dest_slot] = source.values[layer][move.source_slot]
            self.ended.append(MoveResult(move, MoveStatus.DONE))

    def finished(self) -> list[MoveResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, timeout_s: float) -> list[MoveResult]:
        return self.finished()

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        return []

    def in_flight(self) -> int:
        return len(self.ended)


class PlainRing:
    """What OpenStep asks of a ring, without threads: groups of slices in plan order."""

    def __init__(self, store: GpuStore, group_size: int) -> None:
        self.store, self.group_size = store, group_size
        self.streamed: tuple[Source, ...] = ()

    def groups(self, layer: int) -> Iterator[Group]:
        for first in range(0, len(self.streamed), self.group_size):
            sources = self.streamed[first : first + self.group_size]
            slots = [source.slot for source in sources]
            tiers = Counter(source.tier for source in sources)
            yield Group(sources, tiers, self.store.keys[layer][slots], self.store.values[layer][slots])


@dataclass
class World:
    """A batch on two tiers, and what each of its rows must hold."""

    dtype: torch.dtype
    value_dim: int
    num_pieces: int
    group_size: int
    mode: AttentionMode
    seed: int
    host: HostAttention = HostAttention.NEVER
    beside: bool = False
    """Whether a thread attends to the cpu tier's blocks, as beside a device."""
    joined: bool = True
    """Whether slabs are laid out so where they can be, as without a device."""
    rows: list[list[Column]] = field(default_factory=lambda: [[], [], []])

    def __post_init__(self) -> None:
        shape = BlockShape(
            len(LAYERS), KV_HEADS, BLOCK_TOKENS, KEY_DIM, self.value_dim, element_bytes=self.dtype.itemsize
        )
        host = torch.device("cpu")
        joined = self.joined and joins(shape, host)
        self.stores = {tier: GpuStore(shape, n, self.dtype, host, joined) for tier, n in NUM_SLOTS.items()}
        for store in self.stores.values():
            for tensor in (*store.keys, *store.values):
                tensor.fill_(float("nan"))  # what nobody has written must not be read
        self.house = build(NUM_SLOTS[Tier.GPU], NUM_SLOTS[Tier.CPU], 0, block_tokens=BLOCK_TOKENS, low_frac=0.0)
        self.house.placement.engine = TensorEngine(self.stores)
        self.ring = PlainRing(self.stores[Tier.CPU], self.group_size)
        self.group = LayerGroup(LAYERS, shape, "cpu", str(self.dtype), HEADS)
        self.memory = StepMemory(
            self.group, {tier: LayerViews(store.keys, store.values) for tier, store in self.stores.items()}, self.ring,
            self.house.placement.metrics, self.mode, self.num_pieces, torch.full((1 << 18,), 0xFF, dtype=torch.uint8),
            HostShare(self.host, is_on_host=True),
        )  # fmt: skip
        if self.beside:
            self.memory.attender = HostAttender(torch.device("cpu"), self.memory.share)
        self.batch: Batch = self.house.manager.new_batch(3)
        self.random = torch.Generator().manual_seed(self.seed)
        self.next_id = 0

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def step(self, num_new: int, masks: Masks, softcap: float | None = None, has_sinks: bool = False) -> None:
        """One step of every row through every layer, compared with the definition; then committed."""
        num_rows = len(self.rows)
        masks = (masks * 2)[:num_rows]  # type: ignore[assignment]
        holds = torch.tensor([[bool(mask >> column & 1) for column in range(num_new)] for mask in masks])
        manager, new = self.house.manager, []
        for row in range(num_rows):
            ids = [self.next_id + column if holds[row, column] else None for column in range(num_new)]
            new.append(columns(ids))
            self.next_id += num_new
        step = manager.begin_step(self.batch, new)
        plan = manager.plan(self.batch, self.memory.host_frac())
        self.ring.streamed = plan.streamed
        opened = OpenStep(self.memory, step, plan)
        keys = self.randn(len(LAYERS), num_rows, KV_HEADS, num_new, KEY_DIM)
        values = self.randn(len(LAYERS), num_rows, KV_HEADS, num_new, self.value_dim)
        garbage = float("nan") if self.mode is AttentionMode.BLOCKWISE else 7.0
        for tensor in (keys, values):
            tensor.transpose(2, 3)[:, ~holds] = garbage
        sinks = 2 * self.randn(HEADS).float() if has_sinks else None
        for position, layer in enumerate(LAYERS):
            opened.append(layer, keys[position], values[position])
            if self.mode is AttentionMode.GATHERED:
                self.check_gathered(opened, position, keys[position], values[position])
                continue
            query = self.randn(num_rows, HEADS, num_new, KEY_DIM)
            got = opened.attend(layer, query, keys[position], values[position], 0.3, softcap=softcap, sinks=sinks)
            assert got.shape == (num_rows, num_new, HEADS, self.value_dim)
            assert got.is_contiguous() and got.dtype == self.dtype
            for row in range(num_rows):
                self.check_row(got[row], position, row, holds[row], query, keys, values, softcap, sinks)
        step.check_complete(LAYERS)
        manager.commit_step(step)
        for row in range(num_rows):
            self.rows[row] += [
                (keys[:, row, :, column].clone(), values[:, row, :, column].clone()) if holds[row, column] else None
                for column in range(num_new)
            ]
        manager.check_integrity()

    def check_row(
        self, got: torch.Tensor, position: int, row: int, holds: torch.Tensor, query: torch.Tensor, keys: torch.Tensor,
        values: torch.Tensor, softcap: float | None, sinks: torch.Tensor | None,
    ) -> None:  # fmt: skip
        past = [column for column in self.rows[row] if column is not None]
        num_new = len(holds)
        pieces_keys = [column[0][position] for column in past], keys[position, row][:, holds]
        pieces_values = [column[1][position] for column in past], values[position, row][:, holds]
        all_keys, all_values = (
            torch.cat([*(token.unsqueeze(1) for token in before), after], dim=1).double()
            for before, after in (pieces_keys, pieces_values)
        )
        groups = HEADS // KV_HEADS
        all_keys, all_values = all_keys.repeat_interleave(groups, 0), all_values.repeat_interleave(groups, 0)
        scores = query[row].double() @ all_keys.transpose(-1, -2) * 0.3
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        number_before = len(past) + holds.cumsum(0)  # tokens that each new column sees
        seen = torch.arange(all_keys.shape[1]) < number_before.unsqueeze(1)
        scores = scores.masked_fill(~seen, float("-inf"))
        if sinks is not None:
            scores = torch.cat([scores, sinks.double().reshape(HEADS, 1, 1).expand(-1, num_new, -1)], dim=-1)
        weights = scores.softmax(-1).nan_to_num(0.0)[..., : all_keys.shape[1]]
        expected = (weights @ all_values).transpose(0, 1)
        error = (got.double() - expected).abs()
        if self.dtype is torch.float32:
            assert error.max() < 2e-5
            return
        num_tokens, any_new = len(past), bool(holds.any())
        num_pieces = num_tokens // BLOCK_TOKENS
        tail = num_tokens % BLOCK_TOKENS > 0
        num_pieces += (tail or any_new) if num_new == 1 else tail + any_new
        half_unit = torch.finfo(self.dtype).eps / 2 * expected.abs().log2().floor().exp2()
        if num_pieces > 1:  # rounded once
            assert (error <= half_unit + 1e-5).all()
        else:  # what the plain model computes
            assert error.max() < 0.05

    def check_gathered(self, opened: OpenStep, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        whole_keys, whole_values = opened.gather(LAYERS[position], keys, values)
        held = len(self.rows[0])
        assert whole_keys.shape == (len(self.rows), KV_HEADS, held + keys.shape[2], KEY_DIM)
        assert whole_keys.is_contiguous() and whole_values.is_contiguous()
        assert whole_keys.data_ptr() % 64 == whole_values.data_ptr() % 64 == 0
        for got, new, part in ((whole_keys, keys, 0), (whole_values, values, 1)):
            assert torch.equal(got[:, :, held:], new)
            for row, held_columns in enumerate(self.rows):
                for column, token in enumerate(held_columns):
                    expected = torch.zeros_like(got[row, :, column]) if token is None else token[part][position]
                    assert torch.equal(got[row, :, column], expected)

    def select(self, rows: list[int]) -> None:
        rows = [row % len(self.rows) for row in rows]
        self.house.manager.select(self.batch, rows)
        self.rows = [list(self.rows[row]) for row in rows]

    def mask_end(self, row: int, num_columns: int) -> None:
        row, num_columns = row % len(self.rows), min(num_columns, len(self.rows[0]))
        self.house.manager.mask_end(self.batch, row, num_columns)
        self.rows[row][len(self.rows[row]) - num_columns :] = [None] * num_columns

    def crop(self, num_columns: int) -> None:
        length = max(0, len(self.rows[0]) - num_columns)
        self.house.manager.truncate(self.batch, length)
        for row in self.rows:
            del row[length:]

    def demote(self, num_blocks: int) -> None:
        self.house.manager.leave(self.batch)
        self.house.placement.give_up(Tier.GPU, num_blocks)
        self.house.drain()


masks = st.tuples(*[st.sampled_from([0xFFFF] * 3 + [0]) | st.integers(0, 0xFFFF)] * 3)
steps = st.tuples(
    st.just("step"), st.sampled_from([1, 1, 2, 4, 5, 9]), masks, st.sampled_from([None, None, 4.0]), st.booleans()
)
operations = st.one_of(
    steps,
    steps,
    steps,
    st.tuples(st.just("select"), st.lists(st.integers(0, 2), min_size=1, max_size=3)),
    st.tuples(st.just("mask_end"), st.integers(0, 2), st.integers(1, 6)),
    st.tuples(st.just("crop"), st.integers(1, 6)),
    st.tuples(st.just("demote"), st.integers(1, 6)),
    st.tuples(st.just("demote"), st.just(24)),
)
worlds = {
    "value_dim": st.sampled_from([KEY_DIM, KEY_DIM, 4]),
    "num_pieces": st.integers(1, 3),
    "group_size": st.integers(1, 4),
    "seed": st.integers(0, 2**16),
    "host": st.sampled_from(HostAttention),
    "todo": st.lists(operations, min_size=2, max_size=9),
}


def run(world: World, todo: list[tuple[object, ...]]) -> None:
    for name, *arguments in todo:
        if name == "step" and len(world.rows[0]) > 20:
            name, arguments = "crop", [12]
        getattr(world, str(name))(*arguments)


@settings(max_examples=150, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.float32, torch.bfloat16]),
    beside=st.booleans(),
    alone=st.booleans(),
    joined=st.booleans(),
    **worlds,
)
def test_every_row_attends_to_exactly_its_tokens(
    dtype: torch.dtype, value_dim: int, num_pieces: int, group_size: int, seed: int, todo: list[tuple[object, ...]],
    host: HostAttention, beside: bool, alone: bool, joined: bool,
) -> None:  # fmt: skip
    """`alone`: a batch of one row, which decodes by a way of its own."""
    if dtype is torch.bfloat16:  # scores written out, or a sink beside a single piece, are of another precision
        todo = [(*each[:3], None, False) if each[0] == "step" else each for each in todo]
    world = World(dtype, value_dim, num_pieces, group_size, AttentionMode.BLOCKWISE, seed, host, beside, joined)
    if alone:
        world.select([0])
        todo = [each for each in todo if each[0] != "select"]
    try:
        run(world, todo)
    finally:
        world.memory.close()


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from([torch.float32, torch.bfloat16]), joined=st.booleans(), **worlds)
def test_gathered_columns_are_what_the_plain_cache_would_hold(
    dtype: torch.dtype, value_dim: int, num_pieces: int, group_size: int, seed: int, todo: list[tuple[object, ...]],
    host: HostAttention, joined: bool,
) -> None:  # fmt: skip
    world = World(dtype, value_dim, num_pieces, group_size, AttentionMode.GATHERED, seed, host, joined=joined)
    run(world, todo)


@pytest.mark.parametrize("held", [4, 5, 8])
@pytest.mark.parametrize("num_new", [1, 3])
def test_a_row_of_many_pieces_is_rounded_once(held: int, num_new: int) -> None:
    world = World(torch.bfloat16, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    world.step(held, (0xFFFF,) * 3)
    world.step(num_new, (0xFFFF, 0xFFFF, 0))
    world.demote(2)
    world.step(num_new, (0xFFFF, 0, 0xFFFF))


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("held", [1, 4, 7, 13])
@pytest.mark.parametrize("num_demoted", [0, 1, 24])
def test_a_single_row_decodes_exactly(held: int, num_demoted: int, sinks: bool, softcap: float | None) -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    world.select([0])
    world.step(held, (0xFFFF,) * 3)
    for _ in range(BLOCK_TOKENS + 1):
        world.demote(num_demoted)
        world.step(1, (0xFFFF,) * 3, softcap, sinks)


@pytest.mark.parametrize("held", [4, 12, 13, 18])
@pytest.mark.parametrize("num_pieces", [1, 2, 3])
def test_a_single_row_of_16_bits_is_attended_to_a_few_blocks_at_a_time(held: int, num_pieces: int) -> None:
    world = World(torch.bfloat16, KEY_DIM, num_pieces, 2, AttentionMode.BLOCKWISE, 1)
    world.select([0])
    world.step(held, (0xFFFF,) * 3)
    for _ in range(BLOCK_TOKENS):
        world.step(1, (0xFFFF,) * 3)


def test_rows_that_share_streamed_blocks_read_each_once() -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    world.step(9, (0xFFFF,) * 3)
    world.select([0, 0, 0])
    world.demote(24)
    world.step(1, (0xFFFF,) * 3)
    metrics = world.house.placement.metrics
    assert metrics.slices_read[Tier.CPU] == world.batch.metrics.slices_read[Tier.CPU] == 2 * len(LAYERS)


def test_an_append_of_another_shape_or_dtype_is_refused_and_writes_nothing() -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    step = world.house.manager.begin_step(world.batch, [columns([1, 2])] * 3)
    opened = OpenStep(world.memory, step, world.house.manager.plan(world.batch))
    good = torch.zeros(3, KV_HEADS, 2, KEY_DIM)
    for keys, values in (
        (good[:1], good[:1]),
        (good, good[:, :1]),
        (good[:, :, :1], good[:, :, :1]),
        (good.double(), good.double()),
        (good, good[..., :4]),
        (good.clone().requires_grad_(), good),
    ):
        with pytest.raises(UnsupportedError):
            opened.append(LAYERS[0], keys, values)
    assert world.stores[Tier.GPU].keys[0].isnan().all()
    assert not step.appended and step.state is StepState.OPEN
    opened.append(LAYERS[0], good, good.clone())
    with pytest.raises(UnsupportedError, match="did not append in this step"):
        opened.attend(LAYERS[0], torch.zeros(3, HEADS, 2, KEY_DIM), good.clone(), good, 1.0)
    world.house.manager.abort_step(step)


@pytest.mark.parametrize("row", [0, 1])
def test_a_tail_that_lies_away_from_its_run_is_read_where_it_lies(row: int) -> None:
    world = World(torch.float32, KEY_DIM, 2, 2, AttentionMode.BLOCKWISE, 1)
    world.select([0])
    world.step(2 * BLOCK_TOKENS + 1, (0xFFFF,) * 3)
    world.select([0, 0])
    world.step(1, (1,) * 3)  # one of the two tails is copied to where it can grow
    (blocks, others) = (table.blocks for table in world.batch.tables)
    residency = world.house.placement.residency
    slots = [residency[block].copies[Tier.GPU] for block in (*blocks, others[-1])]
    assert slots[1] < slots[2 + row] - 1, "it does not follow"
    world.select([row])
    for _ in range(BLOCK_TOKENS + 1):
        world.step(1, (1,) * 3)
    world.memory.close()
