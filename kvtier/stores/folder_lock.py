"""The lock of a folder: a file `lock` in it, flocked by the process that owns it, with that process's id in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path

from kvtier.errors import ConfigError, FolderInUseError
from kvtier.stores.file_io import close_fd
from kvtier.stores.folder_entries import LOCK_NAME

FILE_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC

claimed_lock_fds: dict[Path, int] = {}
"""Locks taken for a folder when it was made, until its owner takes them over: a new folder is never seen unlocked."""


def lock_owner(folder_fd: int) -> str | None:
    """What the lock says of its owner if it is held, without writing to it; None if nobody holds it.

    Raises OSError: there is no lock, or it is not a file that can be opened.
    """
    fd = os.open(LOCK_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given up at once: nobody is kept out
    except BlockingIOError:
        return _owner(fd)
    finally:
        close_fd(fd)
    return None


def _owner(lock_fd: int) -> str:
    text = os.pread(lock_fd, 32, 0).strip()
    return text.decode() if text.isdigit() else "unknown"  # it is shown to people: nothing but a number


def take_lock(folder_fd: int, path: Path) -> int:
    """Descriptor of the folder's lock file, flocked, our pid written in it."""
    fd = os.open(LOCK_NAME, FILE_FLAGS | os.O_CREAT, 0o600, dir_fd=folder_fd)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ConfigError(f"tiers.nvme.path: folder {path}: lock is not a file; remove it")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FolderInUseError(
                f"nvme folder {path} belongs to process {_owner(fd)}, which is alive",
                "set tiers.nvme.path to another folder, leave it out for a temporary one, or set "
                "tiers.nvme.on_locked: subfolder",
            ) from None
        if os.stat(LOCK_NAME, dir_fd=folder_fd, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
            raise FolderInUseError(f"nvme folder {path} is being removed by its owner; try again")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    except BaseException:  # a Ctrl-C too: no lock is left
        release_lock(fd)
        raise
    return fd


def release_lock(fd: int) -> None:
    """Give up a lock that this process took, and its descriptor.

    Closing is not enough: a child that was forked a moment ago may still have a twin of the descriptor.
    """
    with contextlib.suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)
    close_fd(fd)
