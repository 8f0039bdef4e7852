"""Every slot of several segments, read by several threads, in bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from kvtier.stores.folder_view import FolderView
from kvtier.stores.slot_check import SlotCheck, SlotReader, SlotState, slots_with_data
from kvtier.stores.slot_format import Geometry

_NUM_THREADS = 8  # what a disk needs to be kept busy; hashing releases the GIL
_BATCH_BYTES = 16 << 20  # of neighbouring slots, to one thread
_BATCH_SLOTS = 256
_PROGRESS_EVERY_S = 0.05

Progress = Callable[[int, int], None]
"""Called with the bytes of slots that are done, and of all, now and then. From any thread, one at a time."""


@dataclass(frozen=True, slots=True)
class ScanSegment:
    """A segment whose superblock verifies, with the slots that are whole."""

    name: str
    geometry: Geometry
    num_slots: int


Visit = Callable[[ScanSegment, int, SlotCheck], None]
"""Called with a slot as it was found. From any thread, several at a time."""


@dataclass(slots=True)
class Scan:
    """One pass over the slots.

    Attributes:
        num_unwritten: slots in holes of the files: free, and neither read nor visited.
        read_bytes: what was read.
    """

    view: FolderView
    segments: list[ScanSegment]
    slices: bool
    """Whether slices are read too, or headers alone."""
    visit: Visit
    progress: Progress
    num_unwritten: int = 0
    read_bytes: int = 0
    _done_bytes: int = 0
    _all_bytes: int = 0
    _told_s: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taking: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)
    _idle: threading.Condition = field(default_factory=threading.Condition)
    _num_working: int = 0

    def run(self) -> None:
        """Check them all. Raises what `visit` raises, or KeyboardInterrupt; no thread works on then."""
        self._all_bytes = sum(segment.num_slots * segment.geometry.slot_bytes for segment in self.segments)
        batches = self._batches()
        with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvtier-fsck") as pool:
            try:
                work = [pool.submit(self._work, batches) for _ in range(_NUM_THREADS)]
                for future in wait(work, return_when=FIRST_EXCEPTION).done:
                    future.result()
            finally:
                self._end()

    def _end(self) -> None:
        """After an error or Ctrl-C the threads end after the slot that they are at; none may outlive the lock.

        The pool's own join does not do: Ctrl-C may reach it, or come before it knows of a thread that has started.
        """
        try:
            self._stop.set()
            with self._idle:
                self._idle.wait_for(lambda: self._num_working == 0)
        except KeyboardInterrupt:
            self._end()
            raise

    def _batches(self) -> Iterator[tuple[ScanSegment, list[int]]]:
        """Neighbouring slots that may hold something."""
        for segment in self.segments:
            size = max(1, min(_BATCH_SLOTS, _BATCH_BYTES // segment.geometry.slot_bytes))
            num_written = 0
            for slots in self._written(segment, size):
                num_written += len(slots)
                yield segment, slots
            self.num_unwritten += segment.num_slots - num_written
            self._count_done((segment.num_slots - num_written) * segment.geometry.slot_bytes)

    def _written(self, segment: ScanSegment, size: int) -> Iterator[list[int]]:
        try:
            fd = self.view.open_file(segment.name)
        except OSError:  # gone, or no descriptor left: for each slot the threads find out which
            slots = iter(range(segment.num_slots))
            yield from iter(lambda: list(itertools.islice(slots, size)), [])
            return
        try:
            written = slots_with_data(fd, segment.geometry, segment.num_slots)
            yield from iter(lambda: list(itertools.islice(written, size)), [])
        finally:
            os.close(fd)

    def _work(self, batches: Iterator[tuple[ScanSegment, list[int]]]) -> None:
        with self._idle:
            if self._stop.is_set():
                return
            self._num_working += 1
        try:
            reader = SlotReader()
            while not self._stop.is_set():
                with self._taking:
                    batch = next(batches, None)
                if batch is None:
                    break
                self._check(reader, *batch)
            with self._lock:
                self.read_bytes += reader.read_bytes
        finally:
            with self._idle:
                self._num_working -= 1
                self._idle.notify_all()

    def _check(self, reader: SlotReader, segment: ScanSegment, slots: list[int]) -> None:
        with contextlib.ExitStack() as stack:
            failed: SlotCheck | None = None
            try:
                fd = self.view.open_file(segment.name, direct=True)
                stack.callback(os.close, fd)
            except FileNotFoundError:  # given up by the folder's owner since it was listed
                failed = SlotCheck(SlotState.CHANGING)
            except OSError as error:
                failed = SlotCheck(SlotState.UNREADABLE, reason=error.strerror or "")
            for slot in slots:
                if self._stop.is_set():
                    return
                self.visit(segment, slot, failed or reader.check(fd, segment.geometry, slot, slices=self.slices))
                self._count_done(segment.geometry.slot_bytes)

    def _count_done(self, num_bytes: int) -> None:
        with self._lock:
            self._done_bytes += num_bytes
            if self._done_bytes == self._all_bytes or time.monotonic() - self._told_s >= _PROGRESS_EVERY_S:
                self._told_s = time.monotonic()
                self.progress(self._done_bytes, self._all_bytes)
