"""Reads of slices into a ring's buffers: which are under way, on threads, and what becomes of those that hang."""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from kvtier.breaker import Breaker
from kvtier.device import DONE, Event
from kvtier.errors import BlockLostError, CapacityError, StoreError, TransferTimeoutError
from kvtier.layer_cut import Piece
from kvtier.read_lane import ReadLane
from kvtier.types import Slot, Tier
from kvtier.workers import Workers

EndOfStream = Callable[[], tuple[Event, Sequence[StoreError | None]]]
BeginSlices = Callable[[Tier, Sequence[Slot], int, torch.Tensor, Event], EndOfStream]
"""As `TransferEngine.begin_slices`."""


@dataclass(eq=False, slots=True)
class Cell:
    """Neighbouring slices of the ring."""

    first: int
    num_slices: int
    used: Event = DONE
    """Behind the kernels that used it last."""


@dataclass(eq=False, slots=True)
class Read:
    """One layer's slices of a piece, read by one thread."""

    generation: int
    layer: int
    cell: Cell
    piece: Piece
    used: Event
    """Behind the kernels that used the cell last."""
    arrived: Event = DONE
    """Behind the copies that this read has queued."""
    is_overdue: bool = False
    ended_s: float = math.inf
    """When; infinity before."""


_LANE = "kvtier-stream-nvme"


def _nothing() -> None:
    """What ends a read that was not begun: its step is over."""


@dataclass(frozen=True, slots=True)
class ReadThreads:
    """How many threads read slices for a ring."""

    of_memory: int
    of_files: int
    """From the nvme tier, each a part of a group, where they are not read together."""
    reads_together: Callable[[], bool] = lambda: False
    """Whether the nvme tier now reads many slices at a time by one thread."""

    def by_tier(self) -> dict[Tier, int]:
        """Among how many a tier's slices of a group are shared out."""
        return {Tier.CPU: self.of_memory, Tier.NVME: 1 if self.reads_together() else self.of_files}


