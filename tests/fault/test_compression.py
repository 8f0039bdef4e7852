"""Compressed slots on real files: their room, their budget, damage, kills, and changes of mind."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.codecs.zstd import NUMBERS, ZstdCodec
from kvtier.errors import BudgetError, ChecksumError, ConfigError, IntegrityError, NoSpaceError, StoreError
from kvtier.fsck import check_folder
from kvtier.slots import SlotPool
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.nvme import NvmeStore, min_budget_bytes
from kvtier.stores.segment import Segment, punch_hole
from kvtier.stores.slot_check import SlotState
from kvtier.stores.slot_format import HEADER, SLICE, Geometry, Payload, checksum
from kvtier.system import allocated_bytes
from kvtier.types import BlockShape, Compression, Slot, SlotLabel
from tests.fault.folders import edit, label, namespace, segments
from tests.fault.table import Row, report

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=64, key_dim=64, value_dim=64, element_bytes=2)
"""Slices of 32 KiB: a slot of 25 pages, 18 or so when compressed."""
GEOMETRY = Geometry.of(SHAPE)
SLOT_BYTES = GEOMETRY.slot_bytes
BUDGET_BYTES = 2 << 20
ROOT = Path(__file__).parents[2]


def open_store(
    folder: Path, budget_bytes: int = BUDGET_BYTES, how: str = "zstd", shape: BlockShape = SHAPE, **more: Any
) -> NvmeStore:
    persistent = more.pop("persistent", True)
    more = {"reserve_free_frac": 0.0, **more}
    return NvmeStore(shape, budget_bytes, folder, persistent, compression=Compression(how), **more)


def block(number: int, spread: float = 1.0, shape: BlockShape = SHAPE) -> torch.Tensor:
    """Floats that depend on the number; the larger the spread of their exponents, the less they compress."""
    generator = torch.Generator().manual_seed(number)
    count = shape.block_bytes // shape.element_bytes
    values = torch.randn(count, generator=generator) * torch.exp(spread * torch.randn(count, generator=generator))
    return values.to({2: torch.bfloat16, 4: torch.float32}[shape.element_bytes]).view(torch.uint8)


def noise(number: int) -> torch.Tensor:
    """Bytes that no codec makes smaller."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (SHAPE.block_bytes,), dtype=torch.uint8, generator=generator)


def zeros() -> torch.Tensor:
    """What compresses best."""
    return torch.zeros(SHAPE.block_bytes, dtype=torch.uint8)


def read(store: NvmeStore, slot: int) -> torch.Tensor:
    out = torch.full((store.shape.block_bytes,), 0xA5, dtype=torch.uint8)
    store.read(Slot(slot), out)
    return out


def assert_holds(store: NvmeStore, slot: int, expected: torch.Tensor) -> None:
    """Whole and slice by slice."""
    assert torch.equal(read(store, slot), expected)
    step = store.shape.slice_bytes
    for layer in range(store.shape.num_layers):
        out = torch.full((step,), 0xA5, dtype=torch.uint8)
        store.read_slice(Slot(slot), layer, out)
        assert torch.equal(out, expected[layer * step : (layer + 1) * step])


def assert_within(store: NvmeStore) -> None:
    used_bytes = allocated_bytes(store.folder)
    assert used_bytes == store.used_bytes() <= store.peak_bytes() <= store.budget_bytes
    store.check_integrity()


def fill(store: NvmeStore, first: int = 0, spread: float = 1.0) -> int:
    """Write blocks with labels until there is no room; returns how many fit."""
    for number in range(first, store.num_slots):
        try:
            store.write(Slot(number), block(number, spread), label(number))
        except NoSpaceError as error:
            assert error.available_slots == number and not error.retires_slot
            return number
    return store.num_slots


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    store = open_store(tmp_path / "kv")
    yield store
    store.check_integrity()
    store.close()


