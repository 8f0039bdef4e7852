"""What the machine has and what this process takes of it: memory limits, RSS, file systems, disk, open files.

Pure Python. Linux first: each probe says what it answers elsewhere. `root` parameters exist so that tests can show a
made-up /proc and /sys.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvtier.errors import ConfigError

_ROOT = Path("/")
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes "unlimited" as a huge number that depends on the page size."""
_MEMORY_BACKED = frozenset({"tmpfs", "ramfs"})
_NETWORK = frozenset({"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "afs", "glusterfs", "fuse"})
_MINCORE_PIECE_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class _Mount:
    root: str
    """The folder of the mounted file system that shows at `point`."""
    point: str
    kind: str
    options: frozenset[str]


def _read(path: Path) -> str:
    """The file's text, or nothing where it cannot be read: every probe treats the two alike."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return ""


def _mounts(root: Path) -> Iterator[_Mount]:
    """The mounts of this process, in mount order: a later one hides an earlier one at the same point."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if len(fields) < 5 or len(tail) < 3:
            continue
        folder, point = (re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), field) for field in fields[3:5])
        yield _Mount(folder, point, tail[0], frozenset(tail[2].split(",")))


def _cgroup_folders(root: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Each cgroup folder that binds this process, innermost first, with the names of its limit files."""
    mounts = list(_mounts(root))
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0":
            matching = [mount for mount in mounts if mount.kind == "cgroup2"]
            names: tuple[str, ...] = ("memory.max", "memory.high")
        elif "memory" in controllers.split(","):
            matching = [mount for mount in mounts if mount.kind == "cgroup" and "memory" in mount.options]
            names = ("memory.limit_in_bytes",)
        else:
            continue
        for mount in matching:
            # In a container the path is often the host's, and the mount shows only the container's own part of it.
            inside = os.path.relpath(path, mount.root) if os.path.isabs(path) else "."
            top = root / mount.point.lstrip("/")
            folder = top if inside.startswith("..") else top / inside
            yield folder, names
            while folder != top:
                folder = folder.parent
                yield folder, names


def memory_limit_bytes(root: Path = _ROOT) -> int:
    """Memory in bytes that this process may use: the least of its cgroup limits (v1 and v2, nested) and the host's RAM.

    Limits that say "max", v1's huge number or nothing are ignored. v2's memory.high counts: beyond it the kernel stalls
    the process. Off Linux: the host's RAM. Cost: a few small files.
    """
    match = re.search(r"^MemTotal:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    limit = int(match[1]) * 1024 if match else psutil.virtual_memory().total
    for folder, names in _cgroup_folders(root):
        for name in names:
            text = _read(folder / name).strip()
            if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
                limit = min(limit, int(text))
    return limit


def memory_available_bytes(root: Path = _ROOT) -> int:
    """Memory in bytes that could still be taken: the host's MemAvailable, or what the tightest cgroup has left.

    Page cache of files counts as free, as the kernel gives it back. Cost: a few small files.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE)
    available = int(match[1]) * 1024 if match else psutil.virtual_memory().available
    for folder, names in _cgroup_folders(root):
        for name in names:
            limit = _read(folder / name).strip()
            if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                available = min(available, max(0, int(limit) - _cgroup_used_bytes(folder)))
    return available


def cgroup_memory_bytes(root: Path = _ROOT) -> tuple[int, int] | None:
    """The least cgroup limit that binds this process and what that cgroup uses, in bytes; None without a limit.

    Page cache of files is not in what it uses, as the kernel gives it back.
    """
    found: list[tuple[int, int]] = []
    for folder, names in _cgroup_folders(root):
        for name in names:
            limit = _read(folder / name).strip()
            if limit.isdecimal() and int(limit) < _NO_LIMIT_BYTES:
                found.append((int(limit), _cgroup_used_bytes(folder)))
    return min(found, default=None)


