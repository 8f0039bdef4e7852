"""Streaming: a fixed ring of buffers that slices are read into ahead of the attention that needs them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain

import torch

from kvtier.breaker import Breaker
from kvtier.device import DONE, Device, Event
from kvtier.errors import BlockLostError, IntegrityError, StoreError, TransferTimeoutError
from kvtier.metrics import Metrics, Stall
from kvtier.plan import Source, StepPlan
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier
from kvtier.workers import Workers

ReadSlices = Callable[[Tier, Sequence[Slot], int, torch.Tensor, Event], tuple[Event, Sequence[StoreError | None]]]
"""As `TransferEngine.read_slices`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Slices of one layer that have arrived: views of the ring, valid until the next group is asked for.

    `keys` is `[count, kv_heads, block_tokens, key_dim]`, `values` likewise.
    """

    sources: Sequence[Source]
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(eq=False, slots=True)
class _Cell:
    """Neighbouring slices of the ring."""

    first: int
    num_slices: int
    used: Event = DONE
    """Behind the kernels that used it last."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Sources of a group that lie on one tier, and go to neighbouring buffers of its cell."""

    tier: Tier
    first: int
    """Which of the cell's buffers is the first one's."""
    sources: Sequence[Source]
    slots: Sequence[Slot]


@dataclass(eq=False, slots=True)
class _Read:
    """One layer's slices of a piece, read by one thread."""

    generation: int
    layer: int
    cell: _Cell
    piece: _Piece
    used: Event
    """Behind the kernels that used the cell last."""
    arrived: Event = DONE
    """Behind the copies that this read has queued."""
    is_overdue: bool = False
    ended_s: float = math.inf
    """When; infinity before."""


