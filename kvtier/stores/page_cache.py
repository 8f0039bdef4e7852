"""The page cache held for a store's files: an account in bytes, and the release of what was used longest ago."""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kvtier.errors import BudgetError
from kvtier.log import logger
from kvtier.size import size_and_bytes
from kvtier.stores.file_io import OpenFile
from kvtier.stores.page_calls import resident_pages, write_back

# What is accounted and released at a time, in full however little of it was touched: the kernel's large folios stay
# whole while anybody reads a part of them. Writes are cut at its multiples, since a folio is as long as the write that
# made it.
GRANULE_BYTES = 512 << 10
MIN_BYTES = 8 * GRANULE_BYTES
_HIGH_FRAC, _LOW_FRAC = 0.75, 0.5
_BATCH_GRANULES = 32  # released at a time, so that room comes back in steps
_TRIES = 20  # to drop a granule that stays; the kernel's own work holds pages for moments only

_Key = tuple[OpenFile, int]


@dataclass(slots=True)
class _Granule:
    num_users: int = 0
    is_dirty: bool = False
    num_tries: int = 0
    ahead: list[tuple[int, int]] = field(default_factory=list)
    """Ranges, offset and length, that the kernel was asked to read ahead and may be reading still."""


class PageCache:
    """Keeps the page cache of some files at or under `budget_bytes`.

    Whoever reads or writes does so within `using`, which accounts first. At three quarters of the budget a thread
    writes back and drops the oldest granules until half is left. Only where that does not suffice does a caller release
    some itself, or wait for those who use theirs: the budget is a limit, not a wish.

    A file must not be mapped: the kernel does not drop pages that are.
    """

    def __init__(self, budget_bytes: int) -> None:
        """Raises BudgetError: below `MIN_BYTES`."""
        if budget_bytes < MIN_BYTES:
            raise BudgetError(
                f"tiers.nvme.page_cache is {size_and_bytes(budget_bytes)}, its minimum is {size_and_bytes(MIN_BYTES)}: "
                "raise it"
            )
        self.budget_bytes = budget_bytes
        self._granules: OrderedDict[_Key, _Granule] = OrderedDict()  # the oldest first
        self._num_leaving = 0  # off the map, and not yet dropped
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def used_bytes(self) -> int:
        """Bytes accounted now; never less than what the kernel holds because of us."""
        return (len(self._granules) + self._num_leaving) * GRANULE_BYTES

    def read_ahead(self, file: OpenFile, offset_bytes: int, num_bytes: int) -> None:
        """Account these bytes, far less than `MIN_BYTES`, and ask the kernel to read them; returns at once."""
        keys = self._enter(file, offset_bytes, num_bytes, is_write=False)
        try:
            with self._changed:
                for key in keys:
                    start, end = key[1] * GRANULE_BYTES, (key[1] + 1) * GRANULE_BYTES
                    start, end = max(start, offset_bytes), min(end, offset_bytes + num_bytes)
                    if key in self._granules:  # not after close
                        self._granules[key].ahead.append((start, end - start))
            os.posix_fadvise(file.fd, offset_bytes, num_bytes, os.POSIX_FADV_WILLNEED)
        finally:
            self._leave(keys)

    @contextmanager
    def using(self, file: OpenFile, offset_bytes: int, num_bytes: int, is_write: bool = False) -> Iterator[None]:
        """Account these bytes, far less than `MIN_BYTES`, and hold them while the block runs."""
        keys = self._enter(file, offset_bytes, num_bytes, is_write)
        try:
            yield
        finally:
            self._leave(keys)

    def close(self) -> None:
        """Forget all and stop; a thread that hangs in the kernel is left to itself. Idempotent."""
        with self._changed:
            self._closed = True
            self._granules.clear()
            self._num_leaving = 0
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout=1.0)

    # --- the account

    def _enter(self, file: OpenFile, offset_bytes: int, num_bytes: int, is_write: bool) -> list[_Key]:
        first, last = offset_bytes // GRANULE_BYTES, (offset_bytes + num_bytes - 1) // GRANULE_BYTES
        keys = [(file, index) for index in range(first, last + 1)]
        while True:
            with self._changed:
                if self._closed:
                    return []
                growth_bytes = sum(key not in self._granules for key in keys) * GRANULE_BYTES
                if self.used_bytes() + growth_bytes <= self.budget_bytes:
                    self._take(keys, is_write)
                    is_much = self.used_bytes() > self.budget_bytes * _HIGH_FRAC
                    break
                victims = self._victims()
                if not victims:  # all is in use, or on its way out: either ends and says so
                    self._changed.wait()
                    continue
            self._release(victims)
        if is_much and self._thread is None:
            self._start_thread()
        return keys

    def _take(self, keys: list[_Key], is_write: bool) -> None:
        for key in keys:
            granule = self._granules.setdefault(key, _Granule())
            granule.num_users += 1
            granule.is_dirty |= is_write
            self._granules.move_to_end(key)

    def _leave(self, keys: list[_Key]) -> None:
        with self._changed:
            for key in keys:
                if key in self._granules:  # not after close
                    self._granules[key].num_users -= 1
            self._changed.notify_all()

    # --- release

    def _victims(self) -> dict[_Key, _Granule]:
        """Take the oldest granules that nobody uses off the map. Their bytes stay accounted until they are released."""
        idle = (key for key, granule in self._granules.items() if not granule.num_users)
        chosen = [key for key, _ in zip(idle, range(_BATCH_GRANULES), strict=False)]
        self._num_leaving += len(chosen)
        return {key: self._granules.pop(key) for key in chosen}

    def _release(self, victims: dict[_Key, _Granule]) -> None:
        """Write back and drop; no lock is held meanwhile. Whoever touches a victim now accounts it anew."""
        stayed: list[_Key] = []
        try:
            _finish_ahead(victims)
            for file, first, last in _runs(victims):
                is_dirty = any(victims[file, index].is_dirty for index in range(first, last + 1))
                stayed += [(file, index) for index in _drop(file, first, last, is_dirty)]
        finally:
            with self._changed:
                if not self._closed:
                    self._num_leaving -= len(victims)
                    for key in stayed:
                        self._take_back(key, victims[key])
                self._changed.notify_all()

    def _take_back(self, key: _Key, granule: _Granule) -> None:
        """What the kernel did not drop is still held, and tried again in its turn."""
        if granule.num_tries >= _TRIES:
            logger.warning("nvme tier: the kernel keeps pages of %s; its page cache may exceed page_cache", key[0].path)
        elif key not in self._granules:
            self._granules[key] = _Granule(is_dirty=granule.is_dirty, num_tries=granule.num_tries + 1)

    def _start_thread(self) -> None:
        """It ends when half of the budget is left: an idle store has none."""
        thread = threading.Thread(target=self._run, name="kvtier-page-cache", daemon=True)
        with self._changed:
            if self._thread is not None or self._closed:
                return
            self._thread = thread
        try:
            thread.start()
        except RuntimeError:  # no thread to be had, or the interpreter is ending: callers release it themselves
            self._thread = None

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    victims = self._victims() if self.used_bytes() > self.budget_bytes * _LOW_FRAC else {}
                    if self._closed or not victims:
                        self._thread = None
                        return
                self._release(victims)
        except BaseException:  # whatever it is, it must be seen
            logger.exception("nvme tier: the thread that releases the page cache died; callers release it themselves")
            raise


