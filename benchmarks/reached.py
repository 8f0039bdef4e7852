"""What of the bound a soak reached, in words and rows: `bound` of its document. What it means: docs/bound.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.benchmarks.monitor import EDGES
from kvtier.size import size_words, speed_words

COLUMNS = ("edge", "bytes in steps", "busy", "peak", "at peak")


def edge_rows(bound: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One for each edge that anything went along, as COLUMNS: bytes and time while steps ran, the peak at any time."""
    return [
        (
            edge.replace("_to_", " → "),
            size_words(use["bytes"]),
            f"{use['busy_s']:.2f} s",
            "–" if use["peak_bytes_s"] is None else speed_words(use["peak_bytes_s"]),
            "–" if use["seconds_at_peak"] is None else f"{use['seconds_at_peak']:.2f} s",
        )
        for edge in EDGES
        if (use := bound["edges"].get(edge)) is not None
    ]


def bound_line(bound: Mapping[str, Any]) -> str:
    """How much of it was reached, and what binds."""
    if not bound["steps"]:
        return "bound: no step was taken"
    return (
        f"bound: steps took {bound['took_s']:.2f} s, compute alone {bound['compute_s']:.2f} s of it; no less than "
        f"{bound['bound_s']:.2f} s was possible ({bound['binding'].replace('_to_', ' → ')} binds): "
        f"{bound['bound_frac']:.0%} of the bound"
    )


def stalls_line(bound: Mapping[str, Any]) -> str:
    """What was waited for, the longest first."""
    causes = sorted(bound["stalls"].items(), key=lambda stall: -stall[1])
    waits = " · ".join(f"{cause.replace('_', ' ')} {seconds:.2f} s" for cause, seconds in causes if seconds)
    return f"waited for: {waits or 'nothing'}"
