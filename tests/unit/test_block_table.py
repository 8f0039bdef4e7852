"""Block tables."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.block_table import BlockTable, Made, TokenSource
from kvtier.errors import IntegrityError
from kvtier.padding import Padding
from kvtier.token_runs import TokenRuns
from kvtier.types import BlockId, SequenceId


def blocks(*ids: int) -> list[BlockId]:
    return [BlockId(block) for block in ids]


def table_of(num_tokens: int, block_tokens: int = 4) -> BlockTable:
    table = BlockTable(SequenceId(1), block_tokens)
    table.append(num_tokens, range(100, 100 + num_tokens), blocks(*range(-(-num_tokens // block_tokens))))
    return table


@pytest.mark.parametrize(
    ("num_tokens", "full", "tail_tokens", "tail"), [(0, 0, 0, None), (3, 0, 3, 0), (4, 1, 0, None), (9, 2, 1, 2)]
)
def test_full_blocks_and_the_tail(num_tokens: int, full: int, tail_tokens: int, tail: int | None) -> None:
    table = table_of(num_tokens)
    assert (table.num_full_blocks, table.tail_tokens, table.tail) == (full, tail_tokens, tail)
    table.check_integrity()


def test_appending_fills_the_tail_first() -> None:
    table = table_of(3)
    table.append(1, [7], [])
    table.append(5, [1, 2, 3, 4, 5], blocks(8, 9))
    assert table.blocks == [0, 8, 9]
    assert table.token_ids() == [100, 101, 102, 7, 1, 2, 3, 4, 5]
    table.check_integrity()


@pytest.mark.parametrize(("ids", "new"), [([1, 2], []), ([1, 2], [8, 9]), ([1], [8])])
def test_an_append_that_does_not_add_up_changes_nothing(ids: list[int], new: list[int]) -> None:
    table = table_of(3)
    with pytest.raises(IntegrityError):
        table.append(2, ids, blocks(*new))
    assert (table.num_tokens, table.blocks, table.token_ids()) == (3, [0], [100, 101, 102])
    table.check_integrity()


@pytest.mark.parametrize(("keep", "dropped"), [(9, []), (8, [2]), (5, [2]), (4, [1, 2]), (1, [1, 2]), (0, [0, 1, 2])])
def test_truncate_returns_what_is_no_longer_held(keep: int, dropped: list[int]) -> None:
    table = table_of(9)
    assert table.truncate(keep) == dropped
    assert table.token_ids() == list(range(100, 100 + keep))
    assert table.blocks == [block for block in range(3) if block not in dropped]
    table.check_integrity()


@pytest.mark.parametrize("keep", [-1, 10])
def test_truncate_refuses_lengths_that_it_does_not_have(keep: int) -> None:
    table = table_of(9)
    with pytest.raises(IntegrityError):
        table.truncate(keep)
    assert table.num_tokens == 9


def test_forks_share_no_list() -> None:
    table = table_of(6)
    twin = table.fork(SequenceId(2))
    twin.append(3, [1, 2, 3], blocks(9))
    table.truncate(2)
    assert (table.blocks, table.token_ids()) == ([0], [100, 101])
    assert (twin.blocks, twin.token_ids()) == ([0, 1, 9], [*range(100, 106), 1, 2, 3])
    for each in (table, twin):
        each.check_integrity()


def test_replacing_the_tail() -> None:
    table = table_of(6)
    assert table.replace_tail(BlockId(9)) == 1
    assert table.blocks == [0, 9]
    with pytest.raises(IntegrityError):
        table_of(4).replace_tail(BlockId(9))


def test_first_difference_compares_as_much_as_both_have() -> None:
    table = table_of(6)
    assert table.first_difference(range(100, 106)) is None
    assert table.first_difference(range(100, 120)) is None
    assert table.first_difference([100, 101]) is None
    assert table.first_difference([]) is None
    assert table.first_difference([100, 5, 102]) == 1


def test_ids_are_known_up_to_the_first_embedding() -> None:
    table = table_of(3)
    table.append(1, None, [])
    table.append(1, [5], blocks(8))
    assert table.source is TokenSource.EMBEDS
    assert table.token_ids() == []
    assert table.first_difference([100, 101, 102, 9, 9]) is None
    assert table.first_difference([100, 9]) == 1
    table.check_integrity()
    twin = table.fork(SequenceId(2))
    assert twin.source is TokenSource.EMBEDS
    twin.truncate(4)
    assert twin.source is TokenSource.EMBEDS
    twin.truncate(3)
    twin.append(2, [1, 2], blocks(3))
    assert twin.token_ids() == [100, 101, 102, 1, 2]


def test_integrity_sees_lost_blocks_double_blocks_and_lost_ids() -> None:
    table = table_of(6)
    table.blocks.pop()
    with pytest.raises(IntegrityError, match="6 tokens in 1 blocks"):
        table.check_integrity()
    table.blocks.append(table.blocks[0])
    with pytest.raises(IntegrityError, match="holds a block twice"):
        table.check_integrity()
    table = table_of(6)
    table._ids.put(len(table._ids), [1])
    with pytest.raises(IntegrityError, match="7 ids and 6 positions for 6 tokens"):
        table.check_integrity()


# -- padding ----------------------------------------------------------------------------------------------------------

Column = tuple[int, int] | None
"""A token's id and position, or padding."""


