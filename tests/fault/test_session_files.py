"""Sessions in an nvme folder: whole or not at all, within the budget, and whatever somebody else put in their place."""

from __future__ import annotations

import errno
import hashlib
import logging
import math
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import BudgetError, ClosedError, ConfigError, FolderInUseError, StoreError
from kvtier.rate import Rate
from kvtier.session_record import CHECKSUM_BYTES, SessionRecord, encode
from kvtier.stores import segment
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder_entries import session_name
from kvtier.stores.nvme import NvmeStore, min_budget_bytes
from kvtier.stores.nvme_layout import SESSION_ENTRY_BYTES, sessions_room_bytes
from kvtier.stores.session_files import MAX_FILE_BYTES
from kvtier.system import allocated_bytes, open_fds
from kvtier.types import Compression, Slot, Survives
from tests.fault.folders import SHAPE, SLOT_BYTES, block, filled, flip, label, open_store, read, served, write
from tests.fault.test_fsck import as_nobody
from tests.sessions import record

ROOT = Path(__file__).parents[2]
NUM_KILLS = 50


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("session-*"))


def path_of(folder: Path, kept: SessionRecord) -> Path:
    return folder / session_name(kept.key())


def save(folder: Path, *records: SessionRecord) -> None:
    store = open_store(folder)
    for each in records:
        store.sessions.save(each)
    store.close()


def names(store: NvmeStore) -> set[str]:
    return {each.name for each in store.sessions.load()}


# --- what outlives the process


@pytest.mark.parametrize("survives", Survives)
def test_the_next_process_finds_what_was_saved_last(tmp_path: Path, survives: Survives) -> None:
    store = open_store(tmp_path / "kv", survives=survives)
    kept = [record(name) for name in ("alice", "", "../../etc/passwd", "\x1b[2J", "\udcff", "x" * 5000)]
    other_salt = replace(record("alice", 7), salt=b"o" * 32)
    for each in (*kept, other_salt):
        store.sessions.save(each)
    longer = replace(kept[0], token_ids=array("i", range(3000)), used_s=1.8e9, is_pinned=True, ttl_s=60.0)
    store.sessions.save(longer)
    store.sessions.delete(kept[1].key())
    store.sessions.delete(kept[1].key())
    expected = sorted([longer, *kept[2:], other_salt], key=lambda each: each.key())
    assert sorted(store.sessions.load(), key=lambda each: each.key()) == expected
    store.close()
    store = open_store(tmp_path / "kv")
    assert sorted(store.sessions.load(), key=lambda each: each.key()) == expected
    assert len(files(store.folder)) == 6
    for name in files(store.folder):
        status = (store.folder / name).lstat()
        assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        assert len(name) == len("session-") + 64
    store.close()


def test_blocks_are_found_by_a_records_labels(tmp_path: Path) -> None:
    kept = record("alice", num_tokens=3 * SHAPE.block_tokens + 5, block_tokens=SHAPE.block_tokens)
    store = open_store(tmp_path / "kv")
    labels = kept.labels()
    for number, each in enumerate(labels):
        store.write(Slot(number), block(number), each)
    store.sessions.save(kept)
    store.close()
    store = open_store(tmp_path / "kv")
    (again,) = store.sessions.load()
    assert store.find_all(again.labels()) == [0, 1, 2, 3]
    other = replace(again, token_ids=array("i", [1, *again.token_ids[1:]]))
    assert store.find_all(other.labels()) == [None] * 4
    store.close()


def test_a_temporary_folder_keeps_none(tmp_path: Path) -> None:
    store = NvmeStore(SHAPE, 1 << 20, tmp_path / "kv", False, reserve_free_frac=0.0)
    assert store.sessions.load() == [] and store.sessions.room_bytes == 0
    with pytest.raises(StoreError, match=r"set tiers\.nvme\.path") as error:
        store.sessions.save(record())
    assert error.value.errno == errno.EDQUOT
    store.sessions.delete(record().key())
    assert files(store.folder) == []
    store.close()


