"""Calls of the nvme store with a deadline: a disk that hangs must not hold whoever has the turn."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from concurrent.futures import Future, TimeoutError, wait
from typing import Any, Protocol, TypeVar

from kvtier.breaker import Breaker
from kvtier.errors import StoreError, TransferTimeoutError
from kvtier.log import logger
from kvtier.prefix_cache import Files
from kvtier.session_record import SessionRecord
from kvtier.types import Slot, SlotLabel
from kvtier.workers import Workers

_T = TypeVar("_T")


class SessionFiles(Protocol):
    """Records of sessions."""

    def save(self, record: SessionRecord) -> None:
        """Put it in the place of an older one. Raises StoreError."""
        ...

    def delete(self, key: bytes) -> None:
        """Remove it. Raises StoreError."""
        ...


class KeptFiles(Files, Protocol):
    """What a store whose files outlive the process can be asked."""

    @property
    def sessions(self) -> SessionFiles:
        """Records of sessions."""
        ...

    def find_all(self, labels: Sequence[SlotLabel]) -> list[Slot | None]:
        """As `find`, of many."""
        ...

    def slots_of(self, namespace: bytes) -> Sequence[Slot]:
        """Slots with a label of a namespace."""
        ...

    def erase(self, slot: Slot) -> None:
        """Empty a slot. Raises StoreError."""
        ...

    def forget(self, slot: Slot) -> None:
        """Nobody finds it again. Raises StoreError."""
        ...

    def put_label(self, slot: Slot, label: SlotLabel) -> None:
        """It is found from now on. Raises StoreError."""
        ...


class TimedFiles:
    """Does what `files` does, on a thread of its own. What passes the deadline means that the tier hangs.

    Until it has ended nothing more is begun: look-ups are misses, and all else is refused at once. A save that is late
    may still come to its place: it is the state that it was meant to be.

    Cost: some 50 us a call beside the read or write. One thread at a time, with the turn.
    """

    def __init__(self, files: KeptFiles, breaker: Breaker, timeout_s: float) -> None:
        """`breaker` is the nvme tier's."""
        self._files, self._breaker, self._timeout_s = files, breaker, timeout_s
        self._workers = Workers(1, "kvtier-find")
        self._late: Future[Any] | None = None

    @property
    def num_found(self) -> int:
        """As the store's."""
        return self._files.num_found

    def num_in(self, namespace: bytes) -> int:
        """As the store's."""
        return self._files.num_in(namespace)

    def slots_of(self, namespace: bytes) -> Sequence[Slot]:
        """As the store's."""
        return self._files.slots_of(namespace)

    def find(self, label: SlotLabel) -> Slot | None:
        """The slot that holds this block whole; None, too, where that cannot be told in time."""
        try:
            return self._do("a look-up", lambda: self._files.find(label))
        except TransferTimeoutError:
            return None

    def find_all(self, labels: Sequence[SlotLabel]) -> list[Slot | None]:
        """As `find`, of many."""
        try:
            return self._do("a look-up", lambda: self._files.find_all(labels))
        except TransferTimeoutError:
            return [None] * len(labels)

    def save(self, record: SessionRecord) -> None:
        """As `SessionFiles.save`. Raises StoreError, also when it is late."""
        self._change("saving a session", lambda: self._files.sessions.save(record))

    def delete(self, key: bytes) -> None:
        """As `SessionFiles.delete`. Raises StoreError, also when it is late."""
        self._change("deleting a session", lambda: self._files.sessions.delete(key))

    def forget(self, slot: Slot) -> None:
        """As the store's. Raises StoreError, also when it is late."""
        self._change("forgetting a block", lambda: self._files.forget(slot))

    def put_label(self, slot: Slot, label: SlotLabel) -> None:
        """As the store's. Raises StoreError, also when it is late: it may still be found then."""
        self._change("labelling a block", lambda: self._files.put_label(slot, label))

    def try_forget(self, slot: Slot) -> None:
        """As `forget`, as far as the disk does it."""
        try:
            self.forget(slot)
        except StoreError as error:  # a later process may find it, and sees by its checksums that it is damaged
            logger.info("%s", error)

    def try_label(self, slot: Slot, label: SlotLabel) -> bool:
        """As `put_label`; whether the disk did it."""
        try:
            self.put_label(slot, label)
        except StoreError as error:
            logger.info("%s", error)
            return False
        return True

    def erase(self, slot: Slot) -> None:
        """As the store's. Raises StoreError; TransferTimeoutError: it is late, and the slot must not be used."""
        self._do("erasing a block", lambda: self._files.erase(slot))

    def _change(self, what: str, act: Callable[[], None]) -> None:
        try:
            self._do(what, act)
        except TransferTimeoutError as error:
            raise StoreError(errno.ETIMEDOUT, str(error)) from error

    def _do(self, what: str, act: Callable[[], _T]) -> _T:
        if self._late is not None and not self._late.done():
            raise TransferTimeoutError(f"{what}: the nvme tier hangs")
        running = self._workers.submit(act)
        try:
            return running.result(self._timeout_s)
        except TimeoutError:
            if running.done():
                return running.result(0)  # meanwhile, or it is the store's own
            self._late = running
            why = f"{what} took longer than io_timeout_s ({self._timeout_s:g} s)"
            self._breaker.overdue(running, why)
            running.add_done_callback(self._breaker.ended)
            self._breaker.look()  # no plan is open while this is done
            raise TransferTimeoutError(f"{why}: the nvme tier hangs") from None

    def close(self, timeout_s: float) -> bool:
        """Do nothing any more; whether the last call has ended. Waits so long for it at most."""
        has_ended = self._late is None or not wait([self._late], max(0.0, timeout_s)).not_done
        self._workers.close(wait=has_ended)
        return has_ended
