"""Files that somebody or something changed, at rest and under a live store: a row of the table of faults each.

What one fault of a kind costs in detail is in test_restart.py and test_nvme_store.py.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import ConfigError, FolderInUseError, StoreError
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slot_format import HEADER, Geometry
from kvtier.stores.superblock import SUPERBLOCK, superblock
from kvtier.system import allocated_bytes, open_fds
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
    read,
    segments,
    served,
    write,
)
from tests.fault.table import Row, report
from tests.fault.test_restart import craft

NUMBERS = range(27)
"""Three segments of ten slots, of which the last has three free ones."""
PER_SEGMENT = 10

Damage = Callable[[Path, random.Random], None]


def place(number: int, offset_bytes: int = 0) -> int:
    """Where in its segment a byte of the slot of block `number` lies."""
    return PAGE_BYTES + number % PER_SEGMENT * SLOT_BYTES + offset_bytes


def file_of(folder: Path, number: int) -> Path:
    return folder / f"segment-{number // PER_SEGMENT:05d}.kvt"


def in_payload(folder: Path, chance: random.Random) -> None:
    number = chance.choice(NUMBERS)
    at = place(number, HEADER_BYTES + chance.randrange(SHAPE.block_bytes))
    flip(file_of(folder, number), at, chance.randrange(8))


def in_header(folder: Path, chance: random.Random) -> None:
    number = chance.choice(NUMBERS)
    path = file_of(folder, number)
    header = np.frombuffer(path.read_bytes()[place(number) :][: HEADER.itemsize], HEADER)[0]
    flip(path, place(number, chance.randrange(int(header["length"]))), chance.randrange(8))


def in_free_space(folder: Path, chance: random.Random) -> None:
    path, at = chance.choice(
        [
            (file_of(folder, 0), place(chance.randrange(10), HEADER_BYTES - 1 - chance.randrange(3000))),
            (file_of(folder, 27), place(27 + chance.randrange(3), HEADER_BYTES + chance.randrange(SHAPE.block_bytes))),
            (file_of(folder, 10), chance.randrange(SUPERBLOCK.itemsize, PAGE_BYTES)),
        ]
    )
    flip(path, at, chance.randrange(8))


def swap_payloads(folder: Path, chance: random.Random) -> None:
    one, other = chance.sample(NUMBERS, 2)
    size = SHAPE.block_bytes
    first, second = (file_of(folder, each).read_bytes()[place(each, HEADER_BYTES) :][:size] for each in (one, other))
    edit(file_of(folder, one), place(one, HEADER_BYTES), lambda _: second, size)
    edit(file_of(folder, other), place(other, HEADER_BYTES), lambda _: first, size)


def swap_contents(folder: Path, chance: random.Random) -> None:
    one, other = chance.sample(segments(folder), 2)
    first, second = one.read_bytes(), other.read_bytes()
    edit(one, 0, lambda _: second, len(second))
    edit(other, 0, lambda _: first, len(first))


def swap_names(folder: Path, chance: random.Random) -> None:
    one, other = chance.sample(segments(folder), 2)
    aside = folder.parent / "aside"
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def truncate(folder: Path, chance: random.Random) -> None:
    number = chance.choice(NUMBERS)
    os.truncate(file_of(folder, number), chance.randrange(place(number) + SLOT_BYTES))


def extend(folder: Path, chance: random.Random) -> None:
    with chance.choice(segments(folder)).open("ab") as file:
        file.write(chance.randbytes(chance.choice([1, 512, PAGE_BYTES, SLOT_BYTES])))


def delete(folder: Path, chance: random.Random) -> None:
    chance.choice(segments(folder)).unlink()


def tear_headers(folder: Path, chance: random.Random) -> None:
    """One block's header with the identity and content of another, as a torn write could leave it."""
    one, other = chance.sample(NUMBERS[10:], 2)  # whose contents are of one length
    held = label(other)
    path = file_of(folder, one)
    edit(path, place(one, 48), lambda _: held.identity, 32)
    edit(path, place(one, 80), lambda _: (10**6).to_bytes(8, "little"), 8)  # newer
    edit(path, place(one, 116), lambda _: len(held.content).to_bytes(4, "little"), 4)
    edit(path, place(one, 128 + 3 * 24), lambda _: held.content, len(held.content))


