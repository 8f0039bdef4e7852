"""How bytes get to a file and back: the interface of the two ways, and what both are made of."""

from __future__ import annotations

import contextlib
import errno
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvtier.errors import ShortReadError
from kvtier.types import IoMode

PAGE_BYTES = 4096  # the file system's block, to which slots are aligned, and what every O_DIRECT takes
_STALLS_MAX = 8  # calls in a row that end without a whole page: no disk does this, a broken file system might

Bytes = npt.NDArray[np.uint8]
EndOfRows = Callable[[], Sequence[bool]]
"""As `FileIo.begin_rows` returns it."""


def close_fd(fd: int) -> None:
    """Close a descriptor. It is gone whatever Linux says of it, and what a block lost its checksums tell."""
    with contextlib.suppress(OSError):
        os.close(fd)


class OpenFile:
    """A descriptor and its path, for messages. The descriptor closes when the last user lets go."""

    def __init__(self, fd: int, path: Path) -> None:
        self.fd = fd
        self.path = path
        # Not at the interpreter's exit: a write that still hangs must not go on into a file that got its number.
        weakref.finalize(self, close_fd, fd).atexit = False


class FileIo(ABC):
    """One way to read and write preallocated files. Shared by all files of a store; every call may run on any thread.

    Writers of one 4 KiB page are kept apart by the caller; so are readers and writers of one byte.
    """

    mode: IoMode
    reads_together = False
    """Whether `begin_rows` reads rows of whole pages together."""

    def prepare(self, fd: int) -> None:
        """Set a new descriptor up for this way. Raises OSError (EINVAL where the file system refuses it)."""
        # What an earlier process left in the page cache is in no account of ours. (A new file has none.)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    @abstractmethod
    def read(self, file: OpenFile, offset_bytes: int, out: Bytes) -> None:
        """Fill `out`, which is contiguous. Raises ShortReadError at the file's end, OSError; `out` is then garbage."""

    def begin_rows(self, places: Sequence[tuple[OpenFile, int]], out: Bytes) -> EndOfRows:
        """Begin to read rows of `out` (`[n, row_bytes]`, contiguous), each from its file and offset.

        Only where this way reads several at once for less than it reads each.

        Returns what ends it, to be called on the same thread: it waits, and says which rows are filled. The others are
        left to `read`, and so are all errors: nothing is raised for a medium that fails. Until it has returned the rows
        may be written to; from then on nothing does.
        """
        return lambda: [False] * len(places)

    @abstractmethod
    def write(self, file: OpenFile, offset_bytes: int, data: Bytes) -> None:
        """Write all of `data`, which is contiguous. Raises OSError; what lies at the place is then undefined."""

    @abstractmethod
    def will_need(self, file: OpenFile, offset_bytes: int, num_bytes: int) -> None:
        """Ask for these bytes to be brought nearer, where this way can; returns at once."""

    @abstractmethod
    def host_bytes(self) -> int:
        """Host memory held for the files now: page cache, or staging."""

    @abstractmethod
    def close(self) -> None:
        """Give the host memory's bookkeeping up. Late calls still work. Idempotent."""


def read_all(file: OpenFile, offset_bytes: int, out: memoryview, needed_bytes: int, step_bytes: int = 1) -> None:
    """`preadv` until at least `needed_bytes` of `out` are there. EINTR is Python's to repeat (PEP 475).

    Args:
        step_bytes: each call begins at a multiple of this, counted from `offset_bytes`.

    Raises:
        ShortReadError: the file ends before, or calls keep ending without one whole step.
        OSError: the medium's.
    """
    done, stalls = 0, 0
    while True:
        got = os.preadv(file.fd, [out[done:]], offset_bytes + done)
        if done + got >= needed_bytes:
            return
        whole = (done + got) // step_bytes * step_bytes
        stalls = 0 if whole > done else stalls + 1
        if got == 0 or stalls > _STALLS_MAX:
            raise ShortReadError(
                f"nvme store: {file.path} has {os.fstat(file.fd).st_size} bytes and gave {done + got} of the "
                f"{needed_bytes} at {offset_bytes}"
            )
        done = whole


def write_all(file: OpenFile, offset_bytes: int, data: memoryview, step_bytes: int = 1) -> None:
    """`pwrite` until all of `data` is written; arguments as `read_all`. Raises OSError, EIO when nothing moves."""
    done, stalls = 0, 0
    while done < len(data):
        written = os.pwrite(file.fd, data[done:], offset_bytes + done)
        end = done + written
        whole = end if end == len(data) else end // step_bytes * step_bytes
        stalls = 0 if whole > done else stalls + 1
        if written == 0 or stalls > _STALLS_MAX:
            raise OSError(errno.EIO, f"pwrite wrote {written} of {len(data) - done} bytes")
        done = whole
