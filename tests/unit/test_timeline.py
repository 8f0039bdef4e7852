"""A soak's timeline stays small however long the run, and loses neither a peak nor a count."""

from __future__ import annotations

import itertools
import json

import pytest

from kvtier.benchmarks.timeline import COUNTERS, GAUGES, Timeline


def row(t_s: float, **values: float) -> dict[str, float]:
    return {"t_s": t_s, **dict.fromkeys((*GAUGES, *COUNTERS), 0), **values}


def filled(seconds: int, max_points: int = 60) -> Timeline:
    timeline = Timeline(1.0, max_points)
    for t_s in range(seconds):
        timeline.add(row(t_s, tokens=3 * t_s, memory_bytes=999 if t_s == 137 else 10))
    return timeline


@pytest.mark.parametrize("seconds", [59, 60, 61, 500, 3601])
def test_a_long_run_keeps_few_points_evenly_spread(seconds: int) -> None:
    columns = filled(seconds).columns()
    times_s = columns["t_s"]
    assert (seconds if seconds <= 60 else 30) <= len(times_s) <= 60
    assert times_s[-1] == seconds - 1
    gaps = [b - a for a, b in itertools.pairwise(times_s)]
    assert max(gaps) <= 2 * seconds / len(times_s) + 1


def test_thinning_keeps_peaks_and_counts() -> None:
    columns = filled(2000).columns()
    assert max(columns["memory_bytes"]) == 999
    assert columns["tokens"] == [3 * t_s for t_s in columns["t_s"]]


def test_samples_within_a_period_are_joined() -> None:
    timeline = Timeline(1.0)
    for t_s, fds in ((0.0, 5), (0.4, 9), (0.8, 4), (1.0, 3)):
        timeline.add(row(t_s, open_fds=fds, tokens=10 * t_s))
    columns = timeline.columns()
    assert columns["t_s"] == [0.8, 1.0] and columns["open_fds"] == [9, 3] and columns["tokens"] == [8.0, 10.0]


def test_a_sample_that_comes_late_is_left_out() -> None:
    timeline = Timeline(1.0)
    timeline.add(row(5))
    timeline.add(row(3, tokens=7))
    assert timeline.columns()["t_s"] == [5]


def test_it_goes_on_from_its_json() -> None:
    timeline = filled(200)
    again = Timeline.from_json(json.loads(json.dumps(timeline.as_json())))
    assert again.as_json() == timeline.as_json()
    again.mark_resumed(199.0)
    again.add(row(199.1, memory_bytes=1))
    assert again.columns()["memory_bytes"][-2:] == [10, 1], "another process's sample stands alone"


def test_series_of_another_version_are_refused() -> None:
    document = filled(5).as_json()
    del document["columns"]["stall_s"]
    with pytest.raises(LookupError):
        Timeline.from_json(document)
