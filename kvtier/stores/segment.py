"""The preallocated files of the nvme tier."""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import NoSpaceError, ShortReadError

PAGE_BYTES = 4096  # the file system's block, to which slots are aligned
NO_SPACE_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class Segment:
    """One preallocated file: written with `pwrite`, read through a read-only mapping. Descriptors: two.

    Reading by mapping means that a medium's read error (EIO) ends the process with SIGBUS; a truncated file does not.
    The descriptors close when the last user lets go, so that a late write cannot reach a file it was not meant for.
    """

    def __init__(self, fd: int, path: Path, num_bytes: int) -> None:
        """Map `fd` and own it from here on; if mapping fails it stays the caller's."""
        self.path = path
        self.num_bytes = num_bytes
        self._map = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self._fd = fd
        weakref.finalize(self, os.close, fd)

    def write(self, offset_bytes: int, data: npt.NDArray[np.uint8]) -> None:
        """Write all of `data`, without copying it. Raises OSError; what lies at the place is then undefined."""
        left = data.data
        while left:
            written = os.pwrite(self._fd, left, offset_bytes)
            if written == 0:
                raise OSError(errno.EIO, "pwrite wrote nothing")
            left = left[written:]
            offset_bytes += written

    def read(self, offset_bytes: int, out: npt.NDArray[np.uint8]) -> None:
        """Copy `out.nbytes` bytes into `out`; releases the GIL. Raises ShortReadError if the file was truncated."""
        end_bytes = offset_bytes + out.nbytes
        size_bytes = os.fstat(self._fd).st_size
        if size_bytes < end_bytes:  # touching the mapping there would be a SIGBUS
            raise ShortReadError(f"nvme store: {self.path} has {size_bytes} bytes where {end_bytes} were written")
        np.copyto(out, self._bytes[offset_bytes:end_bytes])

    def will_need(self, offset_bytes: int, num_bytes: int) -> None:
        """Ask the kernel to read ahead; returns at once."""
        start = offset_bytes - offset_bytes % mmap.PAGESIZE
        self._map.madvise(mmap.MADV_WILLNEED, start, min(num_bytes + offset_bytes - start, self.num_bytes - start))

    def sync(self) -> None:
        """Wait until all that was written is on the medium. Raises OSError."""
        os.fdatasync(self._fd)

    def allocated_bytes(self) -> int:
        """As `du` counts it, the file system's own index blocks included."""
        return os.fstat(self._fd).st_blocks * 512

    def size_bytes(self) -> int:
        """The file's size now."""
        return os.fstat(self._fd).st_size


def no_space(error: OSError, path: Path, available_slots: int) -> NoSpaceError:
    """An OSError of NO_SPACE_ERRNOS in the words of a store."""
    reason = f"{errno.errorcode.get(error.errno or 0, '?')} ({os.strerror(error.errno or 0)})"
    message = f"nvme store: no space for {path}: {reason}; {available_slots} slots have backing"
    return NoSpaceError(message, available_slots)
