"""Real faults on real files: what the nvme store must notice, refuse, leave alone and clean up."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvtier.errors import (
    BudgetError,
    ChecksumError,
    ConfigError,
    FolderInUseError,
    NoSpaceError,
    ShortReadError,
    StoreError,
)
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.nvme import NvmeStore, min_budget_bytes
from kvtier.stores.temporary_folders import sweep_stale, temporary_folder
from kvtier.system import allocated_bytes
from kvtier.testing.stores import SHAPES, random_block, read, read_slice
from kvtier.types import BlockShape, Slot

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=16, key_dim=32, value_dim=32, element_bytes=4)
BUDGET_BYTES = 1 << 20


def open_store(folder: Path, persistent: bool = False, budget_bytes: int = BUDGET_BYTES) -> NvmeStore:
    return NvmeStore(SHAPE, budget_bytes, folder, persistent, reserve_free_frac=0.0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[NvmeStore]:
    store = open_store(tmp_path / "kv")
    yield store
    store.close()


def fill(store: NvmeStore, num_slots: int) -> list[torch.Tensor]:
    blocks = [random_block(store, slot) for slot in range(num_slots)]
    for slot, block in enumerate(blocks):
        store.write(Slot(slot), block)
    return blocks


def segments(store: NvmeStore) -> list[Path]:
    return sorted(store.folder.glob("segment-*.kvt"))


def place_of(store: NvmeStore, slot: int, layer: int = 0) -> int:
    """Where a slice begins in the first segment."""
    header_bytes = store.slot_bytes - SHAPE.block_bytes  # of a shape whose block is whole pages
    return PAGE_BYTES + slot * store.slot_bytes + header_bytes + layer * SHAPE.slice_bytes


def edit(path: Path, offset_bytes: int, change: Callable[[bytes], bytes], num_bytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset_bytes)
        data = file.read(num_bytes)
        file.seek(offset_bytes)
        file.write(change(data))


# --- bytes that changed


@pytest.mark.parametrize("layer", range(SHAPE.num_layers))
@pytest.mark.parametrize("place", [0, SHAPE.key_bytes, SHAPE.slice_bytes - 1])
def test_one_flipped_bit_is_seen_in_its_slice_only(store: NvmeStore, layer: int, place: int) -> None:
    blocks = fill(store, 2)
    edit(segments(store)[0], place_of(store, 1, layer) + place, lambda data: bytes([data[0] ^ 4]))
    with pytest.raises(ChecksumError, match=rf"slot 1, layer {layer} of .*segment-00000\.kvt"):
        read_slice(store, 1, layer)
    with pytest.raises(ChecksumError):
        read(store, 1)
    for other in set(range(SHAPE.num_layers)) - {layer}:
        expected = blocks[1][other * SHAPE.slice_bytes : (other + 1) * SHAPE.slice_bytes]
        assert torch.equal(read_slice(store, 1, other), expected)
    assert torch.equal(read(store, 0), blocks[0])
    store.write(Slot(1), blocks[1])
    assert torch.equal(read(store, 1), blocks[1])


def test_swapped_slots_are_seen(store: NvmeStore) -> None:
    fill(store, 2)
    path, size = segments(store)[0], store.slot_bytes
    edit(path, PAGE_BYTES, lambda data: data[size:] + data[:size], num_bytes=2 * size)
    for slot in range(2):
        with pytest.raises(ChecksumError):
            read(store, slot)
        with pytest.raises(ChecksumError):
            read_slice(store, slot, 0)


def test_swapped_slices_are_seen(store: NvmeStore) -> None:
    fill(store, 1)
    size = SHAPE.slice_bytes
    edit(segments(store)[0], place_of(store, 0), lambda data: data[size:] + data[:size], num_bytes=2 * size)
    with pytest.raises(ChecksumError):
        read_slice(store, 0, 1)


def test_an_old_generation_of_a_slot_is_seen(store: NvmeStore) -> None:
    fill(store, 1)
    old = segments(store)[0].read_bytes()
    store.write(Slot(0), random_block(store, 99))
    edit(segments(store)[0], 0, lambda _: old)
    with pytest.raises(ChecksumError):
        read(store, 0)


@pytest.mark.parametrize("left_bytes", [0, 1, SHAPE.slice_bytes, SHAPE.block_bytes - 1])
def test_a_truncated_file_is_an_error_not_a_signal(store: NvmeStore, left_bytes: int) -> None:
    fill(store, 1)
    os.truncate(segments(store)[0], left_bytes)
    with pytest.raises(ShortReadError, match="segment-00000"):
        read(store, 0)
    with pytest.raises(ShortReadError):
        read_slice(store, 0, SHAPE.num_layers - 1)


# --- writes that fail


def test_a_failed_write_leaves_nothing_readable(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fill(store, 2)

    def broken(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwrite", broken)
    with pytest.raises(StoreError, match="segment-00000") as error:
        store.write(Slot(0), blocks[0])
    assert error.value.errno == errno.EIO
    monkeypatch.undo()
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 0)
    assert torch.equal(read(store, 1), blocks[1])


def test_a_slot_is_unreadable_while_it_is_written(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = fill(store, 1)
    seen: list[bool] = []
    real = os.pwrite

    def spying(fd: int, data: memoryview, offset: int) -> int:
        with pytest.raises(StoreError, match="nothing readable"):
            read(store, 0)
        seen.append(True)
        return real(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", spying)
    store.write(Slot(0), blocks[0])
    assert seen
    assert torch.equal(read(store, 0), blocks[0])


def test_short_writes_are_continued(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 1)  # the segment is there
    block = random_block(store, 1)
    real, calls = os.pwrite, []

    def short(fd: int, data: memoryview, offset: int) -> int:
        calls.append(offset)
        return real(fd, data[:5000], offset)

    monkeypatch.setattr(os, "pwrite", short)
    store.write(Slot(1), block)
    assert len(calls) == -(-SHAPE.block_bytes // 5000)
    assert torch.equal(read(store, 1), block)


def test_enospc_at_pwrite_is_no_space(store: NvmeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(store, 1)

    def full(fd: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpaceError, match=r"ENOSPC.*backing"):
        store.write(Slot(0), random_block(store, 1))


# --- room


def test_segments_come_as_they_are_needed(store: NvmeStore) -> None:
    assert segments(store) == []
    assert store.used_bytes() < 64 << 10
    fill(store, 1)
    assert len(segments(store)) == 1
    assert segments(store)[0].stat().st_blocks * 512 >= segments(store)[0].stat().st_size  # not sparse
    fill(store, store.num_slots)
    assert len(segments(store)) > 4
    store.check_integrity()


@pytest.mark.parametrize("name", sorted(SHAPES))
@pytest.mark.parametrize("slots_wanted", [1, 7, 150])
def test_du_stays_within_the_budget_with_all_slots_written(tmp_path: Path, name: str, slots_wanted: int) -> None:
    shape = SHAPES[name]
    budget_bytes = min_budget_bytes(shape) + (slots_wanted - 1) * shape.block_bytes
    store = NvmeStore(shape, budget_bytes, tmp_path / "kv", persistent=False, reserve_free_frac=0.0)
    block = random_block(store, 1)
    # Every other slot first: the most index blocks that a file system can need.
    for slot in [*range(0, store.num_slots, 2), *range(1, store.num_slots, 2)]:
        store.write(Slot(slot), block)
    os.sync()
    assert allocated_bytes(store.folder) <= budget_bytes
    assert store.used_bytes() == allocated_bytes(store.folder)
    assert store.ceiling_bytes() == budget_bytes
    store.check_integrity()
    store.close()


def test_a_budget_without_room_for_a_slot_states_its_minimum(tmp_path: Path) -> None:
    minimum_bytes = min_budget_bytes(SHAPE)
    with pytest.raises(BudgetError, match=str(minimum_bytes)):
        open_store(tmp_path / "kv", budget_bytes=minimum_bytes - 1)
    assert not (tmp_path / "kv").exists()
    store = open_store(tmp_path / "kv", budget_bytes=minimum_bytes)
    assert store.num_slots == 1
    fill(store, 1)
    store.close()


def test_a_part_of_the_disk_stays_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = [10 << 20]
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda path: free_bytes[0])
    monkeypatch.setattr("kvtier.system.disk_total_bytes", lambda path: 100 << 20)
    store = NvmeStore(SHAPE, BUDGET_BYTES, tmp_path / "kv", persistent=False, reserve_free_frac=0.05)
    blocks = fill(store, 1)
    per_segment = (segments(store)[0].stat().st_size - PAGE_BYTES) // store.slot_bytes
    assert store.ceiling_bytes() == BUDGET_BYTES
    free_bytes[0] = 5 << 20
    assert store.ceiling_bytes() == store.used_bytes()
    fill(store, per_segment)  # what has backing stays writable
    with pytest.raises(NoSpaceError, match="5% of the disk") as error:
        store.write(Slot(per_segment), blocks[0])
    assert error.value.available_slots == per_segment
    assert len(segments(store)) == 1
    assert torch.equal(read(store, 0), blocks[0])
    free_bytes[0] = 10 << 20
    store.write(Slot(per_segment), blocks[0])
    store.close()


def test_reachable_slots_are_those_of_whole_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = [10 << 20]
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda path: free_bytes[0])
    store = open_store(tmp_path / "kv")
    assert store.reachable_slots() == store.num_slots
    fill(store, 1)
    segment_bytes = segments(store)[0].stat().st_size
    per_segment = (segment_bytes - PAGE_BYTES) // store.slot_bytes
    for free, num_segments in ((0, 1), (segment_bytes - 1, 1), (segment_bytes, 2), (3 * segment_bytes - 1, 3)):
        free_bytes[0] = free
        assert store.reachable_slots() == num_segments * per_segment
    assert len(segments(store)) == 1

    def failing(path: Path) -> int:
        raise OSError(errno.EIO, "fake")

    monkeypatch.setattr("kvtier.system.free_disk_bytes", failing)
    assert store.reachable_slots() == per_segment
    assert store.ceiling_bytes() == store.used_bytes()
    store.close()
    assert store.reachable_slots() == 0


@pytest.mark.parametrize("num_spare", [1, 2])
def test_after_a_segment_that_was_made_short_there_are_further_ones_when_there_is_room(
    num_spare: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free_bytes = [10 << 20]
    monkeypatch.setattr("kvtier.system.free_disk_bytes", lambda path: free_bytes[0])
    store = open_store(tmp_path / "kv", persistent=True)
    blocks = fill(store, 1)
    segment_bytes = segments(store)[0].stat().st_size
    per_segment = (segment_bytes - PAGE_BYTES) // store.slot_bytes
    assert per_segment > num_spare
    free_bytes[0] = PAGE_BYTES + num_spare * store.slot_bytes
    backed = per_segment + num_spare
    blocks = fill(store, backed)
    free_bytes[0] = 10 << 20
    with pytest.raises(NoSpaceError, match="and no more") as error:
        store.write(Slot(backed), blocks[0])
    assert error.value.available_slots == backed
    free_bytes[0] = segment_bytes - 1
    assert store.reachable_slots() == backed  # not whole: nothing is planned anew
    with pytest.raises(NoSpaceError):
        store.write(Slot(backed), blocks[0])
    free_bytes[0] = 10 << 20
    reachable = store.reachable_slots()
    assert backed < reachable <= store.num_slots
    assert store.reachable_slots() == reachable
    for slot, block in enumerate(blocks):
        assert torch.equal(read(store, slot), block)
    blocks = fill(store, reachable)
    for slot in range(reachable, store.num_slots):
        with pytest.raises(NoSpaceError) as error:
            store.write(Slot(slot), blocks[0])
        assert error.value.available_slots == reachable
    assert allocated_bytes(store.folder) == store.used_bytes() <= BUDGET_BYTES
    # No more than one further segment's pages and rounding are lost.
    assert reachable >= store.num_slots - per_segment
    for slot, block in enumerate(blocks):
        assert torch.equal(read(store, slot), block)
    store.check_integrity()
    sizes = [path.stat().st_size for path in segments(store)]
    store.close()
    again = open_store(tmp_path / "kv", persistent=True)  # the files say how long they are
    assert [path.stat().st_size for path in segments(again)] == sizes
    assert again.num_slots >= reachable and again.num_quarantined == 0
    again.check_integrity()
    again.close()


# A child of its own, since the tmpfs needs a mount namespace and the file size limit cannot be raised again.
FULL_DISK = """
    import resource, sys
    from pathlib import Path
    from kvtier import system
    from kvtier.errors import NoSpaceError
    from kvtier.stores.nvme import NvmeStore
    from kvtier.system import allocated_bytes
    from kvtier.testing.stores import random_block, read
    from tests.fault.test_nvme_store import SHAPE
    from kvtier.types import Slot

    folder, limit_bytes, segment_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes))
    system.free_disk_bytes = lambda path: 1 << 40  # another process fills the disk after the check
    store = NvmeStore(SHAPE, 4 << 20, folder, False, segment_bytes, reserve_free_frac=0.0)
    written = 0
    try:
        for slot in range(store.num_slots):
            store.write(Slot(slot), random_block(store, slot))
            written += 1
        raise SystemExit("the disk never filled up")
    except NoSpaceError as error:
        assert error.available_slots == written, (error.available_slots, written)
        print(error)
    store.check_integrity()
    for slot in range(written):
        assert read(store, slot).equal(random_block(store, slot))
    files = [path.stat().st_blocks for path in folder.glob("segment-*")]
    assert all(files), "an empty file was left"
    assert allocated_bytes(folder) == store.used_bytes()
    store.close()
    assert not folder.exists()
    print("written", written)
