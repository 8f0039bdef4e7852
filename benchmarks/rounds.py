"""Alternating measurements: what is compared takes turns, and a ratio is of neighbours in time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def alternate(sides: Mapping[str, Callable[[], T]], num_rounds: int) -> dict[str, list[T]]:
    """Measure every side once a round. Each round begins with another one: nobody always follows the same side."""
    names = list(sides)
    found: dict[str, list[T]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            found[name].append(sides[name]())
    return found


def ratios(ours: Sequence[float], others: Sequence[float]) -> tuple[float, list[float]]:
    """How many times as fast ours are as the others, from times: the median over the rounds, and the least and most."""
    each = sorted(other / our for our, other in zip(ours, others, strict=True))
    return statistics.median(each), [each[0], each[-1]]


def ratio_columns(name: str, ours: Sequence[float], others: Sequence[float]) -> dict[str, Any]:
    """`ratio_to_<name>` of a row, and `ratio_to_<name>_spread`."""
    ratio, spread = ratios(ours, others)
    return {f"ratio_to_{name}": ratio, f"ratio_to_{name}_spread": spread}