def loosen(folder: Path, chance: random.Random) -> None:
    chance.choice(segments(folder)).chmod(0o600 | chance.randrange(1, 0o100))


def by_slot(store: NvmeStore) -> tuple[set[int], set[int], set[int]]:
    """As `served`, of what this process wrote, which it reads without a look-up: as a model's KV is."""
    right, refused, wrong = set(), set(), set()
    for number in NUMBERS:
        try:
            (right if torch.equal(read(store, number), block(number)) else wrong).add(number)
        except StoreError:
            refused.add(number)
    return right, refused, wrong


def attempt(folder: Path, damage: Damage, chance: random.Random, *, live: bool) -> str:
    """Damage a folder once; what became of it: `detected`, `absorbed` or `wrong`."""
    store = open_store(folder)
    write(store, NUMBERS)
    if not live:
        store.close()
    damage(folder, chance)
    if not live:
        store = open_store(folder)
    results = [served(store, NUMBERS)] + ([by_slot(store)] if live else [])
    store.check_integrity()
    assert allocated_bytes(folder) <= BUDGET_BYTES
    store.close()
    # The next process is served nothing wrong either, and the folder is as good as new to it.
    store = open_store(folder)
    results.append(served(store, NUMBERS)) if not live else None
    write(store, range(100, 112), first_slot=0)
    assert served(store, range(100, 112))[0] == set(range(100, 112))
    store.check_integrity()
    assert allocated_bytes(folder) <= BUDGET_BYTES
    store.close()
    if any(wrong for _, _, wrong in results):
        return "wrong"
    return "absorbed" if all(right == set(NUMBERS) for right, _, _ in results) else "detected"


BOTH = (False, True)
DAMAGES: dict[Row, tuple[Damage, tuple[bool, ...], str]] = {
    Row.PAYLOAD_FLIP_AT_REST: (in_payload, (False,), "detected"),
    Row.PAYLOAD_FLIP_LIVE: (in_payload, (True,), "detected"),
    Row.HEADER_FLIP_AT_REST: (in_header, (False,), "detected"),
    Row.HEADER_FLIP_LIVE: (in_header, (True,), "detected"),
    Row.FREE_FLIP: (in_free_space, BOTH, "absorbed"),
    Row.TORN_HEADER: (tear_headers, (False,), "detected"),
    Row.SWAPPED_AT_REST: (swap_payloads, (False,), "detected"),
    Row.SWAPPED_LIVE: (swap_contents, (True,), "detected"),
    Row.RENAMED: (swap_names, BOTH, "absorbed"),
    Row.TRUNCATED_AT_REST: (truncate, (False,), "detected"),
    Row.TRUNCATED_LIVE: (truncate, (True,), "detected"),
    Row.EXTENDED: (extend, BOTH, "absorbed"),
    Row.DELETED_AT_REST: (delete, (False,), "detected"),
    Row.DELETED_LIVE: (delete, (True,), "absorbed"),
    Row.LOOSE_MODE: (loosen, (False,), "detected"),
}
UNCHECKED = {
    Row.TORN_HEADER: ("kvtier.stores.slot_format.are_signed", lambda raw, rows, lengths: np.ones(len(rows), bool)),
}
"""What is switched off for a row's control, and what takes its place; the checksums of slices for all others."""


