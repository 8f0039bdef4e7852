"""What a soak's tiers, memory and files did over time: a bounded list of samples, and the thread that takes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvtier.benchmarks.monitor import EDGES, TIERS, Ticker

PERIOD_S = 1.0
MAX_POINTS = 600

GAUGES = (
    *(f"{tier}_used_bytes" for tier in TIERS),
    "nvme_only_copy_bytes",
    "nvme_disk_bytes",
    "memory_bytes",
    "memory_allowed_bytes",
    "open_fds",
    "threads",
)
"""What was there at a moment. Where samples are thinned the larger one stays, so that no peak is lost."""

COUNTERS = (
    "tokens",
    "committed_tokens",
    *(f"{tier}_slices_read" for tier in TIERS),
    *(f"{edge}_bytes" for edge in EDGES),
    "stall_s",
)
"""What had been counted since the run began: only ever grows, also over a resumed run."""

Row = dict[str, float]


def row_of(t_s: float, stats: Mapping[str, Any], seen: Mapping[str, int], tokens: int) -> Row:
    """One sample, from `stats()` and the sampler's last look.

    Args:
        t_s: seconds of the run.
        seen: `memory_bytes`, `memory_allowed_bytes`, `open_fds`, `threads`, `nvme_disk_bytes`.
        tokens: generated so far.
    """
    tiers = stats["tiers"]
    row = {"t_s": t_s, "tokens": tokens, "committed_tokens": stats["tokens"], "stall_s": stats["stall_s"]}
    row["nvme_only_copy_bytes"] = tiers["nvme"]["only_copy_bytes"]
    for tier in TIERS:
        row[f"{tier}_used_bytes"] = tiers[tier]["used_bytes"]
        row[f"{tier}_slices_read"] = tiers[tier]["slices_read"]
    for edge in EDGES:
        row[f"{edge}_bytes"] = stats["bytes_moved"][edge]
    for name in ("memory_bytes", "memory_allowed_bytes", "open_fds", "threads", "nvme_disk_bytes"):
        row[name] = seen[name]
    return row


class Timeline:
    """Samples of a run, never more than `max_points`, evenly spread however long it gets.

    Neighbours are joined when there are too many: the later one's time and counters, the larger of their gauges. Safe
    to use from several threads.
    """

    def __init__(self, period_s: float = PERIOD_S, max_points: int = MAX_POINTS) -> None:
        self.period_s = period_s
        self.max_points = max_points
        self.resumed_at_s: list[float] = []
        """When an interrupted run went on; the time between is not counted."""
        self._rows: list[Row] = []
        self._began_s = 0.0  # of the last row: later samples are joined to it for one period
        self._mutex = threading.Lock()

    def add(self, row: Row) -> None:
        """Take a sample. One that is older than the last is left out."""
        with self._mutex:
            rows = self._rows
            if rows and row["t_s"] < rows[-1]["t_s"]:
                return
            is_new_process = bool(self.resumed_at_s) and bool(rows) and rows[-1]["t_s"] <= self.resumed_at_s[-1]
            if rows and row["t_s"] - self._began_s < self.period_s and not is_new_process:
                rows[-1] = _join(rows[-1], row)
                return
            rows.append(row)
            self._began_s = row["t_s"]
            if len(rows) > self.max_points:
                pairs = zip(rows[::2], rows[1::2], strict=False)
                self._rows = [_join(*pair) for pair in pairs] + ([rows[-1]] if len(rows) % 2 else [])
                self.period_s *= 2

    def mark_resumed(self, t_s: float) -> None:
        """Note that another process goes on from here."""
        with self._mutex:
            self.resumed_at_s.append(t_s)

    def columns(self) -> dict[str, list[float]]:
        """One list a series, all of one length; `t_s` and every name of GAUGES and COUNTERS."""
        with self._mutex:
            return {name: [_short(row[name]) for row in self._rows] for name in ("t_s", *GAUGES, *COUNTERS)}

    def as_json(self) -> dict[str, Any]:
        """For a checkpoint or a document."""
        return {"period_s": self.period_s, "resumed_at_s": list(self.resumed_at_s), "columns": self.columns()}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Timeline:
        """What `as_json` gave, ready to go on.

        Raises:
            LookupError: series that are missing or of different length.
        """
        timeline = cls(document["period_s"])
        timeline.resumed_at_s = list(document["resumed_at_s"])
        columns = document["columns"]
        names = ("t_s", *GAUGES, *COUNTERS)
        if set(columns) != set(names) or len({len(column) for column in columns.values()}) != 1:
            raise LookupError("the timeline's series are not those of this version")
        timeline._rows = [
            dict(zip(names, values, strict=True)) for values in zip(*(columns[name] for name in names), strict=True)
        ]
        timeline._began_s = timeline._rows[-1]["t_s"] if timeline._rows else 0.0
        return timeline


def _join(earlier: Row, later: Row) -> Row:
    return later | {name: max(earlier[name], later[name]) for name in GAUGES}


def _short(value: float) -> float:
    return value if isinstance(value, int) else round(value, 3)


class Recorder:
    """Adds a sample to a timeline once a second, in a thread of its own: `stats()` waits for its turn, and the sampler
    of memory must not."""

    def __init__(self, timeline: Timeline, sample: Callable[[], Row]) -> None:
        self.timeline = timeline
        self._sample = sample
        self._ticker = Ticker("soak-timeline", PERIOD_S, self.now)

    def now(self) -> None:
        """Take a sample at once."""
        self.timeline.add(self._sample())

    def start(self) -> None:
        self._ticker.start()

    def stop(self) -> None:
        """End the thread after one last sample; raise what it died of, if it did."""
        self._ticker.stop()
