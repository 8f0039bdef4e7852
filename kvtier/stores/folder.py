"""A folder that one process owns, and the files that may lie in it.

Every file is 0600 in a folder 0700, is opened relative to the folder's descriptor and never through a symlink. Nor is
the folder itself; what leads to it is the user's own, and may.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError, StoreError
from kvtier.stores.buffered_io import BufferedIo
from kvtier.stores.file_io import PAGE_BYTES, FileIo, close_fd
from kvtier.stores.folder_check import check_contents, not_owned
from kvtier.stores.folder_entries import (
    LOCK_NAME,
    NAMESPACE_NAME,
    NEW_SUFFIX,
    SEGMENT_NAME,
    WRITES_NAME,
    is_data,
    is_session,
    namespace_name,
)
from kvtier.stores.folder_lock import FILE_FLAGS, claimed_lock_fds, release_lock, take_lock
from kvtier.stores.segment import Segment, punch_hole

_PAGE_CACHE_BYTES = 4 << 20  # for whoever only looks into a folder

_log = logging.getLogger("kvtier")

# Whose lock a forked child must let go of: its copy of the descriptor would hold it for as long as the child lives.
_owned: weakref.WeakSet[OwnedFolder] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A segment file that an earlier process left, by what the file system says of it."""

    name: str
    size_bytes: int
    allocated_bytes: int
    changed_s: float
    is_private: bool
    """Whether only its owner could read and write it."""


