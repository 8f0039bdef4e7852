"""A file that is there whole or not at all: written beside its place under another name, flushed, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvtier.errors import ArchiveError
from kvtier.stores.file_io import close_fd

if TYPE_CHECKING:
    from typing_extensions import Buffer

_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS)  # file systems without hard links, as on USB sticks
_TRIES_MAX = 100
_MENDS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), "make room there, or write it elsewhere"),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "give a folder that you may write to"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "make the folder {}, or give another"),
    errno.ENAMETOOLONG: "give it a shorter name",
}


class NewFile:
    """One file on its way to its place. Entering creates it there under another name; leaving, however, removes that.

    It is the caller's alone (mode 0600). Its other name is random, and it is locked while it is written, so that the
    next writer of the same path can tell what a killed one left, and removes it.

    All methods raise ArchiveError where the system fails; the file is then not in its place, and what was there is.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        """Does nothing yet. `overwrite`: take the place of a regular file that is there. Nothing else is replaced."""
        self.path = path
        self.fd = -1
        self._overwrite = overwrite
        self._folder_fd = -1
        self._name: str | None = None

    def create(self) -> None:
        """Make the file under its other name, empty. Removes what killed writers of this path left.

        Raises:
            ArchiveError: there is no such folder, or the place is taken by a file, a folder, a link or whatever else.
        """
        if "\0" in str(self.path):
            raise ArchiveError(f"{str(self.path)!r} is no path: it has a zero byte in it")
        with self.failing("cannot be written"):
            self._folder_fd = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            self._check_place()
            self._remove_leftovers()
            for _ in range(_TRIES_MAX):
                if self._create_locked():
                    return
            raise OSError(errno.EAGAIN, "what is created there is locked by others")

    def write(self, data: Buffer) -> None:
        """Append all of it."""
        with self.failing("cannot be written"):
            view = memoryview(data).cast("B")
            while view:
                view = view[os.write(self.fd, view) :]

    def publish(self) -> None:
        """Flush it and put it in its place, at once and whole. It stays there even if the folder cannot be flushed.

        Raises:
            ArchiveError: as ever; or something has come to be in its place meanwhile.
        """
        assert self._name is not None
        with self.failing("cannot be written"):
            os.fsync(self.fd)
            self._check_place()
            if self._overwrite or not self._link(self._name):
                os.rename(self._name, self.path.name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd)
        with self.failing("is written, but may not outlive a power loss"):
            _flush_folder(self._folder_fd)

    def abandon(self) -> None:
        """Remove what is not in its place by now, and let go of everything. Idempotent."""
        try:
            if self._name is not None:
                with contextlib.suppress(OSError):  # gone when it was renamed
                    os.unlink(self._name, dir_fd=self._folder_fd)
        finally:
            fds, self.fd, self._folder_fd, self._name = (self.fd, self._folder_fd), -1, -1, None
            for fd in fds:
                if fd >= 0:
                    close_fd(fd)

    def __enter__(self) -> Self:
        try:
            self.create()
        except BaseException:  # a Ctrl-C too: nothing is left beside the target
            self.abandon()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.abandon()

    @contextlib.contextmanager
    def failing(self, what: str) -> Iterator[None]:
        """The system's errors inside as ArchiveError. Keep other people's code out: theirs would be taken for these."""
        try:
            yield
        except ArchiveError:
            raise
        except OSError as error:
            mend = _MENDS.get(error.errno or 0, "see what is wrong with that disk").format(self.path.parent)
            raise ArchiveError(error.errno, f"{self.path} {what}: {error.strerror}. Mend: {mend}") from error

    def _check_place(self) -> None:
        """Raises ArchiveError unless the file may go to its place as it is now."""
        if self.path.name in ("", ".."):
            raise ArchiveError(f"{self.path} is a folder. Mend: give the path of a file in it")
        try:
            mode = os.stat(self.path.name, dir_fd=self._folder_fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return
        if stat.S_ISDIR(mode):
            raise ArchiveError(f"{self.path} is a folder. Mend: give the path of a file in it")
        if stat.S_ISLNK(mode):
            raise ArchiveError(
                f"{self.path} is a symbolic link, and would be replaced. Mend: give the path it leads to"
            )
        if not stat.S_ISREG(mode):
            raise ArchiveError(f"{self.path} is there and no regular file. Mend: give another path")
        if not self._overwrite:
            mend = "give another path, or overwrite=True (--overwrite)"
            raise ArchiveError(f"{self.path} is there already. Mend: {mend}")

    def _create_locked(self) -> bool:
        """One try. False: a writer that looks for leftovers found the file before it was locked, and removes it."""
        name = f"{_prefix(self.path.name)}{secrets.token_hex(16)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._name = name  # before it is there: an interrupt removes it, and nobody else has such a name
        fd = os.open(name, flags, 0o600, dir_fd=self._folder_fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            close_fd(fd)
            return False
        except OSError:  # no locks here: then nobody takes it for a leftover either
            pass
        self.fd = fd
        if os.fstat(fd).st_nlink:
            return True
        close_fd(fd)
        self.fd = -1
        return False

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self._folder_fd):
            if name.startswith(_prefix(self.path.name)):
                with contextlib.suppress(OSError):  # in use, somebody else's, or gone
                    _remove_if_unused(name, self._folder_fd)

    def _link(self, name: str) -> bool:
        """Put the file in its place unless there is one by now. False: this file system has no links; renaming must do.

        Raises OSError.
        """
        try:
            os.link(name, self.path.name, src_dir_fd=self._folder_fd, dst_dir_fd=self._folder_fd, follow_symlinks=False)
        except OSError as error:
            if error.errno in _NO_LINKS:
                return False
            if error.errno == errno.EEXIST:
                self._check_place()
            raise
        return True


def _prefix(name: str) -> str:
    """What the other names of this file begin with. Not with its own: that may be as long as names get."""
    return f".kvtier-new-{hashlib.blake2b(os.fsencode(name), digest_size=8).hexdigest()}-"


def _flush_folder(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system where folders cannot be flushed
            raise


def _remove_if_unused(name: str, folder_fd: int) -> None:
    """Raises OSError: somebody is writing it (BlockingIOError), or it cannot be removed."""
    fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(name, dir_fd=folder_fd)
    finally:
        close_fd(fd)
