"""Where padding stands among the tokens of one row: the columns that the caller sees are both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Padding:
    """`count` columns of padding that stand just before token number `at`. They have no K and V here."""

    at: int
    count: int


class PaddingRuns:
    """Runs of padding, in order; no two at the same token. Does not know how many tokens there are.

    Attributes:
        runs: those; changed by `add` alone.
    """

    __slots__ = ("runs",)

    def __init__(self, runs: Sequence[Padding] = ()) -> None:
        self.runs = list(runs)

    @property
    def num_columns(self) -> int:
        """Columns of padding."""
        return sum(padding.count for padding in self.runs) if self.runs else 0

    def add(self, at: int, count: int) -> None:
        """Columns behind all others, in front of token `at`."""
        if self.runs and self.runs[-1].at == at:
            count += self.runs.pop().count
        self.runs.append(Padding(at, count))

    def within(self, first: int, last: int) -> list[tuple[int, int]]:
        """Runs in front of tokens `first … last - 1`: at which of these, and how many columns."""
        return [(p.at - first, p.count) for p in self.runs if first <= p.at < last]

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Tokens `first … last - 1` as runs of neighbouring columns: `(column, token, count)`. O(runs)."""
        column = first + sum(p.count for p in self.runs if p.at <= first)
        for padding in self.runs:
            if first < padding.at < last:
                yield column, first, padding.at - first
                column += padding.at - first + padding.count
                first = padding.at
        if last > first:
            yield column, first, last - first

    def column(self, num_tokens: int) -> int:
        """How many columns end with the first `num_tokens` tokens: padding behind the last of them is not counted."""
        return num_tokens + sum(p.count for p in self.runs if p.at < num_tokens)

    def first_columns(self, length: int) -> tuple[int, PaddingRuns]:
        """How many tokens are among the first `length` columns, and the padding among these."""
        num_tokens, left, kept = 0, length, list[Padding]()
        for padding in self.runs:
            if padding.at - num_tokens >= left:
                break
            left -= padding.at - num_tokens
            num_tokens = padding.at
            kept.append(Padding(padding.at, min(padding.count, left)))
            left -= kept[-1].count
            if left == 0:
                break
        return num_tokens + left, PaddingRuns(kept)

    def copy(self) -> PaddingRuns:
        """Its own list."""
        return PaddingRuns(self.runs)

    def is_among(self, num_tokens: int) -> bool:
        """Whether these are runs of padding, in order, among so many tokens."""
        places = [padding.at for padding in self.runs]
        return places == sorted(set(places)) and all(p.count >= 1 and p.at <= num_tokens for p in self.runs)
