"""The residency table."""

from __future__ import annotations

import pytest

from kvtier.errors import IntegrityError
from kvtier.residency import NO_PINS, ResidencyTable
from kvtier.types import BlockId, Move, MovePurpose, SequenceId, Slot, Tier


def block_on(table: ResidencyTable, *places: tuple[Tier, int]) -> BlockId:
    block = table.create(SequenceId(1), 0)
    for tier, slot in places:
        table.add_copy(block, tier, Slot(slot))
    return block


def test_ids_are_never_used_again() -> None:
    table = ResidencyTable()
    first = table.create(SequenceId(1), 0)
    table[first].holders = 0
    table.delete(first)
    assert table.create(SequenceId(1), 0) != first
    assert table.get(first) is None


def test_fastest_clean_and_redundant() -> None:
    table = ResidencyTable()
    record = table[block_on(table, (Tier.CPU, 3), (Tier.NVME, 1))]
    assert record.fastest is Tier.CPU
    assert record.is_clean(Tier.CPU)
    assert not record.is_clean(Tier.NVME)
    assert record.is_redundant(Tier.NVME)
    assert not record.is_redundant(Tier.CPU)
    assert not record.is_redundant(Tier.GPU)
    assert table[table.create(SequenceId(1), 1)].fastest is None


def test_redundant_blocks_are_listed_as_copies_come_and_go() -> None:
    table = ResidencyTable()
    block = block_on(table, (Tier.NVME, 0))
    assert table.num_only_nvme == 1
    table.add_copy(block, Tier.CPU, Slot(0))
    table.add_copy(block, Tier.GPU, Slot(0))
    assert table.num_only_nvme == 0
    assert [list(table.redundant[tier]) for tier in Tier] == [[], [block], [block]]
    assert table.drop_copy(block, Tier.GPU) == 0
    assert [list(table.redundant[tier]) for tier in Tier] == [[], [], [block]]
    table.drop_copy(block, Tier.CPU)
    assert [list(table.redundant[tier]) for tier in Tier] == [[], [], []]
    assert table.num_only_nvme == 1
    table.check_integrity()
    table.drop_copy(block, Tier.NVME)
    assert table.num_only_nvme == 0


def test_a_tier_holds_one_copy_of_a_block() -> None:
    table = ResidencyTable()
    block = block_on(table, (Tier.GPU, 0))
    with pytest.raises(IntegrityError, match="has a copy on gpu already"):
        table.add_copy(block, Tier.GPU, Slot(1))
    assert table[block].copies == {Tier.GPU: 0}


def test_pins_are_counted_and_hold_the_copy() -> None:
    table = ResidencyTable()
    block = block_on(table, (Tier.GPU, 0), (Tier.CPU, 0))
    with pytest.raises(IntegrityError, match="cannot be pinned to nvme"):
        table.pin(block, Tier.NVME)
    table.pin(block, Tier.GPU)
    table.pin(block, Tier.GPU)
    table.unpin(block, Tier.GPU)
    with pytest.raises(IntegrityError, match="is pinned to gpu"):
        table.drop_copy(block, Tier.GPU)
    assert Tier.GPU in table[block].copies
    table.drop_copy(block, Tier.CPU)
    table.unpin(block, Tier.GPU)
    with pytest.raises(IntegrityError, match="is not pinned"):
        table.unpin(block, Tier.GPU)
    table.drop_copy(block, Tier.GPU)


def test_a_block_in_use_is_not_deleted() -> None:
    table = ResidencyTable()
    block = block_on(table, (Tier.GPU, 0))
    with pytest.raises(IntegrityError, match="while in use"):
        table.delete(block)
    table[block].holders = 0
    with pytest.raises(IntegrityError, match="while in use"):
        table.delete(block)
    table.drop_copy(block, Tier.GPU)
    table.delete(block)
    assert len(table) == 0


def test_integrity_sees_what_must_not_be() -> None:
    def broken(match: str) -> None:
        with pytest.raises(IntegrityError, match=match):
            table.check_integrity()

    table = ResidencyTable()
    block_on(table, (Tier.CPU, 0))
    block_on(table, (Tier.CPU, 0))
    broken("cpu slot 0 has two owners")

    table = ResidencyTable()
    block = block_on(table, (Tier.CPU, 0))
    table[block].holders = 0
    broken("held by no one")
    table[block].move = Move(0, block, MovePurpose.DEMOTE, Tier.CPU, Slot(0), Tier.NVME, Slot(0))
    table.check_integrity()

    table = ResidencyTable()
    block = block_on(table, (Tier.CPU, 0))
    table[block].pins = {**NO_PINS, Tier.GPU: 1}
    broken("pinned where it is not")

    table = ResidencyTable()
    block_on(table, (Tier.NVME, 0))
    table.num_only_nvme = 0
    broken("1 blocks are only on nvme")

    table = ResidencyTable()
    block = block_on(table, (Tier.CPU, 0), (Tier.NVME, 0))
    table.redundant[Tier.NVME].clear()
    broken("wrongly listed as redundant")
    table.redundant[Tier.NVME][block] = None
    table.redundant[Tier.CPU][BlockId(99)] = None
    broken("a dead block is listed")
