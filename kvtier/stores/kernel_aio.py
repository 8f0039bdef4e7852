"""Linux's own asynchronous I/O: many reads past the page cache by two system calls, from one thread.

A thread for each read costs as much processor time as the read itself, most of it in Python and in handing the
interpreter's lock to and fro, while the thread that computes waits for that lock. Here the kernel has all at once.
By ctypes: the calls are six lines of ABI that has not changed since Linux 2.6, and no library that is kept up wraps
them. Source: io_submit(2), io_getevents(2), linux/aio_abi.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import sys
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
"""By machine: the numbers of io_setup, io_destroy, io_getevents and io_submit."""
_PREAD = 0  # IOCB_CMD_PREAD
_IOCB = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("fd", "<u4"),
        ("buffer", "<u8"), ("num_bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"),
        ("eventfd", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])


class AioReads:
    """Reads that were begun together.

    Attributes:
        results: of each how many bytes were read, as `pread` says it, or minus the errno; -ECANCELED until it has
            ended, and of one whose result is lost.
    """

    def __init__(self, fds: Sequence[int], offsets: Sequence[int], out: npt.NDArray[np.uint8]) -> None:
        self.fds, self.offsets = fds, offsets
        self.out = out  # it stays as long as the kernel may write into it
        self.results = np.full(len(fds), -errno.ECANCELED, np.int64)
        self.num_begun = self.num_ended = 0


class KernelAio:
    """Reads of one thread, up to `depth` of them in flight."""

    def __init__(self, depth: int) -> None:
        """Raises OSError where the kernel, the machine or a sandbox has none of it, or no more of it to give."""
        numbers = _NUMBERS.get(platform.machine()) if sys.platform == "linux" and sys.byteorder == "little" else None
        if numbers is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        setup, destroy, self._getevents, self._submit = numbers
        self._syscall = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        self.depth = depth
        self._iocbs, self._events = np.zeros(depth, _IOCB), np.zeros(depth, _EVENT)
        self._iocbs["opcode"], self._iocbs["data"] = _PREAD, np.arange(depth)
        self._addresses = self._iocbs.ctypes.data + _IOCB.itemsize * np.arange(depth, dtype=np.uint64)
        self._pointers = np.zeros(depth, np.uint64)
        self._first_pointer, self._first_event = self._pointers.ctypes.data, self._events.ctypes.data
        self._free = list(range(depth))
        """Iocbs that are not in flight."""
        self._read_of: dict[int, tuple[AioReads, int]] = {}
        """By iocb in flight, whose it is, and which."""
        context = ctypes.c_ulong(0)
        self._call(setup, ctypes.c_uint(depth), ctypes.byref(context))
        self._context = ctypes.c_ulong(context.value)
        self._destroy = weakref.finalize(self, self._syscall, ctypes.c_long(destroy), self._context)
        # Not at the interpreter's exit: destroying waits for reads that hang, and the kernel does it then anyway.
        self._destroy.atexit = False
        try:  # a sandbox may allow some of the calls
            self._call(self._getevents, self._context, *map(ctypes.c_long, (0, 1)), *map(ctypes.c_void_p, (0, 0)))
        except BaseException:
            self.close()
            raise

    @property
    def is_closed(self) -> bool:
        """After `close`, and after a `begin` or `end` that raised."""
        return not self._destroy.alive

    def close(self) -> None:
        """Wait for reads that are under way, and give the kernel's part back. Idempotent."""
        self._destroy()
        self._read_of.clear()

    def begin(self, fds: Sequence[int], offsets: Sequence[int], out: npt.NDArray[np.uint8]) -> AioReads:
        """Ask for the rows of `out` (`[n, row_bytes]`, contiguous), each from its descriptor and offset.

        As many as have room in flight are under way when this returns. The kernel writes into `out` from now on until
        `end` has returned: it must be called.

        Raises:
            OSError, and whatever a signal's handler raises. It is closed then: nothing writes into `out`, nor into that
                of reads that were begun before.
        """
        reads = AioReads(fds, offsets, out)
        try:
            self._begin_more(reads)
        except BaseException:
            self.close()
            raise
        return reads

    def end(self, reads: AioReads) -> npt.NDArray[np.int64]:
        """Wait for reads that this object began; their `results`. Nothing writes into their `out` any more.

        Raises:
            OSError: results cannot be had; and whatever a signal's handler raises. It is closed then: nothing writes
                into any `out`, and no later read can take these results for its own.
        """
        try:
            while reads.num_ended < len(reads.results) and not self.is_closed:
                self._begin_more(reads)
                if self._read_of:  # perhaps only others', which have all the room
                    self._take(max(1, reads.num_begun - reads.num_ended))
        except BaseException:
            self.close()
            raise
        return reads.results

    def _begin_more(self, reads: AioReads) -> None:
        """Submit what has room in flight, until the kernel takes no more for now."""
        while num := min(len(self._free), len(reads.results) - reads.num_begun):
            start, end = reads.num_begun, reads.num_begun + num
            chosen = self._free[-num:]
            iocbs, row_bytes = self._iocbs, reads.out.shape[1]
            iocbs["fd"][chosen], iocbs["offset"][chosen] = reads.fds[start:end], reads.offsets[start:end]
            iocbs["buffer"][chosen] = reads.out.ctypes.data + row_bytes * np.arange(start, end)
            iocbs["num_bytes"][chosen] = row_bytes
            self._pointers[:num] = self._addresses[chosen]
            try:
                taken = self._call(
                    self._submit, self._context, ctypes.c_long(num), ctypes.c_void_p(self._first_pointer)
                )
            except OSError as error:  # it is the first one's that is told
                if error.errno == errno.EAGAIN and self._read_of:
                    return  # what is in flight ends first
                reads.results[start] = -(error.errno or errno.EIO)
                reads.num_begun, reads.num_ended = start + 1, reads.num_ended + 1
                continue
            for row, iocb in enumerate(chosen[:taken], start):
                self._read_of[iocb] = reads, row
            self._free[-num:] = chosen[taken:]
            reads.num_begun += taken

    def _take(self, num: int) -> None:
        """Wait for `num` reads, whosever they are, and note what became of them. A signal ends the wait, not them."""
        most = len(self._read_of)
        try:
            got = self._call(
                self._getevents, self._context, ctypes.c_long(min(num, most)), ctypes.c_long(most),
                ctypes.c_void_p(self._first_event), ctypes.c_void_p(),
            )  # fmt: skip
        except InterruptedError:
            return
        events = self._events[:got]
        for iocb, result in zip(events["data"].tolist(), events["result"].tolist(), strict=True):
            reads, row = self._read_of.pop(iocb)
            reads.results[row] = result
            reads.num_ended += 1
            self._free.append(iocb)

    def _call(self, number: int, *arguments: object) -> int:
        result = int(self._syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
