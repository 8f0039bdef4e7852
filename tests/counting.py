"""Containers that count the entries that somebody walks through, in Python or in C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any


class Visits:
    """How many entries were visited in the containers made here."""

    def __init__(self) -> None:
        self.count = 0

    def each(self, entries: Iterable[Any]) -> Iterator[Any]:
        """Count them as they are taken."""
        for entry in entries:
            self.count += 1
            yield entry

    def counting(self, plain: Any) -> Any:
        """A container with the same entries as a dict, a set or a list, and of the same type but for this.

        Only walks are counted, not look-ups: `iter`, and what is made of it (`list(d)`, `sorted(s)`, comprehensions),
        `items`, `values`, and `reversed`.
        """
        visits = self

        class Counting(type(plain)):  # type: ignore[misc]  # of whatever type it is
            def __iter__(self) -> Iterator[Any]:
                return visits.each(super().__iter__())

            def __reversed__(self) -> Iterator[Any]:
                return visits.each(super().__reversed__())

            def items(self) -> Iterator[Any]:
                return visits.each(super().items())

            def values(self) -> Iterator[Any]:
                return visits.each(super().values())

        return Counting(plain)