"""

ROOT = Path(__file__).parents[2]


def run_full_disk(prefix: list[str], *arguments: str) -> str:
    command = [*prefix, sys.executable, "-c", textwrap.dedent(FULL_DISK), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_full_tmpfs_is_no_space(tmp_path: Path) -> None:
    mount = 'mount -t tmpfs -o size=1m,mode=700 kvtier "$0"'
    probe = subprocess.run(["unshare", "-rm", "sh", "-c", mount, str(tmp_path)], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip("no mount namespaces here; the file size limit test covers the path")
    prefix = ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', str(tmp_path)]
    output = run_full_disk(prefix, str(tmp_path / "kv"), "0", str(128 << 10))
    assert "had room for" in output and "and no more" in output
    assert int(output.split("written ")[1]) > 0
    assert not list(tmp_path.iterdir())  # it all went to the tmpfs


def test_a_file_size_limit_is_no_space(tmp_path: Path) -> None:
    # Segments of 512 KiB against a limit of 256 KiB: the first is made as long as it may be, and is the last.
    output = run_full_disk([], str(tmp_path / "kv"), str(256 << 10), str(512 << 10))
    assert "had room for" in output
    assert int(output.split("written ")[1]) > 0


def test_a_file_size_limit_below_one_slot_is_no_space(tmp_path: Path) -> None:
    output = run_full_disk([], str(tmp_path / "kv"), str(4 << 10), str(512 << 10))
    assert "EFBIG" in output
    assert "written 0" in output


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_failed_allocation_leaves_no_file(store: NvmeStore, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    real = os.posix_fallocate

    def partly(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length // 2)
        raise OSError(code, os.strerror(code))

    fill(store, 1)
    before = store.used_bytes()
    monkeypatch.setattr(os, "posix_fallocate", partly)
    with pytest.raises(NoSpaceError) as error:
        fill(store, store.num_slots)
    assert error.value.available_slots > 0
    assert len(segments(store)) == 1
    assert allocated_bytes(store.folder) == before


def test_a_file_system_that_allocates_more_than_asked_does_not_break_the_budget(
    store: NvmeStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.posix_fallocate

    def generous(fd: int, offset: int, length: int) -> None:
        real(fd, offset, length)
        os.pwrite(fd, bytes(length), length)  # blocks beyond the asked-for end

    monkeypatch.setattr(os, "posix_fallocate", generous)
    with pytest.raises(NoSpaceError, match="would bring the folder to"):
        fill(store, store.num_slots)
    assert allocated_bytes(store.folder) <= BUDGET_BYTES


# --- whose folder it is


def test_a_second_store_on_the_folder_is_refused(store: NvmeStore) -> None:
    blocks = fill(store, 1)
    for persistent in (True, False):
        with pytest.raises(FolderInUseError, match=str(os.getpid())):
            open_store(store.folder, persistent)
    assert torch.equal(read(store, 0), blocks[0])
    store.check_integrity()


def test_another_process_is_refused_until_the_owner_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    code = f"""
        import sys, time
        from pathlib import Path
        from kvtier.types import Slot
        from tests.fault.test_nvme_store import open_store, random_block
        store = open_store(Path({str(folder)!r}), persistent=True)
        store.write(Slot(0), random_block(store, 0))
        print("ready", flush=True)
        time.sleep(60)
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(FolderInUseError, match=str(child.pid)):
            open_store(folder)
        assert len(list(folder.glob("segment-*"))) == 1
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        if child.stdout is not None:
            child.stdout.close()
    store = open_store(folder, persistent=True)  # the kernel has freed the lock
    with pytest.raises(StoreError, match="nothing readable"):
        read(store, 0)
    assert store.num_found == store.num_quarantined == 0
    store.close()