def padded(*columns: int | None, block_tokens: int = 4, first_block: int = 0) -> BlockTable:
    """A table of those columns, appended in one piece; None is padding. Positions are those of the columns."""
    model = Model(BlockTable(SequenceId(1), block_tokens), itertools.count(first_block))
    model.append([None if token is None else (token, column) for column, token in enumerate(columns)])
    return model.table


@dataclass
class Model:
    """A table, and what it must hold: a plain list of columns."""

    table: BlockTable
    new_block: itertools.count[int]
    columns: list[Column] = field(default_factory=list)

    @property
    def tokens(self) -> list[tuple[int, int]]:
        return [column for column in self.columns if column is not None]

    def append(self, columns: list[Column]) -> None:
        padding, tokens, count = [], [column for column in columns if column is not None], 0
        for is_padding, run in itertools.groupby(columns, key=lambda column: column is None):
            length = len(list(run))
            if is_padding:
                padding.append(Padding(count, length))
            count += 0 if is_padding else length
        table = self.table
        num_blocks = -(-(table.num_tokens + len(tokens)) // table.block_tokens) - len(table.blocks)
        new_blocks = blocks(*itertools.islice(self.new_block, num_blocks))
        ids, positions = [token for token, _ in tokens], [position for _, position in tokens]
        table.append(len(tokens), ids, new_blocks, positions=positions, padding=padding)
        self.columns += columns

    def check(self) -> None:
        table, size = self.table, self.table.block_tokens
        table.check_integrity()
        assert (table.length, table.num_tokens) == (len(self.columns), len(self.tokens))
        assert table.token_ids() == [token for token, _ in self.tokens]
        assert len(table.blocks) == -(-len(self.tokens) // size)
        places = [column for column, token in enumerate(self.columns) if token is not None]
        for first in range(len(places) + 1):
            for last in range(first, len(places) + 1):
                pieces = list(table.pieces(first, last))
                found = [(c + i, t + i) for c, t, count in pieces for i in range(count)]
                assert found == [(places[token], token) for token in range(first, last)]
                # As few runs as there are: neighbouring tokens in neighbouring columns are one.
                assert all(c + count < following[0] for (c, _, count), following in itertools.pairwise(pieces))


columns_strategy = st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 9))), max_size=7)


@settings(max_examples=150, deadline=None)
@given(
    steps=st.lists(st.tuples(columns_strategy, st.integers(0, 3)), max_size=4),
    block_tokens=st.sampled_from([1, 3, 4]),
)
def test_a_padded_table_is_its_list_of_columns_whatever_is_appended_masked_and_kept(
    steps: list[tuple[list[Column], int]], block_tokens: int
) -> None:
    model = Model(BlockTable(SequenceId(1), block_tokens), itertools.count())
    for columns, num_masked in steps:
        model.append(columns)
        model.check()
        num_masked = min(num_masked, len(model.columns))
        before = list(model.table.blocks)
        dropped = model.table.mask_end(num_masked)
        assert model.table.blocks + dropped == before
        model.columns[len(model.columns) - num_masked :] = [None] * num_masked
        model.check()
    for length in range(len(model.columns) + 1):
        twin = Model(model.table.fork(SequenceId(2)), itertools.count(100), list(model.columns))
        dropped = twin.table.truncate(length)
        assert twin.table.blocks + dropped == model.table.blocks
        del twin.columns[length:]
        twin.check()
        twin.append([None, (1, 1), None])
        twin.check()
    model.check()


def test_padding_in_front_behind_and_between() -> None:
    table = BlockTable(SequenceId(1), 4)
    table.append(3, [1, 2, 3], blocks(0), padding=[Padding(0, 2), Padding(1, 1), Padding(3, 2)])
    assert (table.length, table.num_tokens, table.token_ids()) == (8, 3, [1, 2, 3])
    assert list(table.pieces(0, 3)) == [(2, 0, 1), (4, 1, 2)]
    table.append(2, [4, 5], blocks(1), padding=[Padding(0, 1), Padding(1, 4)])
    # Padding behind the one step and in front of the next is one run.
    assert table.padding == [Padding(0, 2), Padding(1, 1), Padding(3, 3), Padding(4, 4)]
    assert list(table.pieces(1, 5)) == [(4, 1, 2), (9, 3, 1), (14, 4, 1)]
    assert list(table.pieces(4, 5)) == [(14, 4, 1)]
    assert list(table.pieces(2, 2)) == []
    table.check_integrity()


