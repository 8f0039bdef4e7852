"""Through the page cache, of which only so much is kept."""

from __future__ import annotations

import os

from kvtier.stores.file_io import Bytes, FileIo, OpenFile, read_all, write_all
from kvtier.stores.page_cache import GRANULE_BYTES, PageCache
from kvtier.types import IoMode

_READ_BYTES = 1 << 20  # a longer read goes in pieces, each accounted before it begins


class BufferedIo(FileIo):
    """`preadv` into the caller's memory and `pwrite` from it; the page cache they leave is accounted and released.

    Not through a mapping, whatever the mode's name says: docs/adr/0012.
    """

    mode = IoMode.MMAP

    def __init__(self, host_budget_bytes: int) -> None:
        """`host_budget_bytes`: the most page cache that the files may hold. Raises BudgetError."""
        self.cache = PageCache(host_budget_bytes)

    def prepare(self, fd: int) -> None:
        super().prepare(fd)
        # Slices are read in no order that the kernel could guess; its read-ahead would read up to twice the bytes.
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, file: OpenFile, offset_bytes: int, out: Bytes) -> None:
        view = out.data
        for at in range(0, len(view), _READ_BYTES):
            piece = view[at : at + _READ_BYTES]
            with self.cache.using(file, offset_bytes + at, len(piece)):
                read_all(file, offset_bytes + at, piece, len(piece))

    def write(self, file: OpenFile, offset_bytes: int, data: Bytes) -> None:
        view = data.data
        while view:
            piece = view[: GRANULE_BYTES - offset_bytes % GRANULE_BYTES]
            with self.cache.using(file, offset_bytes, len(piece), is_write=True):
                write_all(file, offset_bytes, piece)
            view = view[len(piece) :]
            offset_bytes += len(piece)

    def will_need(self, file: OpenFile, offset_bytes: int, num_bytes: int) -> None:
        for at in range(offset_bytes, offset_bytes + num_bytes, _READ_BYTES):
            self.cache.read_ahead(file, at, min(_READ_BYTES, offset_bytes + num_bytes - at))

    def host_bytes(self) -> int:
        return self.cache.used_bytes()

    def close(self) -> None:
        self.cache.close()
