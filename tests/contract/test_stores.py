"""kvtier's own stores, and the fakes, against the suite that is shipped to store authors."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from kvtier.errors import ChecksumError, IntegrityError, NoSpaceError, ShortReadError, StoreError
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.gpu import GpuStore
from kvtier.stores.null import NullStore
from kvtier.stores.nvme import NvmeStore, min_budget_bytes
from kvtier.stores.slab import joins
from kvtier.stores.staging import page_aligned
from kvtier.testing import FakeEngine, Fault, FaultyStore, StoreContract
from kvtier.testing.stores import NUM_SLOTS, SHAPES, random_block, read
from kvtier.types import BlockId, BlockShape, Compression, IoMode, Move, MovePurpose, MoveResult, MoveStatus, Slot, Tier

DTYPES = {2: torch.float16, 4: torch.float32}
HOST = torch.device("cpu")


class TestGpuStore(StoreContract):
    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return GpuStore(shape, num_slots, DTYPES[shape.element_bytes], torch.device("cpu"))


class TestJoinedGpuStore(StoreContract):
    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return GpuStore(shape, num_slots, DTYPES[shape.element_bytes], HOST, joined=joins(shape, HOST))


class TestJoinedCpuStore(StoreContract):
    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return CpuStore(shape, num_slots, pin=False, joined=joins(shape, HOST))


class TestCpuStore(StoreContract):
    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return CpuStore(shape, num_slots, pin=False)


class TestNvmeStore(StoreContract):
    refuses_never_written = True
    io = IoMode.MMAP
    page_cache_bytes = 256 << 20
    persistent = False
    segment_bytes_max = 1 << 30
    compression = Compression.NONE

    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return NvmeStore(
            shape,
            min_budget_bytes(shape) * (num_slots + 1),
            tmp_path / "kv",
            self.persistent,
            segment_bytes_max=self.segment_bytes_max,
            reserve_free_frac=0.0,
            io=self.io,
            page_cache_bytes=self.page_cache_bytes,
            compression=self.compression,
        )

    def test_does_what_it_was_told(self, store: Store) -> None:
        assert isinstance(store, NvmeStore)
        store.write(Slot(0), random_block(store, 0))
        assert store.io.mode is self.io
        flags = fcntl.fcntl(store._space.segments[0]._file.fd, fcntl.F_GETFL)
        assert bool(flags & os.O_DIRECT) == (self.io is IoMode.DIRECT)

    def test_buffers_on_and_off_pages(self, store: Store, shape: BlockShape) -> None:
        room = page_aligned(shape.block_bytes + 2 * PAGE_BYTES)
        for start in (0, 1, 64, 512, PAGE_BYTES - 1, PAGE_BYTES):  # of which the first and the last need no staging
            data = room[start : start + shape.block_bytes]
            block = random_block(store, start)
            data.copy_(block)
            store.write(Slot(1), data)
            room.fill_(0xA5)
            store.read(Slot(1), data)
            assert torch.equal(data, block)
            assert (room[:start] == 0xA5).all() and (room[start + shape.block_bytes :] == 0xA5).all()
            for layer in range(shape.num_layers):
                part = room[start : start + shape.slice_bytes]
                store.read_slice(Slot(1), layer, part)
                assert torch.equal(part, block[layer * shape.slice_bytes : (layer + 1) * shape.slice_bytes])


class TestPersistentNvmeStoreOfSmallSegments(TestNvmeStore):
    page_cache_bytes = 4 << 20
    persistent = True
    segment_bytes_max = 1


class TestDirectNvmeStore(TestNvmeStore):
    io = IoMode.DIRECT


class TestDirectNvmeStoreOfSmallSegmentsAndOneBuffer(TestNvmeStore):
    io = IoMode.DIRECT
    page_cache_bytes = 1 << 20
    segment_bytes_max = 1


def random_floats(store: Store, seed: int) -> torch.Tensor:
    """A block of normal floats: unlike random bytes, they compress."""
    count = store.shape.block_bytes // store.shape.element_bytes
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed))
    return values.to(DTYPES[store.shape.element_bytes]).view(torch.uint8)


class TestCompressedNvmeStore(TestNvmeStore):
    compression = Compression.ZSTD

    @pytest.fixture(autouse=True)
    def floats(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvtier.testing.stores.random_block", random_floats)

    def test_used_bytes_cover_what_is_held(self, store: Store, shape: BlockShape) -> None:
        assert isinstance(store, NvmeStore)
        for slot in range(NUM_SLOTS):
            store.write(Slot(slot), random_floats(store, slot))
        stored_bytes = store.stored_frac * NUM_SLOTS * shape.block_bytes
        assert 0.4 < store.stored_frac < 0.97
        assert stored_bytes < store.used_bytes() <= store.budget_bytes


class TestCompressedPersistentNvmeStoreOfSmallSegments(TestCompressedNvmeStore):
    persistent = True
    segment_bytes_max = 1


class TestCompressedDirectNvmeStore(TestCompressedNvmeStore):
    io = IoMode.DIRECT


class TestCompressedNvmeStoreOfRandomBytes(TestNvmeStore):
    """Which do not compress: all slices lie as they are."""

    compression = Compression.ZSTD


class TestNullStore(StoreContract):
    refuses_never_written = True

    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return NullStore(shape, num_slots, Tier.NVME)


class TestFaultyStoreWithoutFaults(StoreContract):
    refuses_never_written = True

    def make_store(self, shape: BlockShape, num_slots: int, tmp_path: Path) -> Store:
        return FaultyStore(NullStore(shape, num_slots, Tier.CPU), seed=1)


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_gpu_views_are_the_blocks_bytes(name: str) -> None:
    shape = SHAPES[name]
    dtype = DTYPES[shape.element_bytes]
    store = GpuStore(shape, 4, dtype, torch.device("cpu"))
    blocks = [random_block(store, slot) for slot in range(4)]
    for slot, block in enumerate(blocks):
        store.write(Slot(slot), block)
        assert store.block(Slot(slot)).data_ptr() % 64 == 0
    for slot, layer in itertools.product(range(4), range(shape.num_layers)):
        start = layer * shape.slice_bytes
        key = blocks[slot][start : start + shape.key_bytes].clone().view(dtype)
        value = blocks[slot][start + shape.key_bytes : start + shape.slice_bytes].clone().view(dtype)
        heads, tokens = shape.kv_heads, shape.block_tokens
        # compared as bits, since random bits hold NaNs
        bits = {2: torch.int16, 4: torch.int32}[shape.element_bytes]
        assert torch.equal(store.keys[layer][slot].view(bits), key.reshape(heads, tokens, shape.key_dim).view(bits))
        assert torch.equal(
            store.values[layer][slot].view(bits), value.reshape(heads, tokens, shape.value_dim).view(bits)
        )
        assert store.keys[layer].stride(-1) == store.values[layer].stride(-1) == 1
    store.keys[-1][2].zero_()  # written through a view, as an append does
    start = (shape.num_layers - 1) * shape.slice_bytes
    assert not store.block(Slot(2))[start : start + shape.key_bytes].any()
    store.check_integrity()
    store.close()
    store.check_integrity()


def test_gpu_store_refuses_a_dtype_of_another_size() -> None:
    with pytest.raises(ValueError, match="float16"):
        GpuStore(SHAPES["plain"], 4, torch.float16, torch.device("cpu"))


def test_cpu_slices_are_views() -> None:
    store = CpuStore(SHAPES["unaligned"], 3, pin=False)
    block = random_block(store, 1)
    store.write(Slot(1), block)
    store.slice(Slot(1), 1).zero_()
    out = read(store, 1)
    size = store.shape.slice_bytes
    assert not out[size : 2 * size].any()
    assert torch.equal(out[:size], block[:size])
    with pytest.raises(IndexError):
        store.slice(Slot(1), -1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="registering works there: tests/cuda")
def test_cpu_store_goes_on_unpinned_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        store = CpuStore(SHAPES["plain"], 3, pin=True)
    assert not store.pinned
    assert len(caplog.records) == 1
    block = random_block(store, 1)
    store.write(Slot(2), block)
    assert torch.equal(read(store, 2), block)
    store.close()
    store.check_integrity()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.BIT_FLIP, ChecksumError),
        (Fault.SHORT_READ, ShortReadError),
        (Fault.EIO, StoreError),
    ],
)
def test_faulty_reads(fault: Fault, error: type[StoreError]) -> None:
    store = FaultyStore(NullStore(SHAPES["plain"], 3, Tier.NVME), seed=1, at_calls={1: fault})
    block = random_block(store, 1)
    store.write(Slot(0), block)
    with pytest.raises(error):
        read(store, 0)
    assert torch.equal(read(store, 0), block)
    assert store.injected == [(1, fault)]


def test_faulty_writes_leave_nothing_readable() -> None:
    faults = {1: Fault.EIO, 3: Fault.NO_SPACE}
    store = FaultyStore(NullStore(SHAPES["plain"], 3, Tier.NVME), seed=1, at_calls=faults)
    block = random_block(store, 1)
    store.write(Slot(2), block)
    with pytest.raises(StoreError) as eio:
        store.write(Slot(2), block)
    assert eio.value.errno == errno.EIO
    with pytest.raises(StoreError):
        read(store, 2)
    with pytest.raises(NoSpaceError) as full:
        store.write(Slot(2), block)
    assert full.value.available_slots == 2
    store.write(Slot(2), block)
    assert torch.equal(read(store, 2), block)


def test_silent_flips_change_one_bit() -> None:
    store = FaultyStore(NullStore(SHAPES["plain"], 3, Tier.NVME), seed=1, rates={Fault.SILENT_BIT_FLIP: 1.0})
    block = random_block(store, 1)
    store.write(Slot(0), block)
    changed = read(store, 0) ^ block
    assert int(changed.count_nonzero()) == 1
    assert int(changed.max()).bit_count() == 1


def test_a_torn_write_is_noticed_by_reads_until_the_slot_is_written_again() -> None:
    inner = NullStore(SHAPES["plain"], 3, Tier.NVME)
    store = FaultyStore(inner, seed=1, at_calls={0: Fault.TORN_WRITE, 4: Fault.TORN_WRITE})
    block, half = random_block(store, 1), inner.shape.block_bytes // 2
    store.write(Slot(0), block)
    store.write(Slot(1), block)
    out = torch.empty_like(block)
    with pytest.raises(ChecksumError, match="half of slot 0"):
        store.read(Slot(0), out)
    assert torch.equal(out[:half], block[:half]) and not torch.equal(out[half:], block[half:])
    with pytest.raises(ChecksumError):
        store.read_slice(Slot(0), 0, torch.empty(store.shape.slice_bytes, dtype=torch.uint8))
    assert torch.equal(read(inner, 0), block), "what the files hold is whole"
    store.write(Slot(1), block)
    with pytest.raises(ChecksumError):
        read(store, 1)
    for slot in (0, 1):
        store.write(Slot(slot), block)
        assert torch.equal(read(store, slot), block)


def test_a_hang_ends_by_itself_or_when_released() -> None:
    store = FaultyStore(NullStore(SHAPES["plain"], 3, Tier.NVME), seed=1, rates={Fault.HANG: 1.0}, hang_s=0.02)
    block = random_block(store, 1)
    store.write(Slot(0), block)  # this one by itself
    store.hang_s = 3600
    reader = threading.Thread(target=read, args=(store, 0), daemon=True)
    reader.start()
    reader.join(0.1)
    assert reader.is_alive()
    store.release()
    reader.join(60)
    assert not reader.is_alive()
    assert torch.equal(read(store, 0), block)  # nothing hangs any more
    assert store.counts() == {Fault.HANG: 3}


def test_the_same_seed_and_calls_meet_the_same_faults() -> None:
    def injected(seed: int) -> list[tuple[int, Fault]]:
        rates = dict.fromkeys(Fault, 0.1)
        store = FaultyStore(NullStore(SHAPES["plain"], 3, Tier.NVME), seed, rates, delay_s=0.0, hang_s=0.0)
        block = random_block(store, 1)
        for call in range(200):
            with contextlib.suppress(StoreError):
                if call % 3 == 0:
                    store.write(Slot(call % 2), block)
                else:
                    read(store, call % 2)
        return store.injected

    first = injected(7)
    assert first == injected(7) and first != injected(8)
    assert {fault for _, fault in first} == set(Fault)


def move(move_id: int, source_slot: int, dest_slot: int, dest: Tier = Tier.CPU) -> Move:
    return Move(move_id, BlockId(move_id), MovePurpose.DEMOTE, Tier.GPU, Slot(source_slot), dest, Slot(dest_slot))


def drain(engine: FakeEngine) -> list[MoveResult]:
    results = []
    while engine.in_flight():
        results += engine.wait(1.0)
    return results


@pytest.mark.parametrize("max_delay", [0, 1, 4])
def test_fake_engine_reports_every_move_once(max_delay: int) -> None:
    engine = FakeEngine(seed=3, fail_frac=0.3, max_delay=max_delay)
    moves = [move(i, i, i) for i in range(200)]
    for i in range(200):
        engine.bytes_by_slot[Tier.GPU, Slot(i)] = f"block {i}"
    engine.start(moves)
    assert engine.in_flight() == 200
    results = engine.finished() + drain(engine)
    assert [result.move for result in results] != moves  # in random order
    assert sorted(result.move.move_id for result in results) == list(range(200))
    assert 20 < sum(result.status is MoveStatus.FAILED for result in results) < 100
    for result in results:
        place = (Tier.CPU, result.move.dest_slot)
        if result.status is MoveStatus.DONE:
            assert engine.bytes_by_slot[place] == f"block {result.move.move_id}"
        else:
            assert result.error
            assert place not in engine.bytes_by_slot
    assert engine.finished() == engine.wait(0.0) == []


def test_fake_engine_shows_a_source_that_was_freed_too_early() -> None:
    seen = set()
    for seed in range(40):
        engine = FakeEngine(seed)
        engine.bytes_by_slot[Tier.GPU, Slot(0)] = "right"
        engine.start([move(0, 0, 0)])
        engine.bytes_by_slot[Tier.GPU, Slot(0)] = "of the next owner"
        drain(engine)
        seen.add(engine.bytes_by_slot[Tier.CPU, Slot(0)])
    assert seen == {"right", "of the next owner"}


def test_fake_engine_refuses_moves_that_get_into_each_others_way() -> None:
    for second in (move(0, 5, 5), move(1, 5, 0)):
        engine = FakeEngine(seed=1)
        engine.start([move(0, 0, 0)])
        with pytest.raises(IntegrityError):
            engine.start([second])


def test_fake_engine_runs_out_of_nvme_slots() -> None:
    engine = FakeEngine(seed=1)
    engine.nvme_available_slots = 2
    engine.start([move(i, i, i, Tier.NVME) for i in range(4)])
    full = [result for result in drain(engine) if result.status is MoveStatus.NO_SPACE]
    assert sorted(result.move.dest_slot for result in full) == [2, 3]
    assert {result.available_slots for result in full} == {2}


def test_fake_engine_needs_neither_torch_nor_pytest() -> None:
    code = (
        "import sys; sys.modules.update(torch=None, numpy=None, pytest=None); "
        "from kvtier.testing import FakeEngine; FakeEngine(seed=1)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_faulty_store_needs_no_pytest() -> None:
    code = "import sys; sys.modules.update(pytest=None); from kvtier.testing import FaultyStore"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
