"""How many slots a budget has room for, with what the file system takes for itself."""

from __future__ import annotations

from kvtier.stores.segment import PAGE_BYTES
from kvtier.types import BlockShape

_FOLDER_BYTES = 64 << 10  # the folder, which grows with its entries, and its lock file
_EXTENTS_PER_INDEX_BLOCK = 300  # ext4 keeps 340 in 4 KiB; at worst each slot of a half-written segment is an extent


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot: a block rounded up to 4 KiB."""
    return -(-shape.block_bytes // PAGE_BYTES) * PAGE_BYTES


def min_budget_bytes(shape: BlockShape) -> int:
    """The smallest budget that an NvmeStore of this shape takes: one slot, and what the file system needs for it."""
    return slot_bytes(shape) + _FOLDER_BYTES + _index_bytes(1)


def _index_bytes(num_slots: int) -> int:
    """Room for the index blocks that a file system keeps for one segment and counts as the file's."""
    return PAGE_BYTES * (1 + num_slots // _EXTENTS_PER_INDEX_BLOCK)


def slots_within(budget_bytes: int, slot_bytes: int, slots_per_segment: int) -> int:
    """How many slots fit, with every segment's overhead and the folder's."""
    room_bytes = budget_bytes - _FOLDER_BYTES
    full_bytes = slots_per_segment * slot_bytes + _index_bytes(slots_per_segment)
    num_full, rest_bytes = divmod(max(0, room_bytes), full_bytes)
    num_rest = max(0, (rest_bytes - _index_bytes(slots_per_segment)) // slot_bytes)
    return num_full * slots_per_segment + min(num_rest, slots_per_segment)
