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
import struct
import sys
import weakref
from collections.abc import Sequence

_NUMBERS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2), "riscv64": (0, 1, 4, 2)}
"""By machine: the numbers of io_setup, io_destroy, io_getevents and io_submit."""
_PREAD = 0  # IOCB_CMD_PREAD
_IOCB = struct.Struct("=QIiHhIQQqQII")
"""data, key, rw_flags, opcode, priority, fd, buffer, bytes, offset, reserved, flags, eventfd: the same layout wherever
`_NUMBERS` knows the machine, all of which are little-endian."""
_EVENT = struct.Struct("=QQqq")
"""data, iocb, result, result2."""


class AioReads:
    """Reads that were begun together, of rows of equal length behind one another.

    Attributes:
        results: of each how many bytes were read, as `pread` says it, or minus the errno; -ECANCELED until it has
            ended, and of one whose result is lost.
    """

    __slots__ = ("address", "fds", "memory", "num_begun", "num_ended", "offsets", "results", "row_bytes")

    def __init__(self, fds: Sequence[int], offsets: Sequence[int], memory: object, address: int, row_bytes: int):
        self.fds, self.offsets, self.address, self.row_bytes = fds, offsets, address, row_bytes
        self.memory = memory  # it stays as long as the kernel may write into it
        self.results = [-errno.ECANCELED] * len(fds)
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
        # Plain memory and `struct`: arrays of numpy take ten times as long for a handful of entries.
        self._iocbs = ctypes.create_string_buffer(depth * _IOCB.size)
        self._events = ctypes.create_string_buffer(depth * _EVENT.size)
        self._pointers = (ctypes.c_uint64 * depth)()
        self._first_iocb, self._first_event, self._first_pointer = (
            ctypes.addressof(memory) for memory in (self._iocbs, self._events, self._pointers)
        )
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
        except BaseException:  # a signal's handler too: nothing may write into memory that nobody holds
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

    def begin(
        self, fds: Sequence[int], offsets: Sequence[int], memory: object, address: int, row_bytes: int
    ) -> AioReads:
        """Ask for rows of `row_bytes`, each from its descriptor and offset, to lie from `address` on.

        As many as have room in flight are under way when this returns. The kernel writes there from now on until `end`
        has returned: it must be called.

        Args:
            memory: whatever owns the bytes at `address`; it is kept meanwhile.

        Raises:
            OSError, and whatever a signal's handler raises. It is closed then: nothing writes there, nor where reads
                that were begun before do.
        """
        reads = AioReads(fds, offsets, memory, address, row_bytes)
        try:
            self._begin_more(reads)
        except BaseException:  # a signal's handler too: nothing may write into memory that nobody holds
            self.close()
            raise
        return reads

    def end(self, reads: AioReads) -> list[int]:
        """Wait for reads that this object began; their `results`. Nothing writes into their memory any more.

        Raises:
            OSError: results cannot be had; and whatever a signal's handler raises. It is closed then: nothing writes
                anywhere, and no later read can take these results for its own.
        """
        try:
            while reads.num_ended < len(reads.results) and not self.is_closed:
                self._begin_more(reads)
                if self._read_of:  # perhaps only others', which have all the room
                    self._take(max(1, reads.num_begun - reads.num_ended))
        except BaseException:  # a signal's handler too: nothing may write into memory that nobody holds
            self.close()
            raise
        return reads.results

    def _begin_more(self, reads: AioReads) -> None:
        """Submit what has room in flight, until the kernel takes no more for now."""
        while num := min(len(self._free), len(reads.results) - reads.num_begun):
            start, chosen = reads.num_begun, self._free[-num:]
            for at, iocb in enumerate(chosen):
                row = start + at
                _IOCB.pack_into(
                    self._iocbs, iocb * _IOCB.size, iocb, 0, 0, _PREAD, 0, reads.fds[row],
                    reads.address + row * reads.row_bytes, reads.row_bytes, reads.offsets[row], 0, 0, 0,
                )  # fmt: skip
                self._pointers[at] = self._first_iocb + iocb * _IOCB.size
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
        for at in range(got):
            iocb, _, result, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
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
