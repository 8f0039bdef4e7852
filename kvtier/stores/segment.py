"""The preallocated files of the nvme tier."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import NoSpaceError, StoreError
from kvtier.stores.file_io import PAGE_BYTES, FileIo, OpenFile

NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


_KEEP_SIZE, _PUNCH_HOLE, _ZERO_RANGE = 1, 2, 16  # Linux's falloc.h
_ZEROS_BYTES = 1 << 20  # written at a time


@functools.cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if fallocate is not None:
        fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]  # off_t, of 64 bits here
    return fallocate


def punch_hole(fd: int, offset_bytes: int, num_bytes: int) -> None:
    """Give the file system these whole pages back; they read as zeros. Raises OSError: EOPNOTSUPP without holes."""
    _change(fd, _PUNCH_HOLE, offset_bytes, num_bytes)


def zero_pages(fd: int, offset_bytes: int, num_bytes: int) -> None:
    """Make whole pages read as zeros that stay allocated, without writing them. Raises OSError where it is unknown."""
    _change(fd, _ZERO_RANGE, offset_bytes, num_bytes)


def _change(fd: int, mode: int, offset_bytes: int, num_bytes: int) -> None:
    fallocate = _fallocate()
    if fallocate is None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
    while fallocate(fd, mode | _KEEP_SIZE, offset_bytes, num_bytes):
        code = ctypes.get_errno()
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))


class Segment:
    """One preallocated file, read and written by a FileIo. One descriptor, which closes when the last user lets go.

    So a late write cannot reach a file that it was not meant for.
    """

    def __init__(self, fd: int, path: Path, num_bytes: int, io: FileIo, count: Callable[[int], None]) -> None:
        """Own `fd` from here on. Raises OSError if it cannot be set up for `io`; it then stays the caller's.

        `count` is told of the bytes of each write before it, in whole pages: the medium is written in no less.
        """
        io.prepare(fd)
        self.path = path
        self.num_bytes = num_bytes
        self._file = OpenFile(fd, path)
        self._io = io
        self._count = count

    def write(self, offset_bytes: int, data: npt.NDArray[np.uint8]) -> None:
        """Write all of `data`. Raises OSError; what lies at the place is then undefined."""
        first, last = offset_bytes // PAGE_BYTES, -(-(offset_bytes + data.nbytes) // PAGE_BYTES)
        self._count((last - first) * PAGE_BYTES)
        self._io.write(self._file, offset_bytes, data)

    def read(self, offset_bytes: int, out: npt.NDArray[np.uint8]) -> None:
        """Fill `out`; releases the GIL. Raises ShortReadError if the file was truncated, OSError."""
        self._io.read(self._file, offset_bytes, out)

    def place(self, offset_bytes: int) -> tuple[OpenFile, int]:
        """An offset as `FileIo.read_rows` wants it."""
        return self._file, offset_bytes

    def will_need(self, offset_bytes: int, num_bytes: int) -> None:
        """Ask for a read ahead, where `io` has one; returns at once."""
        self._io.will_need(self._file, offset_bytes, num_bytes)

    def allocate(self, offset_bytes: int, num_bytes: int) -> None:
        """Have room on disk for these bytes of a sparse file. Raises OSError; some may have been allocated then."""
        os.posix_fallocate(self._file.fd, offset_bytes, num_bytes)

    def punch(self, offset_bytes: int, num_bytes: int) -> None:
        """Give whole pages of a sparse file back; they read as zeros. Raises OSError. Waits for writes to them."""
        punch_hole(self._file.fd, offset_bytes, num_bytes)

    def erase(self, offset_bytes: int, num_bytes: int) -> None:
        """Make whole pages zero that stay allocated. Raises OSError; some may be zero then. Waits for writes to them.

        Where the file system can, it only notes that nothing is in them, and nothing is written; else zeros are.
        """
        try:
            zero_pages(self._file.fd, offset_bytes, num_bytes)
        except OSError:  # not known there (tmpfs), or no room for the note
            zeros = np.zeros(min(num_bytes, _ZEROS_BYTES), np.uint8)
            for at in range(0, num_bytes, _ZEROS_BYTES):
                self.write(offset_bytes + at, zeros[: num_bytes - at])

    def sync(self) -> None:
        """Wait until all that was written is on the medium. Raises OSError."""
        os.fdatasync(self._file.fd)

    def allocated_bytes(self) -> int:
        """As `du` counts it, the file system's own index blocks included."""
        return os.fstat(self._file.fd).st_blocks * 512

    def size_bytes(self) -> int:
        """The file's size now."""
        return os.fstat(self._file.fd).st_size


def no_space(error: OSError, path: Path, available_slots: int) -> NoSpaceError:
    """An OSError of NO_SPACE_ERRNOS in the words of a store."""
    reason = f"{errno.errorcode.get(error.errno or 0, '?')} ({os.strerror(error.errno or 0)})"
    message = f"nvme store: no space for {path}: {reason}; {available_slots} slots have backing"
    return NoSpaceError(message, available_slots)


def io_error(error: OSError, doing: str, path: Path) -> StoreError:
    """An OSError in the words of a store."""
    return StoreError(error.errno, f"nvme store: {doing}: {error.strerror}", str(path))
