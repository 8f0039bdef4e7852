"""Bytes, busy time and peaks of edges, against sums over every instant of a clock that the test moves."""

from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.bound import measured
from kvtier.edge_meter import EdgeMeter, EdgeMeters, StepClock
from kvtier.types import Tier

WINDOW_S, FLIGHTS = EdgeMeter.WINDOW_S, EdgeMeter.WINDOW_FLIGHTS


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def meters() -> tuple[Clock, EdgeMeters]:
    clock = Clock()
    return clock, EdgeMeters(clock)


def one_by_one(clock: Clock, meter: EdgeMeter, times: int, took_s: float, num_bytes: int) -> None:
    for _ in range(times):
        with meter.transfer(num_bytes):
            clock.now_s += took_s


def test_what_overlaps_is_busy_once() -> None:
    clock, edges = meters()
    edge = edges[Tier.NVME, Tier.GPU]
    edges.steps.start()
    first = edge.begin()
    clock.now_s = 1.0
    second = edge.begin()
    clock.now_s = 3.0
    edge.end(first, 100)
    clock.now_s = 4.0
    edge.end(second, 300)
    clock.now_s = 9.0  # nothing is under way
    assert edges.steps.stop() == 9.0
    use = edges.uses()["nvme_to_gpu"]
    assert (use.num_bytes, use.busy_s, use.peak_bytes_s) == (400, 4.0, 100.0)


def test_what_moves_while_no_step_runs_counts_for_the_peak_alone() -> None:
    clock, edges = meters()
    one_by_one(clock, edges[Tier.GPU, Tier.CPU], 3, 1.0, 500)
    use = edges.uses()["gpu_to_cpu"]
    assert (use.num_bytes, use.busy_s, use.peak_bytes_s) == (0, 0.0, 500.0)


def test_a_transfer_that_begins_before_the_step_counts_for_it_in_part() -> None:
    clock, edges = meters()
    edge = edges[Tier.CPU, Tier.GPU]
    began = edge.begin()
    clock.now_s = 3.0
    edges.steps.start()
    clock.now_s = 4.0
    edge.end(began, 400)
    use = edges.uses()["cpu_to_gpu"]
    assert (use.num_bytes, use.busy_s, use.peak_bytes_s) == (100, 1.0, 100.0)


def test_one_that_fails_takes_time_and_brings_nothing() -> None:
    clock, edges = meters()
    edge = edges[Tier.NVME, Tier.GPU]
    edges.steps.start()
    one_by_one(clock, edge, 1, 1.0, 100)
    with pytest.raises(OSError, match="as asked"), edge.transfer(900):
        clock.now_s += 1.0
        raise OSError("as asked")
    use = edges.uses()["nvme_to_gpu"]
    assert (use.num_bytes, use.busy_s, use.peak_bytes_s) == (100, 2.0, 50.0)


def test_edges_that_nothing_went_along_and_copies_within_a_tier_are_not_there() -> None:
    clock, edges = meters()
    one_by_one(clock, edges[Tier.GPU, Tier.GPU], 1, 1.0, 100)
    one_by_one(clock, edges[Tier.CPU, Tier.NVME], 1, 1.0, 0)
    assert edges.uses() == {}


def test_the_peak_is_the_best_window_and_not_the_average() -> None:
    clock, edges = meters()
    edge = edges[Tier.NVME, Tier.GPU]
    one_by_one(clock, edge, 2 * FLIGHTS, WINDOW_S / FLIGHTS * 1.001, 1000)
    fast = 1000 / (WINDOW_S / FLIGHTS * 1.001)
    one_by_one(clock, edge, 10 * FLIGHTS, WINDOW_S, 1000)
    assert edges.uses()["nvme_to_gpu"].peak_bytes_s == pytest.approx(fast)


def test_a_burst_shorter_than_a_window_is_no_peak() -> None:
    clock, edges = meters()
    edge = edges[Tier.NVME, Tier.GPU]
    one_by_one(clock, edge, FLIGHTS, WINDOW_S, 1000)  # 10 to 80 KB/s
    one_by_one(clock, edge, 3, WINDOW_S / 1000, 1000)  # a hundred times that, for a moment
    one_by_one(clock, edge, 3 * FLIGHTS, WINDOW_S, 1000)
    peak = edges.uses()["nvme_to_gpu"].peak_bytes_s
    assert peak is not None and 1000 / WINDOW_S <= peak < 2 * 1000 / WINDOW_S


