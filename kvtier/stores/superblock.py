"""How a segment file begins, byte by byte: docs/nvme-format.md. No I/O, no torch.

All numbers are little-endian and unsigned. Whatever is read here may have been crafted.
"""

from __future__ import annotations

import enum

import numpy as np

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.slot_format import CHECKSUM_BYTES, VERSION, Bytes, Geometry, checksum, whole_pages

SEGMENT_MAGIC = int.from_bytes(b"KVTSEGM\0", "little")

SUPERBLOCK = np.dtype(
    [
        ("magic", "<u8"),
        ("version", "<u2"),
        ("reserved", ("u1", (6,))),
        ("slot_bytes", "<u8"),
        ("header_bytes", "<u8"),
        ("slice_bytes", "<u8"),
        ("num_slices", "<u4"),
        ("num_slots", "<u4"),
        ("checksum", "<u8"),
    ]
)
"""The first page of a segment file; the rest of the page is zero. The checksum is of all fields before it."""


def superblock(geometry: Geometry, num_slots: int) -> Bytes:
    """The first page of a segment of that many slots."""
    page = np.zeros(PAGE_BYTES, np.uint8)
    fields = page[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]
    fields["magic"], fields["version"] = SEGMENT_MAGIC, VERSION
    fields["slot_bytes"], fields["header_bytes"] = geometry.slot_bytes, geometry.header_bytes
    fields["slice_bytes"], fields["num_slices"] = geometry.slice_bytes, geometry.num_slices
    fields["num_slots"] = num_slots
    fields["checksum"] = checksum(page[: SUPERBLOCK.itemsize - CHECKSUM_BYTES])
    return page


class SegmentKind(enum.Enum):
    """What the first page of a file says."""

    OURS = "ours"
    FUTURE = "of a format version that this kvtier does not know"
    DAMAGED = "not a segment, or damaged"


def read_superblock(page: Bytes) -> tuple[SegmentKind, Geometry | None, int]:
    """The kind, geometry and number of slots of a segment from its first PAGE_BYTES, whatever they hold.

    The sizes agree with each other; whether the file has them is for the caller to compare.
    """
    nothing = (SegmentKind.DAMAGED, None, 0)
    if len(page) < SUPERBLOCK.itemsize:
        return nothing
    fields = page[: SUPERBLOCK.itemsize].copy().view(SUPERBLOCK)[0]
    if fields["magic"] != SEGMENT_MAGIC:
        return nothing
    if fields["version"] > VERSION:
        return SegmentKind.FUTURE, None, 0
    if fields["version"] != VERSION or fields["checksum"] != checksum(page[: SUPERBLOCK.itemsize - CHECKSUM_BYTES]):
        return nothing
    names = ("header_bytes", "slot_bytes", "slice_bytes", "num_slices")
    geometry = Geometry(*(int(fields[name]) for name in names))
    if (
        geometry.header_bytes % PAGE_BYTES
        or geometry.num_slices < 1
        or geometry.slice_bytes < 1
        or geometry.max_content_bytes < 0
        or geometry.slot_bytes != geometry.header_bytes + whole_pages(geometry.payload_bytes)
    ):
        return nothing
    return SegmentKind.OURS, geometry, int(fields["num_slots"])
