"""Look-ups in files with a deadline: a disk that hangs must not hold whoever has the turn."""

from __future__ import annotations

from concurrent.futures import Future, TimeoutError, wait

from kvtier.breaker import Breaker
from kvtier.prefix_cache import Files
from kvtier.types import Slot, SlotLabel
from kvtier.workers import Workers


class TimedFiles:
    """Finds what `files` does, on a thread of its own. One that passes the deadline is a miss, and the tier hangs.

    Cost: some 50 us a look-up beside the read of a header. One thread at a time, with the turn.
    """

    def __init__(self, files: Files, breaker: Breaker, timeout_s: float) -> None:
        """`breaker` is the nvme tier's."""
        self._files, self._breaker, self._timeout_s = files, breaker, timeout_s
        self._workers = Workers(1, "kvtier-find")
        self._late: Future[Slot | None] | None = None

    @property
    def num_found(self) -> int:
        """As the store's."""
        return self._files.num_found

    def num_in(self, namespace: bytes) -> int:
        """As the store's."""
        return self._files.num_in(namespace)

    def find(self, label: SlotLabel) -> Slot | None:
        """The slot that holds this block whole; None, too, where that cannot be told in time."""
        if self._late is not None and not self._late.done():
            return None
        found = self._workers.submit(self._files.find, label)
        try:
            return found.result(self._timeout_s)
        except TimeoutError:
            if found.done():  # meanwhile, or it is the store's own
                return None
            self._late = found
            self._breaker.overdue(found, f"a look-up took longer than io_timeout_s ({self._timeout_s:g} s)")
            found.add_done_callback(self._breaker.ended)
            self._breaker.look()  # no plan is open while prompts are looked up
            return None

    def close(self, timeout_s: float) -> bool:
        """Look nothing up any more; whether the last look-up has ended. Waits so long for it at most."""
        has_ended = self._late is None or not wait([self._late], max(0.0, timeout_s)).not_done
        self._workers.close(wait=has_ended)
        return has_ended