def test_a_window_is_long_against_what_was_under_way_when_it_began() -> None:
    clock, edges = meters()
    edge = edges[Tier.NVME, Tier.GPU]
    # Four at a time, all together: the first to arrive must not be credited with what the others still bring.
    for _ in range(20 * FLIGHTS):
        began = [edge.begin() for _ in range(4)]
        clock.now_s += 2 * WINDOW_S
        for each in began:
            edge.end(each, 1000)
            clock.now_s += WINDOW_S / 1000
    peak = edges.uses()["nvme_to_gpu"].peak_bytes_s
    assert peak == pytest.approx(4 * 1000 / (2 * WINDOW_S), rel=1 / FLIGHTS)


def test_asking_in_the_middle_of_a_transfer_changes_nothing() -> None:
    def busy_s(asks: bool) -> float:
        clock, edges = meters()
        edge = edges[Tier.NVME, Tier.GPU]
        edges.steps.start()
        one_by_one(clock, edge, 1, 1.0, 100)
        began = edge.begin()
        clock.now_s += 2.0
        if asks:
            assert edges.uses()["nvme_to_gpu"].busy_s == 3.0
        clock.now_s += 2.0
        edge.end(began, 100)
        return edges.uses()["nvme_to_gpu"].busy_s

    assert busy_s(True) == busy_s(False) == 5.0


def test_a_step_that_never_ended_counts_for_nothing() -> None:
    clock = Clock()
    steps = StepClock(clock)
    steps.start()
    clock.now_s = 100.0
    steps.start()
    clock.now_s = 101.0
    assert steps.is_running and steps.seconds() == 1.0
    assert steps.stop() == 1.0 and not steps.is_running
    clock.now_s = 200.0
    assert steps.seconds() == 1.0 and steps.stop() == 0.0


# Every instant is one second long. A transfer: begin, length, edge, bytes. A step: pause before it, length.
_TRANSFERS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12), st.integers(0, 1), st.integers(1, 99)))
_STEPS = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 8)), min_size=1, max_size=6)


@given(_TRANSFERS, _STEPS)
def test_the_bound_is_never_more_than_the_steps_took(
    transfers: list[tuple[int, int, int, int]], steps: list[tuple[int, int]]
) -> None:
    clock, edges = meters()
    names = "nvme_to_gpu", "cpu_to_gpu"
    of = edges[Tier.NVME, Tier.GPU], edges[Tier.CPU, Tier.GPU]
    runs, at = [False] * 120, 0
    for pause, length in steps:
        runs[at + pause : at + pause + length] = [True] * length
        at += pause + length
    open_now: dict[int, object] = {}
    for second in range(120):
        clock.now_s = float(second)
        for number, (begin, length, edge, num_bytes) in enumerate(transfers):
            if begin + length == second:
                of[edge].end(open_now.pop(number), num_bytes)  # type: ignore[arg-type]
        if runs[second] != edges.steps.is_running:
            (edges.steps.start if runs[second] else edges.steps.stop)()
        for number, (begin, _, edge, _) in enumerate(transfers):
            if begin == second:
                open_now[number] = of[edge].begin()
    assert not open_now
    uses = edges.uses()
    for index, name in enumerate(names):
        own = [(begin, begin + length, size) for begin, length, edge, size in transfers if edge == index]
        assert (name in uses) == bool(own)
        if not own:
            continue
        busy = [any(begin <= second < end for begin, end, _ in own) for second in range(120)]
        assert uses[name].busy_s == sum(a and b for a, b in zip(busy, runs, strict=True))
        shares = sum(size * sum(runs[begin:end]) / (end - begin) for begin, end, size in own)
        assert uses[name].num_bytes == pytest.approx(shares, abs=1.001)  # whole bytes
        assert uses[name].peak_bytes_s is not None
        assert uses[name].peak_bytes_s >= sum(size for *_, size in own) / sum(busy) * (1 - 1e-9)
    took_s = edges.steps.seconds()
    assert took_s == sum(runs)
    none = {"steps": 0, "took_s": 0.0, "compute_s": 0.0}
    idle = measured(took_s, {"decode": none, "prefill": none}, uses, {})
    assert 0 <= idle["bound_frac"] <= 1 + 1e-9
    assert (idle["bound_frac"] > 0) == any(use.num_bytes for use in uses.values()) == (idle["binding"] in names)


def test_threads_lose_nothing() -> None:
    edges = EdgeMeters()
    edge = edges[Tier.CPU, Tier.GPU]
    edges.steps.start()

    def work() -> None:
        for _ in range(200):
            with edge.transfer(7):
                time.sleep(0)

    threads = [threading.Thread(target=work) for _ in range(8)]
    started_s = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    use, took_s = edges.uses()["cpu_to_gpu"], time.monotonic() - started_s
    assert edge._num_open == 0 and edge._bytes == 8 * 200 * 7
    assert use.num_bytes == pytest.approx(8 * 200 * 7, abs=2)  # shares of seconds are rounded
    assert 0 < use.busy_s <= took_s <= edges.steps.seconds()
