"""The bound of a soak that was interrupted and went on: as if it had been one run."""

from __future__ import annotations

from typing import Any

from kvtier.benchmarks.totals import combine
from kvtier.bound import EdgeUse, measured


def _stats(took_s: float, compute_s: float, edges: dict[str, EdgeUse], room_s: float) -> dict[str, Any]:
    decode = {"steps": 10, "took_s": took_s, "compute_s": compute_s}
    counts = ("steps", "steps_aborted", "tokens", "moves_failed", "nvme_sole_reads", "recomputed_blocks", "stall_s")
    bound = measured(took_s, {"decode": decode, "prefill": dict.fromkeys(decode, 0.0)}, edges, {"room": room_s})
    return {**dict.fromkeys(counts, 0), "bytes_moved": {}, "tiers": {}, "bound": bound}


def test_what_is_counted_adds_up_and_the_better_peak_is_the_peak() -> None:
    first = _stats(4.0, 1.0, {"nvme_to_gpu": EdgeUse(600, 3.0, 300.0), "gpu_to_cpu": EdgeUse(5, 0.1, None)}, 0.5)
    second = _stats(6.0, 2.0, {"nvme_to_gpu": EdgeUse(600, 5.0, 200.0), "cpu_to_gpu": EdgeUse(0, 0.0, None)}, 0.25)
    bound = combine(first, second)["bound"]
    assert (bound["steps"], bound["took_s"], bound["compute_s"], bound["stalls"]) == (20, 10.0, 3.0, {"room": 0.75})
    assert bound["edges"]["nvme_to_gpu"] == {
        "bytes": 1200, "busy_s": 8.0, "peak_bytes_s": 300.0, "seconds_at_peak": 4.0,
    }  # fmt: skip
    assert set(bound["edges"]) == {"nvme_to_gpu", "gpu_to_cpu", "cpu_to_gpu"}
    assert (bound["bound_s"], bound["bound_frac"], bound["binding"]) == (4.0, 0.4, "nvme_to_gpu")
    assert combine(None, second)["bound"] == second["bound"]
