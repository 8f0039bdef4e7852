"""How many slots a budget has room for, with what the file system takes for itself."""

from __future__ import annotations

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.slot_format import Geometry
from kvtier.types import BlockShape

RESERVE_FREE_FRAC = 0.05  # of the disk, which always stays free
FOLDER_BYTES = 64 << 10  # the folder, which grows with its entries, and its lock file
SESSION_ENTRY_BYTES = 512  # what a name of 68 characters and its `.new` may make the folder grow by, doubled
_SESSIONS_FRAC, _SMALL_SESSIONS_FRAC, _SMALL_SESSIONS_BYTES = 64, 16, 64 << 10
BOOKKEEPING_BYTES = 3 * PAGE_BYTES
"""Written beside a slot at most: an old header that is taken back, a new segment's superblock, and one to spare."""
_EXTENTS_PER_INDEX_BLOCK = 300  # ext4 keeps 340 in 4 KiB; at worst each slot of a half-written segment is an extent
_EXTENTS_PER_SPARSE_SLOT = 4  # written and merely allocated pages are apart, and what a slot grew by lies elsewhere


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot: the pages of its header, and a block rounded up to 4 KiB."""
    return Geometry.of(shape).slot_bytes


def min_budget_bytes(shape: BlockShape) -> int:
    """The smallest budget that an NvmeStore of this shape takes: one slot, and what the file system needs for it."""
    return FOLDER_BYTES + segment_budget_bytes(1, slot_bytes(shape))


def sessions_room_bytes(budget_bytes: int, shape: BlockShape) -> int:
    """The part of a budget that is kept for files of sessions, in whole pages.

    A 64th; of a small one a 16th, up to 64 KiB; never so much that no slot has room. A token takes 4 bytes there and
    tens of thousands in a block: what limits the number of sessions is that each has a page.
    """
    wanted_bytes = max(budget_bytes // _SESSIONS_FRAC, min(_SMALL_SESSIONS_BYTES, budget_bytes // _SMALL_SESSIONS_FRAC))
    return min(wanted_bytes, budget_bytes - min_budget_bytes(shape)) // PAGE_BYTES * PAGE_BYTES


def segment_bytes(num_slots: int, slot_bytes: int) -> int:
    """Length of a segment file: the page of its superblock, then its slots."""
    return PAGE_BYTES + num_slots * slot_bytes


def segment_budget_bytes(num_slots: int, slot_bytes: int) -> int:
    """What a segment may come to take on disk, the file system's own blocks for it included."""
    return segment_bytes(num_slots, slot_bytes) + PAGE_BYTES * (1 + num_slots // _EXTENTS_PER_INDEX_BLOCK)


def sparse_overhead_bytes(num_slots: int) -> int:
    """What a sparse segment may take on disk beside the pages of its slots."""
    return PAGE_BYTES * (2 + num_slots * _EXTENTS_PER_SPARSE_SLOT // _EXTENTS_PER_INDEX_BLOCK)


def slots_of_segments(budget_bytes: int, slot_bytes: int, slots_per_segment: int) -> list[int]:
    """The slots of each segment that fits, all of one length but the last. `budget_bytes` is for segments alone."""
    num_full, rest_bytes = divmod(max(0, budget_bytes), segment_budget_bytes(slots_per_segment, slot_bytes))
    rest_bytes -= segment_budget_bytes(slots_per_segment, slot_bytes) - slots_per_segment * slot_bytes
    num_rest = max(0, rest_bytes // slot_bytes)
    return [slots_per_segment] * num_full + ([num_rest] if num_rest else [])