def test_a_closed_store_refuses(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    store.sessions.save(record())
    store.close()
    for call in (lambda: store.sessions.save(record()), store.sessions.load, lambda: store.sessions.delete(b"k" * 32)):
        with pytest.raises(ClosedError):
            call()
    assert files(tmp_path / "kv") == [session_name(record().key())]


def test_a_key_of_another_length_is_no_file_name(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    for key in (b"", b"k" * 31, b"../" * 11):
        with pytest.raises(ValueError, match="32 bytes"):
            store.sessions.delete(key)
    store.close()


@pytest.mark.parametrize("survives", Survives)
def test_the_medium_is_waited_for_only_where_power_may_be_lost(
    tmp_path: Path, survives: Survives, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path / "kv", survives=survives)
    synced: list[str] = []
    real_fsync, real_rename = os.fsync, os.rename

    def syncing(fd: int) -> None:
        synced.append("folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "file")
        real_fsync(fd)

    def renaming(*arguments: str, **more: int) -> None:
        synced.append("rename")
        real_rename(*arguments, **more)

    monkeypatch.setattr(os, "fsync", syncing)
    monkeypatch.setattr(os, "rename", renaming)
    store.sessions.save(record())
    store.sessions.delete(record().key())
    expected = {Survives.KILL: ["rename"], Survives.POWER_LOSS: ["file", "rename", "folder", "folder"]}
    assert synced == expected[survives]
    store.close()


def test_two_stores_and_two_threads(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", 8 << 20)
    with pytest.raises(FolderInUseError):
        open_store(tmp_path / "kv")
    other = open_store(tmp_path / "other")
    other.sessions.save(record("alice", 5))
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(60):
                store.sessions.save(record("shared", 10 * number + turn))
                store.sessions.save(record(f"own {number}", turn))
                assert len(store.sessions.load()) >= 2
                assert store.used_bytes() <= 8 << 20
        except BaseException as error:  # whatever it is, it is looked at later
            failed.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert names(store) == {"shared", *(f"own {number}" for number in range(4))}
    assert store.used_bytes() == allocated_bytes(store.folder)
    assert names(other) == {"alice"}
    other.close()
    store.close()


# --- damage


def test_damaged_and_later_files_are_left_out_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kv = tmp_path / "kv"
    kept = [record(name) for name in "abcdefg"]
    save(kv, *kept)
    flip(path_of(kv, kept[0]), 70)
    os.truncate(path_of(kv, kept[1]), 40)
    path_of(kv, kept[2]).rename(path_of(kv, record("z")))  # another's name
    path_of(kv, kept[3]).chmod(0o640)
    path_of(kv, kept[4]).write_bytes(b"")
    later = bytearray(encode(kept[5])[:-CHECKSUM_BYTES])
    later[8] = 2
    path_of(kv, kept[5]).write_bytes(later + hashlib.blake2b(later, digest_size=CHECKSUM_BYTES).digest())
    store = open_store(kv)
    before = {name: (kv / name).read_bytes() for name in files(kv)}
    with caplog.at_level(logging.WARNING, logger="kvtier"):
        assert store.sessions.load() == [kept[6]]
    (warning,) = (each.getMessage() for each in caplog.records)
    assert str(kv) in warning and "6 session files" in warning and "5 damaged, 1 of a later version" in warning
    assert (store.sessions.num_damaged, store.sessions.num_future) == (5, 1)
    assert before == {name: (kv / name).read_bytes() for name in files(kv)}
    assert store.used_bytes() == allocated_bytes(kv)
    for each in (kept[0], kept[1], kept[3], record("z")):
        store.sessions.save(each)
    assert names(store) == {"a", "b", "d", "z", "g"}
    assert (store.sessions.num_damaged, store.sessions.num_future) == (1, 1)
    store.close()


def test_a_file_of_absurd_length_is_not_read(tmp_path: Path) -> None:
    kept = record()
    save(tmp_path / "kv", kept)
    os.truncate(path_of(tmp_path / "kv", kept), MAX_FILE_BYTES + 1)
    store = open_store(tmp_path / "kv")
    before = int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert store.sessions.load() == [] and store.sessions.num_damaged == 1
    assert int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) - before < MAX_FILE_BYTES >> 11
    store.close()


def test_what_was_not_finished_is_removed_by_the_next_open(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    save(kv, record())
    (kv / (session_name(record().key()) + ".new")).write_bytes(encode(record())[:50])
    (kv / (session_name(record("b").key()) + ".new")).write_bytes(b"")
    store = open_store(kv)
    assert store.sessions.load() == [record()]
    assert files(kv) == [session_name(record().key())]
    assert store.used_bytes() == allocated_bytes(kv)
    store.close()


@pytest.mark.parametrize("what", ["symlink", "folder", "fifo"])
@pytest.mark.parametrize("suffix", ["", ".new"])
def test_what_is_no_file_of_ours_is_refused_at_open(tmp_path: Path, what: str, suffix: str) -> None:
    kv, outside = tmp_path / "kv", tmp_path / "outside"
    save(kv, record("b"))
    outside.write_bytes(encode(record()))
    outside.chmod(0o600)
    plant(what, kv / (session_name(record().key()) + suffix), outside)
    with pytest.raises(ConfigError, match=session_name(record().key())):
        open_store(kv)
    assert outside.read_bytes() == encode(record())


@pytest.mark.parametrize("what", ["symlink", "folder", "fifo"])
@pytest.mark.parametrize("suffix", ["", ".new"])
def test_what_is_planted_under_a_live_store_is_neither_read_nor_written_through(
    tmp_path: Path, what: str, suffix: str
) -> None:
    kv, outside = tmp_path / "kv", tmp_path / "outside"
    store = open_store(kv)
    store.sessions.save(record())
    outside.write_bytes(encode(record()))
    outside.chmod(0o600)
    name = session_name(record().key())
    if not suffix:
        (kv / name).unlink()
    plant(what, kv / (name + suffix), outside)
    assert store.sessions.load() == ([record()] if suffix else [])
    newer = record(num_tokens=99)
    if what == "folder":
        with pytest.raises(StoreError, match=name):
            store.sessions.save(newer)
    else:
        store.sessions.save(newer)
        assert store.sessions.load() == [newer] and (kv / name).lstat().st_nlink == 1
    assert outside.read_bytes() == encode(record())
    store.close()


def plant(what: str, path: Path, target: Path) -> None:
    match what:
        case "symlink":
            path.symlink_to(target)
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)


def test_a_hard_link_is_not_written_through(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    (tmp_path / "outside").write_bytes(b"precious")
    os.link(tmp_path / "outside", tmp_path / "kv" / (session_name(record().key()) + ".new"))
    store.sessions.save(record())
    assert (tmp_path / "outside").read_bytes() == b"precious" and store.sessions.load() == [record()]
    store.close()


# --- budget


@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("budget_bytes", [1 << 20, 3 << 20, 16 << 20])
def test_du_stays_within_the_budget_with_all_slots_and_all_sessions(
    tmp_path: Path, budget_bytes: int, compression: Compression
) -> None:
    store = open_store(tmp_path / "kv", budget_bytes, compression=compression)
    room_bytes = store.sessions.room_bytes
    assert room_bytes == max(64 << 10, budget_bytes // 64)
    written = 0
    for slot in [*range(0, store.num_slots, 2), *range(1, store.num_slots, 2)]:
        try:
            store.write(Slot(slot), block(slot % 7), label(slot))
        except StoreError:
            continue
        written += 1
    assert written > 0.8 * (budget_bytes - room_bytes - (64 << 10)) / SLOT_BYTES
    saved = 0
    with pytest.raises(
        StoreError, match=rf"\({room_bytes} bytes\) of tiers\.nvme\.budget .*: delete sessions"
    ) as error:
        for number in range(1000):
            store.sessions.save(record(f"s{number}", 100))
            saved += 1
    assert error.value.errno == errno.EDQUOT
    assert saved == room_bytes // (PAGE_BYTES + SESSION_ENTRY_BYTES)
    os.sync()
    assert store.used_bytes() == allocated_bytes(store.folder) <= budget_bytes
    store.check_integrity()
    assert len(store.sessions.load()) == saved
    with pytest.raises(StoreError, match="delete sessions"):
        store.sessions.save(record("s0", 101))  # the older one stands
    assert record("s0", 100) in store.sessions.load()
    store.sessions.delete(record("s1").key())
    store.sessions.save(record("s0", 101))
    assert store.used_bytes() == allocated_bytes(store.folder)
    slots = store.num_slots
    store.close()
    store = open_store(tmp_path / "kv", budget_bytes, compression=compression)
    assert store.num_slots == slots and store.num_found == written
    assert len(store.sessions.load()) == saved - 1
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("more_bytes", [0, PAGE_BYTES, 15 * PAGE_BYTES, 1 << 20, 1 << 30])
def test_sessions_never_take_the_room_of_the_first_slot(more_bytes: int) -> None:
    budget_bytes = min_budget_bytes(SHAPE) + more_bytes
    room_bytes = sessions_room_bytes(budget_bytes, SHAPE)
    assert 0 <= room_bytes <= more_bytes and room_bytes % PAGE_BYTES == 0
    assert room_bytes <= max(64 << 10, budget_bytes // 64)


def test_the_smallest_budget_has_a_slot_and_no_session(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv", min_budget_bytes(SHAPE))
    assert store.num_slots == 1
    with pytest.raises(StoreError, match=r"raise tiers\.nvme\.budget"):
        store.sessions.save(record())
    store.close()


def test_sessions_of_a_larger_budget_are_kept_and_counted_or_the_budget_is_refused(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    store = open_store(kv, 64 << 20)
    for number in range(100):
        store.sessions.save(record(f"s{number}"))
    store.close()
    used_bytes = 100 * (PAGE_BYTES + SESSION_ENTRY_BYTES)
    least_bytes = min_budget_bytes(SHAPE) + used_bytes
    with pytest.raises(BudgetError, match=rf"its minimum is \S+ \({least_bytes} bytes\)"):
        open_store(kv, least_bytes - 1)
    assert len(files(kv)) == 100
    store = open_store(kv, least_bytes + SLOT_BYTES)
    assert store.num_slots == 2 and len(store.sessions.load()) == 100
    write(store, range(2))
    with pytest.raises(StoreError, match="delete sessions"):
        store.sessions.save(record("one more"))
    assert store.used_bytes() == allocated_bytes(kv) <= least_bytes + SLOT_BYTES
    store.check_integrity()
    store.close()


def test_a_session_too_long_for_a_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvtier.stores.session_files.MAX_FILE_BYTES", 5000)
    store = open_store(tmp_path / "kv")
    store.sessions.save(record(num_tokens=1000))
    with pytest.raises(StoreError, match=r"at most 5kB \(5000 bytes\)"):
        store.sessions.save(record(num_tokens=1300))
    assert store.sessions.load() == [record(num_tokens=1000)]
    store.close()


def test_saving_counts_as_writing_and_is_refused_when_that_is_used_up(tmp_path: Path) -> None:
    limit_bytes = 10 * SLOT_BYTES
    store = open_store(tmp_path / "kv", max_writes=Rate(limit_bytes, 86400))
    store.sessions.save(record(num_tokens=2000))
    assert store.writes.written_bytes == 3 * PAGE_BYTES
    with pytest.raises(StoreError, match=r"tiers\.nvme\.max_writes is used up"):
        for turn in range(100):
            store.sessions.save(record(num_tokens=2000, used_s=float(turn)))
    assert limit_bytes - 3 * SLOT_BYTES < store.writes.written_bytes <= limit_bytes
    assert store.sessions.load() == [record(num_tokens=2000, used_s=turn - 1.0)]
    store.close()


# --- a disk that fails


@pytest.mark.parametrize("call", ["open", "pwrite", "fchmod", "rename", "fsync"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_a_save_that_fails_leaves_the_older_record_and_nothing_else(
    tmp_path: Path, call: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = tmp_path / "kv"
    store = open_store(kv, survives=Survives.POWER_LOSS)
    store.sessions.save(record())
    fds, failures = open_fds(), 0
    for skipped in range(3):
        real, calls = getattr(os, call), 0

        def failing(*arguments: object, **more: object) -> object:
            nonlocal calls
            calls += 1
            if calls == skipped + 1:  # noqa: B023  # called in this very turn of the loop
                raise OSError(code, os.strerror(code))
            return real(*arguments, **more)  # noqa: B023  # as above

        newer = record(num_tokens=200 + skipped)
        before = store.sessions.load()
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                store.sessions.save(newer)
                continue
            except StoreError as error:
                assert error.errno == code and session_name(newer.key()) in str(error)
                failures += 1
        is_last = call == "fsync" and skipped == 1  # the folder's: either stands
        assert store.sessions.load() == ([newer] if is_last else before)
        assert files(kv) == [session_name(newer.key())]
        assert store.used_bytes() == allocated_bytes(kv)
    assert failures and open_fds() == fds
    store.sessions.save(record(num_tokens=5))
    store.close()
    store = open_store(kv)
    assert store.sessions.load() == [record(num_tokens=5)]
    store.close()


def test_a_file_size_limit_is_a_store_error_and_the_older_record_stands(tmp_path: Path) -> None:
    run("""
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
    """, tmp_path, errno.EFBIG)  # fmt: skip


def test_a_full_disk_is_a_store_error_and_the_older_record_stands(tmp_path: Path) -> None:
    run(
        "fill(folder)", tmp_path, errno.ENOSPC, mount="mount -t tmpfs -o size=1m,mode=700 kvtier",
    )  # fmt: skip


def test_a_folder_that_may_not_be_written_is_a_store_error_and_the_older_record_stands() -> None:
    """A real one. (A disk that turns read-only cannot be made while the lock is open: EROFS is injected above.)"""
    with tempfile.TemporaryDirectory() as outer:  # pytest's folders let no other user in
        kv = Path(outer) / "kv"
        kv.mkdir()
        with as_nobody(Path(outer), kv):
            store = open_store(kv)
            store.sessions.save(record())
            kv.chmod(0o500)
            for name in ("alice", "b"):
                with pytest.raises(StoreError, match="saving a session: Permission denied") as error:
                    store.sessions.save(record(name, 5000))
                assert error.value.errno == errno.EACCES
            with pytest.raises(StoreError, match="deleting a session: Permission denied"):
                store.sessions.delete(record().key())
            assert store.sessions.load() == [record()]
            assert files(kv) == [session_name(record().key())]
            assert store.used_bytes() == allocated_bytes(kv)
            kv.chmod(0o700)
            store.sessions.delete(record().key())
            store.sessions.save(record("b", 5000))
            store.close()
            store = open_store(kv)
            assert store.sessions.load() == [record("b", 5000)]
            store.close()


def run(limit: str, folder: Path, code: int, mount: str = "") -> None:
    """In a process of its own: save, come under the limit, save more; what stands then, and after it is lifted."""
    program = f"""
import os, sys
from pathlib import Path
from kvtier.errors import StoreError
from kvtier.system import allocated_bytes
from tests.fault.folders import open_store
from tests.sessions import record

def fill(folder):
    with open(folder / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            pass

folder = Path(sys.argv[1])
store = open_store(folder / "kv", 640 << 10)
store.sessions.save(record())
store.sessions.save(record("b"))
{textwrap.dedent(limit).strip()}
for name in ("alice", "c"):
    try:
        store.sessions.save(record(name, 5000))
        raise SystemExit("there was no limit")
    except StoreError as error:
        assert error.errno == {code}, error
assert sorted(each.name for each in store.sessions.load()) == ["alice", "b"]
assert record() in store.sessions.load()
assert len(list((folder / "kv").glob("session-*"))) == 2
assert store.used_bytes() == allocated_bytes(folder / "kv")
store.sessions.delete(record().key())
assert store.sessions.load() == [record("b")]
print("as it should be")
"""
    command = [sys.executable, "-c", program, str(folder)]
    if mount:
        probe = ["unshare", "-rm", "sh", "-c", f'{mount} "$0"', str(folder)]
        if subprocess.run(probe, capture_output=True, check=False).returncode:
            pytest.skip("no mount namespaces here; the file size limit test covers the path")
        command = ["unshare", "-rm", "sh", "-c", f'{mount} "$0" && exec "$@"', str(folder), *command]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.stdout == "as it should be\n", done.stdout + done.stderr


# --- kill -9


def turned(turn: int) -> SessionRecord:
    """A conversation after so many turns, none of whose records is the beginning of another's."""
    return record(token_ids=array("i", [turn]) * (20_000 + turn % 3000), used_s=float(turn))


@pytest.mark.slow
def test_a_kill_in_the_middle_of_saving_leaves_the_older_record_or_the_newer(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    code = f"""
        import os, sys
        from pathlib import Path
        from tests.fault.folders import open_store
        from tests.fault.test_session_files import turned
        for line in sys.stdin:
            pid = os.fork()
            if pid == 0:
                store = open_store(Path({str(kv)!r}), 16 << 20)
                turn = int(line)
                while True:
                    record = turned(turn)
                    os.write(1, b"begun %d\\n" % turn)
                    store.sessions.save(record)
                    os.write(1, b"ended %d\\n" % turn)
                    turn += 1
            os.write(1, b"pid %d\\n" % pid)
            os.waitpid(pid, 0)
            os.write(1, b"died\\n")
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    dice, middle, unfinished, turn = random.Random(5), 0, 0, 0
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdin is not None and starter.stdout is not None
        for _ in range(NUM_KILLS):
            starter.stdin.write(f"{turn}\n")
            starter.stdin.flush()
            begun, ended, pid = -1, turn - 1, 0
            stop_after = turn + dice.randrange(1, 4)
            is_dead = False
            for line in starter.stdout:
                word, *rest = line.split()
                if word == "pid":
                    pid = int(rest[0])
                elif word == "begun":
                    begun = int(rest[0])
                elif word == "ended":
                    ended = int(rest[0])
                else:
                    break
                if pid and begun >= stop_after and not is_dead:
                    time.sleep(dice.random() * 0.0003)
                    os.kill(pid, signal.SIGKILL)
                    is_dead = True
            middle += begun > ended
            unfinished += len(files(kv)) == 2
            store = open_store(kv, 16 << 20)
            (found,) = store.sessions.load()
            number = int(found.used_s)
            assert ended <= number <= begun, (ended, number, begun)
            assert found == turned(number)
            assert store.sessions.num_damaged == 0 and len(files(kv)) == 1
            store.check_integrity()
            store.close()
            turn = begun + 1
        starter.stdin.close()
    assert middle > NUM_KILLS // 2  # or the test has looked at nothing
    assert unfinished > 0


# --- erase


def pieces_of(number: int) -> list[bytes]:
    """Pieces of a block that a search of the files would find."""
    data = block(number).numpy().tobytes()
    return [data[at : at + 64] for at in range(0, len(data) - 64, 512)]


def holds_any(kv: Path, pieces: list[bytes]) -> bool:
    files = [path.read_bytes() for path in kv.iterdir() if path.is_file()]
    return any(piece in data for data in files for piece in pieces)


@pytest.mark.parametrize("survives", Survives)
@pytest.mark.parametrize("can_zero", [True, False])
def test_an_erased_block_is_gone_from_the_files(
    tmp_path: Path, survives: Survives, can_zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not can_zero:

        def refuse(*_: object) -> None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

        monkeypatch.setattr("kvtier.stores.segment._change", refuse)
    kv = tmp_path / "kv"
    filled(kv, range(10))
    store = open_store(kv, survives=survives)
    store.write(Slot(10), block(10))  # no label
    before, written = allocated_bytes(kv), store.writes.written_bytes
    assert holds_any(kv, pieces_of(4)) and holds_any(kv, pieces_of(10))
    for slot in (4, 4, 10, store.num_slots - 1):
        store.erase(Slot(slot))
    for number in (4, 10):
        assert not holds_any(kv, pieces_of(number))
        with pytest.raises(StoreError, match="nothing readable"):
            read(store, number)
    if not can_zero:
        assert store.writes.written_bytes - written >= 3 * SLOT_BYTES
    assert store.find(label(4)) is None and store.label(Slot(4)) is None and 4 not in store.found()
    assert store.find_all([label(3), label(4), label(5)]) == [3, None, 5]
    assert served(store, range(10))[0] == set(range(10)) - {4}
    assert allocated_bytes(kv) == store.used_bytes() <= before
    store.check_integrity()
    write(store, [40], first_slot=4)
    assert torch.equal(read(store, 4), block(40))
    store.erase(Slot(4))
    store.close()
    assert not holds_any(kv, pieces_of(40))
    store = open_store(kv)
    assert served(store, range(10))[0] == set(range(10)) - {4} and store.num_quarantined == 0
    store.close()


def test_an_erased_compressed_block_gives_its_pages_back(tmp_path: Path) -> None:
    kv = tmp_path / "kv"
    filled(kv, range(10), compression=Compression.ZSTD)
    store = open_store(kv, compression=Compression.ZSTD)
    before = allocated_bytes(kv)
    data = b"".join(path.read_bytes() for path in kv.glob("segment-*"))
    stored = data[PAGE_BYTES + 4 * SLOT_BYTES + PAGE_BYTES :][: SLOT_BYTES - PAGE_BYTES]
    pieces = [stored[at : at + 64] for at in range(0, 4096, 512)]
    assert all(any(piece) for piece in pieces)
    store.erase(Slot(4))
    store.erase(Slot(4))
    assert not holds_any(kv, pieces)
    assert allocated_bytes(kv) == store.used_bytes() <= before - 2 * PAGE_BYTES
    assert served(store, range(10))[0] == set(range(10)) - {4}
    store.check_integrity()
    write(store, [40], first_slot=4)
    store.check_integrity()
    store.close()
    store = open_store(kv, compression=Compression.ZSTD)
    assert served(store, [*range(10), 40])[0] == {*range(10), 40} - {4}
    store.close()


@pytest.mark.parametrize("fails_at", [1, 2])
def test_an_erasure_that_fails_is_told_and_its_order_is_safe(
    tmp_path: Path, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "kv", range(3))
    store = open_store(tmp_path / "kv")
    real, calls = os.pwrite, 0

    def broken(fd: int, data: memoryview, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls >= fails_at:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, data, offset)

    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", broken)
        patch.setattr("kvtier.stores.segment._change", refuse)
        with pytest.raises(StoreError, match="erasing slot 1"):
            store.erase(Slot(1))
    assert calls == fails_at
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 1)
    assert served(store, range(3))[0] == {0, 2}
    assert store.copies([label(1)]) == ([1] if fails_at == 1 else [])  # what is to be tried again
    store.check_integrity()
    store.close()
    store = open_store(tmp_path / "kv")
    assert served(store, range(3)) == ({0, 1, 2} if fails_at == 1 else {0, 2}, set(), set())
    assert store.num_quarantined == 0
    store.close()


def die_at_call(number: int) -> None:
    """The process is killed at that call, from 0, of those that change a file."""
    left = number

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return real(*arguments)

        return call

    os.pwrite = dying(os.pwrite)
    segment._change = dying(segment._change)


@pytest.mark.parametrize("compression", Compression)
def test_a_kill_in_the_middle_of_erasing_leaves_the_block_or_nothing(tmp_path: Path, compression: Compression) -> None:
    """The process dies at each call that changes the file, in turn."""
    seen = []
    for number in range(4):
        kv = tmp_path / str(number)
        filled(kv, range(3), compression=compression)
        pid = os.fork()
        if pid == 0:  # no handler of pytest's runs
            try:
                store = open_store(kv, compression=compression)
                die_at_call(number)
                store.erase(Slot(1))
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(pid, 0)[1]
        assert status in (0, signal.SIGKILL)
        store = open_store(kv, compression=compression)
        right, refused, wrong = served(store, range(3))
        assert {0, 2} <= right and not refused and not wrong and store.num_quarantined == 0
        seen.append((1 in right, status == 0))
        store.close()
        if status == 0:
            break
    assert seen == [(True, False), (False, False), (False, True)]


def test_older_copies_of_a_block_are_named_so_that_they_can_be_erased(tmp_path: Path) -> None:
    """A block that was evicted and written again lies in two slots: without the newer the older one is found later."""
    kv = tmp_path / "kv"
    store = open_store(kv)
    for slot in (0, 5, 3):
        write(store, [1], first_slot=slot)
    write(store, [2], first_slot=1)
    assert store.find(label(1)) == 3 and store.copies([label(1)]) == [0, 3, 5]
    assert store.copies([label(1), label(2), label(9)]) == [0, 1, 3, 5] and store.copies([]) == []
    write(store, [7], first_slot=5)
    assert store.copies([label(1)]) == [0, 3]
    store.close()
    store = open_store(kv)
    assert store.num_quarantined == 1 and store.copies([label(1)]) == [0, 3]
    store.erase(Slot(3))
    store.close()
    store = open_store(kv)
    assert store.find(label(1)) == 0  # so erasing what is found is not enough
    write(store, [1], first_slot=4)
    store.close()
    store = open_store(kv)
    assert store.find(label(1)) == 4
    for slot in store.copies([label(1)]):
        store.erase(slot)
    assert store.copies([label(1)]) == [] and not holds_any(kv, pieces_of(1))
    store.check_integrity()
    store.close()
    store = open_store(kv)
    assert store.find(label(1)) is None and served(store, [2, 7])[0] == {2, 7} and store.num_quarantined == 0
    store.close()


# --- many look-ups at once


def test_looking_up_many_is_looking_up_each(tmp_path: Path) -> None:
    filled(tmp_path / "kv", range(40))
    store = open_store(tmp_path / "kv")
    wanted = [label(number, of) for number in range(60) for of in (0, 1)]
    assert store.find_all(wanted) == [store.find(each) for each in wanted]
    assert store.find_all([]) == []
    store.close()
    with pytest.raises(ClosedError):
        store.find_all(wanted)
    temporary = NvmeStore(SHAPE, 1 << 20, tmp_path / "run", False, reserve_free_frac=0.0)
    write(temporary, [0])
    assert temporary.find_all([label(0)]) == [None]
    temporary.close()


def test_infinite_times_to_live_are_kept(tmp_path: Path) -> None:
    save(tmp_path / "kv", record(ttl_s=math.inf), record("b", ttl_s=0.0))
    store = open_store(tmp_path / "kv")
    assert {each.name: each.ttl_s for each in store.sessions.load()} == {"alice": math.inf, "b": 0.0}
    store.close()
