"""What the files of a folder may take: of the budget, of the disk, and how that is cut into segments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvtier.stores.nvme_layout import FOLDER_BYTES, slots_of_segments
from kvtier.stores.slot_format import Geometry, whole_pages
from kvtier.system import disk_room_bytes
from kvtier.types import BlockShape, Compression

_SMALLEST_FRACTION = 8  # a small budget is taken from the disk in about this many pieces

_PAYLOAD_FRACS = {2: 0.6, 4: 0.8}
"""By the size of an element: a little less than zstd leaves of KV (0.69 and 0.85 of SmolLM2's: docs/adr/0014), so that
it is the budget that runs out and not the slots."""


def expected_frac(shape: BlockShape, compression: Compression) -> float:
    """The part of its place that a block is expected to take."""
    return 1.0 if compression is Compression.NONE else _PAYLOAD_FRACS[shape.element_bytes]


@dataclass(frozen=True, slots=True)
class SpaceLimits:
    """What the files may take.

    `budget_bytes` is for the whole folder, `segment_bytes_max` for one file, and `reserve_free_frac` of the disk stays
    free. `payload_frac` is the part of its place that a block is expected to take; below 1.0 files are sparse.
    """

    budget_bytes: int
    segment_bytes_max: int
    reserve_free_frac: float
    payload_frac: float = 1.0
    sessions_bytes: int = 0
    """Of the budget, kept for files of sessions, whether or not there are any."""

    @property
    def kept_bytes(self) -> int:
        """What segments leave of the budget: for the folder and what is in it beside them."""
        return FOLDER_BYTES + self.sessions_bytes

    @property
    def is_sparse(self) -> bool:
        """Whether slots take only what their content needs."""
        return self.payload_frac < 1.0

    def expected_slot_bytes(self, geometry: Geometry) -> int:
        """What a slot is expected to take on disk: decides how many there are, and nothing else."""
        payload_bytes = (geometry.slot_bytes - geometry.header_bytes) * self.payload_frac
        return geometry.header_bytes + whole_pages(int(payload_bytes))

    def free_bytes(self, folder: Path) -> int:
        """What the disk has room for while the reserve stays free."""
        return disk_room_bytes(folder, self.reserve_free_frac)

    def new_segments(self, geometry: Geometry, taken_bytes: int = 0) -> list[int]:
        """The slots of each segment that the budget has room for beside `taken_bytes` of others."""
        each_bytes = min(self.segment_bytes_max, self.budget_bytes // _SMALLEST_FRACTION)
        slots_per_segment = max(1, each_bytes // geometry.slot_bytes)
        room_bytes = self.budget_bytes - self.kept_bytes - taken_bytes
        return slots_of_segments(room_bytes, self.expected_slot_bytes(geometry), slots_per_segment)