# --- bytes and room


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_the_same_budget_holds_more_blocks(tmp_path: Path, element_bytes: int) -> None:
    shape = BlockShape(3, 2, 64, 64, 64, element_bytes)
    store = open_store(tmp_path / "kv", 4 << 20, shape=shape)
    plain = open_store(tmp_path / "plain", 4 << 20, "none", shape)
    num_plain = plain.num_slots
    assert plain.stored_frac == store.stored_frac == 1.0  # nothing was written yet
    slot = 0
    with pytest.raises(NoSpaceError, match="no room for slot"):
        for slot in range(store.num_slots + 1):
            store.write(Slot(slot), block(slot, 0.2, shape))
            assert_within(store)
    assert slot * (0.75 if element_bytes == 2 else 0.9) > num_plain
    assert 0.5 < store.stored_frac < (0.75 if element_bytes == 2 else 0.88)
    for held in range(slot):
        assert_holds(store, held, block(held, 0.2, shape))
    store.close()
    plain.close()


def test_the_last_page_is_filled_up_with_zeros(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is not ours to show must not reach the disk behind a block."""
    monkeypatch.setattr("kvtier.stores.slot_payload._aligned", lambda size: np.full(size, 0xA5, np.uint8))
    store.write(Slot(0), block(0))
    payload = store._index.payload(0)
    assert payload is not None and payload.sizes is not None
    end = sum(payload.sizes)
    assert end % PAGE_BYTES
    start = PAGE_BYTES + GEOMETRY.header_bytes
    on_disk = segments(store.folder)[0].read_bytes()[start : start + GEOMETRY.payload_bytes]
    assert on_disk[end - 100 : end].strip(b"\0") and not on_disk[end:].strip(b"\0")


def test_what_does_not_pay_lies_as_it_is(store: NvmeStore) -> None:
    store.write(Slot(0), noise(1))
    assert_holds(store, 0, noise(1))
    assert store.stored_frac == 1.0
    mixed = torch.cat([noise(2)[: SHAPE.slice_bytes], zeros()[: SHAPE.slice_bytes], block(3)[: SHAPE.slice_bytes]])
    store.write(Slot(1), mixed)
    assert_holds(store, 1, mixed)
    payload = store._index.payload(1)
    assert payload is not None and payload.sizes is not None
    assert payload.sizes[0] == SHAPE.slice_bytes > payload.sizes[2] > payload.sizes[1]


def test_a_thousand_rewrites_stay_within_the_budget_and_do_not_grow(store: NvmeStore) -> None:
    """Of contents that compress to anything from a half to nothing, in a folder that is nearly full of them."""
    chance = random.Random(1)
    num_slots = 16  # of 25 pages at most, and 512 pages in the budget: nobody is refused
    held: dict[int, torch.Tensor] = {}
    peaks = []
    for turn in range(1000):
        slot = chance.randrange(num_slots)
        held[slot] = chance.choice([noise, block, lambda number: block(number, 6.0), lambda number: zeros()])(turn)
        store.write(Slot(slot), held[slot], label(turn) if chance.random() < 0.5 else None)
        assert allocated_bytes(store.folder) <= BUDGET_BYTES
        if turn % 10 == 0:
            assert_within(store)
            other = chance.choice(list(held))
            assert_holds(store, other, held[other])
        if turn % 100 == 99:
            for same, expected in held.items():
                assert_holds(store, same, expected)
                store.write(Slot(same), noise(same))  # all as long as they can be: the same room at each time
                held[same] = noise(same)
            peaks.append(allocated_bytes(store.folder))
    # What the file system takes for itself comes and goes with how pieces lie: a page a file at most.
    assert max(peaks) - min(peaks) <= len(segments(store.folder)) * PAGE_BYTES, peaks
    for slot in held:
        store.write(Slot(slot), zeros())
    assert allocated_bytes(store.folder) < 0.6 * peaks[-1]  # what they do not need is given back
    assert store.peak_bytes() >= peaks[-1]


def test_rewriting_the_same_contents_changes_no_bytes_on_disk(store: NvmeStore) -> None:
    num_slots = fill(store)
    before = allocated_bytes(store.folder)
    for turn in range(3):
        for slot in range(num_slots):
            store.write(Slot(slot), block(slot), label(slot + 1000 * turn))
        assert allocated_bytes(store.folder) == before


def test_a_block_that_grew_and_finds_no_room_costs_one_slot_whose_bytes_serve_the_others(store: NvmeStore) -> None:
    num_slots = fill(store)
    slot = 3
    with pytest.raises(NoSpaceError, match="pages more do not fit") as error:
        for slot in range(3, num_slots):
            store.write(Slot(slot), noise(slot))
            assert_within(store)
    assert slot < 10
    assert error.value.retires_slot and error.value.available_slots == num_slots
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, slot)
    assert store.find(label(slot)) is None
    assert_within(store)
    store.write(Slot(slot + 1), noise(slot + 1))
    assert_holds(store, slot + 1, noise(slot + 1))
    for other in range(slot + 2, num_slots):
        assert_holds(store, other, block(other))
    with pytest.raises(NoSpaceError, match="no more"):
        store.write(Slot(num_slots), zeros())  # refused once: who was told so must not be contradicted
    store.close()


def test_the_pool_learns_how_many_slots_there_are(tmp_path: Path) -> None:
    """As the manager drives it: no slot is lost but for those whose bytes others took, and none is tried for ever."""
    store = open_store(tmp_path / "kv")
    pool = SlotPool(store.num_slots)
    chance, held, refused = random.Random(4), {}, 0
    for turn in range(400):
        slot = pool.take() if len(held) < pool.ceiling else None
        if slot is None:
            slot = chance.choice(list(held))
            del held[slot]
            pool.give_back(Slot(slot))
            continue
        content = block(turn, 6.0) if turn > 200 else block(turn)  # later ones are larger
        try:
            store.write(slot, content)
            held[slot] = content
        except NoSpaceError as error:
            refused += 1
            pool.lower_ceiling(error.available_slots)
            (pool.retire if error.retires_slot else pool.give_back)(slot)
        pool.check_integrity()
        assert_within(store)
    assert refused > 2
    assert pool.ceiling >= BUDGET_BYTES // SLOT_BYTES - 2  # as many as there would be uncompressed, at the least
    for slot, content in held.items():
        assert_holds(store, slot, content)
    store.close()


def test_the_smallest_budget_holds_one_block_of_any_bytes(tmp_path: Path) -> None:
    with pytest.raises(BudgetError):
        open_store(tmp_path / "kv", min_budget_bytes(SHAPE) - 1)
    store = open_store(tmp_path / "kv", min_budget_bytes(SHAPE))
    store.write(Slot(0), noise(1))
    assert_holds(store, 0, noise(1))
    assert_within(store)
    store.close()


def test_a_part_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = [100 << 20]
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda path: free_bytes[0])
    monkeypatch.setattr("kvtier.system.disk_total_bytes", lambda path: 100 << 20)
    store = open_store(tmp_path / "kv", reserve_free_frac=0.05)
    store.write(Slot(0), block(0))
    assert store.ceiling_bytes() == BUDGET_BYTES
    free_bytes[0] = (5 << 20) + PAGE_BYTES
    assert store.ceiling_bytes() == store.used_bytes() + PAGE_BYTES
    store.write(Slot(0), block(0))  # takes nothing more
    with pytest.raises(NoSpaceError, match="slot 1") as error:
        store.write(Slot(1), block(1))
    assert error.value.available_slots == 1
    assert_holds(store, 0, block(0))
    store.close()


# --- failures


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("slot", [2, 9])
def test_a_failed_allocation_writes_nothing_and_leaves_nothing(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch, code: int, slot: int
) -> None:
    for number in range(5):
        store.write(Slot(number), block(number), label(number))
    real = os.posix_fallocate

    def partly(fd: int, offset: int, length: int) -> None:
        real(fd, offset, PAGE_BYTES)
        raise OSError(code, os.strerror(code))

    def no_write(self: Segment, offset_bytes: int, data: np.ndarray) -> None:
        assert data.nbytes == PAGE_BYTES and not data.any()  # a header taken back, and nothing else

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", partly)
        patch.setattr(Segment, "write", no_write)
        with pytest.raises(StoreError) as error:
            store.write(Slot(slot), noise(1), label(100))
    assert isinstance(error.value, NoSpaceError) is (code != errno.EIO)
    if isinstance(error.value, NoSpaceError):
        assert (error.value.available_slots, error.value.retires_slot) == (5, slot == 2)
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, slot)
    for number in set(range(5)) - {slot}:
        assert_holds(store, number, block(number))
    assert_within(store)


def test_a_hole_that_cannot_be_made_is_an_error_and_is_still_counted(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(Slot(0), noise(0))

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "punch", broken)
        with pytest.raises(StoreError) as error:
            store.write(Slot(0), zeros())
    assert error.value.errno == errno.EIO
    assert_within(store)
    store.write(Slot(0), zeros())
    assert_holds(store, 0, zeros())
    assert_within(store)


def test_a_file_system_that_allocates_more_than_asked_does_not_break_the_budget(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def generous(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length)
        if length > PAGE_BYTES:
            real(fd, offset + length, PAGE_BYTES * 4)

    monkeypatch.setattr(os, "posix_fallocate", generous)
    with pytest.raises((NoSpaceError, StoreError)):
        for slot in range(store.num_slots):
            store.write(Slot(slot), block(slot))
    assert allocated_bytes(store.folder) <= BUDGET_BYTES


def test_bookkeeping_that_is_wrong_is_seen(store: NvmeStore) -> None:
    store.write(Slot(0), block(0))
    store._space.segments[0].allocate(PAGE_BYTES + SLOT_BYTES, 10 * PAGE_BYTES)
    with pytest.raises(IntegrityError, match="are counted"):
        store.check_integrity()
    store._space.segments[0].punch(PAGE_BYTES, 2 * SLOT_BYTES)
    with pytest.raises(IntegrityError, match="counted as allocated"):
        store.check_integrity()
    store._space.segments[0].allocate(PAGE_BYTES, SLOT_BYTES)  # for the last check at the end
    store.write(Slot(0), noise(0))


def test_shapes_and_file_systems_that_cannot_be_compressed_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for shape in (BlockShape(2, 1, 16, 16, 16, 8), BlockShape(1, 128, 65536, 256, 256, 4)):
        with pytest.raises(ConfigError, match=r"tiers\.nvme\.compression"):
            open_store(tmp_path / "kv", 1 << 40, shape=shape)
    assert not (tmp_path / "kv").exists()

    def none(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr("kvtier.stores.folder.punch_hole", none)
    with pytest.raises(ConfigError, match=r"tiers\.nvme\.compression.*set it to none"):
        open_store(tmp_path / "kv")
    open_store(tmp_path / "kv", how="none").close()  # its lock is free


FULL_DISK = """
    import sys
    from pathlib import Path
    from kvtier.errors import NoSpaceError
    from kvtier import system
    from kvtier.system import allocated_bytes
    from kvtier.types import Slot
    from tests.fault.test_compression import assert_holds, block, noise, open_store

    folder = Path(sys.argv[1])
    system.free_disk_bytes = lambda path: 1 << 40  # another process fills the disk after the check
    store = open_store(folder, 4 << 20, persistent=False)
    written = 0
    try:
        for slot in range(store.num_slots):
            store.write(Slot(slot), block(slot))
            written += 1
        raise SystemExit("the disk never filled up")
    except NoSpaceError as error:
        assert error.available_slots == written, (error.available_slots, written)
        print(error)
    try:
        store.write(Slot(0), noise(0))
        store.write(Slot(1), noise(1))
        raise SystemExit("there was room to grow")
    except NoSpaceError as error:
        assert error.retires_slot, error
    store.check_integrity()
    for slot in range(2, written):
        assert_holds(store, slot, block(slot))
    assert allocated_bytes(folder) == store.used_bytes()
    store.close()
    print("written", written)
"""


def test_a_full_tmpfs_is_no_space(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m,mode=700 kvtier "$0"'
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount, str(tmp_path)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces here; the failed allocations cover the path")
    command = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path), sys.executable, "-c"]
    command += [textwrap.dedent(FULL_DISK), str(tmp_path / "kv")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ENOSPC" in done.stdout
    assert int(done.stdout.split("written ")[1]) > (1 << 20) // SLOT_BYTES


# --- restarts and damage


def found_right(store: NvmeStore, numbers: range) -> set[int]:
    """Of these blocks those that are found; what is found and read is right, or the test fails."""
    right = set()
    for number in numbers:
        slot = store.find(label(number))
        if slot is not None:
            try:
                assert_holds(store, slot, block(number))
                right.add(number)
            except StoreError:
                continue
    return right


@pytest.mark.parametrize("first", ["none", "zstd"])
@pytest.mark.parametrize("then", ["none", "zstd"])
def test_a_folder_of_either_kind_is_read_by_either(tmp_path: Path, first: str, then: str) -> None:
    written = range(10)
    store = open_store(tmp_path / "kv", how=first)
    for number in written:
        store.write(Slot(number), block(number), label(number))
    store.write(Slot(10), block(99))  # without a label: not found, and its bytes go
    store.close()
    store = open_store(tmp_path / "kv", how=then)
    assert (store.num_found, store.num_quarantined) == (10, 0)
    assert found_right(store, written) == set(written)
    assert_within(store)
    for number in range(20, 25):  # over those of the other kind, and beside them
        store.write(Slot(number - 18), block(number), label(number))
    assert_within(store)
    expected = {0, 1, 7, 8, 9, *range(20, 25)}
    assert found_right(store, range(30)) == expected
    store.close()
    store = open_store(tmp_path / "kv", how=first)
    assert found_right(store, range(30)) == expected
    assert_within(store)
    store.close()


def test_a_restart_finds_all_and_the_folder_does_not_grow(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    num_slots, num_written = store.num_slots, fill(store)
    store.close()
    on_disk = allocated_bytes(tmp_path / "kv")
    for _ in range(3):
        store = open_store(tmp_path / "kv")
        assert store.num_slots == num_slots
        assert store.used_bytes() == on_disk
        assert found_right(store, range(num_written)) == set(range(num_written))
        assert store.held_back()[:num_written] == list(range(num_written))
        assert_within(store)
        for number in range(num_written):
            store.write(Slot(number), block(number), label(number))
        with pytest.raises(NoSpaceError):
            store.write(Slot(num_written), noise(1))
        store.close()
        assert allocated_bytes(tmp_path / "kv") == on_disk


def test_what_is_forgotten_or_torn_takes_no_room_after_the_next_open(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    for number in range(10):
        store.write(Slot(number), block(number), label(number))
    each_bytes = (store.used_bytes() - 3 * PAGE_BYTES) // 10
    store.forget(Slot(2))
    assert torch.equal(read(store, 2), block(2))
    store.close()
    edit(segments(tmp_path / "kv")[0], PAGE_BYTES + SLOT_BYTES + 20, lambda data: bytes([data[0] ^ 1]))
    store = open_store(tmp_path / "kv")
    assert store.num_quarantined == 1
    assert found_right(store, range(10)) == {0, *range(3, 10)}
    assert abs(store.used_bytes() - 8 * each_bytes) < each_bytes
    assert_within(store)
    store.write(Slot(1), block(1), label(1))
    store.close()
    store = open_store(tmp_path / "kv")
    assert found_right(store, range(10)) == {0, 1, *range(3, 10)}
    store.close()


def test_smaller_budgets_remove_files_and_larger_ones_add_slots(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    num_slots, num_written = store.num_slots, fill(store)
    store.close()
    store = open_store(tmp_path / "kv", 2 * BUDGET_BYTES)
    assert store.num_slots > 1.7 * num_slots
    assert len(found_right(store, range(num_written))) == num_written
    store.close()
    for how in ("zstd", "none"):
        store = open_store(tmp_path / "kv", BUDGET_BYTES // 2, how)
        assert allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES // 2
        assert 0 < len(found_right(store, range(num_written))) < num_written
        assert_within(store)
        store.close()


def test_files_of_other_models_go_when_bytes_are_short(tmp_path: Path) -> None:
    other = BlockShape(2, 2, 64, 64, 64, 2)
    store = open_store(tmp_path / "kv", shape=other)
    for number in range(12):
        store.write(Slot(number), block(number, shape=other), SlotLabel(namespace(1), bytes(32), b""))
    store.close()
    store = open_store(tmp_path / "kv")
    assert len(store._space.others) > 1
    slot = 0
    while store._space.others:
        store.write(Slot(slot), block(slot))
        assert_within(store)
        slot += 1
    assert slot > 5
    for held in range(slot):
        assert_holds(store, held, block(held))
    store.close()


@pytest.mark.parametrize("how", ["zstd", "none"])
def test_a_bit_flipped_anywhere_is_a_miss_or_a_refusal(tmp_path: Path, how: str) -> None:
    store = open_store(tmp_path / "kv")
    for number in range(8):
        store.write(Slot(number), block(number), label(number))
    payload = store._index.payload(0)
    assert payload is not None and payload.sizes is not None
    store.close()
    chance = random.Random(5)
    path, seen = segments(tmp_path / "kv")[0], {"missed": 0, "refused": 0}
    per_file = (path.stat().st_size - PAGE_BYTES) // SLOT_BYTES
    for turn in range(60):
        slot, bit = chance.randrange(min(8, per_file)), 1 << chance.randrange(8)
        place = (
            GEOMETRY.header_bytes + chance.randrange(sum(payload.sizes) - 2000) if turn % 3 else chance.randrange(200)
        )
        place += PAGE_BYTES + slot * SLOT_BYTES
        edit(path, place, lambda data, bit=bit: bytes([data[0] ^ bit]))
        store = open_store(tmp_path / "kv", how=how) if how == "none" else open_store(tmp_path / "kv")
        right = found_right(store, range(8))
        assert right == set(range(8)) - {slot}
        seen["refused" if store.find(label(slot)) is not None else "missed"] += 1
        store.write(Slot(slot), block(slot), label(slot))
        store.close()
    assert seen["missed"] >= 10 and seen["refused"] >= 10, seen


def test_a_live_flip_is_refused_and_the_other_slices_are_served(store: NvmeStore) -> None:
    store.write(Slot(0), block(0))
    payload = store._index.payload(0)
    assert payload is not None and payload.sizes is not None
    place = PAGE_BYTES + GEOMETRY.header_bytes + payload.sizes[0] + payload.sizes[1] // 2
    edit(segments(store.folder)[0], place, lambda data: bytes([data[0] ^ 4]))
    out, step = torch.empty(SHAPE.slice_bytes, dtype=torch.uint8), SHAPE.slice_bytes
    with pytest.raises(ChecksumError, match="slot 0, layer 1"):
        store.read_slice(Slot(0), 1, out)
    with pytest.raises(ChecksumError):
        read(store, 0)
    for layer in (0, 2):
        store.read_slice(Slot(0), layer, out)
        assert torch.equal(out, block(0)[layer * step : (layer + 1) * step])
    os.truncate(segments(store.folder)[0], PAGE_BYTES + GEOMETRY.header_bytes + 100)
    with pytest.raises(StoreError):
        store.read_slice(Slot(0), 2, out)


def test_a_crafted_slice_that_verifies_is_refused_by_the_codec(tmp_path: Path) -> None:
    """Header and checksums made by somebody who knows the format, around bytes that zstd never made."""
    store = open_store(tmp_path / "kv")
    store.write(Slot(0), block(0), label(0))
    store.close()
    path, start = segments(tmp_path / "kv")[0], PAGE_BYTES
    with path.open("r+b") as file:
        file.seek(start)
        raw = np.frombuffer(bytearray(file.read(GEOMETRY.header_bytes)), np.uint8).copy()
        table = raw[HEADER.itemsize : HEADER.itemsize + 3 * SLICE.itemsize].view(SLICE)
        sizes = table["stored_bytes"].tolist()
        payload = noise(7)[: sum(sizes)].numpy()
        sums = array("Q", (checksum(part) for part in np.split(payload, np.cumsum(sizes)[:-1])))
        held = store.shape and SlotLabel(namespace(0), label(0).identity, label(0).content)
        crafted = GEOMETRY.header(held, 5, 1, Payload(NUMBERS[2], sums, array("I", sizes)))
        file.seek(start)
        file.write(crafted.tobytes())
        file.seek(start + GEOMETRY.header_bytes)
        file.write(payload.tobytes())
    store = open_store(tmp_path / "kv")
    assert store.find(label(0)) == 0
    for layer in range(3):
        with pytest.raises(ChecksumError, match=r"zstd.*nothing was served"):
            store.read_slice(Slot(0), layer, torch.empty(SHAPE.slice_bytes, dtype=torch.uint8))
    store.close()


def test_slots_say_the_size_of_their_elements(tmp_path: Path) -> None:
    """Models of one geometry share files, whatever their floats are."""
    wide = BlockShape(3, 1, 64, 64, 64, 4)
    assert Geometry.of(wide) == GEOMETRY
    store = open_store(tmp_path / "kv", shape=wide)
    content = block(1, shape=wide)
    store.write(Slot(0), content, label(0))
    store.close()
    store = open_store(tmp_path / "kv")
    assert_holds(store, 0, content)
    payload = store._index.payload(0)
    assert payload is not None and payload.codec == NUMBERS[4] == ZstdCodec(4).number
    store.close()


def test_copies_with_holes_of_zeros_are_filled_before_they_are_used(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    for number in range(4):
        store.write(Slot(number), block(number), label(number))
    store.close()
    path = segments(tmp_path / "kv")[0]
    with path.open("r+b") as file:
        punch_hole(file.fileno(), PAGE_BYTES + GEOMETRY.header_bytes, 2 * PAGE_BYTES)
    store = open_store(tmp_path / "kv")
    assert_within(store)
    with pytest.raises(ChecksumError):
        read(store, 0)
    store.write(Slot(0), block(0), label(0))
    assert found_right(store, range(4)) == set(range(4))
    assert_within(store)
    store.close()


# --- threads and kills


def test_32_threads_on_their_own_slots(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    store = open_store(tmp_path / "kv", 8 << 20)
    errors: list[BaseException] = []

    def work(slot: int) -> None:
        chance = random.Random(slot)
        try:
            for turn in range(12):
                content = chance.choice([noise, block])(100 * slot + turn)
                store.write(Slot(slot), content, label(100 * slot + turn))
                assert_holds(store, slot, content)
                assert allocated_bytes(store.folder) <= store.budget_bytes
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(slot,)) for slot in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert_within(store)
    store.close()
    report(request, Row.THREADS, absorbed=32 * 12)


def test_threads_at_the_end_of_the_budget_never_pass_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    pool, lock, over = SlotPool(store.num_slots), threading.Lock(), []
    held: dict[int, int] = {}

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for turn in range(40):
            with lock:
                slot = pool.take()
                if slot is None:
                    if not held:
                        continue
                    slot = Slot(chance.choice(list(held)))
                    del held[slot]
                    pool.give_back(slot)
                    continue
            number, refusal = 1000 * seed + turn, None
            try:
                store.write(slot, noise(number) if number % 3 else block(number))
            except NoSpaceError as error:
                refusal = error
            if allocated_bytes(store.folder) > BUDGET_BYTES:
                over.append(number)
            with lock:
                if refusal is None:
                    held[slot] = number
                else:
                    pool.lower_ceiling(refusal.available_slots)
                    (pool.retire if refusal.retires_slot else pool.give_back)(slot)
                pool.check_integrity()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not over
    assert len(held) > 5
    assert_within(store)
    for slot, number in held.items():
        assert_holds(store, slot, noise(number) if number % 3 else block(number))
    store.close()


KILLED = """
    import os, random, sys
    from pathlib import Path
    from kvtier.types import Slot
    from tests.fault.folders import label
    from tests.fault.test_compression import block, open_store

    store, chance = open_store(Path(sys.argv[1])), random.Random(int(sys.argv[2]))
    number = 1000 * int(sys.argv[2])
    while True:
        slot, number = chance.randrange(14), number + 1
        os.write(1, f"begun {slot} {number}\\n".encode())
        store.write(Slot(slot), block(number, chance.choice([0.1, 6.0])), label(number))
        os.write(1, f"ended {slot} {number}\\n".encode())
"""


@pytest.mark.slow
def test_kills_during_writes_lose_no_committed_block_and_leak_no_page(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder, held, chance = tmp_path / "kv", {}, random.Random(2)
    during = detected = 0
    for turn in range(6):
        command = [sys.executable, "-c", textwrap.dedent(KILLED), str(folder), str(turn)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            begun, num_ended = None, 0
            for line in child.stdout:
                word, slot, number = line.split()
                if word == "begun":
                    held.pop(int(slot), None)
                    begun = int(slot)
                else:
                    held[int(slot)], begun = int(number), None
                    num_ended += 1
                if num_ended == 25:
                    time.sleep(chance.random() * 0.01)
                    child.send_signal(signal.SIGKILL)
                    num_ended += 1000
            during += begun is not None
        store = open_store(folder)
        detected += store.num_quarantined > 0
        for slot, number in held.items():
            assert store.find(label(number)) == slot
            contents = (block(number, spread) for spread in (0.1, 6.0))
            assert any(torch.equal(read(store, slot), content) for content in contents)
        assert_within(store)
        on_disk = store.used_bytes()
        needed = sum(Geometry.of(SHAPE).header_bytes + _stored(store, slot) for slot in store.found())
        assert on_disk - needed < (len(segments(folder)) * 3 + 16) * PAGE_BYTES
        store.close()
    assert during >= 3
    report(request, Row.KILL_STORE, detected=detected, absorbed=6 - detected)


def _stored(store: NvmeStore, slot: int) -> int:
    payload = store._index.payload(slot)
    assert payload is not None and payload.sizes is not None
    return -(-sum(payload.sizes) // PAGE_BYTES) * PAGE_BYTES


# --- the tool that looks from outside


def test_fsck_verifies_stored_bytes(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    for number in range(6):
        store.write(Slot(number), block(number), label(number))
    payload = store._index.payload(1)
    assert payload is not None and payload.sizes is not None
    store.close()
    assert check_folder(tmp_path / "kv").slots[SlotState.GOOD] == 6
    place = PAGE_BYTES + SLOT_BYTES + GEOMETRY.header_bytes + payload.sizes[0] + payload.sizes[1] // 2
    edit(segments(tmp_path / "kv")[0], place, lambda data: bytes([data[0] ^ 1]))
    report = check_folder(tmp_path / "kv")
    assert (report.slots[SlotState.GOOD], report.slots[SlotState.DAMAGED]) == (5, 1)
