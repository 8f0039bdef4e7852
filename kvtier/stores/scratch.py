"""A file to measure a folder's disk with, which nobody ever finds, and requests at random places of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvtier.stores.file_io import PAGE_BYTES, Bytes, FileIo, OpenFile
from kvtier.stores.staging import page_aligned


@dataclass(frozen=True, slots=True)
class Moved:
    """What a round of requests did."""

    num_bytes: int
    elapsed_s: float


def scratch_file(folder: Path) -> OpenFile:
    """Without a name: it is gone with its descriptor, and never counts as somebody's file in the folder.

    Raises OSError: the folder cannot be written, or its file system has no such files (EOPNOTSUPP).
    """
    fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return OpenFile(fd, folder / "(scratch)")


def reopened(scratch: OpenFile) -> OpenFile:
    """The same file by another descriptor: O_DIRECT belongs to the open file, not to the file. Raises OSError."""
    return OpenFile(os.open(f"/proc/self/fd/{scratch.fd}", os.O_RDWR | os.O_CLOEXEC), scratch.path)


def try_io(io: FileIo, scratch: OpenFile) -> None:
    """Write and read one page. Raises OSError where the file system does not take this way of I/O."""
    io.prepare(scratch.fd)
    io.write(scratch, 0, page_aligned(PAGE_BYTES).numpy())
    io.read(scratch, 0, page_aligned(PAGE_BYTES).numpy())


def move_at(
    io: FileIo, file: OpenFile, places: Sequence[int], buffers: list[Bytes], most_s: float, is_write: bool = False
) -> Moved:
    """Read or write each place once, on as many threads as buffers, for at most `most_s` and the requests under way.

    Args:
        places: which multiples of a buffer's size, in this order.

    Raises:
        OSError: the medium's; RuntimeError: no thread to be had. The other threads have ended then.
    """
    size, stops = buffers[0].nbytes, False
    call = io.write if is_write else io.read
    started_s = time.monotonic()

    def work(index: int) -> int:
        done = 0
        for place in places[index :: len(buffers)]:
            call(file, place * size, buffers[index])
            done += size
            if stops or time.monotonic() > started_s + most_s:
                break
        return done

    with ThreadPoolExecutor(len(buffers), thread_name_prefix="kvtier-measure") as pool:
        try:
            total = sum(pool.map(work, range(len(buffers))))
        finally:
            stops = True  # after an error, or Ctrl-C, nobody waits for the rest
    return Moved(total, time.monotonic() - started_s)
