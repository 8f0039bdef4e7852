"""Both ways of I/O on real files: calls that end early or fail, memory that stays bounded, and how `auto` chooses."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import itertools
import logging
import mmap
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import BudgetError, ConfigError, ShortReadError, StoreError
from kvtier.stores import io_choice, page_cache, page_calls
from kvtier.stores.buffered_io import BufferedIo
from kvtier.stores.direct_io import DirectIo
from kvtier.stores.file_io import PAGE_BYTES, FileIo, OpenFile
from kvtier.stores.io_choice import choose_io, make_io
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.page_cache import GRANULE_BYTES, PageCache
from kvtier.stores.staging import BUFFER_BYTES, StagingPool, page_aligned
from kvtier.system import filesystem_kind, is_memory_backed, open_fds, resident_file_bytes
from kvtier.testing.stores import SHAPES, random_block, read, read_slice
from kvtier.types import BlockShape, IoMode, Slot
from tests.fault.table import Row, report

MODES = [IoMode.MMAP, IoMode.DIRECT]
MIB = 1 << 20
LOCK_BYTES = PAGE_BYTES  # the page of the folder's lock file, in which our pid stands
# a block of 1.5 MiB in four slices of 384 KiB: more than one buffer and one granule
LARGE = BlockShape(num_layers=4, kv_heads=3, block_tokens=256, key_dim=64, value_dim=64, element_bytes=4)
BASE = torch.from_numpy(np.random.default_rng(0).integers(0, 256, LARGE.block_bytes, dtype=np.uint8))


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    """On a disk: where files are memory there is no page cache to look at."""
    if not is_memory_backed(filesystem_kind(tmp_path)):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


def open_store(folder: Path, io: IoMode, shape: BlockShape = SHAPES["unaligned"], **changes: Any) -> NvmeStore:
    arguments: dict[str, Any] = {"budget_bytes": 1 << 20, "persistent": False, "reserve_free_frac": 0.0, "io": io}
    return NvmeStore(shape, folder=folder, **arguments | changes)


def marked_block(slot: int) -> torch.Tensor:
    """A block of LARGE that is the slot's own; made faster than random ones."""
    return BASE ^ slot


def is_idle(store: NvmeStore) -> bool:
    """No staging buffer is held, nor any page cache in use."""
    io = store._io
    if isinstance(io, DirectIo):
        return io.staging.num_free() * BUFFER_BYTES == io.staging.used_bytes()
    assert isinstance(io, BufferedIo)
    return not any(granule.num_users for granule in io.cache._granules.values())


Readv = Callable[[int, Sequence[memoryview], int], int]