def _cgroup_used_bytes(folder: Path) -> int:
    used = (_read(folder / "memory.current") or _read(folder / "memory.usage_in_bytes")).strip()
    cached = re.findall(r"^(?:total_)?(?:in)?active_file (\d+)$", _read(folder / "memory.stat"), re.MULTILINE)
    if "total_active_file" in _read(folder / "memory.stat"):  # v1 tells its own share, then with its children's
        cached = cached[len(cached) // 2 :]
    return max(0, int(used) - sum(map(int, cached))) if used.isdecimal() else 0


def process_memory_bytes(root: Path = _ROOT) -> int:
    """Memory in bytes that only this process accounts for: RssAnon + RssShmem. Mapped files do not count.

    Pinned and plain host memory, heap and tmpfs mappings are in it; swapped-out pages are not. Off Linux: the RSS.
    """
    parts = re.findall(r"^Rss(?:Anon|Shmem):\s+(\d+) kB", _read(root / "proc/self/status"), re.MULTILINE)
    if not parts:
        return int(psutil.Process().memory_info().rss)
    return sum(map(int, parts)) * 1024


def filesystem_kind(path: Path, root: Path = _ROOT) -> str:
    """The type of the file system that `path` (which need not exist) lies on: ext4, tmpfs, overlay, nfs4, fuse.sshfs, …

    `unknown` where mounts cannot be listed.
    """
    wanted = os.path.realpath(path)
    kind, longest = "unknown", -1
    for mount in _mounts(root):
        point = mount.point.rstrip("/")
        if (wanted == point or wanted.startswith(point + "/")) and len(point) >= longest:
            kind, longest = mount.kind, len(point)
    return kind


def is_memory_backed(kind: str) -> bool:
    """Whether files of this kind of file system are memory: they then count against the cpu budget."""
    return kind in _MEMORY_BACKED


def is_doubtful(kind: str) -> bool:
    """Whether an nvme folder there deserves a warning: memory, a container's overlay, a network or FUSE file system."""
    return is_memory_backed(kind) or kind == "overlay" or is_network(kind)


def is_network(kind: str) -> bool:
    """Whether files of this kind of file system lie on another machine, or behind FUSE, where one cannot know."""
    return kind in _NETWORK or kind.startswith("fuse.")


def cache_folder() -> Path:
    """The user's cache folder for kvtier: `$XDG_CACHE_HOME/kvtier` or `~/.cache/kvtier`.

    Raises ConfigError: neither a variable nor the system's list of users says where that is.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvtier"
    except RuntimeError:
        raise ConfigError(
            "no home directory is known for this user. Mend: set HOME or XDG_CACHE_HOME, or tiers.nvme.path"
        ) from None


def existing_folder(path: Path) -> Path:
    """The nearest folder above `path` that exists, or `path` itself: a tier's folder is made later."""
    path = Path(path).absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def free_disk_bytes(path: Path) -> int:
    """Bytes that this user may still write where `path` (which need not exist) lies."""
    return shutil.disk_usage(existing_folder(path)).free


def disk_total_bytes(path: Path) -> int:
    """Size in bytes of the file system that `path` (which need not exist) lies on."""
    return shutil.disk_usage(existing_folder(path)).total


def disk_room_bytes(path: Path, reserve_free_frac: float) -> int:
    """Bytes that may be taken where `path` lies while this fraction of the file system stays free."""
    return max(0, free_disk_bytes(path) - int(reserve_free_frac * disk_total_bytes(path)))


def can_preallocate(fd: int) -> bool:
    """Whether the file system itself reserves space (fallocate(2)); elsewhere posix_fallocate writes zeros instead.

    Takes a page of the file `fd` to see. Raises OSError: the disk is full, or the like.
    """
    try:
        function = ctypes.CDLL(None, use_errno=True).fallocate
    except (AttributeError, OSError):
        return False
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if function(fd, 0, 0, os.sysconf("SC_PAGESIZE")) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return False
    raise OSError(code, os.strerror(code))


def _files(folder: Path) -> Iterator[str]:
    for parent, _, names in os.walk(folder):
        yield from (os.path.join(parent, name) for name in names)


def allocated_bytes(folder: Path) -> int:
    """Bytes that `folder` takes on disk, as `du` counts: blocks of all files and folders, hard links once.

    0 for a folder that is not there; files that vanish meanwhile are passed over.
    """
    seen: dict[tuple[int, int], int] = {}
    for path in [*(parent for parent, _, _ in os.walk(folder)), *_files(folder)]:
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def resident_file_bytes(folder: Path) -> int:
    """Bytes of the folder's files that lie in the page cache now, by mincore(2).

    0 where mincore is missing. Exact only for files that this user may write: for others Linux says that all is there.
    Cost: one mapping and one byte per page for each file, no reads.
    """
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        mmap, munmap, mincore = libc.mmap, libc.munmap, libc.mincore
    except (AttributeError, OSError, TypeError):
        return 0
    size_t, off_t, void_p = ctypes.c_size_t, ctypes.c_int64, ctypes.c_void_p
    mmap.argtypes, mmap.restype = [void_p, size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, off_t], void_p
    munmap.argtypes, mincore.argtypes = [void_p, size_t], [void_p, size_t, ctypes.c_char_p]
    page_bytes = os.sysconf("SC_PAGESIZE")
    prot_read, map_shared, failed = 1, 1, ctypes.c_void_p(-1).value

    def resident_pages(descriptor: int, start: int, length: int) -> int:
        address = mmap(None, length, prot_read, map_shared, descriptor, start)
        if address in (None, failed):
            return 0
        try:
            pages = ctypes.create_string_buffer(-(-length // page_bytes))
            return sum(byte & 1 for byte in pages.raw) if mincore(address, length, pages) == 0 else 0
        finally:
            munmap(address, length)

    num_pages = 0
    for path in _files(folder):
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            for start in range(0, size, _MINCORE_PIECE_BYTES):
                num_pages += resident_pages(file.fileno(), start, min(_MINCORE_PIECE_BYTES, size - start))
    return num_pages * page_bytes


def open_fds() -> int:
    """How many file descriptors this process has open. Compare two calls: the call itself may count one."""
    return int(psutil.Process().num_fds())


def num_threads() -> int:
    """How many threads this process has, Python's and native."""
    return int(psutil.Process().num_threads())


def io_counters(root: Path = _ROOT) -> dict[str, int]:
    """This process's /proc/self/io: `read_bytes`, `write_bytes` reached the disk, `rchar`, `wchar` were asked for.

    Reads through a memory map show in `read_bytes` only. Empty where the kernel does not keep or show them.
    """
    return {key: int(value) for key, value in re.findall(r"^(\w+): (\d+)$", _read(root / "proc/self/io"), re.MULTILINE)}
