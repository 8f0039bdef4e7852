"""The conformance suite for stores. Needs pytest."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.errors import ClosedError, StoreError
from kvtier.stores.base import Store
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockShape, Slot

NUM_SLOTS = 5

SHAPES = {
    "plain": BlockShape(num_layers=3, kv_heads=2, block_tokens=16, key_dim=32, value_dim=32, element_bytes=4),
    # 24-dim heads in fp16, 5 tokens, other values than keys: no size is a multiple of 64, of 512 or of a page
    "unaligned": BlockShape(num_layers=3, kv_heads=1, block_tokens=5, key_dim=24, value_dim=17, element_bytes=2),
    "one_layer": BlockShape(num_layers=1, kv_heads=3, block_tokens=7, key_dim=24, value_dim=24, element_bytes=2),
    "large": BlockShape(num_layers=4, kv_heads=3, block_tokens=64, key_dim=64, value_dim=64, element_bytes=4),
}


class StoreContract(ABC):
    """What every store promises. Derive a `Test…` class, give `make_store`, and pytest does the rest."""

    refuses_never_written: bool = False
    """Whether the store knows which slots were written, and refuses to read the others."""

    @abstractmethod
    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        """A new, empty, open store with at least `num_slots` slots; the suite closes it."""

    @pytest.fixture(params=sorted(SHAPES))
    def shape(self, request: pytest.FixtureRequest) -> BlockShape:
        return SHAPES[request.param]

    @pytest.fixture
    def store(self, shape: BlockShape, tmp_path: Path) -> Iterator[Store]:
        store = self.make_store(shape, NUM_SLOTS, tmp_path)
        yield store
        store.check_integrity()
        store.close()

    def test_describes_itself(self, store: Store, shape: BlockShape) -> None:
        assert store.shape == shape
        assert store.num_slots >= NUM_SLOTS
        assert store.tier.label in ("gpu", "cpu", "nvme")

    def test_block_round_trip(self, store: Store) -> None:
        blocks = [random_block(store, seed) for seed in range(NUM_SLOTS)]
        for slot, block in enumerate(blocks):
            store.write(Slot(slot), block)
            store.check_integrity()
        for slot, block in reversed(list(enumerate(blocks))):
            assert torch.equal(read(store, slot), block)

    def test_slice_round_trip(self, store: Store, shape: BlockShape) -> None:
        blocks = [random_block(store, seed) for seed in range(NUM_SLOTS)]
        for slot, block in enumerate(blocks):
            store.write(Slot(slot), block)
        for slot, block in enumerate(blocks):
            for layer in range(shape.num_layers):
                expected = block[layer * shape.slice_bytes : (layer + 1) * shape.slice_bytes]
                assert torch.equal(read_slice(store, slot, layer), expected)

    def test_overwriting_one_slot_changes_no_other(self, store: Store) -> None:
        blocks = [random_block(store, seed) for seed in range(NUM_SLOTS)]
        for slot, block in enumerate(blocks):
            store.write(Slot(slot), block)
        for turn in range(3):
            blocks[2] = random_block(store, 100 + turn)
            store.write(Slot(2), blocks[2])
            for slot, block in enumerate(blocks):
                assert torch.equal(read(store, slot), block)

    def test_write_keeps_no_hold_of_its_buffer(self, store: Store) -> None:
        block = random_block(store, 1)
        expected = block.clone()
        store.write(Slot(0), block)
        block.zero_()
        assert torch.equal(read(store, 0), expected)

    def test_reading_changes_nothing(self, store: Store) -> None:
        block = random_block(store, 1)
        store.write(Slot(0), block)
        read(store, 0).zero_()
        assert torch.equal(read(store, 0), block)

    def test_buffers_may_lie_at_any_address(self, store: Store, shape: BlockShape) -> None:
        room = torch.empty(shape.block_bytes + 3, dtype=torch.uint8)
        source, out = room[3:], torch.full((shape.block_bytes + 1,), 7, dtype=torch.uint8)
        source.copy_(random_block(store, 1))
        store.write(Slot(1), source)
        store.read(Slot(1), out[1:])
        assert torch.equal(out[1:], source)
        assert out[0] == 7

    def test_slices_of_several_slots_are_those_of_each(self, store: Store, shape: BlockShape) -> None:
        blocks = [random_block(store, seed) for seed in range(NUM_SLOTS)]
        for slot, block in enumerate(blocks):
            store.write(Slot(slot), block)
        for layer in range(shape.num_layers):
            for slots in (range(NUM_SLOTS), [2, 0, 2], [1], []):
                out = page_aligned(max(1, len(slots) * shape.slice_bytes)).fill_(0xA5)
                rows = out[: len(slots) * shape.slice_bytes].view(len(slots), shape.slice_bytes)
                assert store.read_slices([Slot(slot) for slot in slots], layer, rows) == [None] * len(slots)
                for slot, row in zip(slots, rows, strict=True):
                    assert torch.equal(row, blocks[slot][layer * shape.slice_bytes : (layer + 1) * shape.slice_bytes])

    def test_one_slice_of_several_that_cannot_be_read_leaves_the_others(self, store: Store, shape: BlockShape) -> None:
        if not self.refuses_never_written:
            pytest.skip("this store does not promise it")
        blocks = [random_block(store, seed) for seed in range(3)]
        for slot in (0, 2):
            store.write(Slot(slot), blocks[slot])
        out = torch.empty((3, shape.slice_bytes), dtype=torch.uint8)
        failures = store.read_slices([Slot(slot) for slot in range(3)], 0, out)
        assert isinstance(failures[1], StoreError) and failures[0] is failures[2] is None
        for slot in (0, 2):
            assert torch.equal(out[slot], blocks[slot][: shape.slice_bytes])

    def test_wrong_buffers_are_refused(self, store: Store, shape: BlockShape) -> None:
        block = random_block(store, 1)
        store.write(Slot(0), block)
        size = shape.block_bytes
        wrong = [
            torch.zeros(size - 1, dtype=torch.uint8),
            torch.zeros(size + 1, dtype=torch.uint8),
            torch.zeros(size, dtype=torch.int8),
            torch.zeros(2 * size, dtype=torch.uint8)[::2],
        ]
        for buffer in wrong:
            with pytest.raises(ValueError):
                store.write(Slot(0), buffer)
            with pytest.raises(ValueError):
                store.read(Slot(0), buffer)
        with pytest.raises(ValueError):
            store.read_slice(Slot(0), 0, torch.zeros(shape.slice_bytes + 1, dtype=torch.uint8))
        assert torch.equal(read(store, 0), block)

    def test_slots_and_layers_out_of_range_are_refused(self, store: Store, shape: BlockShape) -> None:
        block = random_block(store, 1)
        for slot in (-1, store.num_slots, store.num_slots + 1000):
            with pytest.raises(IndexError):
                store.write(Slot(slot), block)
            with pytest.raises(IndexError):
                read(store, slot)
            with pytest.raises(IndexError):
                read_slice(store, slot, 0)
        store.write(Slot(0), block)
        for layer in (-1, shape.num_layers):
            with pytest.raises(IndexError):
                read_slice(store, 0, layer)
            with pytest.raises(IndexError):
                store.read_slices([Slot(0)], layer, torch.empty((1, shape.slice_bytes), dtype=torch.uint8))

    def test_never_written_slots_are_refused(self, store: Store) -> None:
        if not self.refuses_never_written:
            pytest.skip("this store does not promise it")
        store.write(Slot(0), random_block(store, 1))
        for slot in range(1, store.num_slots):
            with pytest.raises(StoreError):
                read(store, slot)
            with pytest.raises(StoreError):
                read_slice(store, slot, 0)

    def test_closed_store_refuses_every_call(self, store: Store) -> None:
        block = random_block(store, 1)
        store.write(Slot(0), block)
        store.close()
        store.close()
        with pytest.raises(ClosedError):
            store.write(Slot(0), block)
        with pytest.raises(ClosedError):
            read(store, 0)
        with pytest.raises(ClosedError):
            read_slice(store, 0, 0)
        assert store.used_bytes() == 0

    def test_used_bytes_cover_what_is_held(self, store: Store, shape: BlockShape) -> None:
        for slot in range(NUM_SLOTS):
            store.write(Slot(slot), random_block(store, slot))
        assert store.used_bytes() >= NUM_SLOTS * shape.block_bytes

    def test_threads_on_different_slots_do_not_disturb_each_other(self, store: Store, shape: BlockShape) -> None:
        errors: list[BaseException] = []

        def work(slot: int) -> None:
            try:
                for turn in range(20):
                    block = random_block(store, 1000 * slot + turn)
                    store.write(Slot(slot), block)
                    layer = turn % shape.num_layers
                    part = block[layer * shape.slice_bytes : (layer + 1) * shape.slice_bytes]
                    assert torch.equal(read_slice(store, slot, layer), part)
                    assert torch.equal(read(store, slot), block)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(slot,)) for slot in range(NUM_SLOTS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors


def random_block(store: Store, seed: int) -> torch.Tensor:
    """`[block_bytes]` uint8 that depend on the seed alone."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (store.shape.block_bytes,), dtype=torch.uint8, generator=generator)


def read(store: Store, slot: int) -> torch.Tensor:
    """The whole block in a new tensor that was full of other bytes before."""
    out = torch.full((store.shape.block_bytes,), 0xA5, dtype=torch.uint8)
    store.read(Slot(slot), out)
    return out


def read_slice(store: Store, slot: int, layer: int) -> torch.Tensor:
    """One slice in a new tensor that was full of other bytes before."""
    out = torch.full((store.shape.slice_bytes,), 0xA5, dtype=torch.uint8)
    store.read_slice(Slot(slot), layer, out)
    return out