class Preadv:
    """`os.preadv` with a fault at one call, or at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fault: Callable[[int, memoryview, int], int], at: int | None):
        self.real, self.fault, self.at, self.num_calls = os.preadv, fault, at, 0
        monkeypatch.setattr(os, "preadv", self)

    def __call__(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        index, self.num_calls = self.num_calls, self.num_calls + 1
        if self.at is None or index == self.at:
            return self.fault(fd, buffers[0], offset)
        return self.real(fd, buffers, offset)


def shortened(real: Readv, num_bytes: int) -> Callable[[int, memoryview, int], int]:
    """Only so many bytes arrive, and garbage behind them. (Asked for so few, O_DIRECT would refuse the call.)"""

    def short(fd: int, buffer: memoryview, offset: int) -> int:
        got = min(real(fd, [buffer], offset), num_bytes)
        buffer[got:] = b"\xee" * (len(buffer) - got)
        return got

    return short


def failing(code: int) -> Callable[..., int]:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return fail


# --- calls that end early


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("shape", [SHAPES["unaligned"], SHAPES["plain"], LARGE], ids=["unaligned", "plain", "large"])
@pytest.mark.parametrize("num_bytes", [1, 100, PAGE_BYTES, PAGE_BYTES + 1000])
def test_a_short_read_at_any_call_is_continued(
    tmp_path: Path, io: IoMode, shape: BlockShape, num_bytes: int, request: pytest.FixtureRequest
) -> None:
    store = open_store(tmp_path / "kv", io, shape, budget_bytes=16 * MIB)
    blocks = [random_block(store, slot) for slot in range(2)]
    for slot, block in enumerate(blocks):
        store.write(Slot(slot), block)
    layer = shape.num_layers - 1
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = Preadv(monkeypatch, shortened(os.preadv, num_bytes), at)
            assert torch.equal(read(store, 1), blocks[1])
            assert torch.equal(read_slice(store, 1, layer), blocks[1][layer * shape.slice_bytes :])
        if calls.num_calls <= at:
            break
    assert at >= 2  # one call at least for each read
    report(request, Row.SHORT_READS, absorbed=at)
    assert is_idle(store)
    store.close()


@pytest.mark.parametrize("io", MODES)
def test_reads_that_are_all_short_end_all_the_same(tmp_path: Path, io: IoMode, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=16 * MIB)
    block = random_block(store, 1)
    store.write(Slot(1), block)
    calls = Preadv(monkeypatch, shortened(os.preadv, 5000), None)
    assert torch.equal(read(store, 1), block)
    assert calls.num_calls >= LARGE.block_bytes // 5000
    store.close()


@pytest.mark.parametrize(("io", "num_bytes"), [(IoMode.MMAP, 0), (IoMode.DIRECT, 0), (IoMode.DIRECT, 100)])
def test_reads_without_progress_are_short_reads(
    tmp_path: Path, io: IoMode, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=16 * MIB)
    block = random_block(store, 1)
    store.write(Slot(1), block)
    Preadv(monkeypatch, shortened(os.preadv, num_bytes) if num_bytes else lambda *_: 0, None)
    for call in (lambda: read(store, 1), lambda: read_slice(store, 1, 2)):
        with pytest.raises(ShortReadError, match=r"segment-00001\.kvt has \d+ bytes and gave"):
            call()
    monkeypatch.undo()
    assert is_idle(store)
    assert torch.equal(read(store, 1), block)
    store.close()


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("left_bytes", [0, 1, PAGE_BYTES, LARGE.slice_bytes, LARGE.block_bytes - 1])
def test_a_truncated_file_is_a_short_read(tmp_path: Path, io: IoMode, left_bytes: int) -> None:
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=16 * MIB)
    store.write(Slot(0), random_block(store, 0))
    os.truncate(store.folder / "segment-00000.kvt", left_bytes)
    for out in (torch.empty(LARGE.block_bytes, dtype=torch.uint8), page_aligned(LARGE.block_bytes)):
        with pytest.raises(ShortReadError, match=f"has {left_bytes} bytes"):
            store.read(Slot(0), out)
        with pytest.raises(ShortReadError):
            store.read_slice(Slot(0), LARGE.num_layers - 1, out[: LARGE.slice_bytes])
    assert is_idle(store)
    store.close()


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("shape", [SHAPES["unaligned"], LARGE], ids=["unaligned", "large"])
@pytest.mark.parametrize("num_bytes", [512, PAGE_BYTES + 512])  # whole sectors, as O_DIRECT writes, but not whole pages
def test_a_short_write_at_any_call_is_continued(
    tmp_path: Path, io: IoMode, shape: BlockShape, num_bytes: int, request: pytest.FixtureRequest
) -> None:
    store = open_store(tmp_path / "kv", io, shape, budget_bytes=16 * MIB)
    real, calls = os.pwrite, 0
    for at in itertools.count():
        calls, block = 0, random_block(store, at)

        def short(fd: int, data: memoryview, offset: int, at: int = at) -> int:
            nonlocal calls
            calls += 1
            return real(fd, data[:num_bytes] if calls - 1 == at else data, offset)

        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(os, "pwrite", short)
            store.write(Slot(1), block)
        assert torch.equal(read(store, 1), block)
        if calls <= at:
            break
    assert at >= 1
    report(request, Row.SHORT_WRITES, absorbed=at)
    store.close()


@pytest.mark.parametrize("io", MODES)
def test_a_write_that_moves_nothing_is_an_error(tmp_path: Path, io: IoMode, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=16 * MIB)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StoreError) as error:
        store.write(Slot(0), random_block(store, 0))
    assert error.value.errno == errno.EIO
    monkeypatch.undo()
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 0)
    assert is_idle(store)
    store.close()


@pytest.mark.parametrize("io", MODES)
def test_signals_during_reads_and_writes_change_nothing(tmp_path: Path, io: IoMode) -> None:
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=16 * MIB, page_cache_bytes=4 * MIB)
    seen = 0

    def handler(*_: object) -> None:
        nonlocal seen
        seen += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    try:
        for turn in range(2000):
            block = random_block(store, turn)
            store.write(Slot(turn % store.num_slots), block)
            assert torch.equal(read(store, turn % store.num_slots), block)
            if seen >= 50:
                break
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert seen >= 50
    store.close()


# --- calls that fail


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("shape", [SHAPES["unaligned"], LARGE], ids=["unaligned", "large"])
def test_a_mediums_error_at_any_read_is_a_store_error(tmp_path: Path, io: IoMode, shape: BlockShape) -> None:
    store = open_store(tmp_path / "kv", io, shape, budget_bytes=16 * MIB)
    block = random_block(store, 1)
    store.write(Slot(1), block)
    for at in itertools.count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = Preadv(monkeypatch, failing(errno.EIO), at)
            try:
                read(store, 1)
            except StoreError as error:
                assert error.errno == errno.EIO and ".kvt" in str(error)
                failed = True
            else:
                failed = False
        assert failed == (calls.num_calls > at)
        assert is_idle(store)
        assert torch.equal(read(store, 1), block)
        if not failed:
            break
    assert at >= 1
    store.close()


@pytest.mark.parametrize("error", [OSError(errno.ENOMEM, "no memory"), KeyboardInterrupt(), MemoryError()])
def test_staging_comes_back_whatever_ends_its_use(error: BaseException) -> None:
    pool = StagingPool(2 * BUFFER_BYTES)
    for _ in range(5):
        with pytest.raises(type(error)):
            with pool.buffer():
                raise error
    assert pool.num_free() == 1 and pool.used_bytes() == BUFFER_BYTES
    with pool.buffer() as first, pool.buffer() as second:
        assert first.ctypes.data % PAGE_BYTES == second.ctypes.data % PAGE_BYTES == 0
        assert first.ctypes.data != second.ctypes.data


def test_staging_is_bounded_by_count(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match="page_cache"):
        StagingPool(BUFFER_BYTES - 1)
    pool = StagingPool(3 * BUFFER_BYTES + 1)
    held, most, lock, errors = 0, 0, threading.Lock(), []

    def work(number: int) -> None:
        nonlocal held, most
        try:
            for _ in range(20):
                with pool.buffer() as buffer:
                    with lock:
                        held += 1
                        most = max(most, held)
                    buffer[:8] = number
                    time.sleep(0.001)  # so that the others want theirs meanwhile
                    assert (buffer[:8] == number).all()  # nobody else has it
                    with lock:
                        held -= 1
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert most == 3
    assert pool.used_bytes() <= 3 * BUFFER_BYTES
    assert pool.num_free() * BUFFER_BYTES == pool.used_bytes()


def test_thirty_two_reads_are_in_flight_through_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=16 * MIB)
    block = random_block(store, 0)
    store.write(Slot(0), block)
    together = threading.Barrier(32)
    real = os.preadv

    def meeting(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        together.wait(timeout=60)  # passes only once 32 calls are under way
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", meeting)
    outs = [torch.empty(LARGE.slice_bytes + 1, dtype=torch.uint8)[1:] for _ in range(32)]
    threads = [threading.Thread(target=store.read_slice, args=(Slot(0), 1, out)) for out in outs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(out, block[LARGE.slice_bytes : 2 * LARGE.slice_bytes]) for out in outs)
    assert store.host_bytes() == 32 * BUFFER_BYTES
    store.close()


# --- any place, any length, any address


@pytest.mark.parametrize("io", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_any_range_reads_and_writes_what_a_plain_file_would(tmp_path: Path, io: IoMode, seed: int) -> None:
    rng, size = random.Random(seed), 5 * MIB
    way: FileIo = make_io(io, 4 * MIB)
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    expected = np.zeros(size, dtype=np.uint8)
    fd = os.open(path, os.O_RDWR)
    way.prepare(fd)
    file = OpenFile(fd, path)
    room = page_aligned(3 * MIB).numpy()
    for turn in range(120):
        length = rng.choice([1, 511, 512, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, rng.randrange(1, 2 * MIB)])
        offset = rng.choice([0, PAGE_BYTES * rng.randrange(900), rng.randrange(size - length), size - length])
        offset = min(offset, size - length)
        start = rng.choice([0, offset % PAGE_BYTES, -offset % PAGE_BYTES, rng.randrange(PAGE_BYTES)])
        memory = room[start : start + length]
        if turn % 2:
            memory[:] = np.frombuffer(rng.randbytes(length), dtype=np.uint8)
            expected[offset : offset + length] = memory
            way.write(file, offset, memory)
        else:
            memory[:] = 0xA5
            way.read(file, offset, memory)
            assert np.array_equal(memory, expected[offset : offset + length])
    assert np.array_equal(np.fromfile(path, dtype=np.uint8), expected)
    way.close()


# --- what is held


def together(*works: Callable[[], None]) -> list[BaseException]:
    """Run on a thread each; what they raised."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@pytest.mark.parametrize("budget_mib", [4, 16])
