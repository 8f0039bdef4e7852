"""Durations as people write them."""

from __future__ import annotations

import pytest

from kvtier.duration import Duration, duration_units


@pytest.mark.parametrize(
    ("written", "seconds", "shown"),
    [
        ("14d", 1_209_600, "14d"),
        ("36h", 129_600, "36h"),
        (" 48 h ", 172_800, "2d"),
        ("90min", 5400, "90min"),
        ("1.5h", 5400, "90min"),
        ("30s", 30, "30s"),
        ("0s", 0, "0s"),
        (0, 0, "0s"),
        (86_400, 86_400, "1d"),
        (2.5, 2.5, "2.5s"),
    ],
)
def test_what_is_read_is_shown_so_that_it_reads_the_same(written: object, seconds: float, shown: str) -> None:
    duration = Duration.parse(written)
    assert duration.seconds == seconds
    assert str(duration) == shown
    assert Duration.parse(shown) == duration == Duration.parse(duration)


@pytest.mark.parametrize(
    "wrong", [True, -1, float("inf"), float("nan"), "", "14", "d", "-3d", "1e3s", "14 d 3 h", None]
)
def test_what_is_not_a_duration_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        Duration.parse(wrong)


@pytest.mark.parametrize("unit", ["D", "m", "ms", "weeks"])
def test_an_unknown_unit_is_named_with_those_that_are_known(unit: str) -> None:
    with pytest.raises(ValueError, match=f"unknown unit '{unit}'.*{', '.join(duration_units())}"):
        Duration.parse(f"3{unit}")
