"""The sum of the bound, with numbers that are known, and windows between two documents."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bound import Bound, Edge, EdgeUse, bound_between, measured

NONE = {"steps": 0, "took_s": 0.0, "compute_s": 0.0}
NO_STALLS = {"stream_nvme": 0.0, "room": 0.0}


def of(
    took_s: float,
    compute_s: float,
    edges: dict[str, EdgeUse] | None = None,
    stalls: dict[str, float] | None = None,
    steps: int = 1,
) -> dict[str, Any]:
    decode = {"steps": steps, "took_s": took_s, "compute_s": compute_s}
    return measured(took_s, {"decode": decode, "prefill": dict(NONE)}, edges or {}, stalls or NO_STALLS)


def test_compute_binds_where_bytes_arrive_in_less_time() -> None:
    bound = of(10.0, 8.0, {"nvme_to_gpu": EdgeUse(600, 7.0, 100.0)}, {"stream_nvme": 1.5, "room": 0.5})
    assert (bound["bound_s"], bound["bound_frac"], bound["binding"]) == (8.0, 0.8, "compute")
    edge = {"bytes": 600, "busy_s": 7.0, "peak_bytes_s": 100.0, "seconds_at_peak": 6.0}
    assert bound["edges"] == {"nvme_to_gpu": edge}
    assert bound["stalls"] == {"stream_nvme": 1.5, "room": 0.5}
    assert (bound["steps"], bound["took_s"], bound["compute_s"]) == (1, 10.0, 8.0)


def test_the_slowest_edge_binds_and_edges_do_not_add_up() -> None:
    edges = {"nvme_to_gpu": EdgeUse(900, 9.5, 100.0), "cpu_to_gpu": EdgeUse(5000, 8.0, 1000.0)}
    bound = of(10.0, 4.0, edges)
    assert (bound["bound_s"], bound["bound_frac"], bound["binding"]) == (9.0, 0.9, "nvme_to_gpu")


def test_bytes_take_no_longer_than_they_took() -> None:
    # 900 bytes went at 300/s for 3 s of steps; the peak that was known, 100/s, would say 9 s.
    bound = of(4.0, 1.0, {"nvme_to_gpu": EdgeUse(900, 3.0, 100.0)})
    assert bound["edges"]["nvme_to_gpu"]["peak_bytes_s"] == 300.0
    assert (bound["bound_s"], bound["bound_frac"]) == (3.0, 0.75)


def test_decode_and_prefill_add_up() -> None:
    kinds = {
        "decode": {"steps": 3, "took_s": 4.0, "compute_s": 3.0},
        "prefill": {"steps": 2, "took_s": 5.0, "compute_s": 4.0},
    }
    bound = measured(10.0, kinds, {}, {})  # a second went into steps that were aborted
    assert (bound["steps"], bound["compute_s"], bound["bound_frac"]) == (5, 7.0, 0.7)
    assert bound["prefill"] == kinds["prefill"] and bound["decode"] == kinds["decode"]


def test_before_the_first_step_nothing_binds_and_nothing_is_made_up() -> None:
    bound = measured(0.0, {"decode": dict(NONE), "prefill": dict(NONE)}, {"cpu_to_nvme": EdgeUse(0, 0.0, 50.0)}, {})
    assert (bound["bound_s"], bound["bound_frac"], bound["binding"]) == (0.0, 0.0, "none")
    assert bound["edges"]["cpu_to_nvme"] == {"bytes": 0, "busy_s": 0.0, "peak_bytes_s": 50.0, "seconds_at_peak": 0.0}


def test_an_edge_that_nobody_measured_does_not_bind_and_is_named() -> None:
    bound = Bound((Edge("compute", 2.0, 1.0), Edge("link", 1e12, None)))
    assert (bound.seconds, bound.binding, bound.unmeasured) == (2.0, "compute", ["link"])
    assert of(1.0, 0.5, {"link": EdgeUse(10, 0.0, None)})["edges"]["link"]["seconds_at_peak"] is None


# Whole numbers: sums of them are exact.
_COUNT = st.integers(0, 1000)
_DELTA = st.tuples(_COUNT, _COUNT, _COUNT, _COUNT, _COUNT, _COUNT)


@given(st.lists(_DELTA, min_size=2, max_size=6))
def test_windows_add_up(deltas: list[tuple[int, ...]]) -> None:
    def document(upto: int) -> dict[str, Any]:
        steps, wait, compute, num_bytes, other, room = (sum(each[i] for each in deltas[:upto]) for i in range(6))
        edges = {"nvme_to_gpu": EdgeUse(num_bytes, float(compute), 5.0)} if num_bytes else {}
        stalls = {"stream_nvme": float(wait), "room": float(room)}
        return {"bound": of(float(wait + compute + other), float(compute), edges, stalls, steps)}

    documents = [document(upto) for upto in range(len(deltas) + 1)]
    windows = [bound_between(a, b) for a, b in itertools.pairwise(documents)]
    whole = bound_between(documents[0], documents[-1])
    for name in ("steps", "took_s", "compute_s"):
        assert sum(window[name] for window in windows) == whole[name] == documents[-1]["bound"][name]
    for cause in NO_STALLS:
        assert sum(window["stalls"][cause] for window in windows) == whole["stalls"][cause]
    num_bytes = [w["edges"]["nvme_to_gpu"]["bytes"] for w in windows if w["edges"]]
    assert sum(num_bytes) == sum(edge["bytes"] for edge in whole["edges"].values())
    for window in windows:
        assert 0 <= window["bound_frac"] <= 1 + 1e-9
        assert window["bound_s"] >= window["compute_s"]
    # What is the bound of the parts is never less than that of the whole: in the whole one part's bytes may overlap
    # another's compute. At one and the same peak: a later one may be higher.
    if len({w["edges"]["nvme_to_gpu"]["peak_bytes_s"] for w in windows if w["edges"]}) <= 1:
        assert sum(window["bound_s"] for window in windows) >= whole["bound_s"] * (1 - 1e-9)


def test_a_window_has_a_binding_of_its_own() -> None:
    before = {"bound": of(100.0, 90.0, {"nvme_to_gpu": EdgeUse(100, 10.0, 10.0)}, steps=5)}
    after = {"bound": of(110.0, 92.0, {"nvme_to_gpu": EdgeUse(180, 18.0, 10.0)}, steps=6)}
    assert after["bound"]["binding"] == "compute"
    window = bound_between(before, after)
    assert (window["steps"], window["took_s"], window["compute_s"]) == (1, 10.0, 2.0)
    assert (window["binding"], window["bound_s"], window["bound_frac"]) == ("nvme_to_gpu", 8.0, 0.8)
    assert set(window) == set(after["bound"])


def test_documents_the_wrong_way_round_are_refused() -> None:
    early = {"bound": of(1.0, 1.0)}
    late = {"bound": of(2.0, 1.0, {"cpu_to_gpu": EdgeUse(1, 1.0, 1.0)}, steps=2)}
    for before, after in ((late, early), (late, {"bound": of(3.0, 1.0, steps=3)})):
        with pytest.raises(ValueError, match="another TieredKV, or later"):
            bound_between(before, after)