def test_the_page_cache_stays_under_its_budget_all_the_time(tmp_path: Path, budget_mib: int) -> None:
    """Four threads write and read six times the budget of one file, while mincore(2) looks at all of it at once."""
    size, way = 6 * budget_mib * MIB, BufferedIo(budget_mib * MIB)
    path = tmp_path / "file"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, size)
    way.prepare(fd)
    file = OpenFile(fd, path)
    peaks, left = [0], [4]

    def watch() -> None:
        while left[0]:
            peaks.append(int(page_calls.resident_pages(fd, 0, size).sum()) * mmap.PAGESIZE)

    def work(number: int) -> None:
        try:
            rng, data, out = random.Random(number), page_aligned(MIB).numpy(), np.empty(MIB, dtype=np.uint8)
            mine = range(number * MIB, size - MIB, 4 * MIB)
            for offset in mine:
                data[:] = offset // MIB
                way.write(file, offset, data)
            for _ in range(100):
                offset, length = rng.choice(mine), rng.randrange(1, 384 << 10)
                if rng.random() < 0.5:
                    way.will_need(file, offset, length)
                way.read(file, offset, out[:length])
                assert (out[:length] == offset // MIB).all()
        finally:
            left[0] -= 1

    assert not together(watch, *(functools.partial(work, number) for number in range(4)))
    assert len(peaks) > 5 and max(peaks) > MIB  # it was looked at, and something was there
    assert max(peaks) <= budget_mib * MIB
    assert way.host_bytes() <= budget_mib * MIB
    way.close()


def test_the_page_cache_of_all_segments_stays_under_one_budget(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", IoMode.MMAP, LARGE, budget_bytes=64 * MIB, page_cache_bytes=4 * MIB)

    def work(number: int) -> None:
        mine = range(number, store.num_slots, 4)
        for slot in mine:
            store.write(Slot(slot), marked_block(slot))
        for slot in mine:
            store.prefetch(Slot(slot), 1)
            assert torch.equal(read_slice(store, slot, 1), marked_block(slot)[LARGE.slice_bytes :][: LARGE.slice_bytes])
            assert torch.equal(read(store, slot), marked_block(slot))

    for _ in range(3):
        assert not together(*(functools.partial(work, number) for number in range(4)))
        # at rest: file by file is not all at once
        assert 0 < resident_file_bytes(store.folder) <= store.host_bytes() + LOCK_BYTES
        assert store.host_bytes() <= 4 * MIB
    store.close()
    assert store.host_bytes() == 0


def test_what_the_kernel_will_not_drop_is_told_and_does_not_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16 * MIB))
    fd = os.open(path, os.O_RDWR)
    way, file = BufferedIo(4 * MIB), OpenFile(fd, path)
    way.prepare(fd)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as held:  # as another program might
        assert sum(held[at] for at in range(0, len(held), mmap.PAGESIZE)) == 0
        with caplog.at_level(logging.WARNING, logger="kvtier"):
            for offset in range(0, 16 * MIB, MIB):
                way.read(file, offset, np.empty(MIB, dtype=np.uint8))
    assert any("the kernel keeps pages of" in record.message for record in caplog.records)
    way.close()


