"""Rows of one batch: selection, joining at seal, padding, and steps of several rows. Blocks of 4 tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.batch import Batch
from kvtier.errors import BlockLostError, CapacityError, IntegrityError
from kvtier.residency import BlockState
from kvtier.step import NewColumns, Run
from kvtier.types import BlockId, MovePurpose, Tier
from tests.small_tiers import Columns, HandEngine, House, build, columns

NO_BACKGROUND = {"low_frac": 0.0}


def rows_of(house: House, *ids: Columns) -> Batch:
    """A batch whose rows got those columns in one step."""
    batch = house.manager.new_batch(len(ids))
    house.append(batch, list(ids))
    return batch


def blocks_of(batch: Batch) -> list[list[BlockId]]:
    return [list(table.blocks) for table in batch.tables]


def holders(house: House, batch: Batch) -> list[list[int]]:
    return [[house.placement.residency[block].holders for block in table.blocks] for table in batch.tables]


def state_of(house: House, batch: Batch) -> tuple[object, ...]:
    tables = batch.tables
    return (
        blocks_of(batch), [t.token_ids() for t in tables], [t.padding for t in tables], house.used()["gpu"],
        house.manager.residency_len, house.placement.residency_pins(Tier.GPU),
    )  # fmt: skip


# -- what a batch is --------------------------------------------------------------------------------------------------


def test_rows_are_of_one_length_in_columns() -> None:
    house = build()
    batch = house.manager.new_batch(3)
    assert (batch.length, batch.num_rows, batch.is_padded) == (0, 3, False)
    house.append(batch, [[1, 2, 3], [4, 5, 6], [7, 8, 9]])
    assert (batch.length, batch.is_padded) == (3, False)
    house.append(batch, [[1], [None], [2]])
    assert (batch.length, batch.is_padded) == (4, True)
    assert [table.num_tokens for table in batch.tables] == [4, 3, 4]
    house.check()
    batch.tables[1].truncate(3)
    with pytest.raises(IntegrityError, match="rows of 3 and 4 columns"):
        batch.check_integrity()
    with pytest.raises(IntegrityError, match="rows of 3 and 4 columns"):
        house.manager.check_integrity()
    assert house.manager.new_batch(0).length == 0


def test_the_rows_of_a_step_fill_the_batch_and_the_batch_lives() -> None:
    house = build()
    batch = house.manager.new_batch(2)
    with pytest.raises(IntegrityError, match="a step of 1 rows on a batch of 2"):
        house.manager.begin_step(batch, [columns([1])])
    house.manager.drop(batch)
    with pytest.raises(IntegrityError, match="a dropped one"):
        house.manager.begin_step(batch, [columns([1]), columns([2])])


@pytest.mark.parametrize(
    ("ids", "runs", "padding"),
    [
        ([1, 2], [(0, 2)], []),
        ([None, 1, 2], [(1, 2)], [(0, 1)]),
        ([1, None, None], [(0, 1)], [(1, 2)]),
        ([None, 1, None, 2, None], [(1, 1), (3, 1)], [(0, 1), (1, 1), (2, 1)]),
        ([None, None], [], [(0, 2)]),
    ],
)
def test_new_columns_know_where_their_padding_is(
    ids: Columns, runs: list[tuple[int, int]], padding: list[tuple[int, int]]
) -> None:
    new = NewColumns(len(ids), tuple(Run(*run) for run in runs))
    assert new == NewColumns(len(ids), columns(ids).runs)
    assert [(p.at, p.count) for p in new.padding()] == padding
    assert new.num_tokens == sum(token is not None for token in ids)
    assert NewColumns.of(new.num_tokens).num_columns == new.num_tokens
    house = build()
    batch = house.manager.new_batch()
    step = house.manager.begin_step(batch, [new])
    assert step.rows[0].is_full is (not padding)
    assert sum(write.num_tokens for write in step.rows[0].writes) == new.num_tokens
    house.manager.commit_step(step)
    assert batch.length == len(ids)
    assert house.placement.metrics.tokens == new.num_tokens


def test_a_step_of_padding_alone_takes_no_slot() -> None:
    house = build(gpu=1, cpu=0, nvme=0)
    batch = rows_of(house, [None, None], [1, 2])
    assert house.used()["gpu"] == 1
    house.append(batch, [[None, None], [3, 4]])
    assert blocks_of(batch)[0] == []
    assert batch.length == 4
    house.check()


# -- select -----------------------------------------------------------------------------------------------------------


def three_rows(house: House) -> Batch:
    return rows_of(house, [1, 2, 3, 4, 5], [None, 11, 12, 13, 14], [21, 22, 23, 24, 25])


def test_a_permutation_moves_nothing() -> None:
    house = build(gpu=8)
    batch = three_rows(house)
    tables, before = list(batch.tables), house.used()
    house.manager.select(batch, [2, 0, 1])
    assert batch.tables == [tables[2], tables[0], tables[1]]
    assert [house.read(batch, row) for row in range(3)] == [[21, 22, 23, 24, 25], [1, 2, 3, 4, 5], [11, 12, 13, 14]]
    assert (house.used(), house.engine.started) == (before, [])
    house.check()


def test_rows_that_are_named_twice_share_and_those_not_named_are_freed() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = three_rows(house)
    freed = blocks_of(batch)[0]
    house.manager.select(batch, [1, 1, 2, 1])
    assert batch.num_rows == 4
    assert len({table.sequence for table in batch.tables}) == 4
    assert holders(house, batch) == [[3], [3], [1, 1], [3]]
    assert all(house.placement.residency.get(block) is None for block in freed)
    assert house.used()["gpu"] == 3
    assert [table.padding for table in batch.tables] == [
        batch.tables[0].padding,
        *[t.padding for t in batch.tables[1:]],
    ]
    assert [table.length for table in batch.tables] == [5] * 4
    assert len(house.manager.tables) == len(house.placement.sequence_metrics) == 4
    house.append(batch, [[31], [32], [33], [34]])
    assert [house.read(batch, row)[-1] for row in range(4)] == [31, 32, 33, 34]
    house.check()
    house.manager.drop(batch)
    assert house.manager.residency_len == house.used()["gpu"] == 0
    assert not house.placement.sequence_metrics


def test_a_row_that_is_not_there_changes_nothing() -> None:
    house = build(gpu=8)
    batch = three_rows(house)
    tables, before = list(batch.tables), state_of(house, batch)
    for rows in ([3], [0, 0, 3], [0, 1, 2, 99], [-1], [0, -4]):
        with pytest.raises(IndexError):
            house.manager.select(batch, rows)
    assert batch.tables == tables
    assert state_of(house, batch) == before
    house.check()


def test_selecting_no_row_leaves_an_empty_batch_that_can_be_resized() -> None:
    house = build(gpu=8)
    batch = three_rows(house)
    house.manager.select(batch, [])
    assert (batch.num_rows, batch.length, house.used()["gpu"]) == (0, 0, 0)
    with pytest.raises(IntegrityError):
        house.manager.begin_step(batch, [])
    house.manager.resize(batch, 2)
    house.append(batch, [[1], [2]])
    house.check()


def test_the_blocks_of_a_selected_row_run() -> None:
    house = build(gpu=8)
    batch = three_rows(house)
    house.manager.select(batch, [2, 2])
    assert house.placement.running_blocks == set(batch.tables[0].blocks)
    house.manager.leave(batch)
    assert not house.placement.running_blocks


def test_only_an_empty_batch_is_resized() -> None:
    house = build()
    batch = house.manager.new_batch(2)
    old = [table.sequence for table in batch.tables]
    house.manager.resize(batch, 3)
    assert batch.num_rows == len(house.manager.tables) == len(house.placement.sequence_metrics) == 3
    assert not set(old) & set(house.manager.tables)
    house.append(batch, [[None], [1], [2]])
    with pytest.raises(IntegrityError, match="1 columns cannot be resized"):
        house.manager.resize(batch, 2)
    assert batch.num_rows == 3
    house.manager.truncate(batch, 0)
    house.manager.resize(batch, 1)
    assert batch.num_rows == 1
    house.check()


def test_forked_batches_share_rows_and_then_part() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = three_rows(house)
    used = house.used()["gpu"]
    twin = house.manager.fork(batch)
    assert blocks_of(twin) == blocks_of(batch)
    assert house.used()["gpu"] == used
    house.append(twin, [[31], [None], [33]])
    assert house.read(twin, 0) == [1, 2, 3, 4, 5, 31]
    assert house.read(batch, 0) == [1, 2, 3, 4, 5]
    assert (batch.length, twin.length) == (5, 6)
    house.check()


# -- truncate, mask_end, restore --------------------------------------------------------------------------------------


def test_truncate_counts_columns_in_every_row() -> None:
    house = build(gpu=8)
    batch = rows_of(house, [1, 2, 3, 4, 5], [None, None, None, 14, 15], [21, None, None, None, None])
    house.manager.truncate(batch, 3)
    assert [house.read(batch, row) for row in range(3)] == [[1, 2, 3], [], [21]]
    assert (batch.length, house.used()["gpu"]) == (3, 2)
    with pytest.raises(IntegrityError, match="cannot keep 4 of 3"):
        house.manager.truncate(batch, 4)
    house.check()


def test_restore_undoes_what_was_masked_and_appended() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = three_rows(house)
    before = (blocks_of(batch), [table.token_ids() for table in batch.tables], batch.length)
    house.manager.enter(batch)
    backup = house.manager.fork(batch)
    house.manager.mask_end(batch, 0, 2)
    assert house.read(batch, 0) == [1, 2, 3]
    house.manager.mask_end(batch, 2, 5)
    house.append(batch, [[None, 6], [16, 17], [26, 27]])
    assert [house.read(batch, row) for row in range(3)] == [[1, 2, 3, 6], [11, 12, 13, 14, 16, 17], [26, 27]]
    house.check()
    house.manager.restore(batch, backup)
    assert (blocks_of(batch), [table.token_ids() for table in batch.tables], batch.length) == before
    assert [house.read(batch, row) for row in range(3)] == before[1]
    assert house.used()["gpu"] == 5
    assert house.placement.running_blocks == {block for row in before[0] for block in row}
    house.manager.drop(backup)  # used up
    house.check()
    house.append(batch, [[6], [15], [26]])
    house.check()
    house.manager.leave(batch)
    house.manager.drop(batch)
    assert house.used()["gpu"] == 0
    assert not house.manager.tables and not house.placement.sequence_metrics


def test_masked_tokens_free_their_blocks_and_a_sealed_one_is_copied_before_it_grows() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = rows_of(house, list(range(8)), list(range(10, 18)))
    house.manager.seal(batch)
    sealed = batch.tables[0].blocks[0]
    house.manager.mask_end(batch, 0, 5)
    assert house.used()["gpu"] == 3
    house.append(batch, [[None, 90], [18, 19]])
    assert house.read(batch, 0) == [0, 1, 2, 90]
    assert house.placement.residency.get(sealed) is None
    assert batch.length == 10
    house.check()


# -- join at seal -----------------------------------------------------------------------------------------------------


def sealed(house: House, *ids: Columns, positions: list[list[int] | None] | None = None) -> Batch:
    batch = house.manager.new_batch(len(ids))
    new = [columns(row, place) for row, place in zip(ids, positions or [None] * len(ids), strict=True)]
    step = house.manager.begin_step(batch, new)
    for row in step.rows:
        for write in row.writes:
            house.write(write, row.new.token_ids or [])
    house.manager.commit_step(step)
    house.manager.seal(batch)
    house.check()
    return batch


def test_equal_full_blocks_of_rows_are_one_once_sealed() -> None:
    house = build(gpu=9, **NO_BACKGROUND)
    batch = sealed(house, [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 0, 6, 7, 8, 9])
    first, second, third = blocks_of(batch)
    assert first[:2] == second[:2] and first[2] != second[2]
    assert third[0] == first[0] and third[1] != first[1]
    assert holders(house, batch) == [[3, 2, 1], [3, 2, 1], [3, 1, 1]]
    assert house.used()["gpu"] == 6
    assert all(house.placement.residency[block].state is BlockState.SEALED for block in first[:2])
    house.append(batch, [[10], [11], [12]])
    house.manager.truncate(batch, 6)
    house.append(batch, [[60], [61], [62]])
    assert [house.read(batch, row)[4:] for row in range(3)] == [[5, 6, 60], [5, 6, 61], [0, 6, 62]]
    house.check()


def test_blocks_behind_different_parents_are_two() -> None:
    house = build(gpu=9)
    batch = sealed(house, [1, 2, 3, 4, 5, 6, 7, 8], [0, 2, 3, 4, 5, 6, 7, 8])
    assert holders(house, batch) == [[1, 1], [1, 1]]


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        (([1, 2, 3, 4, None], [None, 1, 2, 3, 4]), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (([1, 2, 3, 4, None], [1, None, 2, 3, 4]), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (([1, 2, 3, 4], [1, 2, 3, 4]), [[0, 1, 2, 3], [1, 2, 3, 4]]),
        (([1, 2, 3, 4], [1, 2, 3, 4]), [None, [0, 1, 2, 4]]),
        (([1, 2, 3, 4], [1, 2, 3, 5]), [None, None]),
    ],
)
def test_other_ids_positions_or_padding_are_other_blocks(
    ids: tuple[Columns, Columns], positions: list[list[int] | None]
) -> None:
    house = build()
    batch = sealed(house, *ids, positions=positions)
    assert holders(house, batch) == [[1], [1]]


def test_padding_that_is_the_same_in_both_rows_is_no_difference() -> None:
    house = build()
    batch = sealed(house, [None, 1, 2, None, 3, 4], [None, 1, 2, None, 3, 4])
    assert holders(house, batch) == [[2], [2]]


def test_padding_behind_a_block_is_no_difference_to_it() -> None:
    house = build()
    batch = sealed(house, [1, 2, 3, 4, None, 5], [1, 2, 3, 4, 5, 6])
    assert [row[0] for row in holders(house, batch)] == [2, 2]


def test_unknown_ids_are_never_equal() -> None:
    house = build()
    batch = house.manager.new_batch(2)
    house.manager.commit_step(house.manager.begin_step(batch, [NewColumns.of(4), NewColumns.of(4)]))
    house.manager.seal(batch)
    assert holders(house, batch) == [[1], [1]]


def test_equal_rows_of_different_batches_are_not_joined() -> None:
    house = build()
    one, other = sealed(house, [1, 2, 3, 4]), sealed(house, [1, 2, 3, 4])
    assert blocks_of(one) != blocks_of(other)


def test_a_block_that_fills_later_joins_one_that_was_sealed_before() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = sealed(house, [1, 2, 3, 4, None, None], [1, 2, None, None, None, None])
    house.manager.mask_end(batch, 1, 4)
    house.manager.truncate(batch, 4)  # the padding of row 1 goes from behind its tokens
    house.manager.truncate(batch, 2)
    house.append(batch, [[3, 4], [3, 4]])
    house.manager.seal(batch)
    assert holders(house, batch) == [[2], [2]]
    house.append(batch, [[5, 6, 7, 8], [None, None, None, None]])
    house.manager.seal(batch)
    house.manager.truncate(batch, 4)
    house.append(batch, [[5, 6, 7, 8], [5, 6, 7, 8]])
    house.manager.seal(batch)
    assert holders(house, batch) == [[2, 2], [2, 2]]
    house.check()


def test_the_next_step_and_leaving_seal_and_join() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2, 3, 4], [1, 2, 3, 4])
    assert holders(house, batch) == [[1], [1]]
    house.append(batch, [[5], [6]])
    assert [row[0] for row in holders(house, batch)] == [2, 2]
    other = rows_of(house, [1, 2, 3, 4], [1, 2, 3, 4])
    house.manager.leave(other)
    assert holders(house, other) == [[2], [2]]
    third = rows_of(house, [1, 2, 3, 4], [1, 2, 3, 4])
    house.append(house.manager.new_batch(), [1])  # another batch's step: `third` is idle
    assert holders(house, third) == [[2], [2]]
    house.check()


def test_a_joined_block_whose_copy_is_on_its_way_down_goes_when_that_ends() -> None:
    house = build(gpu=8, cpu=8)
    batch = rows_of(house, [1, 2, 3, 4], [1, 2, 3, 4])
    engine = house.placement.engine = HandEngine()
    kept, released = (table.blocks[0] for table in batch.tables)
    slot = house.placement.pools[Tier.CPU].take()
    assert slot is not None
    house.placement.start(released, MovePurpose.WRITE_BEHIND, Tier.GPU, Tier.CPU, slot)
    house.manager.seal(batch)
    house.manager.check_integrity()
    assert blocks_of(batch) == [[kept], [kept]]
    assert house.placement.residency[released].holders == 0
    assert house.used()["gpu"] == 2, "the source stays until the copy has ended"
    assert engine.in_flight() == 1
    house.drain()
    assert house.placement.residency.get(released) is None
    assert (house.used()["gpu"], house.used()["cpu"]) == (1, 0)
    house.check()


def test_eight_equal_rows_cost_about_one_rows_blocks() -> None:
    house = build(gpu=17, cpu=0, nvme=0)  # while a step is open each row has a block of its own
    batch = house.manager.new_batch(8)
    for start in range(0, 40, 4):
        house.append(batch, [list(range(start, start + 4))] * 8)
    house.manager.leave(batch)
    assert house.used()["gpu"] == house.manager.residency_len == 10
    assert holders(house, batch) == [[8] * 10] * 8
    house.check()
    house.manager.select(batch, [3])
    assert holders(house, batch) == [[1] * 10]


# -- steps of several rows --------------------------------------------------------------------------------------------


def test_rows_that_share_a_tail_each_get_a_copy_and_the_original_goes_at_commit() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = house.filled(6)
    house.manager.select(batch, [0, 0, 0])
    tail = batch.tables[0].blocks[1]
    step = house.manager.begin_step(batch, [columns([60]), columns([70]), columns([80])])
    copies = [row.tail_copy for row in step.rows]
    assert len(set(copies)) == 3 and None not in copies and tail not in copies
    assert len({row.tail_slot for row in step.rows}) == 3
    assert house.placement.residency[tail].holders == 3
    for row in step.rows:
        assert house.cells(Tier.GPU, row.tail_slot or 0)[:2] == (4, 5)
        for write in row.writes:
            house.write(write, row.new.token_ids or [])
    house.manager.commit_step(step)
    assert house.placement.residency.get(tail) is None
    assert [house.read(batch, row) for row in range(3)] == [[0, 1, 2, 3, 4, 5, last] for last in (60, 70, 80)]
    assert holders(house, batch) == [[3, 1]] * 3
    assert house.used()["gpu"] == 4
    started = len(house.engine.started)
    house.append(batch, [[1], [2], [3]])  # tails are their own now
    assert len(house.engine.started) == started
    house.check()


def test_each_row_gets_a_copy_of_its_own_tail() -> None:
    house = build(gpu=12, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2, 3], [None, 4, 5], [6, None, None])
    twin = house.manager.fork(batch)
    house.append(twin, [[91], [92], [93]])
    assert [house.read(twin, row) for row in range(3)] == [[1, 2, 3, 91], [4, 5, 92], [6, 93]]
    assert [house.read(batch, row) for row in range(3)] == [[1, 2, 3], [4, 5], [6]]
    house.check()


@pytest.mark.parametrize("demoted", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_without_new_tokens_reads_its_tail_and_does_not_copy_it(demoted: bool, shared: bool) -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2], [3, 4])
    twin = house.manager.fork(batch) if shared else None
    tail = batch.tables[1].blocks[0]
    record = house.placement.residency[tail]
    if demoted:
        house.placement.give_up(Tier.GPU, 2)
        house.drain()
    generation = record.generation
    step = house.manager.begin_step(batch, [columns([5]), columns([None])])
    row = step.rows[1]
    assert (row.tail_copy, row.new_blocks, row.writes) == (None, (), ())
    assert row.tail_slot == record.copies[Tier.GPU]
    assert record.pins[Tier.GPU] == 1
    assert house.cells(Tier.GPU, row.tail_slot)[:2] == (3, 4)
    for write in step.rows[0].writes:
        house.write(write, [5])
    house.manager.commit_step(step)
    assert batch.tables[1].blocks == [tail]
    assert record.generation == generation
    assert set(record.copies) == ({Tier.GPU, Tier.CPU} if demoted else {Tier.GPU}), "a tail that did not grow is clean"
    assert not record.pins[Tier.GPU]
    purposes = [move.purpose for move in house.engine.started if move.block == tail]
    assert purposes == ([MovePurpose.DEMOTE, MovePurpose.PROMOTE] if demoted else [])
    assert house.read(batch, 0) == [1, 2, 5]
    assert (batch.length, batch.tables[1].length) == (3, 3)
    if twin is not None:
        assert (house.read(twin, 0), house.read(twin, 1)) == ([1, 2], [3, 4])
    house.check()


def test_rows_that_wait_for_one_demoted_tail_promote_it_once() -> None:
    house = build(gpu=6, **NO_BACKGROUND)
    batch = house.filled(2)
    house.manager.select(batch, [0, 0, 0])
    house.placement.give_up(Tier.GPU, 1)
    house.drain()
    step = house.manager.begin_step(batch, [columns([9]), columns([None]), columns([None])])
    tail = batch.tables[1].blocks[0]
    assert house.placement.residency[tail].pins[Tier.GPU] == 2
    assert step.rows[1].tail_slot == step.rows[2].tail_slot != step.rows[0].tail_slot
    assert [move.purpose for move in house.engine.started].count(MovePurpose.PROMOTE) == 1
    house.manager.abort_step(step)
    assert house.placement.residency_pins(Tier.GPU) == 0
    assert house.used()["gpu"] == 1
    house.append(batch, [[9], [None], [None]])
    assert [house.read(batch, row) for row in range(3)] == [[0, 1, 9], [0, 1], [0, 1]]
    assert holders(house, batch) == [[1], [2], [2]]
    house.check()


def test_an_aborted_step_of_several_rows_leaves_nothing_behind() -> None:
    house = build(gpu=12, **NO_BACKGROUND)
    batch = three_rows(house)
    house.manager.select(batch, [0, 0, 1, 2])
    house.manager.seal(batch)
    before = state_of(house, batch)
    step = house.manager.begin_step(batch, [columns([7, 8, 9, 10]) for _ in range(3)] + [columns([None] * 4)])
    assert house.placement.residency_pins(Tier.GPU) == 6  # 2 tail copies, 2 + 1 new blocks, the tail read in place
    house.manager.abort_step(step)
    house.manager.abort_step(step)
    assert state_of(house, batch) == before
    assert house.placement.metrics.steps_aborted == 1
    house.check()


@pytest.mark.parametrize("cause", ["capacity", "lost", "timeout"])
def test_a_step_that_fails_in_a_later_row_leaves_no_pin_and_no_slot(cause: str) -> None:
    house = build(gpu=7, cpu=0, nvme=8 if cause != "capacity" else 0, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2], [11, 12], [21, 22])
    if cause == "capacity":
        rows_of(house, [1, 2, 3], [4, 5, 6])
        new = [columns([3, 4, 5])] * 3  # a tail and a new block each: 6 of 7 slots, and 2 are another's
    else:
        twin = house.manager.fork(batch)
        house.manager.drop(twin)
        house.placement.give_up(Tier.GPU, 7)
        house.drain()
        house.engine.hanging = cause == "timeout"
        new = [columns([3, 4, 5]), columns([None] * 3), columns([3, 4, 5])]
        if cause == "lost":  # two rows are promoted and the first has a new block, the third cannot be read
            lost = batch.tables[2].blocks[0]
            start = house.placement.start

            def fail_the_third(block: BlockId, *arguments: object) -> object:
                house.engine.fail_frac = float(block == lost)
                return start(block, *arguments)  # type: ignore[arg-type]

            house.placement.start = fail_the_third  # type: ignore[method-assign,assignment]
    before = state_of(house, batch)
    error = CapacityError if cause == "capacity" else BlockLostError
    with pytest.raises(error):
        house.manager.begin_step(batch, new)
    after = state_of(house, batch)
    assert house.placement.residency_pins(Tier.GPU) == 0
    assert (after[0], after[1], after[4]) == (before[0], before[1], before[4])
    house.manager.check_integrity()
    house.engine.hanging = False
    house.drain()
    assert house.used()["gpu"] == {"capacity": 5, "lost": 2, "timeout": 0}[cause]
    house.check()
    if cause != "capacity":
        house.engine.fail_frac = 0.0
        if cause == "lost":
            del house.placement.start
        house.append(batch, [[3, 4, 5], [None] * 3, [3, 4, 5]])
        assert [house.read(batch, row) for row in range(3)] == [[1, 2, 3, 4, 5], [11, 12], [21, 22, 3, 4, 5]]
        house.check()


def test_lower_copies_of_tails_that_grew_go_and_of_those_that_did_not_stay() -> None:
    house = build(gpu=8, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2], [3, 4], [5, 6])
    house.placement.give_up(Tier.GPU, 3)
    house.drain()
    house.append(batch, [[9], [None], [9]])
    assert [house.tiers_of(batch, row) for row in range(3)] == [["gpu"], ["gpu+cpu"], ["gpu"]]
    house.check()


# -- how many tokens a step may have ----------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    gpu=st.integers(1, 9),
    tails=st.lists(st.integers(0, 7), min_size=1, max_size=4),
    num_forks=st.integers(0, 2),
    is_sealed=st.booleans(),
    demoted=st.booleans(),
)
def test_max_new_tokens_is_the_most_that_can_ever_fit(
    gpu: int, tails: list[int], num_forks: int, is_sealed: bool, demoted: bool
) -> None:
    house = build(gpu=max(gpu, len(tails)), cpu=0, nvme=40, **NO_BACKGROUND)
    batch = house.manager.new_batch(len(tails))
    length = max(tails)
    for column in range(length):
        house.append(batch, [[100 * row + column if column < tail else None] for row, tail in enumerate(tails)])
    if is_sealed:
        house.manager.seal(batch)
        house.manager.truncate(batch, max(0, length - 1))  # into sealed blocks: tails that are copied
    house.manager.select(
        batch, [*range(len(tails)), *(row % len(tails) for row in range(num_forks))][: max(gpu, len(tails))]
    )
    if demoted:
        house.placement.give_up(Tier.GPU, 40)
        house.drain()
    most, rows = house.manager.max_new_tokens(batch), batch.num_rows

    def new(num_tokens: int) -> list[NewColumns]:
        return [columns(list(range(num_tokens))) for _ in range(rows)]

    ceiling = house.manager.num_gpu_slots
    needed = [sum(-(-(t.tail_tokens + n) // 4) for t in batch.tables) for n in (most, most + 1)]
    assert needed[0] <= ceiling < needed[1] or most == 0
    if most:
        step = house.manager.begin_step(batch, new(most))
        assert sum(write.num_tokens for row in step.rows for write in row.writes) == most * rows
        house.manager.abort_step(step)
        # Rows without new tokens need no more.
        house.manager.abort_step(house.manager.begin_step(batch, [*new(most)[1:], columns([None] * most)]))
    with pytest.raises(CapacityError, match="gpu slots"):
        house.manager.begin_step(batch, new(most + 1))
    house.check()


def test_a_step_of_rows_that_can_never_fit_says_what_it_needs() -> None:
    house = build(gpu=4)
    batch = rows_of(house, [1, 2, 3], [4, 5, 6], [7, 8, 9])
    assert house.manager.max_new_tokens(batch) == 1
    with pytest.raises(CapacityError, match=r"2 new tokens in 3 rows need 6 gpu slots \(tails 3, new blocks 3\)"):
        house.manager.begin_step(batch, [columns([1, 2])] * 3)
    assert not house.engine.started
    house.manager.select(batch, [0, 1, 2, 0, 1])
    assert house.manager.max_new_tokens(batch) == 0


# -- running and dropped ----------------------------------------------------------------------------------------------


def test_dropped_batches_free_every_row_between_steps() -> None:
    house = build(gpu=8)
    batch = three_rows(house)
    house.manager.dropped.append(batch)
    house.manager.dropped.append(batch)
    house.manager.poll()
    assert house.manager.residency_len == 0
    assert not house.manager.tables and not house.placement.running_blocks and not house.placement.sequence_metrics
    house.manager.check_integrity()


def test_metrics_are_of_all_rows() -> None:
    house = build(gpu=4, cpu=0, nvme=8, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2], [3, 4])
    house.placement.give_up(Tier.GPU, 2)
    house.drain()
    house.append(batch, [[5], [None]])
    assert batch.metrics.nvme_read_bytes == 200
    assert house.placement.metrics.tokens == 5


def test_metrics_of_a_restored_batch_go_on() -> None:
    house = build(gpu=4, cpu=0, nvme=8, **NO_BACKGROUND)
    batch = rows_of(house, [1, 2], [3, 4])
    backup = house.manager.fork(batch)
    house.manager.mask_end(batch, 0, 1)
    house.manager.restore(batch, backup)
    house.append(batch, [[5], [6]])
    house.append(batch, [[7, 8], [9, 10]])
    house.placement.give_up(Tier.GPU, 4)
    house.drain()
    house.append(batch, [[11], [12]])  # the tails come back
    assert batch.metrics.nvme_read_bytes == 200
    house.check()


def test_equal_tokens_with_other_bytes_are_not_joined() -> None:
    """As a hook, an adapter or token types that differ by row make them."""
    house = build(gpu=8, **NO_BACKGROUND)
    batch = house.manager.new_batch(3)
    step = house.manager.begin_step(batch, [columns([1, 2, 3, 4])] * 3)
    for row, cells in zip(step.rows, ([1, 2, 3, 4], [1, 2, 3, 40], [1, 2, 3, 40]), strict=True):
        house.write(row.writes[0], cells)
    house.manager.commit_step(step)
    house.manager.seal(batch)
    assert holders(house, batch) == [[1], [2], [2]]
    house.manager.check_integrity()