class OwnedFolder:
    """A folder that this process alone writes to, for as long as it holds `flock` on the file `lock` in it.

    Attributes:
        io: how its segments are read and written; a store sets its own before it makes or adopts any.
        count: told of all bytes that go to its segments, likewise.
    """

    def __init__(self, path: Path, keep_files: bool = False) -> None:
        """Make or open `path` and take its lock; unless `keep_files`, remove what an earlier process left.

        Raises:
            FolderInUseError: another store, here or in another process, owns it. Nothing in it was touched.
            ConfigError: not a folder, a symlink, not ours, not writable, or it holds files that kvtier did not make.
        """
        path = path.absolute()  # so that its last part has a name
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path = path.parent.resolve(strict=True) / path.name
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise not_owned(path, error) from error
        self.io: FileIo = BufferedIo(_PAGE_CACHE_BYTES)
        self.count: Callable[[int], None] = _count_nothing
        self._session_bytes: dict[str, int] = {}  # allocated, by file
        self._lock_fd = claimed_lock_fds.pop(self.path, -1)
        self._owner_pid = os.getpid()
        try:
            check_contents(self._fd, self.path)
            if self._lock_fd < 0:
                self._lock_fd = take_lock(self._fd, self.path)
            os.fchmod(self._fd, 0o700)
            _owned.add(self)
            if not keep_files:
                self._remove_files()
            for entry in os.scandir(self._fd):
                if is_session(entry.name):
                    self._session_bytes[entry.name] = entry.stat(follow_symlinks=False).st_blocks * 512
        except BaseException as error:  # a Ctrl-C too: no descriptor, no lock is left
            self._close_fds()
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise not_owned(path, error) from error
            raise

    def _remove_files(self) -> None:
        names = [entry.name for entry in os.scandir(self._fd) if is_data(entry.name)]
        for name in names:
            self.unlink(name)

    def segment_files(self) -> list[SegmentFile]:
        """The segment files that are there, by name."""
        names = sorted(entry.name for entry in os.scandir(self._fd) if SEGMENT_NAME.fullmatch(entry.name))
        return [self._describe(name, os.stat(name, dir_fd=self._fd, follow_symlinks=False)) for name in names]

    def _describe(self, name: str, status: os.stat_result) -> SegmentFile:
        is_private = not stat.S_IMODE(status.st_mode) & 0o077
        return SegmentFile(name, status.st_size, status.st_blocks * 512, status.st_mtime, is_private)

    def open_file(self, name: str) -> int:
        """A descriptor for reading a file of the folder, the caller's to close. Raises OSError."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: a planted FIFO would hang
        return os.open(name, flags, dir_fd=self._fd)

    def adopt(self, name: str, num_bytes: int, *, sparse: bool = False) -> Segment:
        """A segment of `num_bytes` from a file that is there: cut to that length, unless `sparse` its holes allocated.

        Raises OSError; the file is still there then.
        """
        fd = os.open(name, FILE_FLAGS, dir_fd=self._fd)
        try:
            status = os.fstat(fd)
            if status.st_size != num_bytes:
                os.ftruncate(fd, num_bytes)
            # By reading and writing on some file systems, so not for nothing.
            if not sparse and status.st_blocks * 512 < num_bytes:
                os.posix_fallocate(fd, 0, num_bytes)
            return Segment(fd, self.path / name, num_bytes, self.io, self.count)
        except BaseException:  # a Ctrl-C too: no descriptor is left
            close_fd(fd)
            raise

    def check_holes(self) -> None:
        """Raise ConfigError unless files in this folder can give parts of their space back."""
        try:
            punch_hole(self._lock_fd, PAGE_BYTES, PAGE_BYTES)  # behind its end: nothing is there
        except OSError as error:
            raise ConfigError(
                f"tiers.nvme.compression: zstd needs a file system that can give parts of files back, and that of "
                f"{self.path} cannot ({error.strerror}): set it to none, or tiers.nvme.path to another disk"
            ) from error

    def namespace_times(self) -> dict[bytes, float]:
        """When each namespace was last opened, in seconds since the epoch."""
        matches = ((NAMESPACE_NAME.fullmatch(entry.name), entry) for entry in os.scandir(self._fd))
        return {
            bytes.fromhex(match[1]): entry.stat(follow_symlinks=False).st_mtime for match, entry in matches if match
        }

    def touch_namespace(self, namespace: bytes) -> None:
        """Note that a namespace is opened now. Its file is empty: the name and the time say it all. Raises OSError."""
        flags = FILE_FLAGS | os.O_CREAT
        fd = os.open(namespace_name(namespace), flags, 0o600, dir_fd=self._fd)
        try:
            os.utime(fd)
        finally:
            close_fd(fd)

    def drop_namespace(self, namespace: bytes) -> None:
        """Forget when a namespace was last opened. Raises OSError."""
        self.unlink(namespace_name(namespace))

    def sync(self) -> None:
        """Wait until the folder's entries are on the medium. Raises OSError."""
        os.fsync(self._fd)

    def unlink(self, name: str) -> None:
        """Take a file off the disk; its space is free once nobody reads it any more. Raises OSError."""
        os.unlink(name, dir_fd=self._fd)
        self._session_bytes.pop(name, None)

    def create(self, name: str, num_bytes: int, *, sparse: bool = False) -> Segment:
        """Make a segment file with all of its blocks allocated, or the first only. On any error the file is gone again.

        Raises:
            OSError: NO_SPACE_ERRNOS when the disk, quota or file size limit is reached; EEXIST for a planted file.
        """
        fd = os.open(name, FILE_FLAGS | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._fd)
        try:
            if sparse:
                os.ftruncate(fd, num_bytes)
            # First of all: whoever finds room here does not run out of it in the middle of a write.
            os.posix_fallocate(fd, 0, PAGE_BYTES if sparse else num_bytes)
            return Segment(fd, self.path / name, num_bytes, self.io, self.count)
        except BaseException:  # a Ctrl-C too: no half-made file is left
            close_fd(fd)
            os.unlink(name, dir_fd=self._fd)
            raise

    def read_file(self, name: str, max_bytes: int) -> bytes:
        """The first bytes of a small file. Raises OSError."""
        fd = self.open_file(name)
        try:
            return os.pread(fd, max_bytes, 0)
        finally:
            close_fd(fd)

    def replace_file(self, name: str, data: bytes, *, sync: bool = True) -> None:
        """Put a small file in the place of the one of that name, whole, and with `sync` on the medium.

        Raises OSError: the one before stands, or either if it was the folder that did not reach the medium. Nothing
        else is left.
        """
        new = name + NEW_SUFFIX
        try:
            self._write_new(new, data, sync)
            os.rename(new, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            if new in self._session_bytes:
                self._session_bytes[name] = self._session_bytes.pop(new)
            if sync:
                self.sync()
        except BaseException:  # a Ctrl-C too
            with contextlib.suppress(OSError):
                self.unlink(new)
            raise

    def _write_new(self, name: str, data: bytes, sync: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fd)  # left by a process that died, or planted: never written into
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(name, flags, 0o600, dir_fd=self._fd)
        try:
            os.fchmod(fd, 0o600)
            at = 0
            while at < len(data):  # in part where the disk ends in the middle: the next call says why
                written = os.pwrite(fd, memoryview(data)[at:], at)
                if not written:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                at += written
            if sync:
                os.fsync(fd)
        finally:
            try:
                if is_session(name):
                    self._session_bytes[name] = os.fstat(fd).st_blocks * 512
            finally:
                close_fd(fd)

    def session_files(self) -> list[str]:
        """Names of the sessions' files, those that were not finished included."""
        return sorted(self._session_bytes)

    def sessions_bytes(self) -> int:
        """Allocated bytes of the sessions' files. No call to the file system: only the owner changes them."""
        return sum(list(self._session_bytes.values()))  # a list: another thread may be saving

    def forget_writes(self) -> None:
        """Remove the count of writes, if there is one. Raises OSError."""
        for name in (WRITES_NAME, WRITES_NAME + NEW_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                self.unlink(name)

    def overhead_bytes(self) -> int:
        """Allocated bytes of the folder, its lock, sessions and the count of writes; namespaces' files take none."""
        fds = [fd for fd in (self._fd, self._lock_fd) if fd >= 0]  # a forked child has no lock
        num_blocks = sum(os.fstat(fd).st_blocks for fd in fds)
        for name in (WRITES_NAME, WRITES_NAME + NEW_SUFFIX):
            with contextlib.suppress(FileNotFoundError):
                num_blocks += os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_blocks
        return num_blocks * 512 + self.sessions_bytes()

    def close(self, keep_files: bool) -> None:
        """Give up the lock; unless `keep_files`, remove our files first, and the folder if nothing else is in it."""
        try:
            if not keep_files and os.getpid() == self._owner_pid:  # a forked child must not pull the files away
                self._remove_files()
                os.unlink(LOCK_NAME, dir_fd=self._fd)
                os.rmdir(self.path)
        except OSError as error:
            _log.warning("nvme folder %s could not be removed: %s", self.path, error)
        finally:
            self._close_fds()

    def _close_fds(self) -> None:
        if self._fd >= 0:
            close_fd(self._fd)
        if self._lock_fd >= 0:
            release = release_lock if os.getpid() == self._owner_pid else close_fd  # a child's is its parent's too
            release(self._lock_fd)
        self._fd = self._lock_fd = -1


def _count_nothing(num_bytes: int) -> None:
    """Of a folder that is only looked into, nothing is written."""


def _let_go_in_child() -> None:
    for folder in list(_owned):
        if folder._lock_fd >= 0:
            close_fd(folder._lock_fd)
            folder._lock_fd = -1
    while claimed_lock_fds:
        close_fd(claimed_lock_fds.popitem()[1])


os.register_at_fork(after_in_child=_let_go_in_child)
