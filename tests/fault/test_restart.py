"""What an open finds of an earlier process's blocks, and what not: damage, strangers, other models, age, room."""

from __future__ import annotations

import errno
import os
import pickle
import random
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash

from kvtier.errors import ChecksumError, ConfigError, StoreError
from kvtier.slots import SlotPool
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.segment import Segment
from kvtier.stores.slot_format import HEADER, Geometry
from kvtier.stores.superblock import SUPERBLOCK, superblock
from kvtier.system import allocated_bytes
from kvtier.types import BlockShape, Slot, SlotLabel, Survives
from tests.fault.folders import (
    BUDGET_BYTES,
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
    read,
    segments,
    served,
    write,
)

OTHER_SHAPE = BlockShape(num_layers=2, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
DAY_S = 86400
EVERY = range(30)


def age(folder: Path, of: int, days: float) -> None:
    """As if that namespace had last been opened then."""
    at_s = time.time() - days * DAY_S
    os.utime(folder / f"namespace-{namespace(of).hex()}", (at_s, at_s))


# --- what is found


def test_labelled_blocks_are_found_by_the_next_process_and_read_the_same(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    store = open_store(tmp_path / "kv")
    assert (store.num_found, store.num_quarantined) == (30, 0)
    assert served(store, EVERY) == (set(EVERY), set(), set())
    found = store.found()
    assert sorted(found) == list(EVERY)
    assert {each.namespace for each in found.values()} == {namespace(0)}
    assert [found[n].identity for n in EVERY] == [label(n).identity for n in EVERY]
    assert store.label(Slot(7)) == label(7)
    store.check_integrity()
    store.close()


def test_a_block_is_found_in_the_process_that_wrote_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    write(store, [3])
    assert store.find(label(3)) == 3
    assert store.num_found == 0  # by the open
    store.close()


@pytest.mark.parametrize("survives", Survives)
def test_namespace_identity_and_content_must_all_be_equal(tmp_path: Path, survives: Survives) -> None:
    filled(tmp_path / "kv", [1], survives=survives)
    store = open_store(tmp_path / "kv", survives=survives)
    assert store.find(label(1)) == 1
    right = label(1)
    for wrong in (
        label(1, of=1),
        label(2),
        label(1, content=b""),
        label(1, content=right.content + b"\0"),
        label(1, content=right.content[:-1] + b"2"),
        SlotLabel(right.identity, right.namespace, right.content),
    ):
        assert store.find(wrong) is None
    store.close()


def test_without_a_label_or_in_a_temporary_folder_nothing_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    store.write(Slot(0), block(0))
    assert store.find(label(0)) is None
    store.close()
    store = open_store(tmp_path / "kv")
    assert store.num_found == store.num_quarantined == 0
    store.close()
    store = NvmeStore(SHAPE, BUDGET_BYTES, tmp_path / "kv", False, reserve_free_frac=0.0)
    write(store, [0])
    assert torch.equal(read(store, 0), block(0))
    assert store.find(label(0)) is None and not store.found()
    store.close()
    assert not (tmp_path / "kv").exists()


@pytest.mark.parametrize("survives", Survives)
def test_a_slot_that_is_labelled_late_is_found_here_and_by_the_next_process(tmp_path: Path, survives: Survives) -> None:
    store = open_store(tmp_path / "kv", survives=survives)
    for number in (0, 1, 2):
        store.write(Slot(number), block(number))
    store.put_label(Slot(1), label(1))
    assert store.find(label(1)) == 1 and store.find(label(0)) is None
    with pytest.raises(StoreError, match="nothing readable"):
        store.put_label(Slot(5), label(5))
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv", survives=survives)
    assert store.num_found == 1 and served(store, range(3)) == ({1}, set(), set())
    store.close()


def test_a_late_label_that_hung_until_the_slot_had_another_block_names_neither(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "kv")
    store.write(Slot(1), block(1))
    own_write, has_hung = Segment.write, []

    def late(segment: Segment, offset_bytes: int, data: np.ndarray) -> None:  # type: ignore[type-arg]
        if not has_hung:
            has_hung.append(True)
            store.write(Slot(1), block(2), label(2))  # the slot was given up meanwhile
        own_write(segment, offset_bytes, data)

    monkeypatch.setattr(Segment, "write", late)
    store.put_label(Slot(1), label(1))
    assert has_hung and store.find(label(1)) is None
    assert store.find(label(2)) is None  # its header is not there any more
    assert torch.equal(read(store, 1), block(2))
    store.check_integrity()
    store.close()
    monkeypatch.undo()
    store = open_store(tmp_path / "kv")
    for number in (1, 2):
        slot = store.find(label(number))
        if slot is not None:
            with pytest.raises(ChecksumError):
                read(store, slot)
    store.close()


def test_a_label_too_long_for_the_header_costs_the_label_and_not_the_block(tmp_path: Path) -> None:
    """It must not fail the move: a block with odd positions could then never leave its tier."""
    store = open_store(tmp_path / "kv")
    too_long = label(1, content=bytes(PAGE_BYTES))
    store.write(Slot(0), block(1), too_long)
    assert torch.equal(read(store, 0), block(1))
    assert store.find(too_long) is None and store.label(Slot(0)) is None
    with pytest.raises(ValueError, match="32 bytes"):
        store.write(Slot(0), block(2), SlotLabel(b"short", bytes(32), b""))
    assert torch.equal(read(store, 0), block(1))
    store.close()


@pytest.mark.parametrize("relabel", [True, False])
def test_an_overwritten_slot_is_found_by_its_new_label_alone(tmp_path: Path, relabel: bool) -> None:
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    store.write(Slot(1), block(9), label(9) if relabel else None)
    assert store.find(label(1)) is None
    assert sorted(store.found()) == [0, 2]
    store.close()
    store = open_store(tmp_path / "kv")
    assert store.find(label(1)) is None
    assert served(store, range(10))[0] == {0, 2} | ({9} if relabel else set())
    store.close()


def test_a_forgotten_block_is_not_found_here_nor_later_but_stays_readable_here(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    store.forget(Slot(1))
    store.forget(Slot(1))
    store.forget(Slot(5))  # nothing there
    assert store.find(label(1)) is None and store.label(Slot(1)) is None and 1 not in store.found()
    assert torch.equal(read(store, 1), block(1))
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 2}
    assert store.num_quarantined == 0
    store.close()


def test_of_two_copies_the_newer_is_found(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    store.write(Slot(0), block(100), label(1))  # an older copy with other bytes, so that they can be told apart
    store.write(Slot(1), block(1), label(1))
    assert store.find(label(1)) == 1
    store.close()
    for _ in range(2):
        store = open_store(tmp_path / "kv")
        assert (store.num_found, store.num_quarantined) == (1, 1)
        assert store.find(label(1)) == 1
        with pytest.raises(StoreError, match="nothing readable"):
            read(store, 0)
        store.check_integrity()
        store.close()
    store = open_store(tmp_path / "kv")
    store.write(Slot(1), block(2), label(2))
    store.write(Slot(0), block(1), label(1))  # newer than all before
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, [1, 2]) == ({1, 2}, set(), set())
    assert store.num_quarantined == 0
    store.close()


def test_an_older_copy_does_not_take_the_place_of_a_newer_one_in_flight(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    threads = [threading.Thread(target=store.write, args=(Slot(n), block(1), label(1))) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    slot = store.find(label(1))
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv")
    assert (store.find(label(1)), store.num_quarantined) == (slot, 11)
    store.close()


def test_another_budget_finds_the_same_blocks(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    sizes = [path.stat().st_size for path in segments(tmp_path / "kv")]
    store = open_store(tmp_path / "kv", 5 * BUDGET_BYTES)
    assert served(store, EVERY)[0] == set(EVERY)
    assert store.num_slots > 4 * 50
    write(store, range(100, 140), first_slot=store.num_slots - 40)
    store.check_integrity()
    store.close()
    assert [path.stat().st_size for path in segments(tmp_path / "kv")][: len(sizes)] == sizes
    store = open_store(tmp_path / "kv", 5 * BUDGET_BYTES)
    assert served(store, [*EVERY, *range(100, 140)])[0] == {*EVERY, *range(100, 140)}
    store.close()


def test_the_same_budget_gives_the_same_slots_and_the_folder_does_not_grow(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    num_slots = store.num_slots
    write(store, range(num_slots))
    store.close()
    on_disk = allocated_bytes(tmp_path / "kv")
    for turn in range(3):
        store = open_store(tmp_path / "kv")
        assert store.num_slots == num_slots
        assert store.used_bytes() == on_disk
        write(store, range(turn * 5, num_slots))
        store.check_integrity()
        store.close()
        assert allocated_bytes(tmp_path / "kv") == on_disk


def test_a_budget_smaller_than_the_files_removes_those_beyond_it(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(60))
    small = BUDGET_BYTES // 3
    store = open_store(tmp_path / "kv", small)
    assert allocated_bytes(tmp_path / "kv") <= small
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")
    right, refused, wrong = served(store, range(60))
    assert right and len(right) < 60 and not refused and not wrong
    write(store, range(200, 200 + store.num_slots), first_slot=0)
    store.check_integrity()
    assert allocated_bytes(tmp_path / "kv") <= small
    store.close()


# --- damage at rest


def test_a_bit_flipped_anywhere_at_rest_is_a_miss_or_a_refusal(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    chance = random.Random(5)
    pristine = {path: path.read_bytes() for path in segments(tmp_path / "kv")}
    seen = {"missed": 0, "refused": 0, "harmless": 0}
    for _ in range(120):
        path = chance.choice(segments(tmp_path / "kv"))
        part = chance.choice([0, PAGE_BYTES, HEADER_BYTES + PAGE_BYTES])  # superblock, a header, a block
        slot = chance.randrange((path.stat().st_size - PAGE_BYTES) // SLOT_BYTES)
        at = chance.randrange(SUPERBLOCK.itemsize if part == 0 else 2 * PAGE_BYTES if part > PAGE_BYTES else 250)
        flip(path, at if part == 0 else part + slot * SLOT_BYTES + at, chance.randrange(8))
        store = open_store(tmp_path / "kv")
        right, refused, wrong = served(store, EVERY)
        assert not wrong
        missed = set(EVERY) - right - refused
        seen["missed" if missed else "refused" if refused else "harmless"] += 1
        if part:
            assert len(missed | refused) <= 1
        store.check_integrity()
        store.close()
        for each in segments(tmp_path / "kv"):
            each.unlink()
        for each, data in pristine.items():
            each.write_bytes(data)
            each.chmod(0o600)
    assert seen["missed"] >= 10 and seen["refused"] >= 10 and seen["harmless"] >= 1, seen


def test_a_flip_in_free_space_changes_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(2))
    path = segments(tmp_path / "kv")[0]
    flip(path, place(0, HEADER_BYTES - 1))  # of a header region, behind the header
    flip(path, place(3, HEADER_BYTES + 5))  # of a slot that nobody wrote
    flip(path, SUPERBLOCK.itemsize + 9)
    store = open_store(tmp_path / "kv")
    assert served(store, range(2)) == ({0, 1}, set(), set())
    assert store.num_quarantined == 0
    store.close()


@pytest.mark.parametrize("cut", [1, 8, 40, 127, 128, 150, 210])
@pytest.mark.parametrize("keeps", ["first", "last"])
def test_a_torn_header_is_a_miss_is_counted_and_its_slot_can_be_used(tmp_path: Path, cut: int, keeps: str) -> None:
    filled(tmp_path / "kv", range(3))
    path = segments(tmp_path / "kv")[0]
    if keeps == "first":
        edit(path, place(1, cut), lambda data: bytes(len(data)), HEADER_BYTES - cut)
    else:
        edit(path, place(1), lambda data: bytes(len(data)), cut)
    store = open_store(tmp_path / "kv")
    assert served(store, range(3)) == ({0, 2}, set(), set())
    assert store.num_quarantined == (1 if keeps == "first" or cut < 120 else 0)  # all zero: merely free
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 1)
    write(store, [1])
    assert served(store, range(3))[0] == {0, 1, 2}
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 1, 2}
    assert store.num_quarantined == 0
    store.close()


def test_a_header_of_a_later_version_is_quarantined(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    edit(segments(tmp_path / "kv")[0], place(1, 8), lambda _: b"\x02\x00", 2)
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 2}
    assert store.num_quarantined == 1
    store.close()


def craft(path: Path, slot: int, **fields: int) -> None:
    """Change fields of a header and give it a checksum that fits, if its length still lies in the file."""
    with path.open("r+b") as file:
        file.seek(place(slot))
        raw = np.frombuffer(bytearray(file.read(HEADER_BYTES)), np.uint8).copy()
        view = raw[: HEADER.itemsize].view(HEADER)[0]
        end = int(view["length"]) - 8
        for name, value in fields.items():
            view[name] = value
        raw[end : end + 8] = np.frombuffer(xxhash.xxh3_64_intdigest(raw[:end].tobytes()).to_bytes(8, "little"), "u1")
        file.seek(place(slot))
        file.write(raw.tobytes())


def test_crafted_headers_with_absurd_lengths_are_quarantined_and_cost_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(4))
    path = segments(tmp_path / "kv")[0]
    craft(path, 0, length=2**32 - 1, content_bytes=2**32 - 1)
    craft(path, 1, num_slices=2**32 - 1, payload_bytes=2**64 - 1)
    craft(path, 2, generation=2**64 - 1)
    store = open_store(tmp_path / "kv")
    assert store.num_quarantined == 3
    assert served(store, range(4))[0] == {3}
    write(store, range(3))  # a generation follows
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(4))[0] == {0, 1, 2, 3}
    store.close()


def test_a_header_crafted_for_another_block_serves_what_its_checksums_say_or_nothing(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(2))
    path = segments(tmp_path / "kv")[0]
    with path.open("r+b") as file:  # block 0's header before block 1's bytes
        file.seek(place(0))
        header = file.read(HEADER_BYTES)
        file.seek(place(1))
        file.write(header)
    store = open_store(tmp_path / "kv")
    right, refused, wrong = served(store, range(2))
    assert not wrong and right | refused == {0} and store.num_quarantined == 1
    store.close()


# --- files at rest


@pytest.mark.parametrize("left_bytes", [0, 1, SUPERBLOCK.itemsize, PAGE_BYTES, place(1) - 1, place(2), place(2) + 100])
def test_a_truncated_file_keeps_the_slots_that_are_whole(tmp_path: Path, left_bytes: int) -> None:
    filled(tmp_path / "kv", range(3))
    os.truncate(segments(tmp_path / "kv")[0], left_bytes)
    store = open_store(tmp_path / "kv")
    whole = max(0, left_bytes - PAGE_BYTES) // SLOT_BYTES
    assert served(store, range(3)) == (set(range(whole)), set(), set())
    write(store, range(50), first_slot=0)
    assert served(store, range(50))[0] == set(range(50))
    store.check_integrity()
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(50))[0] == set(range(50))
    store.close()


def test_a_file_that_was_truncated_and_made_long_again_is_allocated_before_it_is_used(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(6))
    path = segments(tmp_path / "kv")[0]
    size = path.stat().st_size
    os.truncate(path, place(2))
    os.truncate(path, size)  # all holes behind
    store = open_store(tmp_path / "kv")
    assert served(store, range(6))[0] == {0, 1}
    assert path.stat().st_blocks * 512 >= size
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")
    store.close()


def test_an_extended_file_is_cut(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    path = segments(tmp_path / "kv")[0]
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(os.urandom(100_000))
    store = open_store(tmp_path / "kv")
    assert served(store, EVERY)[0] == set(EVERY)
    assert path.stat().st_size == size
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")
    store.close()


def test_a_file_of_absurd_length_that_is_all_holes_is_not_ours(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    path = segments(tmp_path / "kv")[0]
    page = superblock(Geometry.of(SHAPE), 2**32 - 1)
    edit(path, 0, lambda _: page.tobytes(), PAGE_BYTES)
    os.truncate(path, 1 << 43)  # 16 TiB of headers to read
    store = open_store(tmp_path / "kv")
    assert store.num_found == 0
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES
    write(store, range(store.num_slots))
    store.check_integrity()
    store.close()


def test_deleted_swapped_and_renamed_files_serve_nothing_wrong(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    first, second, third = segments(tmp_path / "kv")[:3]
    per_segment = (first.stat().st_size - PAGE_BYTES) // SLOT_BYTES
    first.unlink()
    third.rename(first)
    second.rename(second.with_name("segment-00077.kvt"))
    store = open_store(tmp_path / "kv")
    right, refused, wrong = served(store, EVERY)
    assert right == set(EVERY) - set(range(per_segment)) and not refused and not wrong
    write(store, range(per_segment), first_slot=store.num_slots - per_segment)
    assert served(store, EVERY)[0] == set(EVERY)
    store.check_integrity()
    store.close()


def test_files_changed_under_a_live_store_serve_nothing_wrong(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(40))
    store = open_store(tmp_path / "kv")
    first, second, third, fourth = segments(tmp_path / "kv")[:4]
    data = [path.read_bytes() for path in (first, second)]
    edit(first, 0, lambda _: data[1], len(data[0]))
    edit(second, 0, lambda _: data[0], len(data[1]))
    os.truncate(third, place(1))
    fourth.unlink()
    right, _, wrong = served(store, range(40))
    assert not wrong
    per_segment = (len(data[0]) - PAGE_BYTES) // SLOT_BYTES
    assert right == {2 * per_segment, *range(3 * per_segment, 40)}  # the deleted file's descriptor is still ours
    for slot in range(2 * per_segment):
        with pytest.raises(ChecksumError):
            read(store, slot)
    store.close()


def test_a_header_changed_under_a_live_store_is_a_miss(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    flip(segments(tmp_path / "kv")[0], place(1, 20))
    assert store.find(label(1)) is None
    assert store.label(Slot(1)) is None
    assert store.find(label(2)) == 2
    store.close()


# --- whose files


def test_a_pickle_in_the_folder_is_never_loaded(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return os.mkdir, (str(tmp_path / "exploded"),)

    bomb = pickle.dumps(Bomb())
    filled(tmp_path / "kv", range(3))
    planted = tmp_path / "kv" / "segment-00009.kvt"
    planted.write_bytes(bomb)
    planted.chmod(0o600)
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 1, 2}
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")  # counted, not read
    store.close()
    planted.unlink()
    (tmp_path / "kv" / "index.pkl").write_bytes(bomb)
    with pytest.raises(ConfigError, match=r"index\.pkl in it is not kvtier's"):
        open_store(tmp_path / "kv")
    assert not (tmp_path / "exploded").exists()


def test_symlinks_among_the_files_are_refused_by_name(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(3))
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 100)
    for name in ("segment-00009.kvt", f"namespace-{namespace(3).hex()}"):
        (tmp_path / "kv" / name).symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name} in it is a symlink"):
            open_store(tmp_path / "kv")
        (tmp_path / "kv" / name).unlink()
    assert target.read_bytes() == b"x" * 100
    os.mkfifo(tmp_path / "kv" / "segment-00008.kvt")
    with pytest.raises(ConfigError, match=r"segment-00008\.kvt in it is not kvtier's"):
        open_store(tmp_path / "kv")


def test_a_file_of_a_loose_mode_is_not_read(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    path = segments(tmp_path / "kv")[0]
    path.chmod(0o620)
    store = open_store(tmp_path / "kv")
    per_segment = (path.stat().st_size - PAGE_BYTES) // SLOT_BYTES
    assert served(store, EVERY)[0] == set(EVERY) - set(range(per_segment))
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv")
    write(store, range(200, 200 + store.num_slots), first_slot=0)
    assert not path.exists() or stat.S_IMODE(path.stat().st_mode) == 0o600  # given up, its name may be taken anew
    store.check_integrity()
    store.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("what", ["folder", "segment"])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, what: str) -> None:
    filled(tmp_path / "kv", range(3))
    os.chown(tmp_path / "kv" if what == "folder" else segments(tmp_path / "kv")[0], 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345, not to 0"):
        open_store(tmp_path / "kv")


def test_every_file_is_private(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    names = set()
    for path in (tmp_path / "kv").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        names.add(path.name.split("-")[0])
    assert names == {"lock", "segment", "namespace"}


# --- reads that fail at open


def test_a_disk_error_in_one_header_loses_that_slot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "kv", range(4))
    real = os.preadv

    def broken(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset == place(1):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        if offset == place(2):
            return real(fd, [buffers[0][:100]], offset)  # short
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", broken)
    store = open_store(tmp_path / "kv")
    monkeypatch.undo()
    assert served(store, range(4))[0] == {0, 3}
    assert store.num_quarantined == 2
    store.close()


def test_a_failed_taking_back_leaves_the_old_block_for_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv", range(2))
    store = open_store(tmp_path / "kv")

    def broken(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError):
        write(store, [5], first_slot=0)
    with pytest.raises(StoreError):
        store.forget(Slot(1))
    monkeypatch.undo()
    assert store.find(label(0)) is None and store.find(label(1)) is None and store.find(label(5)) is None
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, [0, 1, 5]) == ({0, 1}, set(), set())
    store.close()


@pytest.mark.parametrize("call", [0, 1, 2])
def test_a_write_that_fails_half_way_is_found_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    filled(tmp_path / "kv", range(2))
    store = open_store(tmp_path / "kv")
    real, calls = os.pwrite, 0

    def broken(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls == call + 1:  # taking back, block, header: each written in part
            real(fd, data[:60], offset)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError) as error:
        write(store, [5], first_slot=0)
    assert error.value.errno == errno.EIO and calls == call + 1
    monkeypatch.undo()
    assert store.find(label(5)) is None
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 0)
    store.close()
    store = open_store(tmp_path / "kv")
    right, refused, wrong = served(store, [0, 1, 5])
    assert right == {1} and not refused and not wrong
    write(store, [5], first_slot=0)
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, [0, 1, 5])[0] == {1, 5}
    store.close()


# --- other models, and age


def test_another_geometry_is_counted_not_read_and_given_up_when_room_is_short(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(40), of=1)
    on_disk = allocated_bytes(tmp_path / "kv")
    store = open_store(tmp_path / "kv", shape=OTHER_SHAPE)
    assert (store.num_found, store.num_quarantined) == (0, 0)
    assert store.used_bytes() == on_disk
    write(store, range(3), of=2)
    assert served(store, range(40), of=1) == (set(), set(), set())
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(40), of=1)[0] == set(range(40))  # there was room for both
    store.close()
    store = open_store(tmp_path / "kv", shape=OTHER_SHAPE)
    write(store, range(store.num_slots), of=2)
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES
    assert store.peak_bytes() <= BUDGET_BYTES
    assert served(store, range(store.num_slots), of=2)[0] == set(range(store.num_slots))
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv")
    assert store.num_found == 0
    store.close()


def test_a_segment_of_a_later_version_is_left_alone_until_room_is_short(tmp_path: Path) -> None:
    filled(tmp_path / "kv", EVERY)
    path = segments(tmp_path / "kv")[0]
    edit(path, 8, lambda _: b"\x02\x00", 2)
    data = path.read_bytes()
    store = open_store(tmp_path / "kv")
    per_segment = (len(data) - PAGE_BYTES) // SLOT_BYTES
    assert served(store, EVERY)[0] == set(EVERY) - set(range(per_segment))
    write(store, range(per_segment, 40), first_slot=0)
    store.close()
    assert path.read_bytes() == data
    store = open_store(tmp_path / "kv")
    write(store, range(store.num_slots))
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES
    assert not path.exists() or path.read_bytes()[8] == 1  # its name taken anew
    assert served(store, range(store.num_slots))[0] == set(range(store.num_slots))
    store.close()


def test_of_other_models_files_those_opened_longest_ago_go_first(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    filled(folder, range(20), of=1)
    old = set(segments(folder))
    write_more = open_store(folder)
    write(write_more, range(100, 120), of=2, first_slot=20)
    write_more.close()
    young = set(segments(folder)) - old
    age(folder, 1, days=5)
    age(folder, 2, days=3)
    store = open_store(folder, shape=OTHER_SHAPE)
    files = {path.open("rb"): path in young for path in segments(folder)}  # names are taken anew, descriptors are not
    gone: list[bool] = []
    for slot in range(store.num_slots):
        write(store, [slot], of=3)
        for file in [file for file in files if os.fstat(file.fileno()).st_nlink == 0]:
            gone.append(files.pop(file))
            file.close()
        assert store.used_bytes() <= BUDGET_BYTES
    store.check_integrity()
    store.close()
    assert len(gone) == len(old | young) and gone == sorted(gone) and 0 < sum(gone) < len(gone)


def test_slots_of_found_blocks_are_handed_out_last_oldest_namespace_first(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    store = open_store(folder)
    for of, first in ((1, 0), (2, 5), (3, 10)):
        write(store, range(first, first + 5), of=of)
    num_slots = store.num_slots
    store.close()
    age(folder, 1, days=2)
    age(folder, 2, days=9)
    age(folder, 3, days=20)  # expired
    store = open_store(folder)
    held = store.held_back()
    assert held == [*range(5, 10), *range(5)]  # least recently opened first, then as they were written
    pool = SlotPool(store.num_slots)
    pool.hold_back(held)
    order = [pool.take() for _ in range(num_slots)]
    assert order == [*range(10, num_slots), *held]  # the expired before the folder grows
    pool.check_integrity()
    store.find(label(5, of=2))  # now it is in use
    assert store.held_back() == [*range(5), *range(5, 10)]
    store.close()


@pytest.mark.parametrize(("ttl_days", "is_held"), [(30, True), (20.5, True), (19.5, False), (0, False)])
def test_the_time_to_live_is_the_stores(tmp_path: Path, ttl_days: float, is_held: bool) -> None:
    filled(tmp_path / "kv", range(3))
    age(tmp_path / "kv", 0, days=20)
    store = open_store(tmp_path / "kv", namespace_ttl_s=ttl_days * DAY_S)
    assert bool(store.held_back()) is is_held
    assert served(store, range(3))[0] == {0, 1, 2}  # found until it is overwritten
    store.close()


def test_slots_that_cost_another_models_file_are_held_back_by_that_files_age(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    filled(folder, range(40), of=1)
    age(folder, 1, days=1)
    store = open_store(folder, shape=OTHER_SHAPE)
    held = store.held_back()
    assert held == list(range(held[0], store.num_slots)) and 0 < held[0] < store.num_slots
    write(store, range(held[0]), of=2)
    assert len(store._space.others) > 0
    num_others = len(store._space.others)
    write(store, [held[0]], of=2)
    assert len(store._space.others) < num_others
    store.close()
    age(folder, 1, days=30)
    store = open_store(folder, shape=OTHER_SHAPE)
    assert not set(store.held_back()) & set(range(len(store.found()), store.num_slots))
    store.close()


def test_namespaces_without_a_block_leave_no_file(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    for of in range(300):
        assert store.find(label(0, of=of)) is None
    write(store, range(3), of=7)
    assert len(list((tmp_path / "kv").glob("namespace-*"))) <= 256
    assert store.used_bytes() == allocated_bytes(tmp_path / "kv") <= BUDGET_BYTES
    store.close()
    open_store(tmp_path / "kv").close()
    assert [path.name for path in (tmp_path / "kv").glob("namespace-*")] == [f"namespace-{namespace(7).hex()}"]


def test_a_namespace_file_that_cannot_be_written_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "utime", broken)
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    assert served(store, range(3))[0] == {0, 1, 2}
    store.close()


# --- the control: these faults do reach the bytes


@pytest.mark.parametrize("fault", ["payload", "live swap", "old generation"])
def test_with_verification_switched_off_the_same_faults_give_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    filled(tmp_path / "kv", range(4))
    path = segments(tmp_path / "kv")[0]
    if fault == "payload":
        flip(path, place(1, HEADER_BYTES + 100))
    store = open_store(tmp_path / "kv")
    if fault == "live swap":
        data = path.read_bytes()
        edit(path, place(1, HEADER_BYTES), lambda _: data[place(2, HEADER_BYTES) : place(3)], SHAPE.block_bytes)
    elif fault == "old generation":
        data = path.read_bytes()
        write(store, [50], first_slot=1)
        edit(path, place(1, HEADER_BYTES), lambda _: data[place(1, HEADER_BYTES) : place(2)], SHAPE.block_bytes)
    number = 50 if fault == "old generation" else 1
    assert served(store, [number]) == (set(), {number}, set())
    monkeypatch.setattr("kvtier.stores.slot_reader._verify", lambda *_: None)
    assert served(store, [number]) == (set(), set(), {number})
    store.close()


def test_with_verification_of_headers_switched_off_a_torn_one_gives_wrong_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv", range(3))
    # Block 2's identity in block 1's header, as a torn write of two headers could leave it.
    identity = label(2).identity
    edit(segments(tmp_path / "kv")[0], place(1, 48), lambda _: identity, 32)
    edit(segments(tmp_path / "kv")[0], place(1, 80), lambda _: (10**6).to_bytes(8, "little"), 8)
    edit(segments(tmp_path / "kv")[0], place(1, 128 + 3 * 24), lambda _: label(2).content, len(label(2).content))
    store = open_store(tmp_path / "kv")
    assert served(store, [2]) == ({2}, set(), set())
    store.close()
    monkeypatch.setattr("kvtier.stores.slot_format.are_signed", lambda raw, rows, lengths: np.ones(len(rows), bool))
    store = open_store(tmp_path / "kv")
    assert served(store, [2]) == (set(), set(), {2})
    store.close()


def test_segments_are_synced_in_order_for_power_loss_and_never_for_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    write_real, sync_real = Segment.write, Segment.sync

    def writing(self: Segment, offset_bytes: int, data: np.ndarray) -> None:
        inside = (offset_bytes - PAGE_BYTES) % SLOT_BYTES
        calls.append("superblock" if offset_bytes < PAGE_BYTES else "block" if inside else "header")
        write_real(self, offset_bytes, data)

    def syncing(self: Segment) -> None:
        calls.append("sync")
        sync_real(self)

    monkeypatch.setattr(Segment, "write", writing)
    monkeypatch.setattr(Segment, "sync", syncing)
    for survives, expected in (
        (Survives.POWER_LOSS, ["superblock", "sync", "block", "sync", "header", "sync"]),
        (Survives.KILL, ["superblock", "block", "header"]),
    ):
        calls.clear()
        store = open_store(tmp_path / survives.value, survives=survives)
        write(store, [0])
        assert calls == expected
        calls.clear()
        write(store, [0])
        assert calls == ["header", *expected[2 if "sync" in expected else 1 :]]
        calls.clear()
        store.forget(Slot(0))
        assert calls == (["header", "sync"] if "sync" in expected else ["header"])
        store.close()
