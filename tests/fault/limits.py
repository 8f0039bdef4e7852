"""Limits that the system really sets, each in a process of its own kind: `python -m tests.fault.limits FOLDER ROW…`.

FULL and READ_ONLY need a mount namespace, NO_PERMISSION gives root's rights up and comes last. Prints for each row how
often it was reached, each time with the error that names it; any other end is this program's failure.
"""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvtier import system
from kvtier.errors import ConfigError, KVTierError, NoSpaceError, StoreError
from kvtier.fsck import check_folder
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slot_check import SlotState
from kvtier.stores.temporary_folders import temporary_folder
from kvtier.system import allocated_bytes, open_fds
from kvtier.types import Compression
from tests.fault.folders import SHAPE, open_store, served, write
from tests.fault.table import Row

NOBODY = 65534


def fill(folder: Path, segment_bytes: int, compression: Compression) -> NoSpaceError:
    """Write until there is no room; what was written is right, and `du` is what the store says."""
    store = open_store(folder, 4 << 20, segment_bytes_max=segment_bytes, compression=compression)
    written = 0
    try:
        for written in range(store.num_slots):
            write(store, [written])
        raise SystemExit("there was no limit")
    except NoSpaceError as error:
        found = error
    assert served(store, range(written))[0] == set(range(written))
    assert allocated_bytes(folder) == store.used_bytes()
    store.check_integrity()
    store.close()
    for path in folder.iterdir():
        path.unlink()
    return found


def full(folder: Path) -> int:
    """Another process fills the disk after the check of what is free, so that the calls themselves fail."""
    free = system.free_disk_bytes
    with tmpfs(folder):
        system.free_disk_bytes = lambda path: 1 << 40
        sizes = [16 << 10, 64 << 10, 100 << 10, 256 << 10, 600 << 10, 2 << 20]
        for segment_bytes in sizes:
            for compression in Compression:
                fill(folder / "kv", segment_bytes, compression)
        system.free_disk_bytes = free
    return 2 * len(sizes)


def read_only(folder: Path) -> int:
    def new_store() -> None:
        open_store(folder / "other")

    openings: list[Callable[[], object]] = [
        lambda: open_store(folder / "kv"),
        lambda: NvmeStore(SHAPE, 1 << 20, folder / "kv", False, reserve_free_frac=0.0),
        new_store,
        lambda: temporary_folder(folder),
    ]
    refused = 0
    with tmpfs(folder):
        store = open_store(folder / "kv", 600 << 10)
        write(store, range(5))
        store.close()
        for _ in range(3):
            mount("-o", "remount,ro", str(folder))
            for opening in openings:
                fds = open_fds()
                try:
                    opening()
                except ConfigError as error:
                    assert "Read-only file system" in str(error), error
                    refused += 1
                assert open_fds() == fds
            assert check_folder(folder / "kv").slots[SlotState.GOOD] == 5
            mount("-o", "remount,rw", str(folder))
            store = open_store(folder / "kv", 600 << 10)
            assert served(store, range(5))[0] == set(range(5))
            store.close()
    assert refused == 3 * len(openings)
    return refused


def no_permission(folder: Path) -> int:
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    refused = 0
    for turn in range(6):
        store = open_store(folder / str(turn))
        write(store, range(5))
        (folder / str(turn)).chmod(0o500)
        try:
            write(store, range(5, 30))
        except StoreError as error:
            assert error.errno == errno.EACCES, error
            refused += 1
        right = served(store, range(30))[0]
        assert set(range(5)) <= right
        (folder / str(turn)).chmod(0o700)
        write(store, range(5, 30))
        assert served(store, range(30))[0] == set(range(30))
        store.close()
        (folder / str(turn)).chmod(0o000)
        try:
            open_store(folder / str(turn))
        except ConfigError as error:
            assert "Permission denied" in str(error), error
            refused += 1
        (folder / str(turn)).chmod(0o700)
        store = open_store(folder / str(turn))
        assert served(store, range(30))[0] == set(range(30))
        store.close()
    assert refused == 12
    return refused


def no_descriptors(folder: Path) -> int:
    return sum(with_few_descriptors(folder / each.value, each) for each in Compression)


def with_few_descriptors(folder: Path, compression: Compression) -> int:
    """One more descriptor to be had at each attempt, until there are enough for all that is done."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = open_store(folder, compression=compression)
    write(store, range(12))
    store.close()
    refused = 0
    for number in range(40):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(number + 1)]
        limit = fds[-1]  # that one and all above it cannot be had
        for fd in fds:
            os.close(fd)
        before = open_fds()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        failed = False
        store = None
        try:
            store = open_store(folder, compression=compression)
            failed = store.num_found < 12
            write(store, range(20, 60), first_slot=12)
        except KVTierError as error:
            assert "Too many open files" in str(error), error
            failed = True
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        if store is not None:
            assert not served(store, [*range(12), *range(20, 60)])[2]
            store.close()
            del store
        assert open_fds() == before
        if not failed:
            break
        refused += 1
    else:
        raise SystemExit("it never had enough")
    return refused


def file_size(folder: Path) -> int:
    assert signal.getsignal(signal.SIGXFSZ) is signal.SIG_IGN, "Python ignores it, so that it is an error"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sizes = [4 << 10, 20 << 10, 64 << 10, 100 << 10, 256 << 10, 500 << 10]
    for limit_bytes in sizes:
        for compression in Compression:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
            fill(folder / f"{limit_bytes}-{compression.value}", 512 << 10, compression)
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return 2 * len(sizes)


ROWS: dict[Row, Callable[[Path], int]] = {
    Row.FULL: full,
    Row.READ_ONLY: read_only,
    Row.NO_DESCRIPTORS: no_descriptors,
    Row.FILE_SIZE: file_size,
    Row.NO_PERMISSION: no_permission,
}


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@contextmanager
def tmpfs(folder: Path) -> Iterator[None]:
    """A disk of 1 MiB at `folder`."""
    folder.mkdir(exist_ok=True)
    mount("-t", "tmpfs", "-o", "size=1m,mode=700", "kvtier", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


if __name__ == "__main__":
    for name in sys.argv[2:]:
        place = Path(sys.argv[1]) / name
        place.mkdir()
        print(name, ROWS[Row[name]](place), flush=True)