def test_leftovers_without_a_label_are_never_readable(tmp_path: Path) -> None:
    first = open_store(tmp_path / "kv", persistent=True)
    fill(first, first.num_slots)
    first.close()
    assert len(list((tmp_path / "kv").glob("segment-*"))) > 1
    second = open_store(tmp_path / "kv", persistent=True)
    for slot in range(second.num_slots):
        with pytest.raises(StoreError, match="nothing readable"):
            read(second, slot)
        with pytest.raises(StoreError, match="nothing readable"):
            second.prefetch(Slot(slot), 0)
    second.write(Slot(second.num_slots - 1), random_block(second, 1))  # gives backing to all the others
    for slot in range(second.num_slots - 1):
        with pytest.raises(StoreError, match="nothing readable"):
            read_slice(second, slot, 0)
    second.close()
    assert (tmp_path / "kv" / "lock").exists()


def test_modes(store: NvmeStore) -> None:
    fill(store, 1)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    files = list(store.folder.iterdir())
    assert len(files) == 2
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_loose_folder_of_ours_is_tightened(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    store = open_store(tmp_path / "kv", persistent=True)
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700
    store.close()


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"thesis\.txt"):
        open_store(tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["segment-00000.kvt", "lock"])
def test_symlinks_are_refused(tmp_path: Path, name: str) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 100)
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / name).symlink_to(target)
    with pytest.raises(ConfigError, match="symlink"):
        open_store(tmp_path / "kv")
    assert target.read_bytes() == b"x" * 100