@pytest.mark.parametrize("row", DAMAGES)
def test_damage_is_detected_or_costs_nothing(
    row: Row, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage, states, expected = DAMAGES[row]
    chance, fds = random.Random(row.name), open_fds()
    became = [
        attempt(tmp_path / f"{state}{turn}", damage, chance, live=state)
        for state in states
        for turn in range(12 // len(states))
    ]
    counts = {word: became.count(word) for word in ("detected", "absorbed", "wrong")}
    assert counts[expected] == len(became), counts
    assert open_fds() == fds
    if row.value.control.value != "n/a":
        monkeypatch.setattr(*UNCHECKED.get(row, ("kvtier.stores.slot_reader._verify", lambda *_: None)))
        unchecked = [attempt(tmp_path / f"unchecked{turn}", damage, chance, live=states[0]) for turn in range(3)]
        counts["wrong_unchecked"] = unchecked.count("wrong")
        assert counts["wrong_unchecked"] > 0
    report(request, row, **counts)


def test_an_older_block_in_the_place_of_a_newer_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "kv")
    write(store, range(12), first_slot=0)
    for number in range(12):
        path = file_of(tmp_path / "kv", number)
        old = path.read_bytes()[place(number) :][:SLOT_BYTES]
        write(store, [50 + number], first_slot=number)
        edit(path, place(number), lambda _, old=old: old, SLOT_BYTES)
        assert store.find(label(number)) is None and store.find(label(50 + number)) is None
        with pytest.raises(StoreError, match="not served"):
            read(store, number)
    monkeypatch.setattr("kvtier.stores.slot_reader._verify", lambda *_: None)
    unchecked = sum(torch.equal(read(store, number), block(number)) for number in range(12))
    store.close()
    report(request, Row.OLD_GENERATION, detected=12, wrong_unchecked=unchecked)


# --- made by somebody


ABSURD: list[dict[str, int]] = [
    {"length": 2**32 - 1, "content_bytes": 2**32 - 1},
    {"length": 2**32 - 1},
    {"length": 0},
    {"length": 7},
    {"length": HEADER_BYTES + 1},
    {"content_bytes": 2**32 - 1},
    {"content_bytes": 2**31},
    {"num_slices": 2**32 - 1, "payload_bytes": 2**64 - 1},
    {"num_slices": 0},
    {"slice_bytes": 2**64 - 1},
    {"payload_bytes": 2**63},
    {"generation": 2**64 - 1},
    {"codec": 2**16 - 1},
    {"version": 2**16 - 1},
]


def test_absurd_lengths_are_quarantined_and_cost_no_memory(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for number, fields in enumerate(ABSURD):
        folder = tmp_path / str(number)
        filled(folder, NUMBERS)
        craft(file_of(folder, 0), number % PER_SEGMENT, **fields)
        tracemalloc.start()
        store = open_store(folder)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 4 << 20
        assert store.num_quarantined == 1
        assert served(store, NUMBERS) == (set(NUMBERS) - {number % PER_SEGMENT}, set(), set())
        store.close()
    for number, num_slots in enumerate([2**32 - 1, 2**31, 10**6]):  # in a superblock, in a file of that many holes
        folder = tmp_path / f"superblock{number}"
        filled(folder, NUMBERS)
        page = superblock(Geometry.of(SHAPE), num_slots)
        edit(file_of(folder, 0), 0, lambda _, page=page: page.tobytes(), PAGE_BYTES)
        os.truncate(file_of(folder, 0), min(PAGE_BYTES + num_slots * SLOT_BYTES, 1 << 43))
        store = open_store(folder)
        assert served(store, NUMBERS) == (set(NUMBERS) - set(range(PER_SEGMENT)), set(), set())
        assert allocated_bytes(folder) <= BUDGET_BYTES
        store.close()
    report(request, Row.ABSURD_HEADER, detected=len(ABSURD) + 3)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("name", ["segment-00042.kvt", "index.pkl"])
def test_no_pickle_is_ever_loaded(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    refused = 0
    pickle.loads(pickle.dumps(Bomb(tmp_path / "armed")))
    assert (tmp_path / "armed").exists()
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        folder = tmp_path / str(protocol)
        filled(folder, NUMBERS)
        (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "exploded"), protocol))
        (folder / name).chmod(0o600)
        try:
            store = open_store(folder)
        except ConfigError as error:
            assert name in str(error)
            refused += 1
            continue
        assert served(store, NUMBERS)[0] == set(NUMBERS)
        assert store.used_bytes() == allocated_bytes(folder) <= BUDGET_BYTES
        store.close()
    assert not (tmp_path / "exploded").exists()
    num_turns = pickle.HIGHEST_PROTOCOL + 1
    assert refused == (num_turns if name == "index.pkl" else 0)
    report(request, Row.PICKLE, detected=refused, absorbed=num_turns - refused)


def test_a_symlink_is_never_followed(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    detected = 0
    precious, held = tmp_path / "precious", tmp_path / "held"
    precious.write_bytes(b"x" * 100_000)
    held.mkdir()
    for name in ("segment-00000.kvt", "segment-00009.kvt", "lock", f"namespace-{namespace(0).hex()}"):
        for target in (precious, held, tmp_path / "nowhere"):
            folder = tmp_path / f"kv{detected}"
            filled(folder, NUMBERS)
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to(target)
            for persistent in (True, False):
                with pytest.raises(ConfigError, match=f"{name} in it is a symlink"):
                    NvmeStore(SHAPE, BUDGET_BYTES, folder, persistent, reserve_free_frac=0.0)
            detected += 1
    (tmp_path / "elsewhere").mkdir(mode=0o755)
    for target in (tmp_path / "elsewhere", precious, tmp_path / "nowhere"):  # the folder itself
        folder = tmp_path / f"kv{detected}"
        folder.symlink_to(target)
        for persistent in (True, False):
            with pytest.raises(ConfigError, match=r"tiers\.nvme\.path: .*/kv\d+ is a symlink.* remove it, or give"):
                NvmeStore(SHAPE, BUDGET_BYTES, folder, persistent, reserve_free_frac=0.0)
        assert folder.readlink() == target
        detected += 1
    assert not list((tmp_path / "elsewhere").iterdir())
    assert (tmp_path / "elsewhere").stat().st_mode & 0o777 == 0o755
    for target in (precious, tmp_path / "nowhere"):  # planted where a live store is about to make its next file
        folder = tmp_path / f"live{detected}"
        store = open_store(folder)
        write(store, range(5))
        (folder / "segment-00001.kvt").symlink_to(target)
        with pytest.raises(StoreError, match=r"segment-00001\.kvt"):
            write(store, range(PER_SEGMENT, 12))
        assert served(store, range(5))[0] == set(range(5))
        store.close()
        detected += 1
    assert precious.read_bytes() == b"x" * 100_000 and not list(held.iterdir()) and not (tmp_path / "nowhere").exists()
    report(request, Row.SYMLINK, detected=detected)


def test_a_symlink_on_the_way_to_the_folder_is_the_users_own(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    filled(tmp_path / "link" / "kv", NUMBERS)
    with contextlib.closing(open_store(tmp_path / "disk" / "kv")) as store:
        assert served(store, NUMBERS)[0] == set(NUMBERS)
        with pytest.raises(FolderInUseError):  # one folder, by whatever way
            open_store(tmp_path / "link" / "kv")


def test_what_another_user_owns_is_refused(
    tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [".", "lock", "segment-00000.kvt", "segment-00002.kvt", f"namespace-{namespace(0).hex()}"]
    for number, name in enumerate(names):
        folder = tmp_path / str(number)
        filled(folder, NUMBERS)
        if os.geteuid() == 0:
            os.chown(folder / name, 12345, -1)
        else:  # nobody else may give files away: then everything here is another user's
            monkeypatch.setattr(os, "geteuid", lambda: 12345)
        before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        for persistent in (True, False):
            with pytest.raises(ConfigError, match=r"belongs to user \d+, not to \d+"):
                NvmeStore(SHAPE, BUDGET_BYTES, folder, persistent, reserve_free_frac=0.0)
        assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}
        monkeypatch.undo()
    report(request, Row.WRONG_OWNER, detected=2 * len(names))
