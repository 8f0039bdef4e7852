"""Blocks of a joined slab to and from files, in groups of slices: what goes wrong in any of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.errors import ChecksumError, StoreError
from kvtier.stores.cpu import CpuStore
from kvtier.stores.nvme import NvmeStore
from kvtier.types import BlockShape, Compression, IoMode, Slot, Survives
from tests.fault.folders import block, label, open_store, read
from tests.fault.sweep import Calls, failing

SHAPE = BlockShape(num_layers=3, kv_heads=3, block_tokens=1040, key_dim=24, value_dim=24, element_bytes=4)
"""Slices of half a mebibyte and more, of no whole pages: each is a group."""
BUDGET_BYTES = 8 << 20
MARK = 0xA5


@pytest.fixture(params=[(io, codec) for io in (IoMode.MMAP, IoMode.DIRECT) for codec in Compression], ids=str)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NvmeStore]:
    io, compression = request.param
    store = open_store(
        tmp_path / "kv", BUDGET_BYTES, SHAPE, io=io, compression=compression, survives=Survives.POWER_LOSS
    )
    yield store
    store.close()


@pytest.fixture
def memory() -> Iterator[CpuStore]:
    memory = CpuStore(SHAPE, 3, pin=False, joined=True)
    memory.slab().fill_(MARK)
    yield memory
    memory.close()


def compressible(number: int) -> torch.Tensor:
    """A block that zstd makes shorter, and that is the number's own."""
    return block(number, 0, SHAPE) & 0x3F


def write(store: NvmeStore, memory: CpuStore, slot: int, number: int) -> None:
    memory.write(Slot(1), compressible(number))
    store.write(Slot(slot), memory.block(Slot(1)), label(number))


def read_back(store: NvmeStore, memory: CpuStore, slot: int) -> torch.Tensor:
    """The block by way of a slot between two others, which keep what they hold."""
    memory.slab().fill_(MARK)
    try:
        store.read(Slot(slot), memory.block(Slot(1)))
    finally:
        for other in (0, 2):
            assert (memory.block(Slot(other)) == MARK).all()
    out = torch.empty(SHAPE.block_bytes, dtype=torch.uint8)
    memory.read(Slot(1), out)
    return out


def flip(path: Path, offset_bytes: int) -> None:
    """One bit, on the medium too."""
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        (byte,) = file.read(1)
        file.seek(offset_bytes)
        file.write(bytes([byte ^ 1]))
        file.flush()
        os.fsync(file.fileno())


def test_a_joined_block_is_stored_as_any_other(store: NvmeStore, memory: CpuStore) -> None:
    assert len(list(store._codec.groups())) == SHAPE.num_layers
    write(store, memory, 0, 7)
    store.write(Slot(1), compressible(7), label(8))
    ends = [place + sum(payload.place(2, SHAPE.slice_bytes)) for _, place, payload in map(store._written, (0, 1))]
    starts = [store._written(Slot(slot))[1] for slot in (0, 1)]
    data = store._written(Slot(0))[0].path.read_bytes()
    assert data[starts[0] : ends[0]] == data[starts[1] : ends[1]]
    for slot in (0, 1):
        assert torch.equal(read(store, slot), compressible(7))
        assert torch.equal(read_back(store, memory, slot), compressible(7))


def test_a_write_that_fails_in_any_group_leaves_nothing_to_be_found(store: NvmeStore, memory: CpuStore) -> None:
    write(store, memory, 0, 0)
    write(store, memory, 1, 1)
    with Calls(which=[(os, "pwrite")]) as calls:
        write(store, memory, 1, 2)
    for at in range(calls.num_calls):
        with Calls(failing(errno.EIO), at, [(os, "pwrite")]) as failed, pytest.raises(StoreError):
            write(store, memory, 1, 3 + at)
        assert failed.met == "pwrite"
        assert store.find(label(2)) is None and store.find(label(3 + at)) is None
        with pytest.raises(StoreError):
            read_back(store, memory, 1)
        assert torch.equal(read_back(store, memory, 0), compressible(0))
        write(store, memory, 1, 2)
        assert torch.equal(read_back(store, memory, 1), compressible(2))


def test_a_read_that_fails_in_any_group_is_an_error(store: NvmeStore, memory: CpuStore) -> None:
    write(store, memory, 0, 0)
    with Calls(which=[(os, "preadv")]) as calls:
        read_back(store, memory, 0)
    assert calls.num_calls >= SHAPE.num_layers
    for at in range(calls.num_calls):
        with Calls(failing(errno.EIO), at, [(os, "preadv")]), pytest.raises(StoreError):
            read_back(store, memory, 0)
    assert torch.equal(read_back(store, memory, 0), compressible(0))


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
def test_a_flipped_bit_in_any_group_is_seen(store: NvmeStore, memory: CpuStore, layer: int) -> None:
    write(store, memory, 0, 0)
    segment, start, payload = store._written(Slot(0))
    offset_bytes, num_bytes = payload.place(layer, SHAPE.slice_bytes)
    for at in (start + offset_bytes, start + offset_bytes + num_bytes - 1):
        flip(segment.path, at)
        with pytest.raises(ChecksumError):
            read_back(store, memory, 0)
        flip(segment.path, at)
    assert torch.equal(read_back(store, memory, 0), compressible(0))


def test_a_file_that_ends_in_any_group_is_an_error(store: NvmeStore, memory: CpuStore) -> None:
    write(store, memory, 0, 0)
    segment, start, payload = store._written(Slot(0))
    for layer in reversed(range(SHAPE.num_layers)):
        os.truncate(segment.path, start + payload.place(layer, SHAPE.slice_bytes)[0] + 100)
        with pytest.raises(StoreError):
            read_back(store, memory, 0)
