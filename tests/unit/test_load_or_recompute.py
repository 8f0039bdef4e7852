"""Where what is found in files is cut in two: computed before, loaded behind."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.load_or_recompute import MIN_GAIN_FRAC, Meter, best_cut


@pytest.mark.parametrize(
    ("in_files", "compute_s", "load_s", "cut"),
    [
        ([], 1.0, 1.0, 0),
        ([False, False], 1.0, 9.0, 2),  # nothing is to be loaded
        ([True] * 4, 10.0, 1.0, 0),  # loading wins
        ([True] * 4, 1.0, 100.0, 4),  # computing wins
        ([True] * 4, 1.0, 1.0, 2),  # half and half
        ([False, False, True, True], 1.0, 100.0, 4),
        ([False, False, True, True, True, True], 1.0, 1.0, 4),  # counted from the first that lies in files
        ([True] * 10, 2.0, 1.0, 3),  # 6 s beside 7 s
    ],
)
def test_cuts(in_files: list[bool], compute_s: float, load_s: float, cut: int) -> None:
    assert best_cut(in_files, compute_s, load_s) == cut


@given(st.lists(st.booleans(), max_size=12), st.floats(0.01, 10), st.floats(0.01, 10))
def test_no_cut_is_slower_than_loading_all_and_none_better_by_much(
    in_files: list[bool], compute_s: float, load_s: float
) -> None:
    first = next((index for index, each in enumerate(in_files) if each), len(in_files))

    def took_s(cut: int) -> float:
        return max((cut - first) * compute_s, sum(in_files[cut:]) * load_s)

    cut = best_cut(in_files, compute_s, load_s)
    assert first <= cut <= len(in_files) and took_s(cut) <= took_s(first)
    best_s = min(took_s(each) for each in range(first, len(in_files) + 1))
    assert took_s(cut) == pytest.approx(best_s) or took_s(first) * (1 - MIN_GAIN_FRAC) <= best_s + 1e-9


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_meter_counts_the_time_that_anything_was_under_way_once() -> None:
    clock = Clock()
    meter = Meter(clock)
    assert meter.per_s is None
    meter.begin()
    clock.now_s = 1.0
    meter.begin()
    clock.now_s = 2.0
    meter.end(100)
    clock.now_s = 3.0
    meter.end(100)
    clock.now_s = 50.0  # nobody reads
    meter.begin()
    clock.now_s = 51.0
    meter.end(0)  # a failure takes time too
    assert meter.per_s == pytest.approx(50, rel=0.1)


def test_a_meter_forgets() -> None:
    meter = Meter(Clock())
    meter.add(1000, 1.0)
    for _ in range(10):
        meter.add(100 * Meter.HALF_S, Meter.HALF_S)
    assert meter.per_s == pytest.approx(100, rel=0.01)


def test_threads_end_with_nothing_under_way() -> None:
    meter = Meter()

    def work() -> None:
        for _ in range(1000):
            meter.begin()
            meter.end(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert meter._num_open == 0 and meter.per_s is not None
