"""Rates as people write them."""

from __future__ import annotations

import pytest

from kvtier.rate import Rate


@pytest.mark.parametrize(
    ("written", "num_bytes", "period_s", "shown"),
    [
        ("2TB/day", 2 * 10**12, 86400, "2TB/day"),
        ("330GB/day", 330 * 10**9, 86400, "330GB/day"),
        ("0.33TB/day", 330 * 10**9, 86400, "330GB/day"),
        ("1KB/h", 1000, 3600, "1kB/h"),
        ("999B/h", 999, 3600, "999B/h"),
        ("500GiB/day", 500 << 30, 86400, "500GiB/day"),
        (" 1.5 GiB / h ", 3 << 29, 3600, "1536MiB/h"),
        ("4096/h", 4096, 3600, "4KiB/h"),
    ],
)
def test_what_is_read_is_shown_so_that_it_reads_the_same(
    written: str, num_bytes: int, period_s: int, shown: str
) -> None:
    rate = Rate.parse(written)
    assert (rate.num_bytes, rate.period_s, str(rate)) == (num_bytes, period_s, shown)
    assert Rate.parse(shown) == rate == Rate.parse(rate)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (5, "is not a size in a time"),
        (True, "is not a size in a time"),
        (None, "is not a size in a time"),
        ("2TB", "is not a size in a time"),
        ("2TB/day/h", "is not a size in a time"),
        ("2TB/week", "unknown time 'week' .known: h, day"),
        ("2TB/", "unknown time ''"),
        ("2T/day", "unknown unit 'T'"),
        ("-2TB/day", "is not a size"),
        ("/day", "is not a size"),
        ("5%/day", "is a percentage"),
        ("0/day", "more than 0"),
        ("0.4B/day", "more than 0"),
    ],
)
def test_what_is_not_a_rate_is_refused(wrong: object, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Rate.parse(wrong)