class SliceReads:
    """Reads that are queued or run, each with its cell.

    One of the nvme tier that passes its deadline is a loss, and its cell is left to it until it ends.

    Attributes:
        io_timeout_s: the deadline, from when a group is waited for.
    """

    def __init__(
        self,
        buffers: torch.Tensor,
        begin_slices: BeginSlices,
        *,
        threads: ReadThreads,
        io_timeout_s: float,
        breaker: Breaker | None,
    ) -> None:
        """Args:
        buffers: what cells count in, `[num_slices, slice_bytes]`.
        breaker: the nvme tier's: it is told of reads that hang.
        """
        self._buffers, self._begin_slices = buffers, begin_slices
        self.io_timeout_s, self._breaker = io_timeout_s, breaker
        # Threads that hang on nvme must not be what reads of the cpu tier wait for.
        self._files = Workers(threads.of_files, "kvtier-stream-nvme")
        self._memory = Workers(threads.of_memory, "kvtier-stream")
        self._reads_together = threads.reads_together
        self._lane = ReadLane(_LANE)
        self._left_lanes: list[ReadLane] = []
        """Those in which a read hangs, or hung."""
        self._rows_of: dict[tuple[int, int], torch.Tensor] = {}
        self._running: dict[Read, None] = {}
        self._changed = threading.Condition()
        self._generation = 0

    @property
    def num_overdue(self) -> int:
        """Reads that have passed their deadline and have not ended."""
        with self._changed:
            return sum(read.is_overdue for read in self._running)

    def cells(self) -> set[Cell]:
        """Those that are being read into, or may be, late."""
        with self._changed:
            return {read.cell for read in self._running}

    def forget_rows(self) -> None:
        """Cells are cut anew: other neighbours are read into from now on. Nothing may be under way."""
        self._rows_of.clear()

    def start(self, layer: int, cell: Cell, piece: Piece, used: Event) -> tuple[Future[None], Read]:
        """Queue a read, which begins behind `used`. Its future raises BlockLostError for slices that cannot be read.

        Raises CapacityError: the process may have no further thread. Nothing was queued.
        """
        read = Read(self._generation, layer, cell, piece, used)
        try:
            if piece.tier is not Tier.NVME:
                return self._memory.submit(self._read, read), read
            if self._reads_together():
                return self._lane.submit(self._begin, read), read
            return self._files.submit(self._read, read), read
        except RuntimeError as error:
            raise CapacityError(
                f"no thread is to be had to read from {piece.tier.label} ({error}): raise the limit on threads "
                "(`ulimit -u`, or pids.max of the container), or end what else runs"
            ) from error

    def late(self, reads: Mapping[Future[None], Read]) -> list[Read]:
        """Wait for these; those that have passed their deadline."""
        late = wait(reads, timeout=self.io_timeout_s).not_done
        if late and all(reads[future].piece.tier is not Tier.NVME for future in late):
            # Memory does not hang: the machine is busy, or the process was stopped meanwhile.
            late = wait(reads, timeout=self.io_timeout_s).not_done
        return [reads[future] for future in late]

    def pass_deadline(self, late: Sequence[Read]) -> None:
        """Raise what late reads are: losses, with all that hangs beside them, where the nvme tier is what is late."""
        took = f"reading slices took longer than io_timeout_s ({self.io_timeout_s:g} s)"
        late = [read for read in late if read.piece.tier is Tier.NVME]
        if not late:
            raise TransferTimeoutError(took)
        hung = self._give_up()
        source = late[0].piece.sources[0]
        raise BlockLostError(
            f"block {source.index} (layer {late[0].layer}) cannot be read from nvme: {took}",
            tuple(dict.fromkeys(source.block for read in (*late, *hung) for source in read.piece.sources)),
        )

    def drop(self) -> None:
        """Drop reads that have not begun and wait for those that run, but for what `num_overdue` counts.

        Raises:
            TransferTimeoutError: a read of the cpu tier hangs; it is waited for again at the next call.
        """
        with self._changed:
            self._generation += 1  # what has not begun never will
            in_time = self._changed.wait_for(self._all_are_overdue, timeout=self.io_timeout_s)
        if not in_time:
            self._give_up()
            with self._changed:
                num_others = sum(not read.is_overdue for read in self._running)
            if num_others:
                raise TransferTimeoutError(
                    f"{num_others} reads hang for more than io_timeout_s ({self.io_timeout_s:g} s)"
                )

    def close(self) -> bool:
        """Stop the threads, once `drop` was called; whether all reads have ended. Idempotent."""
        with self._changed:
            have_ended = not self._running
        for workers in (self._files, self._memory):
            workers.close(wait=have_ended)
        for lane in (self._lane, *self._left_lanes):
            lane.close(wait=have_ended)
        return have_ended

    def _read(self, read: Read) -> None:
        self._begin(read)()

    def _begin(self, read: Read) -> Callable[[], None]:
        """Begin a read, and return what ends it, both for its thread."""
        # Counted by the reader itself, not by whoever holds its future: an exception may come between submitting a read
        # and noting its future, and a late read must never write into a buffer that another step uses.
        with self._changed:
            if read.generation != self._generation:
                return _nothing
            self._running[read] = None
        piece, first = read.piece, read.cell.first + read.piece.first
        try:
            out = self._rows(first, len(piece.sources))
            end = self._begin_slices(piece.tier, piece.slots, read.layer, out, read.used)
        except BaseException:  # whatever it is: a read that counts as running would be waited for
            self._has_ended(read)
            raise
        return functools.partial(self._end, read, end)

    def _rows(self, first: int, count: int) -> torch.Tensor:
        """Neighbouring buffers: the same views again and again, for a view takes as long as the rest of a read."""
        found = self._rows_of.get((first, count))
        if found is None:
            found = self._rows_of[first, count] = self._buffers[first : first + count]
        return found

    def _end(self, read: Read, end: EndOfStream) -> None:
        try:
            self._finish(read, end)
        finally:
            self._has_ended(read)

    def _has_ended(self, read: Read) -> None:
        read.ended_s = time.monotonic()
        with self._changed:
            del self._running[read]
            if read.is_overdue and self._breaker is not None:
                self._breaker.ended(read)
            self._changed.notify_all()

    def _finish(self, read: Read, end: EndOfStream) -> None:
        piece = read.piece
        read.arrived, failures = end()
        lost = [(source, error) for source, error in zip(piece.sources, failures, strict=True) if error is not None]
        if lost:
            source, cause = lost[0]
            raise BlockLostError(
                f"block {source.index} (layer {read.layer}) cannot be read from {piece.tier.label}: {cause}",
                tuple(each.block for each, _ in lost),
            ) from cause

    def _give_up(self) -> list[Read]:
        """Leave reads of the nvme tier that run to themselves, each with its cell. Returns them."""
        with self._changed:
            hung = [read for read in self._running if read.piece.tier is Tier.NVME]
            for read in hung:
                read.is_overdue = True
                if self._breaker is not None:
                    self._breaker.overdue(read, f"a read took longer than io_timeout_s ({self.io_timeout_s:g} s)")
        if self._breaker is not None:
            self._breaker.look()
        if hung:  # whatever comes next does not queue up behind them
            self._lane.close(wait=False)
            self._left_lanes = [lane for lane in (*self._left_lanes, self._lane) if lane.is_running]
            self._lane = ReadLane(_LANE)
        return hung

    def _all_are_overdue(self) -> bool:
        return all(read.is_overdue for read in self._running)
