"""Reads of slices into a ring's buffers: which are under way, on threads, and what becomes of those that hang."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from kvtier.breaker import Breaker
from kvtier.device import DONE, Event
from kvtier.errors import BlockLostError, StoreError, TransferTimeoutError
from kvtier.layer_cut import Piece
from kvtier.types import Slot, Tier
from kvtier.workers import Workers

ReadSlices = Callable[[Tier, Sequence[Slot], int, torch.Tensor, Event], tuple[Event, Sequence[StoreError | None]]]
"""As `TransferEngine.read_slices`."""


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


class SliceReads:
    """Reads that are queued or run, each with its cell.

    One of the nvme tier that passes its deadline is a loss, and its cell is left to it until it ends.

    Attributes:
        io_timeout_s: the deadline, from when a group is waited for.
    """

    def __init__(
        self,
        buffers: torch.Tensor,
        read_slices: ReadSlices,
        *,
        num_threads: int,
        io_timeout_s: float,
        breaker: Breaker | None,
    ) -> None:
        """Args:
        buffers: what cells count in, `[num_slices, slice_bytes]`.
        num_threads: for the nvme tier, and as many for memory.
        breaker: the nvme tier's: it is told of reads that hang.
        """
        self._buffers, self._read_slices = buffers, read_slices
        self.io_timeout_s, self._breaker = io_timeout_s, breaker
        # Threads that hang on nvme must not be what reads of the cpu tier wait for.
        self._files = Workers(num_threads, "kvtier-stream-nvme")
        self._memory = Workers(num_threads, "kvtier-stream")
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

    def start(self, layer: int, cell: Cell, piece: Piece, used: Event) -> tuple[Future[None], Read]:
        """Queue a read, which begins behind `used`. Its future raises BlockLostError for slices that cannot be read."""
        workers = self._files if piece.tier is Tier.NVME else self._memory
        read = Read(self._generation, layer, cell, piece, used)
        return workers.submit(self._guarded_read, read), read

    def late(self, reads: Mapping[Future[None], Read]) -> list[Read]:
        """Wait for these; those that have passed their deadline."""
        if all([future.done() for future in reads]):  # most often: they were read ahead
            return []
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
        return have_ended

    def _guarded_read(self, read: Read) -> None:
        # Counted by the reader itself, not by whoever holds its future: an exception may come between submitting a read
        # and noting its future, and a late read must never write into a buffer that another step uses.
        with self._changed:
            if read.generation != self._generation:
                return
            self._running[read] = None
        try:
            self._read(read)
        finally:
            read.ended_s = time.monotonic()
            with self._changed:
                del self._running[read]
                if read.is_overdue and self._breaker is not None:
                    self._breaker.ended(read)
                self._changed.notify_all()

    def _read(self, read: Read) -> None:
        piece, first = read.piece, read.cell.first + read.piece.first
        out = self._buffers[first : first + len(piece.sources)]
        read.arrived, failures = self._read_slices(piece.tier, piece.slots, read.layer, out, read.used)
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
        return hung

    def _all_are_overdue(self) -> bool:
        return all(read.is_overdue for read in self._running)
