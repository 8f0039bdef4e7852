"""A span of time as people write it. Pure Python."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNIT_S = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", re.ASCII)


def duration_units() -> list[str]:
    """The units that `Duration.parse` knows."""
    return list(_UNIT_S)


@dataclass(frozen=True, slots=True)
class Duration:
    """A span of `seconds`, 0 or more."""

    seconds: int | float

    @classmethod
    def parse(cls, value: object) -> Duration:
        """Read `14d`, `36h`, `1.5 h`, `90min`, `30s`, a number of seconds, or a Duration.

        Raises:
            ValueError: anything else: booleans, negative or endless spans, unknown units.
        """
        if isinstance(value, Duration):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf"):
            return cls(value)
        match = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError("is not a duration")
        number, unit = match.groups()
        if unit not in _UNIT_S:
            raise ValueError(f"has the unknown unit {unit!r} (known: {', '.join(_UNIT_S)})")
        return cls(float(number) * _UNIT_S[unit] if "." in number else int(number) * _UNIT_S[unit])

    def __str__(self) -> str:
        """The span as `parse` reads it, in the largest unit that divides it."""
        for name in ("d", "h", "min"):
            if self.seconds and self.seconds % _UNIT_S[name] == 0:
                return f"{int(self.seconds) // _UNIT_S[name]}{name}"
        return f"{self.seconds:g}s"
