"""Losses against a plain model: random rows, forks and crops, blocks that turn to garbage, one way to compute them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from kvtier.batch import Batch
from kvtier.block_table import Made, Span
from kvtier.errors import BlockLostError, CapacityError
from kvtier.losses import Compute, Losses
from kvtier.recomputable import Past
from kvtier.step import NewColumns
from kvtier.types import BlockId, MoveResult, MoveStatus, Tier
from tests.small_tiers import House, build, columns

EACH = 4


def checked(house: House) -> House:
    """Its engine sees spoilt bytes, as checksums do: such a move fails."""
    end = house.engine._end

    def checked_end(flight: Any) -> MoveResult:
        if flight.payload == "lost":
            return MoveResult(flight.move, MoveStatus.FAILED, "checksum")
        return end(flight)

    house.engine._end = checked_end  # type: ignore[method-assign]
    return house


def garbage(house: House, block: BlockId) -> bool:
    """Whether the copy of a block that would be read is one that was spoilt."""
    record = house.placement.residency[block]
    fastest = record.fastest
    return fastest is not None and house.engine.bytes_by_slot.get((fastest, record.copies[fastest])) == "lost"


def lose(house: House, block: BlockId, only: Tier | None = None) -> None:
    for tier, slot in house.placement.residency[block].copies.items():
        if tier is not Tier.GPU and only in (None, tier):
            house.engine.bytes_by_slot[tier, slot] = "lost"


def step(house: House, batch: Batch, new: list[NewColumns]) -> None:
    """As the wrapper: a step that reads garbage is lost."""
    begun = house.manager.begin_step(batch, new)
    blocks = [block for table in batch.tables for block in table.blocks]
    lost = [block for block in blocks if garbage(house, block) or not house.placement.residency[block].copies]
    if lost:
        house.manager.abort_step(begun)
        raise BlockLostError(f"lost {lost}", tuple(lost))
    for row in begun.rows:
        for write in row.writes:
            house.write(write, row.new.token_ids or [])
    house.manager.commit_step(begun)


def opener(house: House, spans: list[Span] | None = None) -> Callable[[Batch], contextmanager[Compute]]:  # type: ignore[type-arg]
    @contextmanager
    def open_row(batch: Batch) -> Iterator[Compute]:
        def compute(span: Span) -> None:
            if spans is not None:
                spans.append(span)
            mask = span.mask[len(span.mask) - len(span.ids) :]
            ids = [token_id if is_token else None for token_id, is_token in zip(span.ids, mask, strict=True)]
            assert batch.length == len(span.mask) - len(span.ids)
            step(house, batch, [columns(ids)])

        yield compute

    return open_row


def chunk(num_blocks: int) -> Callable[[Batch], int]:
    return lambda batch: num_blocks * EACH


def mend(house: House, batch: Batch, new: list[NewColumns], num_blocks: int = 1) -> None:
    """One step of the batch, mended as the wrapper does it, by that many blocks at a time."""
    losses = Losses(house.manager, batch, new, opener(house), chunk(num_blocks))
    try:
        while True:
            try:
                losses.with_room(lambda: step(house, batch, new))
                return
            except BlockLostError as error:
                blocks, why = error.blocks, str(error)
            losses.mend(blocks, why)
    finally:
        losses.close()
        assert house.placement.residency_pins(Tier.GPU) == 0


def sweep(house: House) -> None:
    house.drain()
    house.placement.give_up(Tier.GPU, 100)
    house.drain()


@pytest.mark.parametrize("past", [Past.BLOCKS, Past.WINDOWS])
def test_random_losses_are_mended_for_everyone(past: Past) -> None:
    counts = [random_life(seed, past) for seed in range(150)]
    assert sum(lost for lost, _ in counts) > 500
    assert sum(mended for _, mended in counts) > 300


def random_life(seed: int, past: Past) -> tuple[int, int]:
    """Blocks that were lost, and that were recomputed."""
    rng = random.Random(seed)
    num_blocks = 1 + seed % 4
    num_gpu, num_cpu = rng.randint(6, 9), rng.randint(0, 4)
    house = checked(build(gpu=num_gpu, cpu=num_cpu, nvme=60, seed=seed, max_delay=rng.randint(0, 3), past=past))
    batches, ids = [house.manager.new_batch(rng.randint(1, 2)) for _ in range(2)], iter(range(1, 10_000))
    num_lost = 0
    for _ in range(40):
        batch = rng.choice(batches)
        what = rng.random()
        if what < 0.15 and len(batches) < 5:
            batches.append(house.manager.fork(batch))
        elif what < 0.3 and batch.length:
            house.manager.truncate(batch, rng.randint(0, batch.length))
        elif what < 0.4 and len(batches) > 2:
            batches.remove(batch)
            house.manager.drop(batch)
        elif what < 0.6:
            sweep(house)
            blocks = house.placement.residency.blocks()
            for block in rng.sample(blocks, min(len(blocks), rng.randint(1, 4))):
                lose(house, block, Tier.NVME)
                num_lost += garbage(house, block)
        else:
            pads = rng.randint(0, 2) if batch.num_rows > 1 else 0
            count = rng.randint(1, 5)
            rows = [[next(ids) for _ in range(pads + count)] for _ in range(batch.num_rows)]
            new = [columns([None] * pads + row[pads:] if number else row) for number, row in enumerate(rows)]  # type: ignore[arg-type]
            mend(house, batch, new, num_blocks)
            for table in batch.tables:
                assert house.read_alone(table) == table.token_ids()
        house.manager.check_integrity()
    for batch in batches:  # each at once: the next one may evict the good copy of one that is spoilt below
        mend(house, batch, [columns([next(ids)]) for _ in batch.tables], num_blocks)
        for table in batch.tables:
            assert house.read_alone(table) == table.token_ids()
    house.manager.check_integrity()
    return num_lost, house.placement.metrics.recomputed_blocks


def test_a_copy_that_a_slower_tier_has_too_is_dropped_and_nothing_computed() -> None:
    house = checked(build(gpu=2, cpu=4, nvme=8, low_frac=0.0))
    batch = house.filled(8)
    sweep(house)
    (first, _) = batch.tables[0].blocks
    slot = house.placement.pools[Tier.NVME].take()
    assert slot is not None
    house.engine.bytes_by_slot[Tier.NVME, slot] = (0, 1, 2, 3)
    house.placement.add_copy(first, Tier.NVME, slot)
    lose(house, first, Tier.CPU)
    mend(house, batch, [columns([8])])
    assert house.tiers_of(batch)[0] == "nvme" and house.placement.metrics.recomputed_blocks == 0
    house.check()


def test_with_windows_one_pass_mends_all_and_takes_one_block_of_room() -> None:
    house = checked(build(gpu=2, cpu=0, nvme=6, low_frac=0.0, past=Past.WINDOWS))
    batch = house.filled(24)
    sweep(house)
    blocks = batch.tables[0].blocks
    for index in (1, 4):
        lose(house, blocks[index])
    spans: list[Span] = []
    losses = Losses(house.manager, batch, [columns([24])], opener(house, spans), chunk(1))
    losses.mend([blocks[4], blocks[1]], "lost")
    losses.close()
    assert [span.ids for span in spans] == [list(range(at, at + EACH)) for at in range(0, 20, EACH)]
    assert house.placement.metrics.recomputed_blocks == 2
    house.check()


def dropped(gpu: int, past: Past = Past.BLOCKS) -> tuple[House, Batch]:
    """Six full blocks and a tail that are nowhere."""
    house = checked(build(gpu=gpu, cpu=0, nvme=0, drops=True, low_frac=0.0, past=past))
    batch = house.filled(26)
    for block in batch.tables[0].blocks:
        house.placement.drop(block)
    return house, batch


@pytest.mark.parametrize("past", [Past.BLOCKS, Past.WINDOWS])
def test_neighbours_are_computed_in_one_step_of_a_chunk(past: Past) -> None:
    house, batch = dropped(8, past)
    spans: list[Span] = []
    losses = Losses(house.manager, batch, [columns([26])], opener(house, spans), chunk(3))
    losses.mend(losses.known(), "known")
    losses.close()
    assert [span.ids for span in spans] == [list(range(12)), list(range(12, 24)), [24, 25]]
    assert house.placement.metrics.recomputed_blocks == 7 and house.read(batch) == list(range(26))
    house.check()


def test_blocks_that_are_there_are_not_computed_and_end_a_run() -> None:
    house, batch = dropped(8)
    mend(house, batch, [columns([])], 9)
    for index in (0, 1, 3, 4, 6):
        house.placement.drop(batch.tables[0].blocks[index])
    spans: list[Span] = []
    losses = Losses(house.manager, batch, [columns([26])], opener(house, spans), chunk(9))
    losses.mend(losses.known(), "known")
    losses.close()
    assert [span.ids for span in spans] == [list(range(8)), list(range(12, 20)), [24, 25]]
    assert house.read(batch) == list(range(26))
    house.check()


def test_a_tail_of_which_another_row_holds_more_ends_a_run() -> None:
    house = checked(build(gpu=8, cpu=0, nvme=0, drops=True, low_frac=0.0))
    whole = house.filled(10)
    cropped = house.manager.fork(whole)
    house.manager.truncate(cropped, 6)
    for block in whole.tables[0].blocks:
        house.placement.drop(block)
    mend(house, cropped, [columns([])], 9)
    mend(house, whole, [columns([])], 9)
    assert house.read(cropped) == list(range(6)) and house.read(whole) == list(range(10))
    assert house.placement.metrics.recomputed_blocks == 3
    house.check()


@pytest.mark.parametrize("past", [Past.BLOCKS, Past.WINDOWS])
def test_without_room_for_a_run_it_is_halved(past: Past) -> None:
    house = checked(build(gpu=3, cpu=0, nvme=8, low_frac=0.0, past=past))
    batch, other = house.filled(24), house.manager.new_batch()
    house.append(other, [100])  # one slot is another's, and pinned: two are left
    sweep(house)
    (block,) = other.tables[0].blocks
    mend(house, other, [columns([])])
    house.placement.residency.pin(block, Tier.GPU)
    for each in batch.tables[0].blocks:
        lose(house, each)
    spans: list[Span] = []
    losses = Losses(house.manager, batch, [columns([])], opener(house, spans), chunk(9))
    losses.mend(batch.tables[0].blocks, "lost")
    losses.close()
    house.placement.residency.unpin(block, Tier.GPU)
    assert max(len(span.ids) for span in spans) == 12 and min(len(span.ids) for span in spans) == EACH
    assert house.placement.metrics.recomputed_blocks == 6 and house.read_alone(batch.tables[0]) == list(range(24))
    house.manager.check_integrity()


@pytest.mark.parametrize("past", [Past.BLOCKS, Past.WINDOWS])
def test_a_computed_block_that_has_moved_is_computed_again_alone(past: Past) -> None:
    house = checked(build(gpu=8, cpu=0, nvme=8, low_frac=0.0, past=past))
    batch = house.filled(24)
    sweep(house)
    for each in batch.tables[0].blocks:
        lose(house, each)
    spans: list[Span] = []
    inner = opener(house, spans)

    @contextmanager
    def moving(row: Batch) -> Iterator[Compute]:
        with inner(row) as compute:

            def compute_and_move(span: Span) -> None:
                compute(span)
                if len(spans) == 1:  # as the second step of a span would
                    house.placement.give_up(Tier.GPU, 8)
                    house.drain()

            yield compute_and_move

    losses = Losses(house.manager, batch, [columns([])], moving, chunk(3))
    losses.mend(batch.tables[0].blocks, "lost")
    losses.close()
    assert [span.ids for span in spans] == [list(range(12)), *(list(range(at, at + EACH)) for at in range(0, 24, EACH))]
    assert house.placement.metrics.recomputed_blocks == 6 and house.read_alone(batch.tables[0]) == list(range(24))
    house.manager.check_integrity()


def test_no_room_to_recompute_is_an_error_that_says_so() -> None:
    house = checked(build(gpu=2, cpu=0, nvme=2, low_frac=0.0))
    batch = house.filled(8)
    sweep(house)
    other = house.manager.new_batch()
    house.append(other, [1, 2, 3, 4])
    house.append(other, [5, 6, 7, 8])
    lose(house, batch.tables[0].blocks[0])
    before = house.used()
    losses = Losses(house.manager, batch, [columns([9])], opener(house), chunk(1))
    with pytest.raises(BlockLostError, match="why; recomputing it failed: no tier takes another block") as caught:
        losses.mend([batch.tables[0].blocks[0]], "why")
    assert isinstance(caught.value.__cause__, CapacityError) and house.used() == before
    house.manager.check_integrity()


@pytest.mark.parametrize(
    ("made", "past", "why"),
    [
        (Made.OTHERWISE, Past.BLOCKS, "token types"),
        (Made.COUNTED, Past.STATES, "padding"),
        (None, Past.BLOCKS, "inputs_embeds"),
    ],
)
def test_what_cannot_be_recomputed_says_why(made: Made | None, past: Past, why: str) -> None:
    house = checked(build(gpu=4, past=past))
    batch = house.manager.new_batch()
    given = columns([None, 1, 2, 3, 4])
    new = NewColumns(5, given.runs, None if made is None else given.token_ids, None, made or Made.COUNTED)
    begun = house.manager.begin_step(batch, [new])
    house.write(begun.rows[0].writes[0], [1, 2, 3, 4])
    house.manager.commit_step(begun)
    sweep(house)
    losses = Losses(house.manager, batch, [columns([5])], opener(house), chunk(1))
    with pytest.raises(BlockLostError, match=f"lost; it cannot be recomputed: .*{why}"):
        losses.mend(batch.tables[0].blocks, "lost")
    house.placement.unreadable.update(batch.tables[0].blocks)
    assert losses.known() == []  # it may be readable after all
    house.manager.check_integrity()
