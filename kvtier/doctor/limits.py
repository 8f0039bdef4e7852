"""What the system lets this process have: memory, page-locked memory, descriptors. Read, not measured."""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
from dataclasses import dataclass

from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.system import cgroup_memory_bytes, memory_available_bytes, memory_limit_bytes

UNLIMITED = resource.RLIM_INFINITY if resource.RLIM_INFINITY > 0 else (1 << 64) - 1
_PROBE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """In bytes, but `num_files`. `UNLIMITED` where the system sets no limit."""

    ram_bytes: int
    may_use_bytes: int
    """The least of RAM and cgroup limits."""
    available_bytes: int
    """What may still be taken now."""
    cgroup_bytes: int | NotMeasured
    cgroup_used_bytes: int | NotMeasured
    memlock_bytes: int
    locked_probe_bytes: int | NotMeasured
    """So much was page-locked, just to see (mlock(2)): processes with CAP_IPC_LOCK pass `memlock_bytes`."""
    num_files: int


def read_limits() -> Limits:
    """Cost: a few small files, and 64 MiB of memory for a moment."""
    cgroup = cgroup_memory_bytes()
    none = NotMeasured("no cgroup limits this process")
    available = memory_available_bytes()
    return Limits(
        ram_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        may_use_bytes=memory_limit_bytes(),
        available_bytes=available,
        cgroup_bytes=none if cgroup is None else cgroup[0],
        cgroup_used_bytes=none if cgroup is None else cgroup[1],
        memlock_bytes=_soft(resource.RLIMIT_MEMLOCK),
        locked_probe_bytes=attempt(lambda: _lock(min(_PROBE_BYTES, available // 8))),
        num_files=_soft(resource.RLIMIT_NOFILE),
    )


def _soft(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _lock(num_bytes: int) -> int:
    """Page-lock so much and let it go; return `num_bytes`. Raises OSError (ENOMEM, EPERM beyond the limit)."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        lock, unlock = libc.mlock, libc.munlock
    except AttributeError as error:
        raise RuntimeError("no mlock(2) on this system") from error
    with mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        start, length = ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory))
        try:
            if lock(start, length):
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code))
            unlock(start, length)
            return len(memory)
        finally:
            del view  # a mapping with a view of it cannot be closed
