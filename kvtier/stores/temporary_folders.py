"""Folders that live as long as a process: made locked, and swept when their owner has died."""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from kvtier.errors import ConfigError, FolderInUseError
from kvtier.stores.file_io import close_fd
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.folder_check import unusable
from kvtier.stores.folder_lock import claimed_lock_fds, take_lock

_RUN_NAME = re.compile(r"run-\d+-[0-9a-f]+")


def temporary_folder(root: Path) -> Path:
    """Make `root/run-<pid>-<random>` (0700), locked from birth, so that no `sweep_stale` takes it for a dead owner's.

    Hand it to one `NvmeStore(persistent=False)`, which takes the lock over. Raises ConfigError.
    """
    name = f"{os.getpid()}-{secrets.token_hex(8)}"
    hidden, final = root / f"new-{name}", root / f"run-{name}"
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        hidden.mkdir(mode=0o700)
        folder_fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            lock_fd = take_lock(folder_fd, hidden)
        finally:
            close_fd(folder_fd)
        hidden.rename(final)
    except OSError as error:
        raise unusable(root, error) from error
    claimed_lock_fds[final.resolve()] = lock_fd
    return final


def sweep_stale(root: Path) -> list[Path]:
    """Remove the `run-*` folders in `root` whose owner is dead, that is whose lock can be taken; return their paths."""
    removed: list[Path] = []
    for path in sorted(root.glob("run-*")):
        if path.is_symlink() or not path.is_dir() or not _RUN_NAME.fullmatch(path.name):
            continue
        if path.resolve() in claimed_lock_fds:  # ours, and not yet handed to its store
            continue
        try:
            OwnedFolder(path).close(keep_files=False)
        except (FolderInUseError, ConfigError):
            continue  # alive, or not ours to remove
        if not path.exists():
            removed.append(path)
    return removed


def give_up(folder: Path) -> None:
    """Remove a `temporary_folder` whose store was not made, if it is still there."""
    lock_fd = claimed_lock_fds.pop(folder.resolve(), -1)
    shutil.rmtree(folder, ignore_errors=True)
    if lock_fd >= 0:
        close_fd(lock_fd)
