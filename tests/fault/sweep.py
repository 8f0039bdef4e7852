"""Every call to the system that a scenario makes fails once: run once to count them, then once for each."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.stores import segment

Fault = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""What takes the place of one call: told the real function and its arguments."""

CALLS: list[tuple[Any, str]] = [
    (os, "open"), (os, "close"), (os, "preadv"), (os, "pread"), (os, "pwrite"), (os, "posix_fallocate"),
    (os, "ftruncate"), (os, "fsync"), (os, "fdatasync"), (os, "posix_fadvise"), (os, "stat"), (os, "lstat"),
    (os, "fstat"), (os, "scandir"), (os, "listdir"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "rename"),
    (os, "fchmod"), (os, "utime"), (os, "statvfs"), (fcntl, "flock"), (fcntl, "fcntl"), (segment, "_change"),
]  # fmt: skip
"""All that the store calls, and `_change`, which is fallocate(2) by ctypes."""


def failing(code: int) -> Fault:
    """The call does nothing but fail. A close fails as Linux's do: the descriptor is gone."""

    def fail(real: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if real is _CLOSE:
            real(*arguments)
        raise OSError(code, os.strerror(code))

    return fail


_CLOSE = os.close


class Calls:
    """Counts the calls to the system, and has one of them, or none, go wrong.

    Attributes:
        met: the name of the call that went wrong; None while none has.
        counts: calls so far, by name.
    """

    def __init__(self, fault: Fault | None = None, at: int = -1, which: list[tuple[Any, str]] = CALLS) -> None:
        self._fault, self._at, self._which = fault, at, which
        self._lock, self._next = threading.Lock(), 0
        self.met: str | None = None
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        self._patch = pytest.MonkeyPatch()
        for module, name in self._which:
            self._patch.setattr(module, name, self._wrapped(name, getattr(module, name)))
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.undo()

    @property
    def num_calls(self) -> int:
        return self.counts.total()

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:  # reads of headers are made on several threads
                index, self._next = self._next, self._next + 1
                self.counts[name] += 1
                is_it = index == self._at
                if is_it:
                    self.met = name
            if is_it and self._fault is not None:
                return self._fault(real, arguments, keywords)
            return real(*arguments, **keywords)

        return call
