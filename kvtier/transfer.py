"""How bytes move between stores, and on which thread or CUDA stream. Knows no policies and no residency."""

from __future__ import annotations

import functools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from kvtier.device import DONE, Device, Event
from kvtier.edge_meter import EdgeMeter, EdgeMeters, Moment
from kvtier.errors import ClosedError, NoSpaceError, StoreError
from kvtier.load_or_recompute import Meter
from kvtier.stores.base import EndOfSlices, Store
from kvtier.stores.slab import SlabStore
from kvtier.types import Move, MoveResult, MoveStatus, Slot, Tier
from kvtier.workers import Workers

Streamed = tuple[Event, list[StoreError | None]]
EndOfStream = Callable[[], Streamed]
"""As `TransferEngine.begin_slices` returns it."""


class TransferEngine:
    """Copies whole blocks between stores on threads; every started move is reported exactly once.

    Moves to and from nvme have threads of their own: those that hang there must not stop the moves within memory.

    Threads suffice because the copies, `pwrite` and checksums release the GIL. On a device with queues a move waits for
    the kernels queued when it was started (the producer of the data, and the last reader of the destination), and is
    reported when its copy is over, not when it is queued.
    """

    def __init__(self, stores: Mapping[Tier, Store], num_threads: int, device: Device) -> None:
        self._stores = dict(stores)
        self._device = device
        gpu = stores.get(Tier.GPU)
        self._gpu = gpu if device.is_async and isinstance(gpu, SlabStore) else None
        """The gpu tier, where its bytes are reached by copy commands alone."""
        self._files = Workers(num_threads, "kvtier-move-nvme")
        self._memory = Workers(num_threads, "kvtier-move")
        self._queued: dict[int, tuple[Move, Future[None]]] = {}
        """Moves that have not begun, as far as is known."""
        self._results: queue.SimpleQueue[MoveResult] = queue.SimpleQueue()
        self._in_flight = 0
        self._running: set[int] = set()
        self._closed = False
        self._arriving: deque[tuple[Event, Callable[[], None]]] = deque()
        """Slices on their way to a device with queues, and what is to be told when they are there."""
        self._noting = threading.Lock()
        self.edges = EdgeMeters()
        """Bytes of KV along each edge, from a move's or a read's begin on its thread to its end."""
        self.nvme_reads = Meter()
        """Bytes read from the nvme tier, blocks and slices."""

    def interpose(self, tier: Tier, wrap: Callable[[Store], Store]) -> None:
        """Read and write a tier through `wrap(store)` from here on: for faults injected on purpose, and for probes.

        The engine alone sees the wrapper: whoever made the store still asks it, and closes it. On a device with queues
        the gpu tier's bytes go past it.

        Raises:
            KeyError: there is no such tier. ClosedError: after `close`.
        """
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        self._stores[tier] = wrap(self._stores[tier])

    def start(self, moves: Sequence[Move]) -> None:
        """Queue moves; returns at once."""
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        ready = self._device.record()
        for move in moves:
            self._in_flight += 1
            workers = self._files if Tier.NVME in (move.source, move.dest) else self._memory
            try:
                begun = workers.submit(self._run, move, ready)
            except RuntimeError as error:  # no thread to be had
                self._results.put(MoveResult(move, MoveStatus.FAILED, str(error)))
                continue
            if workers is self._files:
                self._queued[move.move_id] = move, begun
        for move_id in [move_id for move_id, (_, begun) in self._queued.items() if begun.done()]:
            del self._queued[move_id]

    def finished(self) -> list[MoveResult]:
        """Results since the last call, without waiting."""
        results: list[MoveResult] = []
        self._note_arrivals()
        while len(results) < self._in_flight:
            try:
                results.append(self._results.get_nowait())
            except queue.Empty:
                break
        self._in_flight -= len(results)
        return results

    def wait(self, timeout_s: float) -> list[MoveResult]:
        """At least one result, or none after `timeout_s`."""
        if self._in_flight == 0:
            return []
        try:
            first = self._results.get(timeout=timeout_s)
        except queue.Empty:
            return []
        self._in_flight -= 1
        return [first, *self.finished()]

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        """Take back those of these moves that have not begun; their results, all WITHDRAWN. Without waiting."""
        queued = [self._queued.pop(move_id) for move_id in move_ids if move_id in self._queued]
        results = [MoveResult(move, MoveStatus.WITHDRAWN) for move, begun in queued if begun.cancel()]
        self._in_flight -= len(results)
        return results

    def in_flight(self) -> int:
        """Started moves whose result has not been handed out."""
        return self._in_flight

    def close(self, timeout_s: float) -> bool:
        """Stop taking moves and drop those not begun; whether those that run ended within `timeout_s`. Idempotent."""
        self._closed = True
        pools = (self._files, self._memory)
        for workers in pools:
            workers.close(wait=False)
        deadline_s = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline_s:
            time.sleep(0.001)
        if self._running:
            return False
        for workers in pools:
            workers.close(wait=True)  # idle threads end at once; nobody should find one after close
        return True

    # -- threads ----------------------------------------------------------------------------------------------------

    def _run(self, move: Move, ready: Event) -> None:
        self._running.add(move.move_id)
        meter, num_bytes = self.edges[move.source, move.dest], 0
        began = meter.begin()
        try:
            self._copy(move, ready)
            result = MoveResult(move, MoveStatus.DONE)
            num_bytes = self._stores[move.source].shape.block_bytes
        except NoSpaceError as error:
            result = MoveResult(move, MoveStatus.NO_SPACE, str(error), error.available_slots, error.retires_slot)
        except BaseException as error:  # whatever it is, the move must be reported: an unreported one is a hang
            result = MoveResult(move, MoveStatus.FAILED, f"{type(error).__name__}: {error}")
        meter.end(began, num_bytes)
        self._running.discard(move.move_id)
        self._results.put(result)

    @contextmanager
    def _metered(self, num_bytes: int) -> Iterator[None]:
        done_bytes = 0
        self.nvme_reads.begin()
        try:
            yield
            done_bytes = num_bytes
        finally:
            self.nvme_reads.end(done_bytes)

    def _copy(self, move: Move, ready: Event) -> None:
        source, dest = self._stores[move.source], self._stores[move.dest]
        if self._gpu is not None and Tier.GPU in (move.source, move.dest):
            self._copy_by_device(self._gpu, move, source, dest, ready)
            return
        if move.dest is Tier.CPU:
            ready.synchronize()  # slices may still be streamed from what the slot held before
        if isinstance(source, SlabStore):
            dest.write(move.dest_slot, source.block(move.source_slot), move.label)
        elif isinstance(dest, SlabStore):
            with self._metered(source.shape.block_bytes):
                source.read(move.source_slot, dest.block(move.dest_slot))
        else:
            staging = torch.empty(source.shape.block_bytes, dtype=torch.uint8)
            with self._metered(source.shape.block_bytes):
                source.read(move.source_slot, staging)
            dest.write(move.dest_slot, staging, move.label)

    def _copy_by_device(self, gpu: SlabStore, move: Move, source: Store, dest: Store, ready: Event) -> None:
        """To or from the gpu tier of a device with queues; it is over when this returns."""
        device, staging = self._device, self._device.staging()
        if move.dest is not Tier.GPU:
            block = gpu.block(move.source_slot)
            if isinstance(dest, SlabStore):
                device.copy_down([(dest.block(move.dest_slot), block)], ready).synchronize()
                return
            with staging.buffer(gpu.shape.block_bytes) as buffer:
                buffer.until = device.copy_down([(buffer.host, block)], ready)
                buffer.until.synchronize()
                dest.write(move.dest_slot, buffer.host, move.label)
            return
        block = gpu.block(move.dest_slot)
        slab = gpu if move.source is Tier.GPU else source
        if isinstance(slab, SlabStore):
            device.copy_up([(block, slab.block(move.source_slot))], ready).synchronize()
            return
        with staging.buffer(gpu.shape.block_bytes) as buffer:
            with self._metered(gpu.shape.block_bytes):
                source.read(move.source_slot, buffer.host)
            buffer.until = device.copy_up([(block, buffer.host)], ready)
            buffer.until.synchronize()

    def begin_slices(
        self, tier: Tier, slots: Sequence[Slot], layer: int, out: torch.Tensor, after: Event
    ) -> EndOfStream:
        """Begin to stream one slice of each slot to the compute device, on the calling thread, behind `after`.

        Args:
            out: `[len(slots), slice_bytes]` uint8 on the compute device, a row for each.

        Returns:
            What ends it, on the same thread. That returns the event behind which they are there, on a device with
            queues (until then the slots must keep them), and what kept each from being read; None: it was. The row of
            one that was not holds garbage.

        Raises:
            What is nobody's fault but the caller's: nothing was begun.
        """
        store, meter = self._stores[tier], self.edges[tier, Tier.GPU]
        began = meter.begin()
        end: EndOfStream
        try:
            if self._gpu is not None:
                end = functools.partial(self._stream_by_device, store, slots, layer, out, after)
            else:
                end = self._begin_on_host(tier, slots, layer, out)
        except BaseException:  # whatever it is: the meter would run on for ever
            meter.end(began, 0)
            raise
        return functools.partial(self._end_slices, meter, began, store.shape.slice_bytes, end)

    def _end_slices(self, meter: EdgeMeter, began: Moment, slice_bytes: int, end: EndOfStream) -> Streamed:
        num_bytes, arrived = 0, DONE
        try:
            arrived, failures = end()
            num_bytes = failures.count(None) * slice_bytes
            return arrived, failures
        finally:
            if arrived is DONE:
                meter.end(began, num_bytes)
            else:
                self._arriving.append((arrived, functools.partial(meter.end, began, num_bytes)))
                self._note_arrivals()

    def _note_arrivals(self) -> None:
        """A copy on a device with queues counts as under way until it is seen to have arrived: never as too fast."""
        with self._noting:
            while self._arriving and self._arriving[0][0].is_done():
                self._arriving.popleft()[1]()

    def _begin_on_host(self, tier: Tier, slots: Sequence[Slot], layer: int, out: torch.Tensor) -> EndOfStream:
        store = self._stores[tier]
        if tier is not Tier.NVME:
            end = store.begin_slices(slots, layer, out)
            return lambda: (DONE, end())
        self.nvme_reads.begin()
        try:
            end = store.begin_slices(slots, layer, out)
        except BaseException:  # whatever it is: the meter would run on for ever
            self.nvme_reads.end(0)
            raise
        return functools.partial(self._end_from_files, end, store.shape.slice_bytes)

    def _end_from_files(self, end: EndOfSlices, slice_bytes: int) -> Streamed:
        num_bytes = 0
        try:
            failures = end()
            num_bytes = failures.count(None) * slice_bytes
        finally:
            self.nvme_reads.end(num_bytes)
        return DONE, failures

    def _stream_by_device(
        self, store: Store, slots: Sequence[Slot], layer: int, out: torch.Tensor, after: Event
    ) -> Streamed:
        """Slice by slice: each is as long as a copy should be, and staging has no room for all of them."""
        arrived, failures = DONE, list[StoreError | None]()
        for slot, row in zip(slots, out, strict=True):
            try:
                # The last one's is behind them all: copies are done in the order in which they were queued.
                arrived = self._stream_one(store, slot, layer, row, after)
                failures.append(None)
            except StoreError as error:
                failures.append(error)
        return arrived, failures

    def _stream_one(self, store: Store, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        if isinstance(store, SlabStore):
            return self._device.copy_up([(out, store.slice(slot, layer))], after)
        with self._device.staging().buffer(store.shape.slice_bytes) as buffer:
            with self._metered(store.shape.slice_bytes):
                store.read_slice(slot, layer, buffer.host)
            buffer.until = self._device.copy_up([(out, buffer.host)], after)
            return buffer.until
