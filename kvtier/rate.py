"""Bytes in a span of time, as people write them. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.size import Size, SizeUnit

_PERIOD_S = {"h": 3600, "day": 86400}


@dataclass(frozen=True, slots=True)
class Rate:
    """At most `num_bytes`, more than 0, in any `period_s` seconds, an hour or a day."""

    num_bytes: int
    period_s: int

    @classmethod
    def parse(cls, value: object) -> Rate:
        """Read `2TB/day`, `500 GiB/day`, `40GB/h`, or a Rate.

        Raises:
            ValueError: anything else: no time, another one, a percentage, no bytes.
        """
        if isinstance(value, Rate):
            return value
        if not isinstance(value, str) or value.count("/") != 1:
            raise ValueError("is not a size in a time")
        size_text, period = (part.strip() for part in value.split("/"))
        if period not in _PERIOD_S:
            raise ValueError(f"has the unknown time {period!r} (known: {', '.join(_PERIOD_S)})")
        size = Size.parse(size_text)
        if size.unit is not SizeUnit.BYTES:
            raise ValueError("is a percentage, of nothing that is known")
        if size.amount < 1:
            raise ValueError("must be more than 0: leave it out for no limit")
        return cls(int(size.amount), _PERIOD_S[period])

    def __str__(self) -> str:
        """The rate as `parse` reads it."""
        period = next(name for name, seconds in _PERIOD_S.items() if seconds == self.period_s)
        return f"{Size(self.num_bytes)}/{period}"
