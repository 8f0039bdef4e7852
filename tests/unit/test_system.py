"""Machine probes, on made-up /proc and /sys trees and on the real one."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import pytest

from kvtier import system

GIB = 2**30
MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree: 1 kB\n"
linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v1_mount(folder: str = "/", point: str = "/sys/fs/cgroup/memory") -> str:
    return f"35 31 0:32 {folder} {point} rw,relatime - cgroup cgroup rw,memory\n"


def v2_mount(folder: str = "/", point: str = "/sys/fs/cgroup") -> str:
    return f"35 31 0:32 {folder} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw\n"


def test_without_cgroups_the_limit_is_the_hosts_memory(tmp_path: Path) -> None:
    assert system.memory_limit_bytes(tree(tmp_path, {})) == 64 * GIB


def test_v1_limit_found_on_a_parent(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/a/b\n3:cpuset:/\n0::/\n",
        "proc/self/mountinfo": v1_mount(),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": f"{5 * GIB}\n",
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == 3 * GIB


def test_v1_unlimited_and_above_the_host(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:cpu,memory:/a\n",
        "proc/self/mountinfo": v1_mount(),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{500 * GIB}\n",
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == 64 * GIB


def test_v1_in_a_container_that_sees_only_its_own_part(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "proc/self/mountinfo": v1_mount("/docker/abc"),
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == 2 * GIB


@pytest.mark.parametrize("inner, outer, high, expected", [
    ("max", f"{8 * GIB}", "max", 8 * GIB),
    (f"{4 * GIB}", f"{8 * GIB}", "max", 4 * GIB),
    (f"{4 * GIB}", "max", f"{1 * GIB}", 1 * GIB),
    ("max", "max", "max", 64 * GIB),
])  # fmt: skip
def test_v2_nested(tmp_path: Path, inner: str, outer: str, high: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/job\n",
        "proc/self/mountinfo": v2_mount(),
        "sys/fs/cgroup/user.slice/memory.max": outer,
        "sys/fs/cgroup/user.slice/memory.high": high,
        "sys/fs/cgroup/user.slice/job/memory.max": inner,
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == expected


def test_v2_path_outside_the_namespace_reads_the_mounts_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/../other\n",
        "proc/self/mountinfo": v2_mount(),
        "sys/fs/cgroup/memory.max": f"{6 * GIB}",
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == 6 * GIB


def test_garbage_is_passed_over(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "nonsense\n0:\n\n4:memory:/a\n",
        "proc/self/mountinfo": "nonsense\n1 2 - x\n" + v1_mount(),
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": "-1\n",
    }
    assert system.memory_limit_bytes(tree(tmp_path, files)) == 64 * GIB


def test_available_memory_is_the_tightest_cgroups_rest_without_page_cache(tmp_path: Path) -> None:
    meminfo = MEMINFO + f"MemAvailable: {20 * GIB // 1024} kB\n"
    v2 = {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": "0::/a/b\n",
        "proc/self/mountinfo": v2_mount(),
        "sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/a/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {2 * GIB}\nactive_file {GIB}\nfile_dirty 7\n",
        "sys/fs/cgroup/a/b/memory.max": "max\n",
        "sys/fs/cgroup/a/b/memory.current": f"{5 * GIB}\n",
    }
    assert system.memory_available_bytes(tree(tmp_path / "v2", v2)) == 5 * GIB
    assert system.cgroup_memory_bytes(tmp_path / "v2") == (8 * GIB, 3 * GIB)
    v1 = {
        "proc/meminfo": meminfo,
        "proc/self/cgroup": "4:memory:/a\n",
        "proc/self/mountinfo": v1_mount(),
        "sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory/a/memory.usage_in_bytes": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory/a/memory.stat": (
            "active_file 1\ninactive_file 1\ntotal_inactive_file 0\n" + f"total_active_file {GIB}\n"
        ),
    }
    assert system.memory_available_bytes(tree(tmp_path / "v1", v1)) == 3 * GIB


def test_without_a_cgroup_limit_available_memory_is_the_hosts(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/meminfo": MEMINFO + f"MemAvailable: {20 * GIB // 1024} kB\n"})
    assert system.memory_available_bytes(root) == 20 * GIB
    assert system.cgroup_memory_bytes(root) is None
    assert 0 < system.memory_available_bytes() <= system.memory_limit_bytes()


def test_an_overfull_cgroup_has_nothing_available(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": v2_mount(),
        "sys/fs/cgroup/memory.high": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert system.memory_available_bytes(tree(tmp_path, files)) == 0


def test_process_memory_counts_anonymous_and_shared_memory_only(tmp_path: Path) -> None:
    status = "VmRSS:\t 900 kB\nRssAnon:\t     100 kB\nRssFile:\t     700 kB\nRssShmem:\t      20 kB\n"
    assert system.process_memory_bytes(tree(tmp_path, {"proc/self/status": status})) == 120 * 1024
    assert system.process_memory_bytes(tmp_path / "elsewhere") > 0


@linux_only
def test_process_memory_grows_with_what_is_touched() -> None:
    before = system.process_memory_bytes()
    held = bytearray(os.urandom(1)) * (64 << 20)
    assert system.process_memory_bytes() - before > 56 << 20, len(held)


def test_the_longest_and_latest_mount_names_the_kind(tmp_path: Path) -> None:
    lines = [
        "1 0 8:1 / / rw - overlay overlay rw",
        "2 1 8:2 / /data rw - ext4 /dev/x rw",
        "3 1 8:3 / /data/my\\040disk rw - xfs /dev/y rw",
        "4 1 8:4 / /data rw - nfs4 host:/x rw",
        "5 1 8:5 / /dat rw - tmpfs tmpfs rw",
    ]
    root = tree(tmp_path, {"proc/self/mountinfo": "\n".join(lines)})
    kinds = {"/data/x/y": "nfs4", "/data/my disk/kv": "xfs", "/database": "overlay", "/dat/a": "tmpfs", "/": "overlay"}
    assert {path: system.filesystem_kind(Path(path), root) for path in kinds} == kinds
    assert system.filesystem_kind(Path("/x"), tmp_path / "elsewhere") == "unknown"


def test_kinds() -> None:
    assert all(map(system.is_memory_backed, ["tmpfs", "ramfs"]))
    assert not any(map(system.is_memory_backed, ["ext4", "overlay", "nfs"]))
    assert all(map(system.is_doubtful, ["tmpfs", "ramfs", "overlay", "nfs", "nfs4", "cifs", "9p", "fuse.sshfs"]))
    assert all(map(system.is_network, ["nfs", "nfs4", "cifs", "fuse.sshfs"]))
    assert not any(map(system.is_network, ["tmpfs", "overlay", "ext4", "unknown"]))
    assert not any(map(system.is_doubtful, ["ext4", "xfs", "btrfs", "zfs", "unknown"]))


def test_disk_sizes_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    assert 0 < system.free_disk_bytes(tmp_path / "a" / "b") <= system.disk_total_bytes(tmp_path / "a" / "b")


def test_room_on_a_disk_keeps_a_part_free(tmp_path: Path) -> None:
    total, free = system.disk_total_bytes(tmp_path), system.free_disk_bytes(tmp_path)
    assert abs(system.disk_room_bytes(tmp_path / "not" / "there", 0.05) - max(0, free - total // 20)) < GIB
    assert system.disk_room_bytes(tmp_path, 1.0) == 0


def test_preallocation_is_tried_and_its_errors_are_told_apart(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        assert system.can_preallocate(file.fileno()) is True
    with open(tmp_path / "file", "rb") as file, pytest.raises(OSError, match="Bad file descriptor"):
        system.can_preallocate(file.fileno())
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write), pytest.raises(OSError):
        system.can_preallocate(write)


def test_allocated_bytes_as_du_counts(tmp_path: Path) -> None:
    empty = system.allocated_bytes(tmp_path)
    (tmp_path / "sub").mkdir()
    with open(tmp_path / "sub" / "sparse", "wb") as file:
        file.truncate(1 << 20)
    (tmp_path / "full").write_bytes(b"x" * (1 << 20))
    os.link(tmp_path / "full", tmp_path / "link")
    with open(tmp_path / "full", "rb") as file:
        os.fsync(file.fileno())
    assert 1 << 20 <= system.allocated_bytes(tmp_path) - empty < (1 << 20) + (64 << 10)
    assert system.allocated_bytes(tmp_path / "none") == 0


@linux_only
def test_resident_file_bytes_follow_the_page_cache(tmp_path: Path) -> None:
    if system.is_memory_backed(system.filesystem_kind(tmp_path)):
        pytest.skip("files here are always in memory")
    (tmp_path / "file").write_bytes(b"x" * (1 << 20))
    (tmp_path / "empty").touch()
    assert system.resident_file_bytes(tmp_path) == 1 << 20
    descriptor = os.open(tmp_path / "file", os.O_RDWR)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    assert system.resident_file_bytes(tmp_path) < 1 << 20
    assert system.resident_file_bytes(tmp_path / "none") == 0


def test_open_files_and_threads_are_counted(tmp_path: Path) -> None:
    files, threads = system.open_fds(), system.num_threads()
    stop = threading.Event()
    worker = threading.Thread(target=stop.wait)
    with open(tmp_path / "file", "w"):
        worker.start()
        assert system.open_fds() == files + 1
        assert system.num_threads() == threads + 1
        stop.set()
        worker.join()
    assert system.open_fds() == files


def test_io_counters(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/io": "rchar: 5\nread_bytes: 4096\n"})
    assert system.io_counters(root) == {"rchar": 5, "read_bytes": 4096}
    assert system.io_counters(tmp_path / "elsewhere") == {}
