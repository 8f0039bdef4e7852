"""Does a long run stay where it is? Memory, descriptors and disk over its second half."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

MIN_SECONDS = 300.0
"""A shorter run (since it was last resumed) says nothing about growth."""
MEMORY_TOLERANCE_BYTES = 16 << 20
MEMORY_TOLERANCE_FRAC = 0.02  # of the memory that the process has
FDS_TOLERANCE = 4.0  # a new segment file of the nvme tier takes two
_SEGMENT_FRAC, _SEGMENT_BYTES = 1 / 8, 1 << 30


@dataclass(frozen=True)
class Growth:
    """How much one series grew over the second half of a run, and how much it may."""

    name: str
    growth: float
    tolerance: float
    unit: str
    """bytes, or what is counted."""

    @property
    def is_flat(self) -> bool:
        return self.growth <= self.tolerance


@dataclass(frozen=True)
class Flatness:
    """`seconds` is the length of the second half; `series` is empty when the run was too short to say."""

    seconds: float
    series: tuple[Growth, ...]

    @property
    def problems(self) -> list[str]:
        """Every series that grew, as a sentence."""
        return [
            f"{one.name} grew by {one.growth:.0f} {one.unit} over the last {self.seconds:.0f} s, "
            f"{one.tolerance:.0f} allowed"
            for one in self.series
            if not one.is_flat
        ]

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "series": [{**asdict(one), "is_flat": one.is_flat} for one in self.series]}


def check_flatness(
    columns: Mapping[str, Sequence[float]], resumed_at_s: Sequence[float], nvme_budget_bytes: int
) -> Flatness:
    """Judge a timeline from where it was last resumed: another process has another size.

    Memory: the slope of a least-squares line through the second half, times its length. Open files and the folder
    grow in steps, as the nvme tier takes its disk in whole segment files and one may come late: the difference between
    the medians of the half's last and first fifth, and one more segment is no leak. Shrinking is no fault.
    """
    begin_s = resumed_at_s[-1] if resumed_at_s else 0.0
    times_s = columns["t_s"]
    end_s = times_s[-1] if times_s else 0.0
    if end_s - begin_s < MIN_SECONDS:
        return Flatness(0.0, ())
    half_s = (end_s - begin_s) / 2
    late = [i for i, t_s in enumerate(times_s) if t_s >= end_s - half_s]
    if len(late) < 3:
        return Flatness(0.0, ())

    def slope(name: str) -> float:
        line = statistics.linear_regression([times_s[i] for i in late], [columns[name][i] for i in late])
        return float(line.slope) * half_s

    def step(name: str) -> float:
        first = [columns[name][i] for i in late if times_s[i] <= end_s - 0.8 * half_s]
        last = [columns[name][i] for i in late if times_s[i] >= end_s - 0.2 * half_s]
        return statistics.median(last) - statistics.median(first or [columns[name][late[0]]])

    memory = statistics.median(columns["memory_bytes"][i] for i in late)
    segment_bytes = min(_SEGMENT_BYTES, _SEGMENT_FRAC * nvme_budget_bytes)
    series = (
        Growth(
            "memory",
            slope("memory_bytes"),
            max(MEMORY_TOLERANCE_BYTES, MEMORY_TOLERANCE_FRAC * memory),
            "bytes",
        ),
        Growth("open files", step("open_fds"), FDS_TOLERANCE, "descriptors"),
        Growth("the nvme folder", step("nvme_disk_bytes"), segment_bytes, "bytes"),
    )
    return Flatness(half_s, series)