def test_without_the_release_the_page_cache_would_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # the control of the test above: what it looks at is what the release keeps down
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: None)
    store = open_store(tmp_path / "kv", IoMode.MMAP, LARGE, budget_bytes=64 * MIB, page_cache_bytes=4 * MIB)
    for slot in range(store.num_slots):
        store.write(Slot(slot), marked_block(slot))
    assert resident_file_bytes(store.folder) > 32 * MIB
    store.close()


@pytest.mark.parametrize("io", MODES)
def test_what_an_earlier_owner_left_in_the_page_cache_is_dropped(tmp_path: Path, io: IoMode) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(8 * MIB))
    fd = os.open(path, os.O_RDWR)
    os.fdatasync(fd)  # by the kernel, sooner or later
    assert resident_file_bytes(tmp_path) == 8 * MIB
    make_io(io, 4 * MIB).prepare(fd)
    assert resident_file_bytes(tmp_path) == 0
    os.close(fd)


def test_direct_io_holds_no_page_cache(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=64 * MIB)
    for slot in range(store.num_slots):
        store.write(Slot(slot), marked_block(slot))
        assert torch.equal(read(store, slot), marked_block(slot))
    assert resident_file_bytes(store.folder) <= LOCK_BYTES
    store.close()


def test_memory_of_the_tiers_needs_no_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=16 * MIB)
    store.write(Slot(0), random_block(store, 0))  # this makes the segment, whose superblock does not lie on a page
    monkeypatch.setattr(StagingPool, "buffer", failing(errno.EIO))
    block, out = page_aligned(LARGE.block_bytes), page_aligned(LARGE.block_bytes)
    block.copy_(random_block(store, 1))
    store.write(Slot(0), block)
    store.read(Slot(0), out)
    assert torch.equal(out, block)
    store.read_slice(Slot(0), 1, out[: LARGE.slice_bytes])
    assert torch.equal(out[: LARGE.slice_bytes], block[LARGE.slice_bytes : 2 * LARGE.slice_bytes])
    with pytest.raises(StoreError):  # so it would have been seen
        store.read_slice(Slot(0), 1, torch.empty(LARGE.slice_bytes + 1, dtype=torch.uint8)[1:])
    store.close()


