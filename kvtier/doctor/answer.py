"""What comes of a measurement: a value, or the reason why there is none."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from kvtier.errors import KVTierError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """A measurement that could not be made, and why, in words for people."""

    why: str


def attempt(call: Callable[[], T | NotMeasured]) -> T | NotMeasured:
    """What `call` returns; what the machine refuses (permission, memory, threads, a driver's error) is the reason."""
    try:
        return call()
    except (OSError, MemoryError, RuntimeError, AssertionError, KVTierError) as error:
        # torch without CUDA raises AssertionError, drivers' errors are RuntimeError
        return NotMeasured(in_words(error))


def in_words(error: BaseException) -> str:
    """One line."""
    if isinstance(error, OSError) and not isinstance(error, KVTierError) and error.strerror:
        return f"{error.strerror} ({errno.errorcode.get(error.errno or 0, error.errno)})"
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
