"""`stats()` of a run that was interrupted and went on: counters add up, peaks stay."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvtier.bound import EdgeUse, measured

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
    return {**both, "tiers": tiers, "bound": _bound(earlier["bound"], now["bound"])}


def _bound(earlier: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """Of both: what is counted adds up, the better of an edge's peaks is its peak."""
    kinds = {kind: {of: earlier[kind][of] + now[kind][of] for of in now[kind]} for kind in ("decode", "prefill")}
    uses: dict[str, EdgeUse] = {}
    for name in dict.fromkeys((*earlier["edges"], *now["edges"])):
        parts = [bound["edges"][name] for bound in (earlier, now) if name in bound["edges"]]
        peaks = [part["peak_bytes_s"] for part in parts if part["peak_bytes_s"] is not None]
        moved_bytes, busy_s = (sum(part[of] for part in parts) for of in ("bytes", "busy_s"))
        uses[name] = EdgeUse(moved_bytes, busy_s, max(peaks, default=None))
    stalls = {cause: earlier["stalls"][cause] + seconds for cause, seconds in now["stalls"].items()}
    return measured(earlier["took_s"] + now["took_s"], kinds, uses, stalls)
