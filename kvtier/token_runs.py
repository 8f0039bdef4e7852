"""Where the model placed a row's tokens and what they were made from, as runs: a few numbers for a conversation."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence


class TokenRuns:
    """For each token of a row, a position and a number. Runs of tokens of one number with positions that count on.

    O(log runs) to find a token's, O(runs) to go through them; most rows have one run.
    """

    __slots__ = ("_firsts", "_numbers", "_positions", "num_tokens")

    def __init__(self) -> None:
        self._firsts = array("q")  # the first token of each run
        self._positions = array("q")  # its position
        self._numbers = bytearray()
        self.num_tokens = 0

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._firsts)

    def append(self, num_tokens: int, position: int, number: int) -> None:
        """Tokens behind the last one, at positions from that one on."""
        if num_tokens < 1:
            return
        first, firsts = self.num_tokens, self._firsts
        if not firsts or self._numbers[-1] != number or self._positions[-1] + first - firsts[-1] != position:
            self._firsts.append(first)
            self._positions.append(position)
            self._numbers.append(number)
        self.num_tokens = first + num_tokens

    def extend(self, positions: Sequence[int], number: int) -> None:
        """Tokens behind the last one, at these positions. O(1) for a range, else O(tokens)."""
        if isinstance(positions, range) and positions.step == 1:
            self.append(len(positions), positions.start, number)
            return
        begin = 0
        for at in range(1, len(positions) + 1):
            if at == len(positions) or positions[at] != positions[at - 1] + 1:
                self.append(at - begin, positions[begin], number)
                begin = at

    def truncate(self, num_tokens: int) -> None:
        """Keep the first tokens. O(runs dropped)."""
        if num_tokens >= self.num_tokens:
            return
        keep = len(self._firsts)
        while keep and self._firsts[keep - 1] >= num_tokens:
            keep -= 1
        del self._firsts[keep:], self._positions[keep:], self._numbers[keep:]
        self.num_tokens = num_tokens

    def runs(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Tokens `first … last - 1` as `(position, count, number)`."""
        run = bisect_right(self._firsts, first) - 1
        while first < last:
            end = self._firsts[run + 1] if run + 1 < len(self._firsts) else self.num_tokens
            count = min(end, last) - first
            yield self._positions[run] + first - self._firsts[run], count, self._numbers[run]
            first, run = first + count, run + 1

    def positions(self, first: int, last: int) -> list[tuple[int, int]]:
        """Of tokens `first … last - 1`: first position and length of each longest run of neighbouring ones."""
        if len(self._firsts) == 1:  # most rows
            return [(self._positions[0] + first - self._firsts[0], last - first)]
        found: list[tuple[int, int]] = []
        for position, count, _ in self.runs(first, last):
            if found and sum(found[-1]) == position:  # what they were made from differs
                found[-1] = found[-1][0], found[-1][1] + count
            else:
                found.append((position, count))
        return found

    def number(self, token: int) -> int:
        """Of one token."""
        return self._numbers[bisect_right(self._firsts, token) - 1]

    @property
    def is_counted(self) -> bool:
        """Whether all positions count from 0."""
        return all(position == first for position, first in zip(self._positions, self._firsts, strict=True))

    def copy(self) -> TokenRuns:
        """The same, sharing nothing. O(runs)."""
        twin = TokenRuns()
        twin._firsts, twin._positions = self._firsts[:], self._positions[:]
        twin._numbers, twin.num_tokens = self._numbers[:], self.num_tokens
        return twin
