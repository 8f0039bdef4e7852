"""Slices that the kernel reads together, past the page cache: the same bytes and the same errors as one by one."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.errors import ChecksumError, ShortReadError, StoreError
from kvtier.stores import direct_io
from kvtier.stores.direct_io import DirectIo
from kvtier.stores.kernel_aio import AioReads, KernelAio
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.staging import page_aligned
from kvtier.types import Compression, IoMode, Slot
from tests.fault.test_nvme_io import LARGE, MIB, marked_block, open_store, tmp_path  # noqa: F401  # a fixture

NUM_SLOTS = 6


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:  # noqa: F811
    found = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=32 * MIB)
    assert found.reads_together
    for slot in range(NUM_SLOTS):
        found.write(Slot(slot), marked_block(slot))
    yield found
    found.close()


def rows(num: int) -> torch.Tensor:
    return page_aligned(num * LARGE.slice_bytes).fill_(0xA5).view(num, LARGE.slice_bytes)


def slice_of(slot: int, layer: int) -> torch.Tensor:
    return marked_block(slot)[layer * LARGE.slice_bytes :][: LARGE.slice_bytes]


def read_together(store: NvmeStore, slots: list[int], layer: int) -> tuple[torch.Tensor, list[StoreError | None]]:
    out = rows(len(slots))
    return out, store.read_slices([Slot(slot) for slot in slots], layer, out)


def forbid_single_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("read one by one")

    monkeypatch.setattr(os, "preadv", refuse)


def test_all_are_read_by_the_kernel(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_single_reads(monkeypatch)
    for slots in ([3, 0, 5, 5, 1], [4]):
        for layer in range(LARGE.num_layers):
            out, failures = read_together(store, slots, layer)
            assert failures == [None] * len(slots)
            assert all(torch.equal(row, slice_of(slot, layer)) for slot, row in zip(slots, out, strict=True))
    assert store.read_slices([], 0, rows(1)[:0]) == []


def test_one_slice_is_begun_too(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile tester: where tiers alternate, or the ring is small, each slice waited for the one before."""
    forbid_single_reads(monkeypatch)
    outs = [rows(1) for _ in range(4)]
    ends = [store.begin_slices([Slot(slot)], 2, out) for slot, out in enumerate(outs)]
    for slot, end in enumerate(ends):
        assert end() == [None]
        assert torch.equal(outs[slot][0], slice_of(slot, 2))
    assert store.begin_slices([], 0, rows(1)[:0])() == []


