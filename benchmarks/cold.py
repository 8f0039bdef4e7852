"""Reads that really come from the disk: files out of the page cache first, and the proof of it afterwards."""

from __future__ import annotations

import os
from pathlib import Path

COLD_FRAC = 0.95
"""What counts as cold: so much of what was wanted came from the disk, by `/proc/self/io`."""


def drop_cache(folder: Path, pattern: str = "*") -> None:
    """Make the files below a folder cold: dirty pages cannot be dropped, so they are written first."""
    for path in folder.rglob(pattern):
        if not path.is_file():
            continue
        fd = os.open(path, os.O_RDWR)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def is_cold(read_bytes: int, wanted_bytes: int) -> bool:
    """Whether a measurement that wanted so many bytes may be called cold."""
    return read_bytes >= COLD_FRAC * wanted_bytes