def _finish_ahead(victims: dict[_Key, _Granule]) -> None:
    """Read what was read ahead: that waits for it. Pages that are being read cannot be dropped, and would stay."""
    for (file, _), granule in victims.items():
        for offset_bytes, num_bytes in granule.ahead:
            with contextlib.suppress(OSError):  # whoever needs the bytes will hear of it
                os.preadv(file.fd, [bytearray(num_bytes)], offset_bytes)


def _runs(victims: dict[_Key, _Granule]) -> Iterator[tuple[OpenFile, int, int]]:
    """Neighbouring granules of a file as one range: file, first and last."""
    by_file: dict[OpenFile, list[int]] = {}
    for file, index in victims:
        by_file.setdefault(file, []).append(index)
    for file, indices in by_file.items():
        indices.sort()
        first = indices[0]
        for index, following in zip(indices, [*indices[1:], -1], strict=True):
            if following != index + 1:
                yield file, first, index
                first = following


def _drop(file: OpenFile, first: int, last: int, is_dirty: bool) -> list[int]:
    """Write granules back and drop them; those that stayed. Pages in somebody's hands, even the kernel's, do."""
    start, end = first * GRANULE_BYTES, (last + 1) * GRANULE_BYTES
    try:
        if is_dirty:
            write_back(file.fd, start, end - start)
    except OSError as error:  # what was not written will not pass its checksum: a lost block, not a wrong one
        logger.warning("nvme tier: writing %s back: %s", file.path, error.strerror)
    try:
        os.posix_fadvise(file.fd, start, end - start, os.POSIX_FADV_DONTNEED)
        pages = resident_pages(file.fd, start, min(end, os.fstat(file.fd).st_size) - start)
    except (OSError, ValueError):  # truncated or gone, and its pages with it
        return []
    step = GRANULE_BYTES // mmap.PAGESIZE
    return [first + at // step for at in range(0, len(pages), step) if pages[at : at + step].any()]