def test_a_step_of_padding_alone() -> None:
    table = padded(1, 2)
    table.append(0, [], [], padding=[Padding(0, 3)])
    table.append(0, None, [], padding=[Padding(0, 1)])
    assert (table.length, table.blocks, table.padding) == (6, [0], [Padding(2, 4)])
    assert table.source is TokenSource.IDS


def test_masking_the_end_drops_its_tokens_and_their_blocks() -> None:
    table = padded(None, 1, 2, 3, 4, None, 5, 6)
    assert table.mask_end(0) == []
    assert table.padding == [Padding(0, 1), Padding(4, 1)]
    assert table.mask_end(2) == [1]
    assert (table.length, table.token_ids(), table.blocks) == (8, [1, 2, 3, 4], [0])
    assert table.padding == [Padding(0, 1), Padding(4, 3)]
    assert table.mask_end(8) == [0]
    assert (table.length, table.token_ids(), table.padding) == (8, [], [Padding(0, 8)])
    with pytest.raises(IntegrityError):
        table.mask_end(9)
    assert table.length == 8


def test_an_append_whose_positions_do_not_add_up_changes_nothing() -> None:
    table = padded(None, 1, 2)
    with pytest.raises(IntegrityError, match="1 positions for 2 tokens"):
        table.append(2, [3, 4], [], positions=[7], padding=[Padding(0, 1)])
    assert (table.length, table.token_ids(), table.padding) == (3, [1, 2], [Padding(0, 1)])
    table.check_integrity()


def test_content_is_of_ids_positions_and_padding_in_front() -> None:
    table = padded(1, 2, 3, 4, 5, 6, 7, 8, 9)
    first, second = table.content(0), table.content(1)
    assert first is not None and second is not None and first != second
    assert table.content(2) is None, "a tail has none"
    same = padded(1, 2, 3, 4, 5, 6, 7, 8, first_block=10)
    assert (same.content(0), same.content(1)) == (first, second)
    assert padded(1, 2, 3, 9, 5, 6, 7, 8).content(0) != first
    assert padded(1, 2, 3, 9, 5, 6, 7, 8).content(1) == second  # the parent tells them apart
    assert padded(None, 1, 2, 3, 4).content(0) != first
    assert padded(1, 2, None, 3, 4).content(0) != first
    behind = padded(1, 2, 3, 4, None, 5, 6, 7, 8)
    assert behind.content(0) == first, "padding behind a block is the next one's"
    assert behind.content(1) != second


@pytest.mark.parametrize("padding", [Padding(0, 2), Padding(2, 2)])
def test_content_sees_padding_and_positions_apart(padding: Padding) -> None:
    tables = [BlockTable(SequenceId(1), 4) for _ in range(4)]
    for table, positions, pads in zip(
        tables, (None, None, [5, 6, 7, 8], [5, 6, 7, 8]), ([], [padding]) * 2, strict=True
    ):
        table.append(4, [1, 2, 3, 4], blocks(0), positions=positions, padding=pads)
    assert len({table.content(0) for table in tables}) == 4


def test_content_ends_at_the_first_embedding_and_counts_positions_on() -> None:
    table = padded(1, 2, 3, 4)
    table.append(1, None, blocks(1))
    table.append(3, [6, 7, 8], [])
    assert table.content(0) is not None and table.content(1) is None
    counted, placed = BlockTable(SequenceId(1), 4), BlockTable(SequenceId(2), 4)
    counted.append(2, [1, 2], blocks(0))
    counted.append(2, [3, 4], [])
    placed.append(4, [1, 2, 3, 4], blocks(0), positions=[0, 1, 2, 3])
    assert counted.content(0) == placed.content(0)


def test_forks_have_padding_and_positions_of_their_own() -> None:
    table = padded(None, 1, None, 2, 3)
    twin = table.fork(SequenceId(2))
    assert (twin.padding, twin.length) == (table.padding, 5)
    for each in (table, twin):
        each.append(1, [4], [], positions=[5])
    assert twin.content(0) == table.content(0) is not None
    twin.mask_end(3)
    assert (table.length, table.padding) == (6, [Padding(0, 1), Padding(1, 1)])
    assert (twin.length, twin.padding) == (6, [Padding(0, 1), Padding(1, 4)])
    table.truncate(0)
    assert twin.token_ids() == [1]
    for each in (table, twin):
        each.check_integrity()


