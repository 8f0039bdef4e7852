"""A budget as people write it: bytes, or a percentage of a total that is known only at run time. Pure Python."""

from __future__ import annotations

import enum
import mmap
import re
from dataclasses import dataclass

_UNIT_BYTES = {
    "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([A-Za-z]+|%)?", re.ASCII)


_BINARY = tuple(name for name in reversed(_UNIT_BYTES) if "i" in name)
_SHORT = len("1536MiB")  # still read at a glance; 19531250KiB is not


def size_words(num_bytes: float) -> str:
    """A size for people, as a config takes it: `24GiB`, `1.5GiB`, `20GB`; below 1 KiB `512 bytes`. The only way.

    Exactly where that is short, else rounded up to a hundredth of a unit: a minimum copied from a message is enough.
    """
    whole = round(num_bytes)
    if whole < 0:
        return f"-{size_words(-whole)}"
    unit = next((name for name in _BINARY if whole >= _UNIT_BYTES[name]), None)
    if unit is None:
        return f"{whole} byte{'s' * (whole != 1)}"
    hundredths, rest = divmod(whole * 100, _UNIT_BYTES[unit])
    exact = str(Size(whole))
    if rest and len(exact) <= _SHORT and exact != f"{whole}B":
        return exact
    return f"{(hundredths + bool(rest)) / 100:.2f}".rstrip("0").rstrip(".") + unit


def size_and_bytes(num_bytes: int) -> str:
    """A size for messages that compare budgets, and exactly: `1GiB (1073741824 bytes)`; below 1 KiB bytes alone."""
    words = size_words(num_bytes)
    return words if words.endswith(("byte", "bytes")) else f"{words} ({num_bytes} bytes)"


def speed_words(bytes_per_s: float) -> str:
    """Bytes a second for people, in decimal units as disks and links are sold: `0.53 GB/s`, `12 MB/s`."""
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e8 else f"{bytes_per_s / 1e6:.3g} MB/s"


def whole_pages(num_bytes: int) -> int:
    """What so many bytes of memory take that shares no page with other memory."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def unit_names() -> list[str]:
    """The units of bytes that `Size.parse` knows."""
    return list(_UNIT_BYTES)


class SizeUnit(enum.Enum):
    """What a size counts: bytes, or a percentage of a total that is known only at run time."""

    BYTES = "bytes"
    PERCENT = "percent"


@dataclass(frozen=True, slots=True)
class Size:
    """A budget: `amount` bytes (a whole number), or `amount` percent (0 to 100) of a total given to `resolve`."""

    amount: int | float
    unit: SizeUnit = SizeUnit.BYTES

    @classmethod
    def parse(cls, value: object) -> Size:
        """Read `512MiB`, `20GB`, `1.5 GiB`, `30%`, a whole number of bytes, or a Size.

        Raises:
            ValueError: anything else: booleans, negative or fractional bytes, unknown units, more than 100 %.
        """
        if isinstance(value, Size):
            return value
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return cls(value)
        match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise ValueError("is not a size")
        number, unit = match.groups()
        if unit == "%":
            if float(number) > 100:
                raise ValueError("is more than 100%")
            return cls(float(number), SizeUnit.PERCENT)
        if unit is None:
            if "." in number:
                raise ValueError("is not a whole number of bytes")
            unit = "B"
        if unit not in _UNIT_BYTES:
            raise ValueError(f"has the unknown unit {unit!r} (known: {', '.join(_UNIT_BYTES)}, %)")
        if "." in number:
            return cls(round(float(number) * _UNIT_BYTES[unit]))
        return cls(int(number) * _UNIT_BYTES[unit])  # kept whole: floats are not exact beyond 2**53

    def resolve(self, total_bytes: int) -> int:
        """Bytes of this size; `total_bytes` is what a percentage is taken of and does not cap an absolute size."""
        return int(self.amount) if self.unit is SizeUnit.BYTES else int(total_bytes * self.amount / 100)

    def __str__(self) -> str:
        """The size as `parse` reads it, in the largest unit that divides it: 20GB is 19531250KiB to nobody."""
        if self.unit is SizeUnit.PERCENT:
            return f"{self.amount:g}%"
        num_bytes = int(self.amount)
        dividing = [name for name, unit_bytes in _UNIT_BYTES.items() if num_bytes and num_bytes % unit_bytes == 0]
        name = max(dividing, key=_UNIT_BYTES.__getitem__, default="B")
        return f"{num_bytes // _UNIT_BYTES[name]}{name}"