def test_a_symlink_planted_later_is_refused(store: NvmeStore, tmp_path: Path) -> None:
    target = tmp_path / "precious"
    target.write_bytes(b"x" * 100)
    (store.folder / "segment-00000.kvt").symlink_to(target)
    with pytest.raises(StoreError, match="segment-00000") as error:
        fill(store, 1)
    assert error.value.errno == errno.EEXIST
    assert target.read_bytes() == b"x" * 100


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigError, match="kv"):
        open_store(tmp_path / "kv")
    with pytest.raises(ConfigError, match="kv"):
        open_store(tmp_path / "kv" / "below")


# --- what stays behind


def test_close_removes_a_temporary_folder_and_every_descriptor(tmp_path: Path) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    folder = temporary_folder(tmp_path)
    assert folder.name.startswith(f"run-{os.getpid()}-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    store = open_store(folder)
    fill(store, store.num_slots)
    num_segments = len(segments(store))
    assert len(os.listdir("/proc/self/fd")) <= len(before) + 2 * num_segments + 2
    store.close()
    store.close()
    assert not folder.exists()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("fault", ["in use", "foreign file", "no room"])
def test_a_refused_open_leaks_no_descriptor(tmp_path: Path, fault: str) -> None:
    owner = open_store(tmp_path / "kv") if fault == "in use" else None
    if fault == "foreign file":
        (tmp_path / "kv").mkdir()
        (tmp_path / "kv" / "other").touch()
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises((FolderInUseError, ConfigError)):
        open_store(tmp_path / "kv", budget_bytes=1 if fault == "no room" else BUDGET_BYTES)
    assert sorted(os.listdir("/proc/self/fd")) == before
    if owner:
        owner.close()


def test_close_leaves_what_is_not_ours(store: NvmeStore, caplog: pytest.LogCaptureFixture) -> None:
    fill(store, 1)
    (store.folder / "note").write_text("mine")
    store.close()
    assert [path.name for path in store.folder.iterdir()] == ["note"]
    assert len(caplog.records) == 1


def test_a_late_reader_outlives_close(store: NvmeStore) -> None:
    # The runtime stops transfers first; should one be late all the same, it must not crash or reach another file.
    block = fill(store, 1)[0]
    held, offset_bytes = store._space.segments[0], place_of(store, 0)
    store.close()
    out = torch.empty(SHAPE.block_bytes, dtype=torch.uint8)
    held.read(offset_bytes, out.numpy())
    assert torch.equal(out, block)


def test_sweep_removes_dead_owners_folders_only(tmp_path: Path) -> None:
    live = open_store(temporary_folder(tmp_path))
    blocks = fill(live, 1)
    unclaimed = temporary_folder(tmp_path)  # made, and not yet handed to its store
    code = f"""
        import os
        from pathlib import Path
        from tests.fault.test_nvme_store import fill, open_store
        from kvtier.stores.temporary_folders import temporary_folder
        folder = temporary_folder(Path({str(tmp_path)!r}))
        fill(open_store(folder), 3)
        print(folder, flush=True)
        os._exit(9)
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    dead = Path(child.stdout.strip())
    assert child.returncode == 9
    assert len(list(dead.glob("segment-*"))) > 0
    (tmp_path / "run-away").mkdir()  # somebody else's
    assert sweep_stale(tmp_path) == [dead]
    assert not dead.exists()
    assert (tmp_path / "run-away").exists()
    assert torch.equal(read(live, 0), blocks[0])
    late = open_store(unclaimed)
    fill(late, 1)
    late.close()
    live.close()
    assert sweep_stale(tmp_path / "absent") == []


def test_two_threads_growing_at_once_make_each_segment_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "kv")
    blocks = [random_block(store, slot) for slot in range(store.num_slots)]
    errors: list[BaseException] = []

    def work(slots: range) -> None:
        try:
            for slot in slots:
                store.write(Slot(slot), blocks[slot])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(range(start, store.num_slots, 4),)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for slot, block in enumerate(blocks):
        assert torch.equal(read(store, slot), block)
    store.check_integrity()
    store.close()


def test_prefetch_changes_no_bytes(store: NvmeStore) -> None:
    blocks = fill(store, 3)
    for slot in range(3):
        for layer in range(SHAPE.num_layers):
            store.prefetch(Slot(slot), layer)
        assert torch.equal(read(store, slot), blocks[slot])
    with pytest.raises(IndexError):
        store.prefetch(Slot(0), SHAPE.num_layers)