class SliceRing:
    """Reads the streamed slices of a step in plan order into `num_slices` fixed buffers.

    The ring is cut into cells of equal size, anew for each plan: a cell takes a group of neighbouring slices of one
    layer, so that attention gets them as rows of one call. A cell is read into again only after the group it held has
    been used; on a device with queues that is an event behind the kernels that used it, and kernels begin behind the
    copies they need. Runs ahead as far as cells and the prefetch policy allow.

    A read of the nvme tier that passes its deadline is a loss, and its cell is left to it until it ends. Such reads
    usually have all cells: one slice more is kept (of three or more) for streaming from the cpu tier meanwhile.
    """

    MIN_CELLS = 4
    WHOLE_LAYERS = 3
    """Where the ring has room for so many layers, each is one group."""

    def __init__(
        self,
        shape: BlockShape,
        num_slices: int,
        dtype: torch.dtype,
        device: Device,
        *,
        read_slices: ReadSlices,
        prefetch: PrefetchPolicy,
        metrics: Metrics,
        num_threads: int,
        io_timeout_s: float,
        breaker: Breaker | None = None,
        num_together: int = 1,
    ) -> None:
        """Args:
        num_threads: for the nvme tier, and as many for memory.
        num_together: slices of the nvme tier that one read had better bring, if there are so many: a store that reads
            several at once leaves more of the processor to the model.
        breaker: the nvme tier's: it is told of reads that hang.
        """
        if num_slices < 2:
            raise IntegrityError(f"a ring needs at least 2 slices, got {num_slices}")
        num_spare = int(num_slices > 2)
        total, self._num_usable = num_slices, num_slices - num_spare
        self._cells: list[_Cell] = []
        self._spare = [_Cell(total - 1, 1)] if num_spare else []
        self._shape, self._device = shape, device
        num_bytes = total * shape.slice_bytes
        place = device.torch_device
        on_host = place.type == "cpu"  # there O_DIRECT reads into it, without a copy where slices are whole pages
        memory = page_aligned(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=place)
        self._bytes = memory.view(total, shape.slice_bytes)
        heads, tokens = shape.kv_heads, shape.block_tokens
        self._keys = self._bytes[:, : shape.key_bytes].view(dtype).view(total, heads, tokens, shape.key_dim)
        self._values = self._bytes[:, shape.key_bytes :].view(dtype).view(total, heads, tokens, shape.value_dim)
        self._read_slices, self._prefetch, self._metrics = read_slices, prefetch, metrics
        self._num_threads, self._io_timeout_s, self._breaker = num_threads, io_timeout_s, breaker
        self._num_together = num_together
        # Threads that hang on nvme must not be what reads of the cpu tier wait for.
        self._files = Workers(num_threads, "kvtier-stream-nvme")
        self._memory = Workers(num_threads, "kvtier-stream")
        self._reads: dict[int, dict[Future[None], _Read]] = {}
        self._running: dict[_Read, None] = {}
        self._changed = threading.Condition()
        self._generation = 0
        self._free: deque[_Cell] = deque()
        self._cell_of: dict[int, _Cell] = {}
        self._plan: StepPlan | None = None
        """Of the step that is open, or of the one that has ended and is looked ahead for."""
        self._last_plan: StepPlan | None = None
        """Of the last step that went through."""
        self._looks_ahead = False
        self._places: frozenset[tuple[Tier, Slot]] = frozenset()
        """What is read from while no step is open."""
        self._sources: Sequence[Source] = ()
        self._pieces: list[list[_Piece]] = []
        """Of each group of a layer."""
        self._num_cells_now = self._group_slices = 0
        self._groups_per_layer = 0
        self._next_read = self._next_use = 0

    @property
    def group_slices(self) -> int:
        """Slices of a group at most, as the last plan was cut; 0 before the first."""
        return self._group_slices

    @property
    def num_overdue(self) -> int:
        """Reads that have passed their deadline and have not ended."""
        with self._changed:
            return sum(read.is_overdue for read in self._running)

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
        with self._changed:
            taken = {read.cell for read in self._running}
        if not taken:
            self._cut(len(plan.streamed))
        for cells in (self._cells, self._spare):
            self._free = deque(cell for cell in cells if cell not in taken)
            if self._free:
                break
        else:
            raise TransferTimeoutError(
                f"{len(taken)} reads hang for more than io_timeout_s ({self._io_timeout_s:g} s), and no buffer is left "
                "to stream through: raise tiers.gpu.budget, or check the disk"
            )
        self._num_cells_now, self._group_slices = len(self._free), self._free[0].num_slices
        self._sources = plan.streamed
        self._groups_per_layer = -(-len(plan.streamed) // self._group_slices)
        self._pieces = [self._cut_group(self._members(number)) for number in range(self._groups_per_layer)]
        self._next_read = self._next_use = 0
        self._advance(0)

    def _cut(self, num_sources: int) -> None:
        """Make cells for layers of so many slices, none of which is nearly empty. Nothing may be under way."""
        size = (
            num_sources if self._num_usable >= self.WHOLE_LAYERS * num_sources else self._num_usable // self.MIN_CELLS
        )
        num_groups = -(-num_sources // max(1, size))
        size = -(-num_sources // num_groups)
        if self._cells and self._cells[0].num_slices == size:
            return
        used = self._device.record()  # behind whatever has used them as other cells
        self._cells = [_Cell(number * size, size, used) for number in range(self._num_usable // size)]

    def groups(self, layer: int) -> Iterator[Group]:
        """The layer's groups in plan order, each waited for. Layers must be asked for in order, each once.

        Raises:
            BlockLostError: a slice could not be read, or not within `io_timeout_s`.
            TransferTimeoutError: a read of the cpu tier took longer than twice that.
        """
        if self._next_use != layer * self._groups_per_layer:
            raise IntegrityError(f"layer {layer} asks for its slices out of order")
        for number in range(self._next_use, self._next_use + self._groups_per_layer):
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
        total = self._shape.num_layers * self._groups_per_layer
        self._last_plan = self._plan
        if not self._looks_ahead or self._next_use != total:
            self.drain()
            return
        self._next_use, self._next_read = 0, self._next_read - total
        self._reads = {number - total: reads for number, reads in self._reads.items()}
        self._cell_of = {number - total: cell for number, cell in self._cell_of.items()}
        self._places = frozenset((source.tier, source.slot) for source in self._sources)

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
                for number in range(self._next_use, self._next_use + self._groups_per_layer):
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
        num_layers = self._shape.num_layers * (2 if self._looks_ahead else 1)
        allowed = {layer, *self._prefetch.layers_ahead(layer, num_layers)}
        last = min(self._next_use + self._num_cells_now, num_layers * self._groups_per_layer)
        while self._next_read < last and self._next_read // self._groups_per_layer in allowed:
            self._request(self._next_read)
            self._next_read += 1

    def _members(self, number: int) -> Sequence[Source]:
        first = number % self._groups_per_layer * self._group_slices
        return self._sources[first : first + self._group_slices]

    def _request(self, number: int) -> None:
        cell, layer = self._free.popleft(), number // self._groups_per_layer % self._shape.num_layers
        used, cell.used = cell.used, DONE
        self._cell_of[number] = cell
        reads = self._reads[number] = {}
        for piece in self._pieces[number % self._groups_per_layer]:
            workers = self._files if piece.tier is Tier.NVME else self._memory
            read = _Read(self._generation, layer, cell, piece, used)
            reads[workers.submit(self._guarded_read, read)] = read

    def _cut_group(self, members: Sequence[Source]) -> list[_Piece]:
        """Pieces of a group, each of one tier and for one thread."""
        most = {}
        for tier in Tier:
            num_own = sum(source.tier is tier for source in members)
            most[tier] = max(-(-num_own // self._num_threads), self._num_together if tier is Tier.NVME else 1)
        pieces, start = list[_Piece](), 0
        for end in range(1, len(members) + 1):
            tier = members[start].tier
            if end == len(members) or members[end].tier is not tier or end - start == most[tier]:
                sources = members[start:end]
                pieces.append(_Piece(tier, start, sources, [source.slot for source in sources]))
                start = end
        return pieces

    def _guarded_read(self, read: _Read) -> None:
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

    def _read(self, read: _Read) -> None:
        piece, first = read.piece, read.cell.first + read.piece.first
        out = self._bytes[first : first + len(piece.sources)]
        read.arrived, failures = self._read_slices(piece.tier, piece.slots, read.layer, out, read.used)
        lost = [(source, error) for source, error in zip(piece.sources, failures, strict=True) if error is not None]
        if lost:
            source, cause = lost[0]
            raise BlockLostError(
                f"block {source.index} (layer {read.layer}) cannot be read from {piece.tier.label}: {cause}",
                tuple(each.block for each, _ in lost),
            ) from cause

    def _arrived(self, number: int) -> Group:
        started_s = time.monotonic()
        reads = self._reads[number]
        late = wait(reads, timeout=self._io_timeout_s).not_done
        if late and all(reads[future].piece.tier is not Tier.NVME for future in late):
            # Memory does not hang: the machine is busy, or the process was stopped meanwhile.
            late = wait(reads, timeout=self._io_timeout_s).not_done
        last = max(reads.values(), key=lambda read: (read.ended_s, read.piece.tier))
        self._metrics.stalls[Stall.of_stream(last.piece.tier)] += time.monotonic() - started_s
        if late:
            self._pass_deadline([reads[future] for future in late])
        del self._reads[number]
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
        sources, first = self._members(number), self._cell_of[number].first
        view = slice(first, first + len(sources))
        return Group(sources, self._keys[view], self._values[view])

    def _pass_deadline(self, late: Sequence[_Read]) -> None:
        """Raise what late reads are: losses, with all that hangs beside them, where the nvme tier is what is late."""
        took = f"reading slices took longer than io_timeout_s ({self._io_timeout_s:g} s)"
        late = [read for read in late if read.piece.tier is Tier.NVME]
        if not late:
            raise TransferTimeoutError(took)
        hung = self._give_up_reads()
        source = late[0].piece.sources[0]
        raise BlockLostError(
            f"block {source.index} (layer {late[0].layer}) cannot be read from nvme: {took}",
            tuple(dict.fromkeys(source.block for read in (*late, *hung) for source in read.piece.sources)),
        )

    def _give_up_reads(self) -> list[_Read]:
        """Leave reads of the nvme tier that run to themselves, each with its cell. Returns them."""
        with self._changed:
            hung = [read for read in self._running if read.piece.tier is Tier.NVME]
            for read in hung:
                read.is_overdue = True
                if self._breaker is not None:
                    self._breaker.overdue(read, f"a read took longer than io_timeout_s ({self._io_timeout_s:g} s)")
        if self._breaker is not None:
            self._breaker.look()
        return hung

    def drain(self) -> None:
        """Drop reads that have not begun and wait for those that run: no buffer or slot is in use afterwards.

        But for reads of the nvme tier that have passed their deadline, each with its cell: it is left to them.

        Raises:
            TransferTimeoutError: a read of the cpu tier hangs; it is waited for again at the next call.
        """
        self._plan, self._looks_ahead, self._places = None, False, frozenset()
        with self._changed:
            self._generation += 1  # what has not begun never will
            in_time = self._changed.wait_for(self._all_are_overdue, timeout=self._io_timeout_s)
        if not in_time:
            self._give_up_reads()
            with self._changed:
                num_others = sum(not read.is_overdue for read in self._running)
            if num_others:
                raise TransferTimeoutError(
                    f"{num_others} reads hang for more than io_timeout_s ({self._io_timeout_s:g} s)"
                )
        for reads in self._reads.values():  # whatever moves next into the slots they read does not know of them
            for read in reads.values():
                read.arrived.synchronize()
        self._reads.clear()
        self._cell_of.clear()

    def _all_are_overdue(self) -> bool:
        return all(read.is_overdue for read in self._running)

    def close(self, timeout_s: float | None = None) -> bool:
        """Stop the threads; whether all reads have ended. One that hangs is left to itself. Idempotent.

        `timeout_s` takes the place of `io_timeout_s`.
        """
        self._io_timeout_s = self._io_timeout_s if timeout_s is None else timeout_s
        with suppress(TransferTimeoutError):
            self.drain()
        with self._changed:
            have_ended = not self._running
        for workers in (self._files, self._memory):
            workers.close(wait=have_ended)
        return have_ended