def test_a_page_cache_in_full_use_is_waited_for(tmp_path: Path) -> None:
    cache = PageCache(8 * GRANULE_BYTES)
    (tmp_path / "file").write_bytes(bytes(12 * GRANULE_BYTES))
    file = OpenFile(os.open(tmp_path / "file", os.O_RDWR), tmp_path / "file")
    entered, order = threading.Event(), []

    def late() -> None:
        with cache.using(file, 10 * GRANULE_BYTES, GRANULE_BYTES):
            order.append("late")
        entered.set()

    with cache.using(file, 0, 4 * GRANULE_BYTES), cache.using(file, 4 * GRANULE_BYTES, 4 * GRANULE_BYTES):
        thread = threading.Thread(target=late)
        thread.start()
        assert not entered.wait(0.2)
        order.append("left")
    assert entered.wait(60)
    thread.join()
    assert order == ["left", "late"]
    assert cache.used_bytes() <= cache.budget_bytes
    cache.close()


def test_a_write_back_that_fails_is_reported_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(page_cache, "write_back", failing(errno.EIO))
    store = open_store(tmp_path / "kv", IoMode.MMAP, LARGE, budget_bytes=32 * MIB, page_cache_bytes=4 * MIB)
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        for slot in range(store.num_slots):
            store.write(Slot(slot), marked_block(slot))
    assert any("writing" in record.message and "back" in record.message for record in caplog.records)
    assert store.host_bytes() <= 4 * MIB
    store.close()


def test_no_thread_to_be_had_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store = open_store(tmp_path / "kv", IoMode.MMAP, LARGE, budget_bytes=32 * MIB, page_cache_bytes=4 * MIB)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    blocks = [marked_block(slot) for slot in range(store.num_slots)]
    for slot, block in enumerate(blocks):
        store.write(Slot(slot), block)
    for slot, block in enumerate(blocks):
        assert torch.equal(read(store, slot), block)
    assert resident_file_bytes(store.folder) <= 4 * MIB + LOCK_BYTES
    store.close()


@pytest.mark.parametrize("io", MODES)
def test_descriptors_and_threads_are_given_back(tmp_path: Path, io: IoMode) -> None:
    gc.collect()
    fds, threads = open_fds(), threading.active_count()
    store = open_store(tmp_path / "kv", io, LARGE, budget_bytes=32 * MIB, page_cache_bytes=4 * MIB)
    for slot in range(store.num_slots):
        store.write(Slot(slot), marked_block(slot))
    # The folder, its lock, one a segment. Whoever releases page cache meanwhile holds one more while it looks.
    wanted = 2 + len(list(store.folder.glob("segment-*")))
    deadline_s = time.monotonic() + 30
    while open_fds() - fds != wanted and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert open_fds() - fds == wanted
    store.close()
    assert (open_fds(), threading.active_count()) == (fds, threads)


