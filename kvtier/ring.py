"""Streaming: a fixed ring of buffers that slices are read into ahead of the attention that needs them."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch

from kvtier.breaker import Breaker
from kvtier.device import DONE, Device
from kvtier.errors import BlockLostError, IntegrityError, TransferTimeoutError
from kvtier.layer_cut import LayerCut, cut_layer, even_group_slices
from kvtier.metrics import Metrics, Stall
from kvtier.plan import Source, StepPlan
from kvtier.slice_reads import BeginSlices, Cell, Read, ReadThreads, SliceReads
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier


@dataclass(frozen=True, slots=True)
class Group:
    """Slices of one layer that have arrived: views of the ring, valid until the next group is asked for.

    `keys` is `[count, kv_heads, block_tokens, key_dim]`, `values` likewise.
    """

    sources: Sequence[Source]
    num_slices: Mapping[Tier, int]
    """How many of them come from each tier."""
    keys: torch.Tensor
    values: torch.Tensor


class SliceRing:
    """Reads the streamed slices of a step in plan order into `num_slices` fixed buffers.

    The ring is cut into cells of equal size, anew for each plan: a cell takes a group of neighbouring slices of one
    layer, so that attention gets them as rows of one call. A cell is read into again only after the group it held has
    been used; on a device with queues that is an event behind the kernels that used it, and kernels begin behind the
    copies they need. Runs ahead as far as cells and the prefetch policy allow.

    A read of the nvme tier that passes its deadline is a loss, and its cell is left to it until it ends. Such reads
    usually have all cells: one slice more is kept (of three or more) for streaming from the cpu tier meanwhile.
    """

    def __init__(
        self,
        shape: BlockShape,
        num_slices: int,
        dtype: torch.dtype,
        device: Device,
        *,
        begin_slices: BeginSlices,
        prefetch: PrefetchPolicy,
        metrics: Metrics,
        threads: ReadThreads,
        io_timeout_s: float,
        breaker: Breaker | None = None,
    ) -> None:
        """`breaker`: the nvme tier's: it is told of reads that hang."""
        if num_slices < 2:
            raise IntegrityError(f"a ring needs at least 2 slices, got {num_slices}")
        num_spare = int(num_slices > 2)
        total, self._num_usable = num_slices, num_slices - num_spare
        self._cells: list[Cell] = []
        self._spare = [Cell(total - 1, 1)] if num_spare else []
        self._shape, self._device = shape, device
        num_bytes = total * shape.slice_bytes
        place = device.torch_device
        on_host = place.type == "cpu"  # there O_DIRECT reads into it, without a copy where slices are whole pages
        memory = page_aligned(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=place)
        self._bytes = memory.view(total, shape.slice_bytes)
        heads, tokens = shape.kv_heads, shape.block_tokens
        self._keys = self._bytes[:, : shape.key_bytes].view(dtype).view(total, heads, tokens, shape.key_dim)
        self._values = self._bytes[:, shape.key_bytes :].view(dtype).view(total, heads, tokens, shape.value_dim)
        self._views_of: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._prefetch, self._metrics = prefetch, metrics
        self._threads = threads
        self._reads = SliceReads(self._bytes, begin_slices, threads=threads, io_timeout_s=io_timeout_s, breaker=breaker)
        self._reads_of: dict[int, dict[Future[None], Read]] = {}
        self._free: deque[Cell] = deque()
        self._cell_of: dict[int, Cell] = {}
        self._plan: StepPlan | None = None
        """Of the step that is open, or of the one that has ended and is looked ahead for."""
        self._last_plan: StepPlan | None = None
        """Of the last step that went through."""
        self._looks_ahead = False
        self._places: frozenset[tuple[Tier, Slot]] = frozenset()
        """What is read from while no step is open."""
        self._cut = LayerCut()
        self._num_cells_now = 0
        self._next_read = self._next_use = 0

    @property
    def group_slices(self) -> int:
        """Slices of a group at most, as the last plan was cut; 0 before the first."""
        return self._cut.group_slices

    @property
    def num_overdue(self) -> int:
        """Reads that have passed their deadline and have not ended."""
        return self._reads.num_overdue

    def begin(self, plan: StepPlan) -> None:
        """Start a step that streams a plan's blocks in every layer; layer 0's first slices are requested at once.

        The same plan once more goes on with what has been read for it since the step before.

        Raises:
            TransferTimeoutError: reads of the cpu tier hang, or reads that hang have the whole ring.
        """
        if plan is self._plan and self._places:
            self._places = frozenset()
            self._advance(0)
            return
        self.drain()
        self._plan, self._looks_ahead = plan, plan is self._last_plan
        taken = self._reads.cells()
        if not taken:
            self._make_cells(even_group_slices(len(plan.streamed), self._num_usable))
        for cells in (self._cells, self._spare):
            self._free = deque(cell for cell in cells if cell not in taken)
            if self._free:
                break
        else:
            raise TransferTimeoutError(
                f"{len(taken)} reads hang for more than io_timeout_s ({self._reads.io_timeout_s:g} s), and no buffer "
                "is left to stream through: raise tiers.gpu.budget, or check the disk"
            )
        self._num_cells_now = len(self._free)
        self._cut = cut_layer(plan.streamed, self._free[0].num_slices, self._threads.by_tier())
        self._next_read = self._next_use = 0
        self._advance(0)

    def _make_cells(self, size: int) -> None:
        """Cut the ring into cells of so many slices. Nothing may be under way."""
        if self._cells and self._cells[0].num_slices == size:
            return
        used = self._device.record()  # behind whatever has used them as other cells
        self._cells = [Cell(number * size, size, used) for number in range(self._num_usable // size)]
        self._views_of.clear()
        self._reads.forget_rows()

    def groups(self, layer: int) -> Iterator[Group]:
        """The layer's groups in plan order, each waited for. Layers must be asked for in order, each once.

        Raises:
            BlockLostError: a slice could not be read, or not within `io_timeout_s`.
            TransferTimeoutError: a read of the cpu tier took longer than twice that.
        """
        if self._next_use != layer * len(self._cut.groups):
            raise IntegrityError(f"layer {layer} asks for its slices out of order")
        for number in range(self._next_use, self._next_use + len(self._cut.groups)):
            self._advance(layer)
            yield self._arrived(number)
            self._next_use = number + 1
            cell = self._cell_of.pop(number)
            cell.used = self._device.record()
            self._free.append(cell)
        # What the policy allows behind this layer may go on while the model computes the rest of it.
        self._advance(layer)

    def finish(self) -> None:
        """The step has gone through. Where the next one is likely to have the same plan, reading goes on for it.

        Likely means that this one had the plan of the step before: sequences that take turns are not read ahead for.
        """
        total = self._shape.num_layers * len(self._cut.groups)
        self._last_plan = self._plan
        if not self._looks_ahead or self._next_use != total:
            self.drain()
            return
        self._next_use, self._next_read = 0, self._next_read - total
        self._reads_of = {number - total: reads for number, reads in self._reads_of.items()}
        self._cell_of = {number - total: cell for number, cell in self._cell_of.items()}
        self._places = frozenset((source.tier, source.slot) for group in self._cut.groups for source in group.sources)

    def leave(self, tier: Tier, slot: Slot) -> None:
        """A slot is given up, between steps: nothing is read from it any more when this returns.

        Raises:
            TransferTimeoutError: as `drain`.
        """
        if (tier, slot) in self._places:
            self.drain()

    def unreadable(self, plan: StepPlan) -> list[BlockId]:
        """Read every slice that a plan streams; which blocks cannot be read. Costs the reads of a whole step.

        Once a read of the nvme tier has passed its deadline, all blocks there count as such, without further waiting.

        Raises:
            TransferTimeoutError: as `begin` and `groups`.
        """
        lost: dict[int, None] = {}
        self.drain()
        self.begin(plan)
        try:
            for layer in range(self._shape.num_layers):
                for number in range(self._next_use, self._next_use + len(self._cut.groups)):
                    self._advance(layer)
                    try:
                        self._arrived(number)
                    except BlockLostError as error:
                        lost.update(dict.fromkeys(error.blocks))
                    if self.num_overdue:
                        lost.update((source.block, None) for source in plan.streamed if source.tier is Tier.NVME)
                        return [BlockId(block) for block in lost]
                    self._next_use = number + 1
                    self._free.append(self._cell_of.pop(number))
        finally:
            self.drain()
        return [BlockId(block) for block in lost]

    def _advance(self, layer: int) -> None:
        # Looking ahead, the layers of the next step come behind the last of this one.
        num_layers, num_groups = self._shape.num_layers * (2 if self._looks_ahead else 1), len(self._cut.groups)
        last = min(self._next_use + self._num_cells_now, num_layers * num_groups)
        if self._next_read >= last:  # most often: all cells are in use or read into
            return
        allowed = {layer, *self._prefetch.layers_ahead(layer, num_layers)}
        while self._next_read < last and self._next_read // num_groups in allowed:
            self._request(self._next_read)
            self._next_read += 1

    def _request(self, number: int) -> None:
        cell, layer = self._free.popleft(), number // len(self._cut.groups) % self._shape.num_layers
        used, cell.used = cell.used, DONE
        self._cell_of[number] = cell
        reads = self._reads_of[number] = {}
        for piece in self._cut.groups[number % len(self._cut.groups)].pieces:
            future, read = self._reads.start(layer, cell, piece, used)
            reads[future] = read

    def _arrived(self, number: int) -> Group:
        reads = self._reads_of[number]
        if not all([future.done() for future in reads]):  # most often they are: they were read ahead
            self._wait(reads)
        del self._reads_of[number]
        for read in reads.values():
            self._device.compute_waits_for(read.arrived)
        failed = [failure for failure in (future.exception() for future in reads) if failure is not None]
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
        group, cell = self._cut.groups[number % len(self._cut.groups)], self._cell_of[number]
        keys, values = self._views(cell.first, len(group.sources))
        return Group(group.sources, group.num_slices, keys, values)

    def _wait(self, reads: Mapping[Future[None], Read]) -> None:
        started_s = time.monotonic()
        late = self._reads.late(reads)
        last = max(reads.values(), key=lambda read: (read.ended_s, read.piece.tier))
        self._metrics.stalls[Stall.of_stream(last.piece.tier)] += time.monotonic() - started_s
        if late:
            self._reads.pass_deadline(late)

    def _views(self, first: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some slices of the ring. Made once for a cut: two views take as long as a short attention call."""
        found = self._views_of.get((first, count))
        if found is None:
            view = slice(first, first + count)
            found = self._views_of[first, count] = self._keys[view], self._values[view]
        return found

    def drain(self) -> None:
        """Drop reads that have not begun and wait for those that run: no buffer or slot is in use afterwards.

        But for reads of the nvme tier that have passed their deadline, each with its cell: it is left to them.

        Raises:
            TransferTimeoutError: a read of the cpu tier hangs; it is waited for again at the next call.
        """
        self._plan, self._looks_ahead, self._places = None, False, frozenset()
        self._reads.drop()
        for reads in self._reads_of.values():  # whatever moves next into the slots they read does not know of them
            for read in reads.values():
                read.arrived.synchronize()
        self._reads_of.clear()
        self._cell_of.clear()

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the threads; whether all reads have ended. One that hangs is left to itself. Idempotent.

        `timeout_s` takes the place of `io_timeout_s`.
        """
        if timeout_s is not None:
            self._reads.io_timeout_s = timeout_s
        with suppress(TransferTimeoutError):
            self.drain()
        return self._reads.close()
