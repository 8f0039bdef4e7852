"""Block tables."""

from __future__ import annotations

import pytest

from kvtier.block_table import BlockTable, TokenSource
from kvtier.errors import IntegrityError
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
    table._ids.append(1)
    with pytest.raises(IntegrityError, match="7 ids for 6 tokens"):
        table.check_integrity()
