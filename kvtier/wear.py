"""What is written to a medium that wears, and the limit to it. Knows no files, and no time but its clock's."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvtier.log import logger
from kvtier.rate import Rate


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes that were written `age_s` ago."""

    age_s: float
    num_bytes: int


class Ledger(Protocol):
    """Keeps what was written for the next process."""

    def load(self) -> list[Written]:
        """What earlier processes wrote, and may have. Raises ValueError: nobody can tell. OSError."""
        ...

    def save(self, written: Sequence[Written], promised_bytes: int) -> None:
        """Replace what is kept, as a whole. Raises OSError; the old is kept then.

        Args:
            promised_bytes: more, that may be written before the next save: an earlier process is dead at a `load`, so
                they count as written then.
        """
        ...


class WriteMeter:
    """Counts bytes when they are handed to the medium, and says whether a move may write more.

    Every write belongs to a move that was let in by `allows` and begun, is a page or two of its bookkeeping, or was let
    in by `spend`. With a ledger, what a move may write is in it before the move begins: a process that is killed has
    never written more than the next one counts. In any `limit.period_s` no more than the limit is written, so what is
    counted is a little more: a period and the part of a bucket before it.

    `wrote` may be called on any thread, the rest on one at a time.
    """

    NUM_BUCKETS = 24
    EARLY_FRAC = 0.5
    """Of the limit: beyond it nothing is written that is not needed yet."""
    SPENT_FRAC = 1 / 64
    """Of the limit: the most that is spent at a time on anything but blocks."""
    NUM_PROMISES = 256
    """A promise is this part of the limit: a ledger is rarely written, and little is lost with a process that dies."""
    RETRY_S = 5.0

    def __init__(
        self,
        limit: Rate | None = None,
        move_bytes: int = 0,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        limit: None: all is counted, and nothing refused. What it reports is of a day then.
        move_bytes: the most that one move writes.
        ledger: for what outlives the process.

        Raises OSError, the ledger's.
        """
        self.limit = limit
        self.written_bytes = 0
        """Since this process opened the medium."""
        self._move_bytes, self._ledger, self._clock = move_bytes, ledger, clock
        self._period_s = 86400 if limit is None else limit.period_s
        self._bucket_s = self._period_s / self.NUM_BUCKETS
        self._buckets: dict[int, int] = {}
        self._lock = threading.Lock()
        self._num_begun = 0
        self._promised_up_to = 0  # of written_bytes
        self._retry_at: float | None = None
        self._was_used_up = False
        if ledger is not None:
            self._load(ledger)

    def _load(self, ledger: Ledger) -> None:
        now_s = self._clock()
        try:
            written = ledger.load()
        except ValueError as error:
            logger.warning("%s: going on as if tiers.nvme.max_writes, %s, were used up", error, self.limit)
            written = [Written(0.0, 0 if self.limit is None else self.limit.num_bytes)]
        for each in written:
            self._add(now_s - each.age_s, each.num_bytes)

    def _add(self, at_s: float, num_bytes: int) -> None:
        number = int(at_s // self._bucket_s)
        self._buckets[number] = self._buckets.get(number, 0) + num_bytes

    def wrote(self, num_bytes: int) -> None:
        """Bytes are handed to the medium now, whether or not that will have worked."""
        now_s = self._clock()
        with self._lock:
            self.written_bytes += num_bytes
            self._add(now_s, num_bytes)

    def in_period_bytes(self) -> int:
        """Written in the last period, by earlier processes too; a little more, as buckets count whole."""
        first = (self._clock() - self._period_s) // self._bucket_s
        with self._lock:
            for number in [number for number in self._buckets if number < first]:
                del self._buckets[number]
            return sum(self._buckets.values())

    @property
    def is_used_up(self) -> bool:
        """Whether the limit has no room for one move, even when those under way write nothing more."""
        return self.limit is not None and self.in_period_bytes() + self._move_bytes > self.limit.num_bytes

    def _fits(self, limit_bytes: float) -> bool:
        """Whether one more may begin, if those under way write all that they may."""
        return self.in_period_bytes() + (self._num_begun + 1) * self._move_bytes <= limit_bytes

    def allows(self, *, early: bool = False) -> bool:
        """Whether a move may begin now. O(buckets), and the ledger's cost once a promise.

        Args:
            early: it is not needed yet.
        """
        if self.limit is None:
            return True
        if early:
            return self._fits(self.EARLY_FRAC * self.limit.num_bytes) and self._promise()
        used_up = self.is_used_up
        if used_up and not self._was_used_up:
            logger.warning(
                "tiers.nvme.max_writes, %s, is used up: the nvme tier takes no blocks until older writes are out of "
                "that time; going on with the other tiers",
                self.limit,
            )
        elif self._was_used_up and not used_up:
            logger.info("tiers.nvme.max_writes has room again: the nvme tier takes blocks")
        self._was_used_up = used_up
        return self._fits(self.limit.num_bytes) and self._promise()

    def spend(self, num_bytes: int) -> bool:
        """Count bytes that no move writes, if they are a small part of the limit; whether they may be written."""
        if self.limit is not None:
            room_bytes = self.EARLY_FRAC * self.limit.num_bytes - self.in_period_bytes()
            if num_bytes > min(self.SPENT_FRAC * self.limit.num_bytes, room_bytes):
                return False
        self.wrote(num_bytes)
        try:
            if self._ledger is not None:
                self._save(0)
        except OSError as error:
            logger.warning("what is written to the nvme tier cannot be counted (%s): nothing is measured", error)
            return False
        return True

    def begin(self) -> None:
        """A move that was allowed begins."""
        self._num_begun += 1

    def end(self) -> None:
        """A move has ended, however it did: it writes nothing more."""
        self._num_begun -= 1

    def close(self) -> None:
        """Nothing is written any more: keep the exact count, if that can be. Idempotent."""
        if self._ledger is not None:
            try:
                self._save(0)
            except OSError as error:
                logger.warning("what was written to the nvme tier could not be kept: %s", error)

    # -- the ledger ---------------------------------------------------------------------------------------------------

    def _promise(self) -> bool:
        """Whether the ledger covers what those under way and one more may write; makes it so."""
        more = (self._num_begun + 1) * self._move_bytes
        with self._lock:
            covered = self.written_bytes + more <= self._promised_up_to
        if self._ledger is None or covered or self.limit is None:
            return True
        if self._retry_at is not None and self._clock() < self._retry_at:
            return False
        try:
            self._save(more + self.limit.num_bytes // self.NUM_PROMISES)
        except OSError as error:
            self._retry_at = self._clock() + self.RETRY_S
            logger.warning("the nvme tier takes no blocks for now: their bytes cannot be counted (%s)", error)
            return False
        self._retry_at = None
        return True

    def _save(self, promised_bytes: int) -> None:
        assert self._ledger is not None  # asked by the callers
        self.in_period_bytes()  # forgets what is older
        now_s = self._clock()
        with self._lock:
            up_to = self.written_bytes + promised_bytes
            # A bucket is as old as its end: what the next process counts is never older than it is.
            written = [Written(max(0.0, now_s - (n + 1) * self._bucket_s), b) for n, b in sorted(self._buckets.items())]
        self._ledger.save(written, promised_bytes)
        self._promised_up_to = up_to
