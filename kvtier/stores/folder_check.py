"""Whether a folder can be owned, by what it is and holds; and the errors that say why not. Nothing is changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.stores.file_io import close_fd
from kvtier.stores.folder_entries import EntryKind, entry_kind


def check_folder_usable(path: Path) -> None:
    """Raise the ConfigError of an OwnedFolder for what `path` is and holds, if it is there; nothing is changed.

    Whether somebody owns it is not looked at.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        raise not_owned(path, error) from error
    try:
        check_contents(fd, path)
    except OSError as error:
        raise not_owned(path, error) from error
    finally:
        close_fd(fd)


def check_contents(fd: int, path: Path) -> None:
    """Refuse a folder with anything of somebody else's: its mode is about to change, and `du` counts it all."""
    _check_owner(os.fstat(fd), path, "it")
    for entry in os.scandir(fd):
        status = entry.stat(follow_symlinks=False)
        if entry_kind(entry.name, status.st_mode) is EntryKind.STRANGER:
            kind = "a symlink" if entry.is_symlink() else "not kvtier's"
            raise ConfigError(
                f"tiers.nvme.path: folder {path}: {entry.name} in it is {kind}; move it elsewhere, or give another "
                "folder"
            )
        _check_owner(status, path, entry.name)


def _check_owner(status: os.stat_result, path: Path, what: str) -> None:
    """Root may open anything: what another user put there is still not ours to read."""
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"tiers.nvme.path: folder {path}: {what} belongs to user {status.st_uid}, not to {os.geteuid()}; give a "
            "folder of your own"
        )


def not_owned(path: Path, error: OSError) -> ConfigError:
    """Why a folder that was to be ours is not."""
    if path.is_symlink():  # O_NOFOLLOW says that it is no folder
        return ConfigError(
            f"tiers.nvme.path: {path} is a symlink, which is not followed: remove it, or give another folder"
        )
    return unusable(path, error)


def unusable(path: Path, error: OSError) -> ConfigError:
    """Why nothing can be made, opened or looked at there."""
    reason = os.strerror(error.errno or 0)
    is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    mend = "make room there, or give a folder on another disk" if is_full else "give a folder that you may write to"
    return ConfigError(f"tiers.nvme.path: folder {path}: {reason}; {mend}")
