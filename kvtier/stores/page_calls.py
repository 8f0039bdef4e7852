"""Calls about the page cache that Python's `os` does not have: sync_file_range(2) and mincore(2)."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

_WAIT_BEFORE, _WRITE, _WAIT_AFTER = 1, 2, 4  # of sync_file_range


def _load(name: str, *argument_types: type) -> ctypes._NamedFuncPointer | None:
    try:
        function: ctypes._NamedFuncPointer = getattr(ctypes.CDLL(None, use_errno=True), name)
    except (AttributeError, OSError):
        return None
    function.argtypes = argument_types
    return function


_sync_file_range = _load("sync_file_range", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_mincore = _load("mincore", ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)


def write_back(fd: int, start: int, num_bytes: int) -> None:
    """Wait until a range's dirty pages are on the device: dirty ones cannot be dropped. Raises OSError."""
    if _sync_file_range is None:
        os.fdatasync(fd)
    elif _sync_file_range(fd, start, num_bytes, _WAIT_BEFORE | _WRITE | _WAIT_AFTER):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def resident_pages(fd: int, start: int, num_bytes: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """For each page of a range within the file, whether it is in the page cache; nothing is where nobody can tell.

    Cost: a mapping whose pages are never touched, so that it does not keep them from being dropped.
    """
    found = np.zeros(-(-num_bytes // mmap.PAGESIZE), dtype=np.uint8)
    if _mincore is not None and num_bytes > 0:
        with mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
            view = np.frombuffer(mapped, dtype=np.uint8)
            address = view.ctypes.data
            del view  # a mapping with views cannot be closed
            if _mincore(address, num_bytes, found.ctypes.data):
                found[:] = 0
    return (found & 1).astype(np.bool_)
