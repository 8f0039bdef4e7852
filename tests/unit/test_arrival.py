"""Think times, as the command line writes them."""

from __future__ import annotations

import statistics

import pytest

from kvtier.benchmarks.arrival import Arrival
from kvtier.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "arrival"),
    [
        ("none", Arrival()),
        ("0", Arrival()),
        ("2.5", Arrival(2.5)),
        ("exponential:4", Arrival(4.0, True)),
    ],
)
def test_what_is_read(text: str, arrival: Arrival) -> None:
    assert Arrival.parse(text) == arrival


@pytest.mark.parametrize(
    "text",
    ["", "soon", "-1", "nan", "inf", "exponential", "exponential:", "exponential:-1", "poisson:3", ":3", "1:2:3"],
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--arrival .*: give none, a number of seconds"):
        Arrival.parse(text)


def test_draws_depend_on_their_place_only_and_have_the_mean() -> None:
    arrival = Arrival(4.0, True)
    drawn = [arrival.think_s(0, session, turn) for session in range(40) for turn in range(1, 51)]
    assert drawn[77] == arrival.think_s(0, 1, 28) and len(set(drawn)) == len(drawn)
    assert arrival.think_s(1, 1, 28) != drawn[77]
    assert 3.6 < statistics.mean(drawn) < 4.4 and min(drawn) >= 0
    assert Arrival(3.0).think_s(0, 5, 1) == 3.0
    assert Arrival(0.0, True).think_s(0, 5, 1) == 0.0
