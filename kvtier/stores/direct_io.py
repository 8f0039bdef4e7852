"""O_DIRECT: between the disk and page-aligned memory, past the page cache."""

from __future__ import annotations

import fcntl
import functools
import os
import threading
from collections.abc import Sequence

import numpy as np

from kvtier.log import logger
from kvtier.stores.file_io import PAGE_BYTES, Bytes, EndOfRows, FileIo, OpenFile, read_all, write_all
from kvtier.stores.kernel_aio import AioReads, KernelAio
from kvtier.stores.staging import BUFFER_BYTES, StagingPool
from kvtier.types import IoMode

_AIO_DEPTH = 64
"""Reads of one thread in flight at most: 16 keep a disk busy, and those of several layers wait for their turn here."""


class DirectIo(FileIo):
    """Straight between the file and the caller's memory where both lie alike on pages; the rest through staging.

    A file's offset and the memory's address must leave the same remainder by 4 KiB for that; whole pages then move
    without a copy. Pages that a write covers in part are read, changed and written back. No page cache, no read-ahead.
    """

    mode = IoMode.DIRECT

    def __init__(self, host_budget_bytes: int) -> None:
        """`host_budget_bytes`: the most that staging may take. Raises BudgetError."""
        self.staging = StagingPool(host_budget_bytes)
        self._local = threading.local()
        self.reads_together = True
        # See whether there is any. Not kept: whoever closes may be another thread, which cannot give this one's back.
        if (aio := self._aio()) is not None:
            aio.close()

    def prepare(self, fd: int) -> None:
        super().prepare(fd)
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)

    def read(self, file: OpenFile, offset_bytes: int, out: Bytes) -> None:
        start, end = _straight(offset_bytes, out)
        if start:
            self._read_staged(file, offset_bytes, out[:start])
        if start < end:
            read_all(file, offset_bytes + start, out.data[start:end], end - start, PAGE_BYTES)
        if end < out.nbytes:
            self._read_staged(file, offset_bytes + end, out[end:])

    def begin_rows(self, places: Sequence[tuple[OpenFile, int]], out: Bytes) -> EndOfRows:
        address, row_bytes = int(out.__array_interface__["data"][0]), out.shape[1]
        is_whole = not (row_bytes % PAGE_BYTES or address % PAGE_BYTES)
        # One row too: other reads are begun before it is ended.
        aio = self._aio() if is_whole and places else None
        if aio is None or any([offset_bytes % PAGE_BYTES for _, offset_bytes in places]):
            return super().begin_rows(places, out)
        fds, offsets = [file.fd for file, _ in places], [offset_bytes for _, offset_bytes in places]
        try:
            reads = aio.begin(fds, offsets, out, address, row_bytes)
        except OSError as error:
            self._go_without(error)
            return super().begin_rows(places, out)
        return functools.partial(self._end_rows, aio, reads, places)

    def _end_rows(self, aio: KernelAio, reads: AioReads, places: Sequence[tuple[OpenFile, int]]) -> Sequence[bool]:
        """`places` keeps the descriptors open as long as the kernel reads from them."""
        try:
            return [result == reads.row_bytes for result in aio.end(reads)]
        except OSError as error:
            self._go_without(error)
            return [False] * len(places)

    def write(self, file: OpenFile, offset_bytes: int, data: Bytes) -> None:
        start, end = _straight(offset_bytes, data)
        if start:
            self._write_staged(file, offset_bytes, data[:start])
        if start < end:
            write_all(file, offset_bytes + start, data.data[start:end], PAGE_BYTES)
        if end < data.nbytes:
            self._write_staged(file, offset_bytes + end, data[end:])

    def will_need(self, file: OpenFile, offset_bytes: int, num_bytes: int) -> None:
        """Nothing: there is no cache to bring them into."""

    def host_bytes(self) -> int:
        return self.staging.used_bytes()

    def close(self) -> None:
        # The buffers go with the pool, other threads' contexts with the threads: a late reader may still need them.
        self.reads_together = False
        if (aio := getattr(self._local, "aio", None)) is not None:
            aio.close()

    def _aio(self) -> KernelAio | None:
        """This thread's own; None where there is none to be had."""
        aio: KernelAio | None = getattr(self._local, "aio", None)
        if self.reads_together and (aio is None or aio.is_closed):
            try:
                aio = self._local.aio = KernelAio(_AIO_DEPTH)
            except OSError as error:
                self._go_without(error)
        return aio if self.reads_together else None

    def _go_without(self, error: OSError) -> None:
        self.reads_together = False
        logger.info("nvme tier: slices are read one by one, not by the kernel's AIO: %s", error.strerror)

    def _read_staged(self, file: OpenFile, offset_bytes: int, out: Bytes) -> None:
        while out.nbytes:
            skipped = offset_bytes % PAGE_BYTES
            taken = min(out.nbytes, BUFFER_BYTES - skipped)
            with self.staging.buffer() as buffer:
                pages = buffer[: _whole_pages(skipped + taken)]
                read_all(file, offset_bytes - skipped, pages.data, skipped + taken, PAGE_BYTES)
                np.copyto(out[:taken], buffer[skipped : skipped + taken])
            out = out[taken:]
            offset_bytes += taken

    def _write_staged(self, file: OpenFile, offset_bytes: int, data: Bytes) -> None:
        while data.nbytes:
            skipped = offset_bytes % PAGE_BYTES
            taken = min(data.nbytes, BUFFER_BYTES - skipped)
            start, length = offset_bytes - skipped, _whole_pages(skipped + taken)
            with self.staging.buffer() as buffer:
                in_part = {0} if skipped else set()
                if (skipped + taken) % PAGE_BYTES:
                    in_part.add(length - PAGE_BYTES)
                for at in in_part:
                    read_all(file, start + at, buffer[at : at + PAGE_BYTES].data, PAGE_BYTES, PAGE_BYTES)
                np.copyto(buffer[skipped : skipped + taken], data[:taken])
                write_all(file, start, buffer[:length].data, PAGE_BYTES)
            data = data[taken:]
            offset_bytes += taken


def _straight(offset_bytes: int, memory: Bytes) -> tuple[int, int]:
    """The part of `memory`, from and to, whose pages are pages of the file too; (0, 0) where none is."""
    address: int = memory.__array_interface__["data"][0]
    start = -offset_bytes % PAGE_BYTES
    if (address + start) % PAGE_BYTES or start + PAGE_BYTES > memory.nbytes:
        return 0, 0
    return start, memory.nbytes - (memory.nbytes - start) % PAGE_BYTES


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
