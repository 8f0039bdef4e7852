"""What is measured of a disk, as rows: each rate, or why it could not be had."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from kvtier.doctor.answer import NotMeasured
from kvtier.types import IoMode

REQUEST_BYTES = (384 << 10, 1 << 20, 64 << 10)  # what matters most comes first: a slow disk's time may run out
DEPTHS = (32, 4, 1)
MODES = (IoMode.DIRECT, IoMode.MMAP)


NO_READS = NotMeasured("told of reads only")


class Access(enum.StrEnum):
    """What a request does."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class DiskRate:
    """`depth` requests in flight (as many threads), each of `request_bytes` at a random place; the file was cold."""

    mode: IoMode
    access: Access
    request_bytes: int
    depth: int
    bytes_per_s: float | NotMeasured
    disk_frac: float | NotMeasured
    """What the kernel says it moved to or from a disk, as a fraction of the bytes asked for. Well under 1: a cache
    answered; 0 for files that are memory."""
    core_bytes_per_s: float | NotMeasured = NO_READS
    """Bytes for each second that a core works on them: what one core would read if the disk took no time."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """All rates, also those that could not be had."""

    rates: tuple[DiskRate, ...]
    takes_direct: Literal[True] | NotMeasured
    """What the file system answers where it does not."""
    preallocates: bool | NotMeasured
    scratch_bytes: int
    written_bytes: int

    def row(self, mode: IoMode, access: Access, request_bytes: int, depth: int) -> DiskRate:
        """The one of these."""
        wanted = (mode, access, request_bytes, depth)
        return next(row for row in self.rates if (row.mode, row.access, row.request_bytes, row.depth) == wanted)
