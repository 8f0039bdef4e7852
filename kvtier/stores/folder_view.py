"""An nvme folder seen from outside: what is in it, without owning it, and owned for as long as it is mended.

Nothing is written unless it was opened to be mended. Every file is opened relative to the folder's descriptor, never
through a symlink, and only if it is a plain file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from kvtier.errors import ConfigError, FolderInUseError
from kvtier.stores.file_io import close_fd
from kvtier.stores.folder_entries import EntryKind, entry_kind
from kvtier.stores.folder_lock import lock_owner, release_lock, take_lock

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # non-blocking: a planted FIFO would hang


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the folder, by what the file system says of it; nothing of it was opened."""

    name: str
    kind: EntryKind
    reason: str
    """Of a STRANGER: why it is one."""
    size_bytes: int
    allocated_bytes: int
    changed_s: float
    is_private: bool
    """Whether only its owner can read and write it."""


class FolderView:
    """A folder that an nvme store of this user may have left, or may be using now. A context manager."""

    def __init__(self, path: Path, *, owned: bool) -> None:
        """Open it; with `owned` take its lock until `close`, so that no process starts to use it.

        Raises:
            ConfigError: it cannot be opened, or belongs to another user.
            FolderInUseError: `owned`, and a living process has it. Nothing was changed.
        """
        self._lock_fd = -1
        try:
            self.path = path.resolve(strict=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise _unusable(path, error) from error
        try:
            owner = os.fstat(self._fd).st_uid
            if owner != os.geteuid():  # root may open anything: another's prompts are still not ours to read
                raise ConfigError(f"{self.path} belongs to user {owner}, not to {os.geteuid()}: run this as that user")
            if owned:
                self._lock_fd = self._take_lock()
        except BaseException as error:  # a Ctrl-C too: no descriptor, no lock is left
            self.close()
            if isinstance(error, OSError):
                raise _unusable(path, error) from error
            raise

    def _take_lock(self) -> int:
        try:
            return take_lock(self._fd, self.path)
        except FolderInUseError as error:
            raise FolderInUseError(
                f"{self.path} is in use by process {self.owner() or 'unknown'}: end it before --repair or --drop; "
                "without them it can be checked now"
            ) from error

    def owner(self) -> str | None:
        """What the lock says of the process that uses the folder now; None if there is none, or we are it."""
        if self._lock_fd >= 0:
            return None
        with contextlib.suppress(OSError):  # no lock: nobody; one that is no file is an entry that `entries` reports
            return lock_owner(self._fd)
        return None

    def is_private(self) -> bool:
        """Whether only its owner can enter it."""
        return not stat.S_IMODE(os.fstat(self._fd).st_mode) & 0o077

    def make_private(self) -> None:
        """Mode 0700. Raises OSError."""
        os.fchmod(self._fd, 0o700)

    def own_bytes(self) -> int:
        """Allocated bytes of the folder itself, without what is in it."""
        return os.fstat(self._fd).st_blocks * 512

    def entries(self) -> list[Entry]:
        """All that is in the folder, by name. Raises OSError."""
        entries = []
        for name in sorted(os.listdir(self._fd)):
            with contextlib.suppress(FileNotFoundError):  # the owner removed it meanwhile
                entries.append(_describe(name, os.stat(name, dir_fd=self._fd, follow_symlinks=False)))
        return entries

    def open_file(self, name: str, *, direct: bool = False, writable: bool = False) -> int:
        """A descriptor of a plain file, the caller's to close. Raises OSError.

        `direct` asks for reads past the page cache: of the bytes on disk, and without filling memory with them. Where
        the file system has none it is a common descriptor.
        """
        flags = _READ_FLAGS | (os.O_RDWR if writable else 0)
        try:
            fd = os.open(name, flags | (os.O_DIRECT if direct else 0), dir_fd=self._fd)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            fd = os.open(name, flags, dir_fd=self._fd)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a plain file")
        except OSError:
            close_fd(fd)
            raise
        return fd

    def unlink(self, name: str) -> None:
        """Take a file off the disk. Raises OSError."""
        os.unlink(name, dir_fd=self._fd)

    def sync(self) -> None:
        """Wait until what was removed is gone from the medium too. Raises OSError."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the lock up, if it is held."""
        if self._fd >= 0:
            close_fd(self._fd)
        if self._lock_fd >= 0:
            release_lock(self._lock_fd)
        self._fd = self._lock_fd = -1

    def __enter__(self) -> FolderView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


_MADE = "give what tiers.nvme.path says, or the folder kv in it, which is made when a model is wrapped with it"


def find_folder(path: Path) -> Path:
    """The folder of a store: `path`, or `kv` in it, where the runtime puts it.

    Raises ConfigError: there is none.
    """
    try:
        path = path.expanduser()
        kinds = _kinds(path)
        if kinds & {EntryKind.SEGMENT, EntryKind.NAMESPACE, EntryKind.SESSION}:
            return path
        inner = path / "kv"
        mode = os.lstat(inner).st_mode if os.path.lexists(inner) else 0
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: {error.strerror}: {_MADE}") from None
    except (OSError, ValueError, RuntimeError) as error:  # a zero byte in the path, a user unknown
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if stat.S_ISLNK(mode):
        raise ConfigError(f"{inner} is a symlink, which is not followed: give the folder that it leads to")
    if stat.S_ISDIR(mode):
        return inner
    if EntryKind.LOCK in kinds and EntryKind.STRANGER not in kinds:
        return path  # of a store that has written nothing yet
    raise ConfigError(f"{path} is not a folder of kvtier's: {_MADE}")


def _kinds(path: Path) -> set[EntryKind]:
    kinds = set()
    for entry in os.scandir(path):
        with contextlib.suppress(FileNotFoundError):  # its owner removed it meanwhile
            kinds.add(entry_kind(entry.name, entry.stat(follow_symlinks=False).st_mode))
    return kinds


def _describe(name: str, status: os.stat_result) -> Entry:
    kind, reason = entry_kind(name, status.st_mode), ""
    if kind is EntryKind.STRANGER:
        reason = "a symlink" if stat.S_ISLNK(status.st_mode) else kind.value
    elif status.st_uid != os.geteuid():
        kind, reason = EntryKind.STRANGER, f"of user {status.st_uid}"
    is_private = not stat.S_IMODE(status.st_mode) & 0o077
    return Entry(name, kind, reason, status.st_size, status.st_blocks * 512, status.st_mtime, is_private)


def _unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path}: {os.strerror(error.errno or 0)}")
