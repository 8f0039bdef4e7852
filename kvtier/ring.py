"""Streaming: a fixed ring of buffers that slices are read into ahead of the attention that needs them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from kvtier.errors import BlockLostError, IntegrityError, StoreError, TransferTimeoutError
from kvtier.metrics import Metrics
from kvtier.plan import Source
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier

ReadSlice = Callable[[Tier, Slot, int, torch.Tensor], None]


@dataclass(frozen=True, slots=True)
class Group:
    """Slices of one layer that have arrived: views of the ring, valid until the next group is asked for.

    `keys` is `[count, kv_heads, block_tokens, key_dim]`, `values` likewise.
    """

    sources: Sequence[Source]
    keys: torch.Tensor
    values: torch.Tensor


class SliceRing:
    """Reads the streamed slices of a step in plan order into `num_slices` fixed buffers.

    The ring is `num_cells` cells of equal size; a cell takes a group of neighbouring slices of one layer, so that
    attention gets them as rows of one call. A cell is read into again only after the group it held has been used (with
    CUDA: after an event behind the kernels that used it). Runs ahead as far as cells and the prefetch policy allow.
    """

    NUM_CELLS = 4

    def __init__(
        self,
        shape: BlockShape,
        num_slices: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        read_slice: ReadSlice,
        prefetch: PrefetchPolicy,
        metrics: Metrics,
        num_threads: int,
        io_timeout_s: float,
    ) -> None:
        if num_slices < 2:
            raise IntegrityError(f"a ring needs at least 2 slices, got {num_slices}")
        self.num_cells = min(self.NUM_CELLS, num_slices)
        self.cell_slices = num_slices // self.num_cells
        self._shape, self._device = shape, device
        total = self.num_cells * self.cell_slices
        num_bytes = total * shape.slice_bytes
        on_host = device.type == "cpu"  # there O_DIRECT reads into it, without a copy where slices are whole pages
        memory = page_aligned(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._bytes = memory.view(total, shape.slice_bytes)
        heads, tokens = shape.kv_heads, shape.block_tokens
        self._keys = self._bytes[:, : shape.key_bytes].view(dtype).view(total, heads, tokens, shape.key_dim)
        self._values = self._bytes[:, shape.key_bytes :].view(dtype).view(total, heads, tokens, shape.value_dim)
        self._read_slice, self._prefetch, self._metrics = read_slice, prefetch, metrics
        self._num_threads, self._io_timeout_s = num_threads, io_timeout_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-stream")
        self._reads: dict[int, list[Future[None]]] = {}
        self._running = threading.Condition()
        self._num_running = 0
        self._generation = 0
        self._used: dict[int, torch.cuda.Event | None] = {}
        self._sources: Sequence[Source] = ()
        self._groups_per_layer = 0
        self._next_read = self._next_use = 0

    def begin(self, sources: Sequence[Source]) -> None:
        """Start a step that streams these blocks in every layer; layer 0's first slices are requested at once.

        Raises:
            TransferTimeoutError: reads of an earlier step still hang.
        """
        self.drain()
        self._sources = sources
        self._groups_per_layer = -(-len(sources) // self.cell_slices)
        self._next_read = self._next_use = 0
        self._used.clear()
        self._advance(0)

    def groups(self, layer: int) -> Iterator[Group]:
        """The layer's groups in plan order, each waited for. Layers must be asked for in order, each once.

        Raises:
            BlockLostError: a slice could not be read.
            TransferTimeoutError: a read took longer than `io_timeout_s`.
        """
        if self._next_use != layer * self._groups_per_layer:
            raise IntegrityError(f"layer {layer} asks for its slices out of order")
        for number in range(self._next_use, self._next_use + self._groups_per_layer):
            self._advance(layer)
            yield self._arrived(number)
            self._next_use = number + 1
            self._used[number % self.num_cells] = self._mark()
        # What the policy allows behind this layer may go on while the model computes the rest of it.
        self._advance(layer)

    def unreadable(self, sources: Sequence[Source]) -> list[BlockId]:
        """Read every slice of these blocks; which of them cannot be read. Costs the reads of a whole step.

        Raises:
            TransferTimeoutError: a read took longer than `io_timeout_s`.
        """
        lost: dict[int, None] = {}
        self.begin(sources)
        try:
            for layer in range(self._shape.num_layers):
                for number in range(self._next_use, self._next_use + self._groups_per_layer):
                    self._advance(layer)
                    try:
                        self._arrived(number)
                    except BlockLostError as error:
                        lost.update(dict.fromkeys(error.blocks))
                    self._next_use = number + 1
        finally:
            self.drain()
        return [BlockId(block) for block in lost]

    def _advance(self, layer: int) -> None:
        num_layers = self._shape.num_layers
        allowed = {layer, *self._prefetch.layers_ahead(layer, num_layers)}
        last = min(self._next_use + self.num_cells, num_layers * self._groups_per_layer)
        while self._next_read < last and self._next_read // self._groups_per_layer in allowed:
            self._request(self._next_read)
            self._next_read += 1

    def _members(self, number: int) -> Sequence[Source]:
        first = number % self._groups_per_layer * self.cell_slices
        return self._sources[first : first + self.cell_slices]

    def _request(self, number: int) -> None:
        sources = self._members(number)
        cell = number % self.num_cells
        layer, first, used = number // self._groups_per_layer, cell * self.cell_slices, self._used.pop(cell, None)
        share = -(-len(sources) // self._num_threads)
        reads = self._reads[number] = []
        for at in range(0, len(sources), share):
            part = sources[at : at + share]
            reads.append(self._pool.submit(self._guarded_read, self._generation, part, layer, first + at, used))

    def _guarded_read(self, generation: int, *arguments: Any) -> None:
        # Counted by the reader itself, not by whoever holds its future: an exception may come between submitting a read
        # and noting its future, and a late read must never write into a buffer that another step uses.
        with self._running:
            if generation != self._generation:
                return
            self._num_running += 1
        try:
            self._read(*arguments)
        finally:
            with self._running:
                self._num_running -= 1
                self._running.notify_all()

    def _read(self, sources: Sequence[Source], layer: int, first: int, used: torch.cuda.Event | None) -> None:
        if used is not None:
            used.synchronize()
        lost: list[tuple[Source, StoreError]] = []
        for entry, source in enumerate(sources, first):
            try:
                self._read_slice(source.tier, source.slot, layer, self._bytes[entry])
            except StoreError as error:
                lost.append((source, error))
        if lost:
            source, cause = lost[0]
            raise BlockLostError(
                f"block {source.index} (layer {layer}) cannot be read from {source.tier.label}: {cause}",
                tuple(each.block for each, _ in lost),
            ) from cause

    def _arrived(self, number: int) -> Group:
        started_s = time.monotonic()
        reads = self._reads[number]
        late = wait(reads, timeout=self._io_timeout_s).not_done
        self._metrics.stall_s += time.monotonic() - started_s
        if late:
            raise TransferTimeoutError(f"reading slices took longer than io_timeout_s ({self._io_timeout_s:g} s)")
        del self._reads[number]
        failed = [failure for failure in (read.exception() for read in reads) if failure is not None]
        if failed:
            told = failed[0]
            if isinstance(told, BlockLostError):  # it names all that are known by now: each may cost a repeated step
                blocks = (other.blocks for other in failed if isinstance(other, BlockLostError))
                told.blocks = tuple(dict.fromkeys(chain.from_iterable(blocks)))
            try:
                raise told
            finally:
                # Its traceback names this frame: what both hold, the caller's cache too, would wait for the collector.
                del told, failed, reads
        sources = self._members(number)
        first = number % self.num_cells * self.cell_slices
        view = slice(first, first + len(sources))
        return Group(sources, self._keys[view], self._values[view])

    def _mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record(torch.cuda.current_stream(self._device))
        return event

    def drain(self) -> None:
        """Drop reads that have not begun and wait for those that run: no buffer or slot is in use afterwards.

        Raises:
            TransferTimeoutError: a read still hangs; it is waited for again at the next call.
        """
        with self._running:
            self._generation += 1  # what has not begun never will
            if not self._running.wait_for(lambda: self._num_running == 0, timeout=self._io_timeout_s):
                raise TransferTimeoutError(
                    f"{self._num_running} reads hang for more than io_timeout_s ({self._io_timeout_s:g} s)"
                )
        self._reads.clear()

    def close(self) -> bool:
        """Stop the threads; whether all reads have ended. One that hangs is left to itself. Idempotent."""
        try:
            self.drain()
        except TransferTimeoutError:
            self._pool.shutdown(wait=False, cancel_futures=True)
            return False
        self._pool.shutdown(wait=True)
        return True
