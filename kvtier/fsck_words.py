"""Numbers and times in the words of `kvtier fsck`."""

from __future__ import annotations

from datetime import UTC, datetime

from kvtier.terminal import printable

_LAST_S = 253402300800.0  # the year 10000; files may say anything
_MAX_NAME = 240  # characters of a name: a crafted one must not fill the screen


def counted(number: int, what: str) -> str:
    """`1 slot`, `2 slots`."""
    return f"{number} {what}" + ("" if number == 1 else "s")


def shown_name(name: str) -> str:
    """A session's name for a table's cell, with escapes; of more than 240 characters the first ones."""
    shown = printable(name)
    return shown if len(shown) <= _MAX_NAME else f"{shown[: _MAX_NAME - 1]}…"


def iso(at_s: float | None) -> str | None:
    """A time in seconds since the epoch, for programs; None for none, and for nonsense."""
    if at_s is None or not 0 <= at_s < _LAST_S:
        return None
    return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")


def ago(at_s: float | None, now_s: float) -> str:
    """A time for people."""
    if at_s is None or not 0 <= at_s < _LAST_S:
        return "unknown"
    past_s = now_s - at_s
    if past_s < 0:
        return "in the future"
    for unit, unit_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if past_s >= 2 * unit_s:
            return f"{past_s // unit_s:.0f} {unit} ago"
    return f"{past_s:.0f} s ago"
