"""When each namespace of a folder was last opened: who goes first when room is short."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable

from kvtier.stores.folder import OwnedFolder

_MAX_FILES = 256  # a folder's entries take room too
_TOUCH_EVERY_S = 3600.0

Age = tuple[bool, float]
"""Orders what goes first before what goes later: the expired, then the least recently opened."""


class Namespaces:
    """The last opening of each namespace, kept as the time of an empty file of its name.

    Only an order depends on it, so a file that cannot be written is no error: its namespace goes earlier.
    """

    def __init__(self, folder: OwnedFolder, ttl_s: float) -> None:
        self._folder = folder
        self._ttl_s = ttl_s
        now_s = time.time()  # no file's time may be later: it would stay last for ever
        self._opened_s = {namespace: min(at_s, now_s) for namespace, at_s in folder.namespace_times().items()}
        self._touched_s: dict[bytes, float] = {}  # by the monotonic clock

    def age(self, namespaces: Iterable[bytes]) -> Age:
        """Of what these namespaces hold together: that of the one opened last. Without any it goes first of all."""
        return self.age_of(max((self._opened_s.get(namespace, 0.0) for namespace in namespaces), default=0.0))

    def age_of(self, opened_s: float) -> Age:
        """Of what was last opened then, in seconds since the epoch."""
        return opened_s > time.time() - self._ttl_s, opened_s

    def is_expired(self, age: Age) -> bool:
        """Whether nobody opened it for longer than the time to live."""
        return not age[0]

    def touch(self, namespace: bytes) -> None:
        """Note that it is in use, on disk at most once an hour."""
        now_s = time.monotonic()
        if now_s - self._touched_s.get(namespace, -_TOUCH_EVERY_S) < _TOUCH_EVERY_S:
            return
        self._touched_s[namespace] = now_s
        self._opened_s[namespace] = time.time()
        with contextlib.suppress(OSError):  # see the class
            self._folder.touch_namespace(namespace)
        self._drop_oldest()

    def keep_only(self, namespaces: set[bytes]) -> None:
        """Forget those that nothing in the folder belongs to any more."""
        for namespace in self._opened_s.keys() - namespaces:
            self._drop(namespace)
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while len(self._opened_s) > _MAX_FILES:
            self._drop(min(self._opened_s, key=self._opened_s.__getitem__))

    def _drop(self, namespace: bytes) -> None:
        del self._opened_s[namespace]
        self._touched_s.pop(namespace, None)
        with contextlib.suppress(OSError):
            self._folder.drop_namespace(namespace)