def test_more_than_are_in_flight_at_once(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    forbid_single_reads(monkeypatch)
    slots = [number % NUM_SLOTS for number in range(2 * direct_io._AIO_DEPTH + 3)]
    out, failures = read_together(store, slots, 1)
    assert failures == [None] * len(slots)
    assert all(torch.equal(row, slice_of(slot, 1)) for slot, row in zip(slots, out, strict=True))


def test_what_does_not_lie_on_pages_is_read_one_by_one(store: NvmeStore) -> None:
    out = page_aligned(3 * LARGE.slice_bytes + 1)[1:].view(3, LARGE.slice_bytes)
    assert store.read_slices([Slot(0), Slot(2), Slot(4)], 2, out) == [None] * 3
    assert all(torch.equal(row, slice_of(slot, 2)) for slot, row in zip((0, 2, 4), out, strict=True))


def test_a_flipped_bit_spoils_its_own_slice_alone(store: NvmeStore) -> None:
    segment, start = store._space.locate(Slot(2))
    at = start + store._geometry.header_bytes + 3 * LARGE.slice_bytes + 1000
    with open(segment.path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
    out, failures = read_together(store, [1, 2, 3], 3)
    assert isinstance(failures[1], ChecksumError) and failures[0] is failures[2] is None
    assert "layer 3" in str(failures[1]) and "slot 2" in str(failures[1])
    assert torch.equal(out[0], slice_of(1, 3)) and torch.equal(out[2], slice_of(3, 3))
    assert read_together(store, [1, 2, 3], 2)[1] == [None] * 3


def test_a_file_that_ends_too_early_is_a_short_read_of_those_behind_its_end(store: NvmeStore) -> None:
    segment, start = store._space.locate(Slot(4))
    os.truncate(segment.path, start + store._geometry.header_bytes + LARGE.slice_bytes // 2)
    _, failures = read_together(store, [0, 4, 5], 0)
    assert failures[0] is None
    assert isinstance(failures[1], ShortReadError) and isinstance(failures[2], ShortReadError)


@pytest.mark.parametrize("wrong", [-errno.EIO, 0, 4096, 12345], ids=["EIO", "nothing", "a page", "odd"])
def test_what_the_kernel_did_not_read_whole_is_read_again_and_its_error_is_told(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    real = KernelAio.end

    def spoiled(self: KernelAio, reads: AioReads) -> Any:
        results = real(self, reads)
        assert isinstance(reads.memory, np.ndarray)
        results[1], reads.memory[1] = wrong, 0x5A
        return results

    monkeypatch.setattr(KernelAio, "end", spoiled)
    out, failures = read_together(store, [0, 1, 2], 0)
    assert failures == [None] * 3
    assert all(torch.equal(out[slot], slice_of(slot, 0)) for slot in range(3))

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", fails)
    _, failures = read_together(store, [0, 1, 2], 0)
    assert failures[0] is failures[2] is None
    assert isinstance(failures[1], StoreError) and failures[1].errno == errno.EIO


@pytest.mark.parametrize("num_reads", [2, 7, 30])
def test_reads_that_are_begun_before_others_have_ended_each_get_their_own_bytes(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch, num_reads: int
) -> None:
    """Also where all of them together are more than may be in flight: 30 of 5."""
    forbid_single_reads(monkeypatch)
    begun = []
    for number in range(num_reads):
        slots, layer = [(number + at) % NUM_SLOTS for at in range(5)], number % LARGE.num_layers
        out = rows(5)
        begun.append((slots, layer, out, store.begin_slices([Slot(slot) for slot in slots], layer, out)))
    random.Random(num_reads).shuffle(begun)  # in whatever order they end
    for slots, layer, out, end in begun:
        assert end() == [None] * 5
        assert all(torch.equal(row, slice_of(slot, layer)) for slot, row in zip(slots, out, strict=True))
    out, failures = read_together(store, [4, 2], 1)
    assert failures == [None] * 2 and torch.equal(out[0], slice_of(4, 1)) and torch.equal(out[1], slice_of(2, 1))


def test_when_results_of_one_read_are_lost_those_begun_beside_it_are_read_again(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rows(3), rows(2)
    ends = [
        store.begin_slices([Slot(0), Slot(1), Slot(2)], 1, first),
        store.begin_slices([Slot(3), Slot(4)], 2, second),
    ]

    def interrupted(self: KernelAio, num: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(KernelAio, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ends[0]()
    second.fill_(0x5A)  # nothing writes into it any more
    assert ends[1]() == [None] * 2
    assert torch.equal(second[0], slice_of(3, 2)) and torch.equal(second[1], slice_of(4, 2))


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM, errno.EAGAIN])
def test_without_it_slices_are_read_one_by_one(
    tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    code: int,
) -> None:
    def refused(*_: Any) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(KernelAio, "_call", refused)
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=32 * MIB)
    assert not store.reads_together
    for slot in range(3):
        store.write(Slot(slot), marked_block(slot))
    out, failures = read_together(store, [2, 0], 1)
    assert failures == [None] * 2 and torch.equal(out[0], slice_of(2, 1)) and torch.equal(out[1], slice_of(0, 1))
    store.close()


def test_a_thread_that_gets_none_reads_one_by_one(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's number of them is limited, and others may have it all."""

    def refused(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(KernelAio, "__init__", refused)
    found: list[list[StoreError | None]] = []
    thread = threading.Thread(target=lambda: found.append(read_together(store, [0, 1], 0)[1]))
    thread.start()
    thread.join()
    assert found == [[None, None]]
    assert isinstance(store._io, DirectIo) and not store.reads_together


def test_compressed_slices_are_read_one_by_one(tmp_path: Path) -> None:  # noqa: F811
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=32 * MIB, compression=Compression.ZSTD)
    assert not store.reads_together  # or one thread would decode what several can
    blocks = [torch.zeros(LARGE.block_bytes, dtype=torch.uint8), marked_block(1)]
    for slot, block in enumerate(blocks):
        store.write(Slot(slot), block)
    out, failures = read_together(store, [0, 1], 1)
    assert failures == [None] * 2
    assert all(torch.equal(out[slot], blocks[slot][LARGE.slice_bytes :][: LARGE.slice_bytes]) for slot in range(2))
    store.close()


def test_many_threads_each_get_their_own(store: NvmeStore) -> None:
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        try:
            for _ in range(30):
                slots, layer = random.integers(0, NUM_SLOTS, 5).tolist(), int(random.integers(0, LARGE.num_layers))
                out, failures = read_together(store, slots, layer)
                assert failures == [None] * 5
                assert all(torch.equal(row, slice_of(slot, layer)) for slot, row in zip(slots, out, strict=True))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_a_submission_that_takes_few_at_a_time_ends_all_the_same(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """io_submit may take fewer than it is given, none for now (EAGAIN), or refuse one; waits are interrupted."""
    aio = KernelAio(8)
    real, turns = KernelAio._call, iter(range(1000))

    def few(self: KernelAio, number: int, *arguments: Any) -> int:
        turn = next(turns)
        if number == self._submit:
            if turn % 5 == 4:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return real(self, number, arguments[0], type(arguments[1])(min(2, arguments[1].value)), arguments[2])
        if turn % 3 == 2:
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))
        return real(self, number, *arguments)

    monkeypatch.setattr(KernelAio, "_call", few)
    segment, start = store._space.locate(Slot(0))
    fd = segment.place(0)[0].fd
    offsets = [start + store._geometry.header_bytes + layer * LARGE.slice_bytes for layer in range(4)] * 5
    out = rows(20)
    reads = aio.begin([fd] * 19 + [10_000], offsets, out, out.data_ptr(), LARGE.slice_bytes)
    results = np.array(aio.end(reads))
    assert results[19] == -errno.EBADF
    whole = results == LARGE.slice_bytes
    assert all(torch.equal(out[at], slice_of(0, at % 4)) for at in range(20) if whole[at])
    assert set(results[~whole].tolist()) <= {-errno.EBADF, -errno.EAGAIN} and whole.sum() >= 10


def test_an_exception_in_the_middle_leaves_nothing_that_a_later_read_could_take_for_its_own(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by a hostile tester: a signal's handler that raised left events behind, and rows counted as read."""
    real = KernelAio._take

    def interrupted(self: KernelAio, num: int) -> None:
        raise KeyboardInterrupt

    for _ in range(5):
        monkeypatch.setattr(KernelAio, "_take", interrupted)
        with pytest.raises(KeyboardInterrupt):
            read_together(store, [0, 1, 2], 0)
        monkeypatch.setattr(KernelAio, "_take", real)
        out, failures = read_together(store, [3, 4, 5, 1], 2)
        assert failures == [None] * 4 and store.reads_together
        assert all(torch.equal(row, slice_of(slot, 2)) for slot, row in zip((3, 4, 5, 1), out, strict=True))


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_sandbox_that_forbids_to_ask_for_results_costs_nothing_but_time(
    tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    when: str,
) -> None:
    real = KernelAio._call

    def forbidden(self: KernelAio, number: int, *arguments: Any) -> int:
        if number == self._getevents:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))
        return real(self, number, *arguments)

    if when == "at once":
        monkeypatch.setattr(KernelAio, "_call", forbidden)
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=32 * MIB)
    assert store.reads_together == (when == "later")
    monkeypatch.setattr(KernelAio, "_call", forbidden)
    for slot in range(3):
        store.write(Slot(slot), marked_block(slot))
    for _ in range(2):
        out, failures = read_together(store, [2, 0], 1)
        assert failures == [None] * 2 and not store.reads_together
        assert torch.equal(out[0], slice_of(2, 1)) and torch.equal(out[1], slice_of(0, 1))
    store.close()


def test_close_gives_the_kernels_part_back(store: NvmeStore) -> None:
    io = store._io
    assert isinstance(io, DirectIo)
    aio = io._aio()
    assert aio is not None and not aio.is_closed
    store.close()
    assert aio.is_closed and io._aio() is None


def test_none_is_left_when_another_thread_closes(
    tmp_path: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by a hostile tester: that of the thread that opened the store stayed until the collector came by."""
    made: list[KernelAio] = []

    class Noted(KernelAio):
        def __init__(self, depth: int) -> None:
            super().__init__(depth)
            made.append(self)

    monkeypatch.setattr(direct_io, "KernelAio", Noted)
    store = open_store(tmp_path / "kv", IoMode.DIRECT, LARGE, budget_bytes=32 * MIB)
    assert made and store.reads_together
    closer = threading.Thread(target=store.close)
    closer.start()
    closer.join()
    assert all(aio.is_closed for aio in made)
