"""What counts as growth in the second half of a long run."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvtier.benchmarks.flatness import FDS_TOLERANCE, MEMORY_TOLERANCE_BYTES, Flatness, check_flatness

MIB = 1 << 20
NVME_BYTES = 1 << 30


def check(
    seconds: int = 600,
    memory: Callable[[int], float] = lambda t: 300 * MIB,
    fds: Callable[[int], float] = lambda t: 20,
    disk: Callable[[int], float] = lambda t: 500 * MIB,
    resumed_at_s: tuple[float, ...] = (),
) -> Flatness:
    times = range(0, seconds + 1)
    columns = {
        "t_s": [float(t) for t in times],
        "memory_bytes": [memory(t) for t in times],
        "open_fds": [fds(t) for t in times],
        "nvme_disk_bytes": [disk(t) for t in times],
    }
    return check_flatness(columns, resumed_at_s, NVME_BYTES)


def test_a_short_run_says_nothing() -> None:
    flat = check(seconds=299, memory=lambda t: t * MIB)
    assert flat.series == () and flat.problems == []


def test_growth_that_ends_in_the_first_half_is_warm_up() -> None:
    flat = check(memory=lambda t: min(t, 290) * MIB, fds=lambda t: min(t, 290), disk=lambda t: min(t, 290) * MIB)
    assert len(flat.series) == 3 and flat.problems == [] and flat.seconds == 300


def test_noise_is_no_growth() -> None:
    assert check(memory=lambda t: (300 + 40 * (t % 7 == 0)) * MIB, fds=lambda t: 20 + t % 3).problems == []


@pytest.mark.parametrize(
    ("series", "per_second", "name"),
    [
        ("memory", 1.5 * MEMORY_TOLERANCE_BYTES / 300, "memory"),
        ("fds", 1.5 * FDS_TOLERANCE / 300, "open files"),
        ("disk", 1.5 * NVME_BYTES / 8 / 300, "the nvme folder"),
    ],
)
def test_a_slow_leak_is_found_and_half_of_it_is_not(series: str, per_second: float, name: str) -> None:
    (problem,) = check(**{series: lambda t: 1000 + t * per_second}).problems  # type: ignore[arg-type]
    assert problem.startswith(f"{name} grew by ") and "over the last 300 s" in problem
    assert check(**{series: lambda t: 1000 + t * per_second / 2}).problems == []  # type: ignore[arg-type]


def test_one_more_segment_file_is_no_leak_and_two_are() -> None:
    segment, late = NVME_BYTES // 8, 480
    assert check(disk=lambda t: segment * (1 + (t > late)), fds=lambda t: 10 + 2 * (t > late)).problems == []
    (problem,) = check(disk=lambda t: segment * (1 + 2 * (t > late))).problems
    assert problem.startswith("the nvme folder grew")


def test_shrinking_is_no_fault() -> None:
    assert check(memory=lambda t: (900 - t) * MIB).problems == []


def test_a_resumed_run_is_judged_from_there() -> None:
    def another_process(t: int) -> float:
        return (200 if t < 650 else 300) * MIB

    assert check(seconds=1000, memory=another_process).problems
    assert check(seconds=1000, memory=another_process, resumed_at_s=(650.0,)).problems == []
    assert check(seconds=1000, memory=another_process, resumed_at_s=(701.0,)).series == ()
