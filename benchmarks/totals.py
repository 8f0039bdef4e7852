"""`stats()` of a run that was interrupted and went on: counters add up, peaks stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_COUNTERS = (
    "steps",
    "steps_aborted",
    "tokens",
    "moves_failed",
    "nvme_sole_reads",
    "recomputed_blocks",
    "stall_s",
)
_PEAKS = ("peak_bytes", "only_copy_peak_bytes")


def combine(earlier: Mapping[str, Any] | None, now: Mapping[str, Any]) -> dict[str, Any]:
    """The two together, in the form of `stats()`; what lies where is `now`'s. None: there was nothing earlier."""
    if earlier is None:
        return dict(now)
    both = {**now, **{name: earlier[name] + now[name] for name in _COUNTERS}}
    both["bytes_moved"] = {edge: earlier["bytes_moved"][edge] + moved for edge, moved in now["bytes_moved"].items()}
    tiers = {}
    for name, tier in now["tiers"].items():
        before = earlier["tiers"][name]
        peaks = {peak: max(before[peak], tier[peak]) for peak in _PEAKS if peak in tier}
        tiers[name] = {**tier, **peaks, "slices_read": before["slices_read"] + tier["slices_read"]}
    all_slices = sum(tier["slices_read"] for tier in tiers.values())
    for tier in tiers.values():
        tier["hit_frac"] = tier["slices_read"] / all_slices if all_slices else 0.0
    return {**both, "tiers": tiers}
