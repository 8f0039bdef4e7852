"""The count of what is written to a folder: every byte, over restarts, kills, damage and clocks."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import BudgetError, ConfigError
from kvtier.fsck import check_folder
from kvtier.rate import Rate
from kvtier.size import Size
from kvtier.stores.cpu import CpuStore
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.io_choice import MEASURING_BYTES
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.write_ledger import MAX_BYTES, FolderLedger, parse_ledger
from kvtier.system import allocated_bytes
from kvtier.types import BlockShape, Compression, IoMode, Slot
from tests.fault.folders import SHAPE, SLOT_BYTES, block, label, open_store, read, served, write

ROOT = Path(__file__).parents[2]
LIMIT = Rate.parse("1GiB/day")
MOVE_BYTES = SLOT_BYTES + 3 * PAGE_BYTES


def limited(folder: Path, **more: Any) -> NvmeStore:
    return open_store(folder, **{"max_writes": LIMIT, **more})


def fill(store: NvmeStore, numbers: range) -> None:
    """As the tier manager: each write is a move that was let in."""
    for number in numbers:
        assert store.writes.allows()
        store.writes.begin()
        write(store, [number])
        store.writes.end()


@pytest.mark.parametrize("io", [IoMode.MMAP, IoMode.DIRECT])
@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_all_that_goes_to_segments_is_counted(
    limit: Rate | None, compression: Compression, io: IoMode, tmp_path: Path, written: list[int]
) -> None:
    store = open_store(tmp_path / "kv", io=io, compression=compression, max_writes=limit)
    fill(store, range(12))
    fill(store, range(5))  # headers are taken back first
    store.forget(Slot(7))
    unlabelled = store.writes.written_bytes
    store.write(Slot(8), block(100))
    assert store.writes.written_bytes - unlabelled <= MOVE_BYTES
    total = store.writes.written_bytes
    assert sum(written) <= total <= sum(written) + PAGE_BYTES * len(written)
    if io is IoMode.DIRECT:  # whole pages all of them
        assert total == sum(written)
    assert store.writes.in_period_bytes() == total
    assert store.used_bytes() == allocated_bytes(store.folder) <= store.budget_bytes
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("io", [IoMode.MMAP, IoMode.DIRECT])
def test_groups_of_slices_that_are_no_whole_pages_write_no_page_twice(io: IoMode, tmp_path: Path) -> None:
    shape = BlockShape(num_layers=12, kv_heads=4, block_tokens=300, key_dim=80, value_dim=80, element_bytes=2)
    assert shape.slice_bytes % PAGE_BYTES and shape.block_bytes % PAGE_BYTES == 0
    memory = CpuStore(shape, 1, pin=False, joined=True)
    store = limited(tmp_path / "kv", shape=shape, budget_bytes=16 << 20, io=io)
    for number in range(2):
        memory.write(Slot(0), block(number, 0, shape))
        before_bytes = store.writes.written_bytes
        store.write(Slot(0), memory.block(Slot(0)), label(number))
        assert store.writes.written_bytes - before_bytes <= store.slot_bytes + 3 * PAGE_BYTES
        assert torch.equal(read(store, 0), block(number, 0, shape))
    store.close()


@pytest.mark.parametrize("compression", Compression)
def test_no_move_writes_more_than_what_it_is_let_in_with(compression: Compression, tmp_path: Path) -> None:
    store = limited(tmp_path / "kv", compression=compression)
    for number in [*range(store.num_slots), *range(store.num_slots)]:
        before = store.writes.written_bytes
        write(store, [number])
        assert store.writes.written_bytes - before <= MOVE_BYTES
    store.close()


def test_the_next_process_goes_on_with_the_count_and_one_without_a_limit_forgets_it(tmp_path: Path) -> None:
    store = limited(tmp_path / "kv")
    fill(store, range(10))
    total = store.writes.written_bytes
    assert total >= 10 * SLOT_BYTES
    store.close()
    file = tmp_path / "kv" / "writes"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600 and file.stat().st_size <= MAX_BYTES
    assert sorted(path.name for path in file.parent.iterdir() if "w" in path.name) == ["writes"]
    again = limited(tmp_path / "kv")
    assert (again.writes.written_bytes, again.writes.in_period_bytes()) == (0, total)
    assert served(again, range(10))[0] == set(range(10))
    again.close()
    open_store(tmp_path / "kv").close()
    assert not file.exists()
    assert limited(tmp_path / "kv").writes.in_period_bytes() == 0


def test_a_full_count_fits_its_file(tmp_path: Path) -> None:
    store = limited(tmp_path / "kv")
    for hour in range(30):
        store.writes._add(store.writes._clock() - hour * 3600, (1 << 62) // 24)
    store.close()
    file = tmp_path / "kv" / "writes"
    assert file.stat().st_size <= MAX_BYTES and len(json.loads(file.read_bytes())["written"]) == 25
    assert check_folder(tmp_path / "kv").notices == []
    assert limited(tmp_path / "kv").writes.is_used_up


def test_killed_processes_together_write_no_more_than_the_limit(tmp_path: Path) -> None:
    """Each is killed in the middle of its writes, after it has told how much it had handed over."""
    code = """
        import os, sys
        from pathlib import Path
        from kvtier.rate import Rate
        from tests.fault.folders import open_store, write

        store = open_store(Path(sys.argv[1]), max_writes=Rate.parse(sys.argv[2]))
        total, original = 0, os.pwrite
        def pwrite(fd, data, offset):
            global total
            done = original(fd, data, offset)
            if "segment-" in os.readlink(f"/proc/self/fd/{fd}"):
                total += done
                print(total, flush=True)
            return done
        os.pwrite = pwrite
        number = 0
        print(0, flush=True)
        while store.writes.allows():
            store.writes.begin()
            write(store, [number % 30])
            store.writes.end()
            number += 1
        print("limited", flush=True)
        sys.stdin.read()
    """
    limit_bytes, total, ends = 60 * SLOT_BYTES, 0, []
    for round_number in range(5):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "kv"), f"{limit_bytes}/day"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        lines: list[str] = []
        for line in process.stdout:
            lines.append(line.strip())
            if line.strip() == "limited" or (round_number < 3 and len(lines) > 25):
                break
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().split()
        process.wait()
        ends.append(lines[-1])
        total += int(next(each for each in reversed(lines) if each.isdigit()))
    assert ends[-1] == "limited" and ends[0] != "limited"
    assert limit_bytes / 2 < total <= limit_bytes


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b"null", b"\xff" * 100, b"[" * 4000, b" " * (MAX_BYTES + 1),
        b'{"version": 2, "saved_s": 1, "promised_bytes": 0, "written": []}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": -1, "written": []}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 1.5, "written": []}',
        b'{"version": 1, "saved_s": NaN, "promised_bytes": 0, "written": []}',
        b'{"version": 1, "saved_s": "now", "promised_bytes": 0, "written": []}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 0, "written": [[1]]}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 0, "written": [[-1, 5]]}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 0, "written": [[NaN, 5]]}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 0, "written": [[1, 1e300]]}',
        b'{"version": 1, "saved_s": 1, "promised_bytes": 0, "written": {"a": 1}}',
    ],
)  # fmt: skip
def test_a_damaged_count_is_the_whole_limit_and_is_replaced(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = limited(tmp_path / "kv")
    fill(store, range(3))
    store.close()
    file = tmp_path / "kv" / "writes"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"is damaged|another version"):
        parse_ledger(content, time.time())
    (notice,) = check_folder(tmp_path / "kv").notices
    assert notice.startswith("writes, the count of bytes written, is")
    again = limited(tmp_path / "kv")
    assert again.writes.is_used_up and "going on as if tiers.nvme.max_writes, 1GiB/day, were used" in caplog.text
    assert served(again, range(3))[0] == {0, 1, 2}
    again.close()
    assert check_folder(tmp_path / "kv").notices == []
    assert limited(tmp_path / "kv").writes.is_used_up  # it was replaced by what it was taken for


def test_what_a_killed_save_leaves_is_no_obstacle(tmp_path: Path) -> None:
    store = limited(tmp_path / "kv")
    fill(store, range(3))
    total = store.writes.written_bytes
    store.close()
    (tmp_path / "kv" / "writes.new").write_bytes(b'{"version": 1, "sav')
    assert check_folder(tmp_path / "kv").problems == []
    again = limited(tmp_path / "kv")
    assert again.writes.in_period_bytes() == total
    assert again.used_bytes() == allocated_bytes(again.folder)
    fill(again, range(3, 5))
    again.close()
    assert not (tmp_path / "kv" / "writes.new").exists()


def test_links_in_its_place_are_not_followed(tmp_path: Path) -> None:
    limited(tmp_path / "kv").close()
    target = tmp_path / "precious"
    target.write_text("precious")
    for name in ("writes", "writes.new"):
        path = tmp_path / "kv" / name
        path.unlink(missing_ok=True)
        path.symlink_to(target)
        with pytest.raises(ConfigError, match=f"{name} in it is a symlink"):
            limited(tmp_path / "kv")
        path.unlink()
    assert target.read_text() == "precious"


def test_clocks_between_two_processes(tmp_path: Path) -> None:
    store = limited(tmp_path / "kv")
    fill(store, range(10))
    total = store.writes.written_bytes
    store.close()
    now_s = time.time()
    data = (tmp_path / "kv" / "writes").read_bytes()

    def counted(at_s: float) -> list[float]:
        return [each.age_s for each in parse_ledger(data, at_s) if each.num_bytes]

    assert counted(now_s - 1e6) == [0.0]  # a clock that went back
    (age_s,) = counted(now_s + 7200)
    assert 7200 <= age_s < 7260
    assert sum(each.num_bytes for each in parse_ledger(data, now_s)) == total


def test_temporary_folders_keep_no_count_and_are_removed(tmp_path: Path) -> None:
    store = NvmeStore(SHAPE, 1 << 20, tmp_path / "run", False, reserve_free_frac=0.0, max_writes=LIMIT)
    fill(store, range(3))
    assert not (store.folder / "writes").exists() and store.writes.written_bytes > 0
    store.close()
    assert not (tmp_path / "run").exists()


def test_a_disk_that_cannot_keep_the_count_gets_no_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = limited(tmp_path / "kv")

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(30, os.strerror(30))

    with monkeypatch.context() as patch:
        patch.setattr(FolderLedger, "save", failing)
        assert not store.writes.allows() and not store.writes.is_used_up
        store.close()
    assert limited(tmp_path / "kv").writes.allows()


def test_less_than_a_block_is_refused_with_the_sum(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=rf"tiers.nvme.max_writes is 4KiB/h, its minimum is {Size(MOVE_BYTES)}/h:"):
        limited(tmp_path / "kv", max_writes=Rate.parse("4KiB/h"))


def test_auto_measures_only_what_is_little_of_the_limit_and_counts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvtier.stores.io_choice.MEASURED_FROM_BYTES", 0)
    monkeypatch.setattr("kvtier.stores.io_choice.is_memory_backed", lambda kind: False)
    for limit, is_measured in (("1GB/day", False), ("64GB/day", True)):
        store = limited(tmp_path / limit[:2], io=IoMode.AUTO, max_writes=Rate.parse(limit))
        assert ("too much of tiers.nvme.max_writes" in store.io.reason) is not is_measured
        assert store.writes.written_bytes == (MEASURING_BYTES if is_measured else 0)
        store.close()
        again = limited(tmp_path / limit[:2], io=IoMode.MMAP, max_writes=Rate.parse(limit))
        assert again.writes.in_period_bytes() == (MEASURING_BYTES if is_measured else 0)


def test_what_cannot_be_counted_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise OSError(30, os.strerror(30))

    store = limited(tmp_path / "kv", max_writes=Rate.parse("64GB/day"))
    with monkeypatch.context() as patch:
        patch.setattr(FolderLedger, "save", failing)
        assert not store.writes.spend(1000)
    assert store.writes.spend(1000) and not store.writes.spend(1_000_000_001)


@pytest.fixture(autouse=True)
def close_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Those that a test leaves open: the folder is its own, the lock is not another test's affair."""
    made: list[NvmeStore] = []
    original = NvmeStore.__init__

    def init(store: NvmeStore, *args: Any, **kwargs: Any) -> None:
        original(store, *args, **kwargs)
        made.append(store)

    monkeypatch.setattr(NvmeStore, "__init__", init)
    yield
    for store in made:
        store.close()


def test_labels_are_found_as_without_a_limit(tmp_path: Path) -> None:
    store = limited(tmp_path / "kv")
    fill(store, range(4))
    assert store.find(label(2)) == 2
