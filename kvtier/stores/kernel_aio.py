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
        first = self._iocbs.ctypes.data
        self._pointers = first + _IOCB.itemsize * np.arange(depth, dtype=np.uint64)
        self._first_pointer, self._first_event = self._pointers.ctypes.data, self._events.ctypes.data
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
        """After `close`, and after a `read` that raised."""
        return not self._destroy.alive

    def close(self) -> None:
        """Wait for reads that are under way, and give the kernel's part back. Idempotent."""
        self._destroy()

    def read(self, fds: Sequence[int], offsets: Sequence[int], out: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Fill the rows of `out` (`[n, row_bytes]`, contiguous), each from its descriptor and offset.

        Returns:
            Of each row how many bytes were read, as `pread` says it, or minus the errno. All reads have ended: nothing
            writes into `out` any more.

        Raises:
            OSError: results cannot be had; and whatever a signal's handler raises. It is closed then: nothing writes
                into `out`, and no later read can take these results for its own.
        """
        results = np.empty(len(fds), np.int64)
        row_bytes, address = out.shape[1], out.ctypes.data
        for start in range(0, len(fds), self.depth):
            end = min(start + self.depth, len(fds))
            iocbs = self._iocbs[: end - start]
            iocbs["fd"], iocbs["offset"] = fds[start:end], offsets[start:end]
            iocbs["buffer"], iocbs["num_bytes"] = address + row_bytes * np.arange(start, end), row_bytes
            try:
                self._read(results[start:end])
            except BaseException:
                self.close()
                raise
        return results

    def _read(self, results: npt.NDArray[np.int64]) -> None:
        """Submit as many of the first iocbs as `results` is long, and wait for all of them."""
        submitted = ended = 0
        while ended < len(results):
            if submitted < len(results):
                try:
                    left = len(results) - submitted
                    at = self._first_pointer + submitted * self._pointers.itemsize
                    submitted += self._call(self._submit, self._context, ctypes.c_long(left), ctypes.c_void_p(at))
                except OSError as error:
                    if error.errno != errno.EAGAIN or submitted == ended:  # it is the first one's that is told
                        results[submitted], submitted, ended = -(error.errno or errno.EIO), submitted + 1, ended + 1
                        continue
            ended += self._take(results, submitted - ended)

    def _take(self, results: npt.NDArray[np.int64], num: int) -> int:
        """Wait for `num` reads; how many have ended. A signal ends the wait, not the reads."""
        wanted = ctypes.c_long(num)
        try:
            got = self._call(
                self._getevents, self._context, wanted, wanted, ctypes.c_void_p(self._first_event), ctypes.c_void_p()
            )
        except InterruptedError:
            return 0
        events = self._events[:got]
        results[events["data"].astype(np.int64)] = events["result"]
        return got

    def _call(self, number: int, *arguments: object) -> int:
        result = int(self._syscall(ctypes.c_long(number), *arguments))
        if result < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        return result
