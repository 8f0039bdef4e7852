"""`kvtier fsck`: what it says of a folder, what it mends, and what it never touches."""

from __future__ import annotations

import errno
import os
import pickle
import random
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from kvtier.errors import ConfigError, FolderInUseError
from kvtier.fsck import check_folder
from kvtier.fsck_report import FsckReport, Outcome
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.slot_check import SlotState, slots_with_data
from kvtier.stores.slot_format import HEADER, Geometry
from kvtier.stores.superblock import SUPERBLOCK, superblock
from kvtier.system import allocated_bytes
from kvtier.types import BlockShape, Slot
from tests.fault.folders import (
    HEADER_BYTES,
    SHAPE,
    SLOT_BYTES,
    block,
    edit,
    filled,
    flip,
    label,
    namespace,
    open_store,
    place,
    segments,
    served,
    write,
)

OTHER_SHAPE = BlockShape(num_layers=2, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
LARGE_SHAPE = BlockShape(num_layers=5, kv_heads=8, block_tokens=256, key_dim=100, value_dim=100, element_bytes=4)
"""A block of 8 MB: more than is read at once, and slices that straddle what is."""
SLICE_BYTES = SHAPE.slice_bytes


def counts(report: FsckReport) -> dict[str, int]:
    return {state.value: number for state, number in report.slots.items() if number}


def snapshot(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything that a write would change; the lock's bytes and times aside, in which an owner leaves its pid."""
    seen = {}
    for path in [folder, *sorted(folder.iterdir())]:
        status = path.lstat()
        data = path.read_bytes() if stat.S_ISREG(status.st_mode) else b""
        times = () if path.name == "lock" else (status.st_mtime_ns, status.st_ctime_ns, data)
        seen[path.name] = (status.st_mode, status.st_uid, status.st_ino, status.st_size * (path.name != "lock"), *times)
    return seen


def is_whole(folder: Path, numbers: set[int], of: int = 0, shape: BlockShape = SHAPE, num_future: int = 0) -> None:
    """A store finds these blocks, byte for byte, and nothing that it does not trust."""
    store = open_store(folder, shape=shape)
    assert store.num_quarantined == num_future
    assert served(store, range(60), of) == (numbers, set(), set())
    store.check_integrity()
    store.close()


def craft(path: Path, slot: int, **fields: int) -> None:
    """Change fields of a header and sign it again."""

    def change(data: bytes) -> bytes:
        raw = np.frombuffer(bytearray(data), np.uint8)
        view = raw[: HEADER.itemsize].view(HEADER)[0]
        end = int(view["length"]) - 8
        for name, value in fields.items():
            view[name] = value
        raw[end : end + 8] = np.frombuffer(xxhash.xxh3_64_intdigest(raw[:end].tobytes()).to_bytes(8, "little"), "u1")
        return raw.tobytes()

    edit(path, place(slot), change, HEADER_BYTES)


def craft_superblock(path: Path, **fields: int) -> None:
    def change(data: bytes) -> bytes:
        raw = np.frombuffer(bytearray(data), np.uint8)
        view = raw.view(SUPERBLOCK)[0]
        for name, value in fields.items():
            view[name] = value
        view["checksum"] = xxhash.xxh3_64_intdigest(raw[:-8].tobytes())
        return raw.tobytes()

    edit(path, 0, change, SUPERBLOCK.itemsize)


# --- what it says


@pytest.mark.parametrize("inner", ["", "kv"])
def test_a_sound_folder_is_clean_and_told_by_namespace(tmp_path: Path, inner: str) -> None:
    before_s = time.time()
    filled(tmp_path / "kv", range(20))
    filled(tmp_path / "kv", range(20, 23), of=1, shape=OTHER_SHAPE)
    at_s = time.time() - 5 * 86400
    os.utime(tmp_path / "kv" / f"namespace-{namespace(1).hex()}", (at_s, at_s))
    report = check_folder(tmp_path / inner)
    assert report.outcome is Outcome.CLEAN and not report.problems and not report.notices
    assert report.slots[SlotState.GOOD] == 23
    assert report.path == tmp_path / "kv" and report.owner is None
    assert report.used_bytes == allocated_bytes(tmp_path / "kv")
    first, second = report.namespaces[namespace(0)], report.namespaces[namespace(1)]
    assert (first.blocks, first.num_bad, first.num_bytes) == (20, 0, 20 * SLOT_BYTES)
    assert (second.blocks, second.num_bytes) == (3, 3 * Geometry.of(OTHER_SHAPE).slot_bytes)
    assert second.opened_s == pytest.approx(at_s) and first.opened_s is not None and first.opened_s >= before_s - 1
    assert first.oldest_s is not None and first.newest_s is not None
    assert before_s <= first.oldest_s < first.newest_s <= time.time()
    sizes = {geometry.num_slices: each for geometry, each in report.geometries.items()}
    assert (sizes[3].blocks, sizes[2].blocks) == (20, 3)
    assert sum(each.slots for each in sizes.values()) == sum(report.slots.values())
    assert sum(each.segments for each in sizes.values()) == len(segments(tmp_path / "kv"))


@pytest.mark.parametrize("shape", [SHAPE, LARGE_SHAPE], ids=["small", "large"])
def test_a_flip_in_any_slice_is_found_and_named(tmp_path: Path, shape: BlockShape) -> None:
    filled(tmp_path / "kv", range(2), shape=shape, budget_bytes=512 << 20, segment_bytes_max=32 << 20)
    geometry = Geometry.of(shape)
    path, start = segments(tmp_path / "kv")[0], PAGE_BYTES + geometry.slot_bytes + geometry.header_bytes
    for layer in range(shape.num_layers):
        for offset in (0, shape.slice_bytes // 2, shape.slice_bytes - 1):
            flip(path, start + layer * shape.slice_bytes + offset)
            report = check_folder(tmp_path)
            assert counts(report) | {"free": 0} == {"good": 1, "damaged": 1, "free": 0}
            (problem,) = report.problems
            assert (problem.file, problem.slot, problem.slices) == (path.name, 1, (layer,))
            assert problem.namespace == namespace(0) and not problem.is_mended
            assert report.namespaces[namespace(0)].num_bad == 1
            assert report.outcome is Outcome.DAMAGED
            flip(path, start + layer * shape.slice_bytes + offset)  # as it was
    assert check_folder(tmp_path).outcome is Outcome.CLEAN


def test_a_flip_in_padding_or_a_free_slot_is_nothing(tmp_path: Path) -> None:
    shape = BlockShape(num_layers=3, kv_heads=1, block_tokens=16, key_dim=15, value_dim=15, element_bytes=2)
    filled(tmp_path / "kv", range(2), shape=shape)
    geometry = Geometry.of(shape)
    path = segments(tmp_path / "kv")[0]
    flip(path, PAGE_BYTES + geometry.header_bytes + geometry.payload_bytes)
    flip(path, PAGE_BYTES + 2 * geometry.slot_bytes + geometry.header_bytes)
    report = check_folder(tmp_path)
    assert report.outcome is Outcome.CLEAN and report.slots[SlotState.GOOD] == 2


@pytest.mark.parametrize("cut", [8, 40, 128, 150])
def test_a_torn_header_is_torn_and_its_slot_is_freed(tmp_path: Path, cut: int) -> None:
    filled(tmp_path / "kv", range(4))
    path = segments(tmp_path / "kv")[0]
    edit(path, place(2, cut), lambda data: bytes(len(data)), HEADER_BYTES - cut)
    report = check_folder(tmp_path, repair=True)
    assert (report.slots[SlotState.TORN], report.slots[SlotState.GOOD]) == (1, 3)
    assert [(each.slot, each.what, each.is_mended) for each in report.problems] == [(2, "torn", True)]
    assert report.outcome is Outcome.REPAIRED
    is_whole(tmp_path / "kv", {0, 1, 3})


def test_a_later_version_is_told_and_left(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(24))
    first, second = segments(tmp_path / "kv")[:2]
    craft(first, 1, version=2)
    craft_superblock(second, version=2)
    before = snapshot(tmp_path / "kv")
    report = check_folder(tmp_path, repair=True)
    assert report.slots[SlotState.FUTURE] == 1 and report.future_segments == 1
    assert report.outcome is Outcome.CLEAN
    assert any("later format version" in notice for notice in report.notices)
    assert snapshot(tmp_path / "kv") == before


def test_what_it_calls_good_is_what_the_store_serves(tmp_path: Path) -> None:
    """Sixty folders with random damage: the same blocks by both, none wrong, and after a repair the same again."""
    filled(tmp_path / "sound", range(30))
    seen = dict.fromkeys(("torn", "damaged", "removed"), 0)
    for seed in range(60):
        chance, folder = random.Random(seed), tmp_path / "kv"
        shutil.copytree(tmp_path / "sound", folder)
        for path in segments(folder):
            for _ in range(chance.randrange(6)):
                flip(path, chance.randrange(path.stat().st_size), chance.randrange(8))
            if chance.random() < 0.2:  # a header's beginning, or a superblock, which the draw above seldom meets
                flip(path, chance.choice([0, place(chance.randrange(5))]) + chance.randrange(56))
        before = snapshot(folder)
        report = check_folder(folder)
        assert snapshot(folder) == before
        store = open_store(folder)
        right, _, wrong = served(store, range(30))
        store.close()
        assert not wrong
        assert len(right) == report.slots[SlotState.GOOD], f"seed {seed}"
        mended = check_folder(folder, repair=True)
        assert counts(mended) == counts(report) and mended.outcome is not Outcome.DAMAGED
        assert check_folder(folder).outcome is Outcome.CLEAN
        is_whole(folder, right, num_future=report.slots[SlotState.FUTURE])  # a flip in the version
        for key in ("torn", "damaged"):
            seen[key] += report.slots[SlotState(key)]
        seen["removed"] += len(segments(tmp_path / "sound")) - len(segments(folder))
        shutil.rmtree(folder)
    assert min(seen.values()) >= 10, seen


# --- nothing is written


def test_a_check_changes_nothing(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(24))
    first, second, third = segments(kv)
    flip(first, place(1, HEADER_BYTES))
    flip(first, place(2, 30))
    flip(second, 20)
    os.truncate(third, place(1) + 100)
    (kv / "notes.txt").write_bytes(b"mine")
    (kv / f"namespace-{'ab' * 32}").touch()
    kv.chmod(0o755)
    before, lock = snapshot(kv), (kv / "lock").stat()
    report = check_folder(tmp_path)
    assert report.outcome is Outcome.DAMAGED and report.num_problems == 5 and report.num_mended == 0
    assert snapshot(kv) == before
    assert ((kv / "lock").stat().st_mtime_ns, (kv / "lock").stat().st_ctime_ns) == (lock.st_mtime_ns, lock.st_ctime_ns)
    assert any("mode" in notice for notice in report.notices)


def test_without_a_lock_none_is_made(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    (tmp_path / "kv" / "lock").unlink()
    before = snapshot(tmp_path / "kv")
    assert check_folder(tmp_path).outcome is Outcome.CLEAN
    assert snapshot(tmp_path / "kv") == before


def test_a_folder_in_use_is_checked_but_never_written(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    store = open_store(kv)
    write(store, range(4))
    flip(segments(kv)[0], place(2, 60))
    before, lock = snapshot(kv), (kv / "lock").read_bytes()
    report = check_folder(tmp_path)
    assert report.owner == str(os.getpid())
    assert f"in use by process {os.getpid()}" in report.notices[0]
    assert (report.slots[SlotState.GOOD], report.slots[SlotState.TORN]) == (3, 1)
    for options in ({"repair": True}, {"drop": namespace(0).hex()}, {"repair": True, "drop": "a"}):
        with pytest.raises(FolderInUseError, match=f"in use by process {os.getpid()}: end it before --repair or"):
            check_folder(tmp_path, **options)  # type: ignore[arg-type]
    assert snapshot(kv) == before and (kv / "lock").read_bytes() == lock
    write(store, [9])  # the owner is none the worse
    store.close()
    assert check_folder(tmp_path, repair=True).outcome is Outcome.REPAIRED
    is_whole(kv, {0, 1, 3, 9})


def test_what_the_lock_says_of_its_owner_is_shown_only_if_it_is_a_number(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    (tmp_path / "kv" / "lock").write_bytes(b"\x1b[2J1234")
    assert check_folder(tmp_path).owner == "unknown"
    with pytest.raises(FolderInUseError, match="in use by process unknown"):
        check_folder(tmp_path, repair=True)
    store.close()


def test_a_check_keeps_nobody_out(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    opened = []

    def meanwhile(done: int, of: int) -> None:
        if not opened:
            opened.append(open_store(tmp_path / "kv"))

    report = check_folder(tmp_path, progress=meanwhile)
    assert len(opened) == 1
    assert report.owner == str(os.getpid()) and report.outcome is Outcome.CLEAN
    opened[0].close()


def test_a_repair_keeps_everybody_out(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    refused = []

    def meanwhile(done: int, of: int) -> None:
        try:
            open_store(tmp_path / "kv")
        except FolderInUseError as error:
            refused.append(str(error))

    check_folder(tmp_path, repair=True, progress=meanwhile)
    assert refused and all(f"belongs to process {os.getpid()}" in message for message in refused)
    open_store(tmp_path / "kv").close()


@contextmanager
def reads(monkeypatch: pytest.MonkeyPatch, before: Callable[[int], None]) -> Iterator[None]:
    """Call `before` with the offset of every read, in the thread that reads."""
    real = os.preadv

    def reading(fd: int, buffers: list[memoryview], offset: int) -> int:
        before(offset)
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", reading)
        yield


def test_a_slot_that_its_owner_overwrites_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the header's read and the slices' the owner writes another block there: once, then at every look."""
    store = open_store(tmp_path / "kv")
    write(store, range(4))
    numbers = iter(range(100, 200))

    def once(offset: int) -> None:
        if offset == place(1, HEADER_BYTES) and (number := next(numbers)) == 100:
            store.write(Slot(1), block(number), label(number))

    def always(offset: int) -> None:
        if offset == place(1, HEADER_BYTES):
            number = next(numbers)
            store.write(Slot(1), block(number), label(number))

    with reads(monkeypatch, once):
        report = check_folder(tmp_path)
    assert next(numbers) > 101  # it was looked at again
    assert report.outcome is Outcome.CLEAN and report.slots[SlotState.GOOD] == 4
    with reads(monkeypatch, always):
        report = check_folder(tmp_path)
    assert report.outcome is Outcome.CLEAN
    assert (report.slots[SlotState.GOOD], report.slots[SlotState.CHANGING]) == (3, 1)
    store.close()


def test_a_busy_writer_is_never_called_damaged(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    write(store, range(30))
    done = threading.Event()

    def work() -> None:
        number = 0
        while not done.is_set():
            number += 1
            store.write(Slot(number % 30), block(number), label(number))
            time.sleep(0)

    writer = threading.Thread(target=work)
    writer.start()
    try:
        reports = [check_folder(tmp_path) for _ in range(20)]
    finally:
        done.set()
        writer.join()
    assert {report.outcome for report in reports} == {Outcome.CLEAN}
    assert max(report.slots[SlotState.GOOD] for report in reports) >= 20
    store.close()


# --- repair


def test_repair_frees_what_is_bad_and_keeps_the_rest(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(24))
    store = open_store(kv, shape=OTHER_SHAPE)
    write(store, range(40, 44), of=1, first_slot=0)
    store.close()
    first, *_, last = segments(kv)
    flip(first, place(1, HEADER_BYTES + SLICE_BYTES))
    flip(first, place(3, 100))
    other = Geometry.of(OTHER_SHAPE)
    flip(last, PAGE_BYTES + 2 * other.slot_bytes + other.header_bytes)
    report = check_folder(kv, repair=True)
    assert report.outcome is Outcome.REPAIRED and (report.num_problems, report.num_mended) == (3, 3)
    again = check_folder(kv, repair=True)
    assert again.outcome is Outcome.CLEAN and again.slots[SlotState.GOOD] == 25
    is_whole(kv, set(range(24)) - {1, 3})
    is_whole(kv, {40, 41, 43}, of=1, shape=OTHER_SHAPE)


@pytest.mark.parametrize("left_bytes", [0, 1, PAGE_BYTES, place(1) - 1, place(2), place(2) + 100, place(5)])
def test_a_file_cut_off_is_told_and_mended(tmp_path: Path, left_bytes: int) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(6))
    (path,) = segments(kv)
    os.truncate(path, left_bytes)
    left = max(0, left_bytes - PAGE_BYTES) // SLOT_BYTES
    report = check_folder(kv)
    assert report.outcome is Outcome.DAMAGED and report.slots[SlotState.GOOD] == left
    assert check_folder(kv, repair=True).outcome is Outcome.REPAIRED
    assert check_folder(kv).outcome is Outcome.CLEAN
    assert path.exists() == bool(left)
    assert not left or path.stat().st_size == place(left)
    is_whole(kv, set(range(left)))


def test_a_file_that_is_too_long_is_cut(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(6))
    (path,) = segments(tmp_path / "kv")
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(bytes(5000))
    assert [each.what for each in check_folder(tmp_path).problems] == ["is longer than its slots"]
    assert check_folder(tmp_path, repair=True).outcome is Outcome.REPAIRED
    assert path.stat().st_size == size
    is_whole(tmp_path / "kv", set(range(6)))


def test_files_of_ours_that_cannot_be_used_are_removed_by_a_repair_alone(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(24))
    first, second, third = segments(kv)
    flip(first, 20)
    second.chmod(0o644)
    store = open_store(kv)
    right = served(store, range(24))[0]
    store.close()
    unused = kv / f"namespace-{'ab' * 32}"
    unused.touch()
    report = check_folder(kv)
    assert {each.file for each in report.problems} == {first.name, second.name}
    assert first.exists() and second.exists() and unused.exists()
    assert report.notices == ["1 namespace has no block that verifies"]
    report = check_folder(kv, repair=True)
    assert report.outcome is Outcome.REPAIRED and report.num_swept == 1
    assert sorted(path.name for path in kv.iterdir()) == ["lock", f"namespace-{namespace(0).hex()}", third.name]
    assert 0 < len(right) < 24
    is_whole(kv, right)


def test_what_is_not_ours_is_never_touched_whatever_is_asked(tmp_path: Path) -> None:
    kv, outside = tmp_path / "kv", tmp_path / "outside"
    filled(kv, range(6))
    filled(outside, range(6))
    target = segments(outside)[0]
    flip(target, place(1, HEADER_BYTES))
    flip(segments(kv)[0], place(2, HEADER_BYTES))
    (kv / "segment-00007.kvt").symlink_to(target)
    (kv / f"namespace-{'cd' * 32}").symlink_to(target)
    os.mkfifo(kv / "segment-00008.kvt")
    (kv / "segment-00009.kvt").mkdir()
    (kv / "photo.jpg").write_bytes(b"\xff\xd8")
    (kv / "state.pkl").write_bytes(pickle.dumps(Bomb(tmp_path / "bombed")))
    os.link(kv / "state.pkl", kv / "segment-00010.kvt.bak")
    ours = {"lock", "kv", segments(kv)[0].name}

    def strangers() -> dict[str, Any]:
        return {name: each for name, each in snapshot(kv).items() if name not in ours}

    before, before_outside = strangers(), snapshot(outside)
    report = check_folder(tmp_path, repair=True, drop=namespace(0).hex())
    assert report.outcome is Outcome.DAMAGED  # the tier refuses such a folder
    assert report.num_dropped == 6 and report.num_problems == 7
    assert {each.reason for each in report.problems} == {"a symlink", "not kvtier's"}
    assert f"namespace-{namespace(0).hex()}" in before and strangers() == {
        name: each for name, each in before.items() if name != f"namespace-{namespace(0).hex()}"
    }
    assert snapshot(outside) == before_outside
    assert not (tmp_path / "bombed").exists()


class Bomb:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_in_place_of_a_segment_is_a_damaged_file(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    path = segments(tmp_path / "kv")[0]
    path.write_bytes(pickle.dumps([Bomb(tmp_path / "bombed")] * 3))
    report = check_folder(tmp_path)
    assert [each.what for each in report.problems] == ["not a segment, or damaged"]
    assert not (tmp_path / "bombed").exists()


# --- drop


def test_drop_frees_one_namespace_and_no_other(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(12))
    filled(kv, range(12, 18), of=1)
    filled(kv, range(40, 43), of=1, shape=OTHER_SHAPE)  # of two sizes, as no model is: all the same
    sizes = [path.stat().st_size for path in segments(kv)]
    report = check_folder(tmp_path, drop=namespace(1).hex()[:6].upper())
    assert report.outcome is Outcome.CLEAN
    assert (report.dropped_namespace, report.num_dropped) == (namespace(1), 9)
    assert set(report.namespaces) == {namespace(0)} and report.slots[SlotState.GOOD] == 12
    assert not (kv / f"namespace-{namespace(1).hex()}").exists()
    assert [path.stat().st_size for path in segments(kv)] == sizes
    is_whole(kv, set(range(12)))
    is_whole(kv, set(), of=1)
    is_whole(kv, set(), of=1, shape=OTHER_SHAPE)


def test_drop_does_not_repair(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(6))
    filled(tmp_path / "kv", range(6, 8), of=1)
    flip(segments(tmp_path / "kv")[0], place(2, HEADER_BYTES))
    report = check_folder(tmp_path, drop=namespace(1).hex())
    assert report.outcome is Outcome.DAMAGED and report.num_dropped == 2
    assert check_folder(tmp_path).slots[SlotState.DAMAGED] == 1


def test_a_damaged_block_is_dropped_too(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    flip(segments(tmp_path / "kv")[0], place(1, HEADER_BYTES))
    assert check_folder(tmp_path, drop=namespace(0).hex()).num_dropped == 3
    assert check_folder(tmp_path).outcome is Outcome.CLEAN


def test_a_namespace_that_is_only_a_file_can_be_dropped(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    unused = tmp_path / "kv" / f"namespace-{'ab' * 32}"
    unused.touch()
    assert check_folder(tmp_path, drop="abab").num_dropped == 0
    assert not unused.exists()
    is_whole(tmp_path / "kv", {0, 1, 2})


@pytest.mark.parametrize(
    ("drop", "message"),
    [
        ("ab", "several namespaces begin so: ab0"),
        ("", "no namespace of"),
        ("0x", "no namespace of"),
        ("ff", "no namespace of"),
        ("*", "no namespace of"),
        ("ab" * 40, "no namespace of"),
    ],
)
def test_a_drop_that_does_not_name_one_namespace_changes_nothing(tmp_path: Path, drop: str, message: str) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(12))
    first, second = segments(kv)[:2]
    flip(first, place(2, HEADER_BYTES))
    flip(second, 20)
    for digit in "01":
        (kv / f"namespace-ab{digit}{'0' * 61}").touch()
    before = snapshot(kv)
    with pytest.raises(ConfigError, match=f"--drop .*: {message}"):
        check_folder(tmp_path, repair=True, drop=drop)
    assert snapshot(kv) == before


# --- crafted, absurd, unreadable


def test_crafted_headers_are_torn_and_cost_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(6))
    path = segments(tmp_path / "kv")[0]
    craft(path, 0, length=2**32 - 1, content_bytes=2**32 - 1)
    craft(path, 1, num_slices=2**32 - 1, payload_bytes=2**64 - 1)
    craft(path, 2, generation=2**64 - 1)
    craft(path, 3, codec=77)
    craft(path, 4, written_ns=2**64 - 1)  # signed, and true for all we know
    report = check_folder(tmp_path)
    assert (report.slots[SlotState.TORN], report.slots[SlotState.GOOD]) == (4, 2)
    assert report.document()["namespaces"][0]["newest_written"].startswith("2554-")
    assert check_folder(tmp_path, repair=True).outcome is Outcome.REPAIRED


def test_an_absurd_file_of_holes_is_cheap(tmp_path: Path) -> None:
    """A superblock that is in order, four thousand million slots, 8 TiB of nothing, and one block at the end."""
    kv = tmp_path / "kv"
    filled(kv, range(3))
    path, number = segments(kv)[0], 2**32 - 1
    huge = kv / "segment-00099.kvt"
    num_slots = (8 << 40) // SLOT_BYTES
    with huge.open("wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write(superblock(Geometry.of(SHAPE), number).tobytes())
        file.truncate(place(num_slots))
        file.seek(place(num_slots - 1))
        file.write(path.read_bytes()[place(1) : place(2)])
    report = check_folder(tmp_path)
    assert report.slots[SlotState.GOOD] == 4
    assert report.slots[SlotState.FREE] >= num_slots - 1
    assert report.read_bytes < 1 << 20
    assert [each.what for each in report.problems] == [f"was cut off: {number - num_slots} slots are missing"]


@pytest.mark.parametrize(
    ("fields", "is_read"),
    [
        ({"header_bytes": 1 << 40, "slot_bytes": (1 << 40) + 8192}, False),
        ({"header_bytes": 1 << 63, "slot_bytes": (1 << 63) + 8192}, False),
        ({"header_bytes": 2 << 20, "slot_bytes": (2 << 20) + 8192}, False),
        ({"header_bytes": 1 << 20, "slot_bytes": (1 << 20) + 8192}, True),
        ({"num_slices": 2**32 - 1}, False),
        ({"slice_bytes": 0}, False),
        ({"num_slots": 0}, False),
        ({"slice_bytes": 1 << 34, "num_slices": 1, "slot_bytes": (1 << 34) + 4096}, True),
    ],
)
def test_a_crafted_superblock_costs_no_memory(tmp_path: Path, fields: dict[str, int], is_read: bool) -> None:
    filled(tmp_path / "kv", range(3))
    path = segments(tmp_path / "kv")[0]
    craft_superblock(path, **fields)
    os.truncate(path, 1 << 40)  # as long as they want
    report = check_folder(tmp_path)
    assert report.outcome is Outcome.DAMAGED and len(report.geometries) == is_read
    assert report.read_bytes < 64 << 20
    assert check_folder(tmp_path, repair=True).outcome is Outcome.REPAIRED


@pytest.mark.parametrize("hole", [False, True])
def test_no_slot_with_a_header_is_taken_for_a_hole(tmp_path: Path, hole: bool) -> None:
    """Random files with holes: each slot whose header region is not all zero is visited."""
    num_skipped = 0
    for seed in range(60):
        chance = random.Random(seed)
        header_pages = chance.choice([1, 3])
        geometry = Geometry(header_pages * PAGE_BYTES, (header_pages + chance.choice([1, 4])) * PAGE_BYTES, 1, 1)
        num_slots, path = chance.randrange(1, 60), tmp_path / f"{seed}"
        with path.open("wb") as file:
            file.truncate(PAGE_BYTES + num_slots * geometry.slot_bytes)
            for page in range(1, path.stat().st_size // PAGE_BYTES):
                if not hole or chance.random() < 0.2:
                    file.seek(page * PAGE_BYTES)
                    file.write(chance.randbytes(PAGE_BYTES))
        data = path.read_bytes()[PAGE_BYTES:]
        headers = [data[at : at + geometry.header_bytes] for at in range(0, len(data), geometry.slot_bytes)]
        written = {slot for slot, header in enumerate(headers) if any(header)}
        with path.open("rb") as file:
            visited = list(slots_with_data(file.fileno(), geometry, num_slots))
        assert visited == sorted(set(visited)) and written <= set(visited) <= set(range(num_slots)), f"seed {seed}"
        num_skipped += num_slots - len(visited)
    assert bool(num_skipped) == hole


def failing(monkeypatch: pytest.MonkeyPatch, offsets: range, code: int = errno.EIO) -> Any:
    def fail(offset: int) -> None:
        if offset in offsets:
            raise OSError(code, os.strerror(code))

    return reads(monkeypatch, fail)


def test_a_disk_error_in_a_header_or_a_slice_costs_that_slot_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(6))
    with failing(monkeypatch, range(place(1), place(1) + 1)):
        report = check_folder(kv)
        assert (report.slots[SlotState.UNREADABLE], report.slots[SlotState.GOOD]) == (1, 5)
        assert report.problems[0].reason == "Input/output error"
    with failing(monkeypatch, range(place(3, HEADER_BYTES), place(4))):
        report = check_folder(kv)
        assert (report.slots[SlotState.DAMAGED], report.slots[SlotState.GOOD]) == (1, 5)
        assert report.problems[0].slices == (0, 1, 2) and report.problems[0].reason == "Input/output error"
        assert check_folder(kv, repair=True).outcome is Outcome.REPAIRED
    is_whole(kv, {0, 1, 2, 4, 5})


def test_of_a_large_block_the_readable_slices_are_told_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv", [0], shape=LARGE_SHAPE, budget_bytes=64 << 20)
    start = PAGE_BYTES + Geometry.of(LARGE_SHAPE).header_bytes
    with failing(monkeypatch, range(start, start + 1)):  # the first 4 MiB: slices 0, 1 and part of 2
        assert check_folder(tmp_path).problems[0].slices == (0, 1, 2)
    with failing(monkeypatch, range(start + (4 << 20), start + (4 << 20) + 1)):
        assert check_folder(tmp_path).problems[0].slices == (2, 3, 4)
    assert check_folder(tmp_path).outcome is Outcome.CLEAN


def test_a_disk_that_takes_no_writes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "kv", range(6))
    flip(segments(tmp_path / "kv")[0], place(2, HEADER_BYTES))
    real = os.pwrite

    def broken(fd: int, data: bytes, offset: int) -> int:
        if offset:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    report = check_folder(tmp_path, repair=True)
    assert report.outcome is Outcome.DAMAGED
    assert report.problems[0].reason == "could not be repaired: Read-only file system"
    report = check_folder(tmp_path, drop=namespace(0).hex())
    assert report.num_dropped == 0 and report.outcome is Outcome.DAMAGED
    assert "could not be dropped" in {each.what for each in report.problems}


@contextmanager
def as_nobody(*owned: Path) -> Iterator[None]:
    """As a user whom modes bind, who owns these; root is not bound by them."""
    if os.geteuid() != 0:
        yield
        return
    for path in owned:
        os.chown(path, 65534, -1)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_file_that_may_not_be_read_is_told_and_stays() -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own lie behind folders of other workers' modes
        root = Path(name)
        root.chmod(0o755)
        kv = root / "kv"
        filled(kv, range(24))
        locked = segments(kv)[1]
        locked.chmod(0)
        with as_nobody(kv, *kv.iterdir()):
            report = check_folder(kv, repair=True)
        (problem,) = report.problems
        assert (problem.file, problem.reason, problem.is_mended) == (locked.name, "Permission denied", False)
        assert locked.exists() and report.slots[SlotState.GOOD] > 0


def test_a_file_opened_too_late_is_unreadable_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors run out after the first look, or the owner gives the file up."""
    filled(tmp_path / "kv", range(3))
    real = os.open
    for code, state in ((errno.EMFILE, SlotState.UNREADABLE), (errno.ENOENT, SlotState.CHANGING)):
        looks = iter([True])

        def limited(path: Any, flags: int, *rest: Any, code: int = code, looks: Any = looks, **more: Any) -> int:
            if str(path).startswith("segment") and not next(looks, False):
                raise OSError(code, os.strerror(code))
            return real(path, flags, *rest, **more)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", limited)
            report = check_folder(tmp_path)
        assert report.slots[state] == sum(report.slots.values()) >= 3


@pytest.mark.parametrize("refuses", ["open", "read"])
def test_a_file_system_without_direct_reads_is_read_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuses: str
) -> None:
    import fcntl

    filled(tmp_path / "kv", range(6))
    flip(segments(tmp_path / "kv")[0], place(2, HEADER_BYTES))
    real_open, real_read, refused = os.open, os.preadv, []

    def opening(path: Any, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_DIRECT and refuses == "open":
            refused.append(path)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, *rest, **more)

    def reading(fd: int, buffers: list[memoryview], offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            refused.append(fd)
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_read(fd, buffers, offset)

    monkeypatch.setattr(os, "open", opening)
    monkeypatch.setattr(os, "preadv", reading)
    report = check_folder(tmp_path)
    assert refused
    assert (report.slots[SlotState.GOOD], report.slots[SlotState.DAMAGED]) == (5, 1)


# --- speed, memory, ends


def test_slots_are_read_by_several_threads_past_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "kv", range(6), shape=LARGE_SHAPE, budget_bytes=128 << 20, segment_bytes_max=32 << 20)
    meeting, met = threading.Barrier(2), []

    def meet(offset: int) -> None:
        if not met:  # two threads inside a read at the same time
            meeting.wait(timeout=60)
            met.append(True)

    with reads(monkeypatch, meet):
        assert check_folder(tmp_path).slots[SlotState.GOOD] == 6
    assert met


def test_an_interrupt_ends_the_threads(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(24))

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        check_folder(tmp_path, repair=True, progress=stop)
    for thread in threading.enumerate():
        if thread.name.startswith("kvtier-fsck"):
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert check_folder(tmp_path, repair=True).outcome is Outcome.CLEAN  # the lock was given back


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(24))
    flip(segments(tmp_path / "kv")[0], 20)
    before = len(os.listdir("/proc/self/fd"))
    check_folder(tmp_path)
    with pytest.raises(ConfigError):
        check_folder(tmp_path, drop="zz")
    check_folder(tmp_path, repair=True, drop=namespace(0).hex())
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_bar_ends_at_all_bytes(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(24))
    told: list[tuple[int, int]] = []
    check_folder(tmp_path, progress=lambda done, of: told.append((done, of)))
    assert told[-1][0] == told[-1][1] > 0 and told == sorted(told)