def test_integrity_sees_padding_that_is_nowhere_and_lost_positions() -> None:
    for padding in ([Padding(3, 1)], [Padding(1, 0)], [Padding(1, 1), Padding(1, 1)], [Padding(2, 1), Padding(0, 1)]):
        table = padded(1, 2)
        table._padding.runs = padding
        with pytest.raises(IntegrityError, match="padding"):
            table.check_integrity()
    table = padded(1, 2)
    table._runs.truncate(1)
    with pytest.raises(IntegrityError, match="2 ids and 1 positions"):
        table.check_integrity()


def test_positions_and_what_tokens_were_made_from_take_a_run_each() -> None:
    table = BlockTable(SequenceId(1), 4)
    for first in range(0, 40, 4):
        table.append(4, range(first, first + 4), blocks(first))
    assert len(table._runs) == 1 and table.is_counted
    table.append(2, [1, 2], blocks(80), made=Made.PLACED)
    assert len(table._runs) == 2 and table.is_counted
    table.append(2, [1, 2], [], positions=[7, 9], made=Made.PLACED)
    assert len(table._runs) == 4 and not table.is_counted
    assert [(span.positions, span.ids) for span in table.spans(38, 44)] == [
        (None, [38, 39]),
        ([40, 41, 7, 9], [1, 2, 1, 2]),
    ]
    table.truncate(43)
    assert len(table._runs) == 3
    table.truncate(41)
    assert len(table._runs) == 2 and table.is_counted
    table.check_integrity()


@settings(max_examples=200)
@given(st.lists(st.tuples(st.sampled_from(["count", "place", "crop"]), st.integers(0, 9), st.integers(0, 3))))
def test_runs_are_what_lists_of_positions_and_numbers_would_be(actions: list[tuple[str, int, int]]) -> None:
    runs, model = TokenRuns(), list[tuple[int, int]]()
    for action, amount, number in actions:
        if action == "count":
            runs.extend(range(len(model), len(model) + amount), number)
            model += [(len(model) + i, number) for i in range(amount)]
        elif action == "place":
            positions = [number + i * (i % 3) for i in range(amount)]
            runs.extend(positions, number)
            model += [(position, number) for position in positions]
        else:
            runs.truncate(max(0, len(model) - amount))
            del model[max(0, len(model) - amount) :]
        assert runs.num_tokens == len(model)
        twin = runs.copy()
        for first in range(0, len(model) + 1, 3):
            found = [(p + i, n) for p, count, n in twin.runs(first, len(model)) for i in range(count)]
            assert found == model[first:]
        assert [runs.number(token) for token in range(len(model))] == [n for _, n in model]
        assert runs.is_counted is all(position == token for token, (position, _) in enumerate(model))


def test_ids_that_a_label_has_are_not_kept_twice_and_are_the_same_after_any_crop() -> None:
    table = table_of(19)
    contents = [table.content(index) for index in range(4)]
    assert all(content is not None for content in contents)
    plain, wanted = table.fork(SequenceId(2)), table.token_ids()
    table.share_ids(0, [content for content in contents if content is not None])
    assert len(table._ids._rest) == 3
    assert table.fork(SequenceId(3))._ids._contents[1] is contents[1]
    for length in range(20):
        for first in range(length + 1):
            assert table._ids.slice(first, length).tolist() == wanted[first:length]
    for index in range(5):
        assert table.content(index) == plain.content(index)
    for length in (18, 16, 14, 12, 9, 4, 1, 0):
        twin = table.fork(SequenceId(4))
        twin.truncate(length)
        assert twin.token_ids() == wanted[:length]
        assert twin.first_difference([*wanted[:length], 5]) is None
        twin.append(7, range(7), blocks(*range(50, 50 + -(-(length + 7) // 4) - -(-length // 4))))
        assert twin.token_ids() == [*wanted[:length], *range(7)]
        twin.check_integrity()
    assert table.token_ids() == wanted
    assert table.first_difference([*wanted[:9], 1]) == 9


def test_contents_of_other_tokens_are_refused_and_those_behind_a_gap_left() -> None:
    table, other = table_of(12), BlockTable(SequenceId(2), 4)
    other.append(12, range(12), blocks(7, 8, 9))
    foreign, own = other.content(0), table.content(1)
    assert foreign is not None and own is not None
    with pytest.raises(IntegrityError, match="other tokens"):
        table.share_ids(0, [foreign])
    table.share_ids(1, [own])
    assert table._ids._contents == [] and table.token_ids() == list(range(100, 112))