@pytest.mark.parametrize("io", MODES)
def test_too_little_host_memory_leaves_nothing_behind(tmp_path: Path, io: IoMode) -> None:
    fds = open_fds()
    with pytest.raises(BudgetError, match=r"tiers\.nvme\.page_cache"):
        open_store(tmp_path / "kv", io, page_cache_bytes=BUFFER_BYTES - 1)
    assert open_fds() == fds
    assert not (tmp_path / "kv").exists()


# --- auto


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if every folder were worth measuring."""
    monkeypatch.setattr(io_choice, "MEASURED_FROM_BYTES", 0)
    yield


@pytest.mark.usefixtures("measured")
def test_auto_measures_and_leaves_nothing_behind(tmp_path: Path) -> None:
    fds, threads = open_fds(), threading.active_count()
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode in MODES
    assert "384KiB" in choice.reason and len(re.findall(r"\d [MG]B/s", choice.reason)) == 2
    assert list(tmp_path.iterdir()) == []
    assert (open_fds(), threading.active_count()) == (fds, threads)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("direct", "mmap", "expected"),
    [(2e9, 1e9, IoMode.DIRECT), (1e9, 1.05e9, IoMode.DIRECT), (1e9, 1.2e9, IoMode.MMAP)],
)
def test_auto_takes_the_faster_and_direct_in_a_tie(
    tmp_path: Path, direct: float, mmap: float, expected: IoMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_choice, "_read_rate", lambda io, *_: direct if io.mode is IoMode.DIRECT else mmap)
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode is expected
    assert f"direct {direct / 1e9:.2f} GB/s" in choice.reason and f"mmap {mmap / 1e9:.2f} GB/s" in choice.reason


def test_auto_does_not_measure_small_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_choice, "scratch_file", failing(errno.EIO))  # not reached
    choice = choose_io(IoMode.AUTO, tmp_path, (1 << 30) - 1, 384 << 10)
    assert choice.mode is IoMode.MMAP
    assert "not measured: there is room for 1024MiB (1073741823 bytes)" in choice.reason


@pytest.mark.parametrize("where", ["fcntl", "preadv", "pwrite"])
@pytest.mark.usefixtures("measured")
def test_o_direct_refused(tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a file system that refuses the flag, or that takes it and then refuses the calls."""
    if where == "fcntl":
        real = fcntl.fcntl

        def refuse(fd: int, command: int, *arguments: Any) -> Any:
            if command == fcntl.F_SETFL:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, command, *arguments)

        monkeypatch.setattr(fcntl, "fcntl", refuse)
    else:
        monkeypatch.setattr(os, where, failing(errno.EINVAL))
    fds = open_fds()
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode is IoMode.MMAP
    assert "refuses O_DIRECT (EINVAL)" in choice.reason
    with pytest.raises(ConfigError, match=r"tiers\.nvme\.io is direct.*refuses O_DIRECT.*auto or mmap"):
        if where == "pwrite":  # which the lock file needs too
            choose_io(IoMode.DIRECT, tmp_path, 64 * MIB, 384 << 10)
        else:
            open_store(tmp_path / "kv", IoMode.DIRECT)
    assert open_fds() == fds
    assert not (tmp_path / "kv").exists()


@pytest.mark.usefixtures("measured")
def test_no_unnamed_files_is_no_measuring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_choice, "scratch_file", failing(errno.EOPNOTSUPP))
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode is IoMode.MMAP and "gives no unnamed file" in choice.reason
    assert choose_io(IoMode.DIRECT, tmp_path, 64 * MIB, 384 << 10).mode is IoMode.DIRECT


def test_files_in_memory_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_choice, "filesystem_kind", lambda _: "tmpfs")
    choice = choose_io(IoMode.AUTO, tmp_path, 1 << 40, 384 << 10)
    assert choice.mode is IoMode.MMAP and "tmpfs" in choice.reason


@pytest.mark.usefixtures("measured")
def test_a_disk_that_is_too_slow_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_choice, "_write_scratch", lambda *_: MIB)
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode is IoMode.MMAP and "took only 1MiB" in choice.reason


@pytest.mark.usefixtures("measured")
def test_an_error_while_measuring_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io_choice, "_read_rate", failing(errno.EIO))
    choice = choose_io(IoMode.AUTO, tmp_path, 64 * MIB, 384 << 10)
    assert choice.mode is IoMode.MMAP and "EIO" in choice.reason
