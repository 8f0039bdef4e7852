"""One step while the model's forward runs: new K and V into gpu slots, attention over runs from every tier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait

import torch

from kvtier.attention import (
    Kernel,
    Partial,
    causal_attention,
    finish,
    merge,
    pack,
    padded_attention,
    partial_attention,
    sink_attention,
)
from kvtier.errors import UnsupportedError
from kvtier.places import Piece
from kvtier.plan import Source, StepPlan
from kvtier.step import RowStep, Step
from kvtier.step_memory import StepMemory
from kvtier.types import AttentionMode, Tier


class OpenStep:
    """One step while the model's forward runs: what `current_step` points to."""

    def __init__(self, memory: StepMemory, step: Step, plan: StepPlan) -> None:
        self._memory, self.step, self._plan = memory, step, plan
        self._places = memory.places(plan)
        self._metrics = step.batch.metrics
        self._new: dict[int, tuple[int, int]] = {}
        self.causal_masks: list[torch.Tensor] = []
        """Plain causal masks that were made in this step: the only ones that a tiered layer may be given."""
        self._at_once = memory.num_pieces if step.num_new > 1 else memory.num_decode_pieces

    @property
    def mode(self) -> AttentionMode:
        """How this step attends."""
        return self._memory.mode

    @property
    def streams(self) -> bool:
        """Whether anything comes through the ring."""
        return bool(self._plan.streamed)

    def is_tiered(self, layer: int) -> bool:
        """Whether the layer's K and V lie on tiers. Others keep transformers' own cache and attention."""
        return layer in self._memory.positions

    @property
    def has_untiered(self) -> bool:
        """Whether the model has layers that are not tiered: their masks are their own affair."""
        return self._memory.group.num_untiered > 0

    # -- new tokens ---------------------------------------------------------------------------------------------------

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's new K and V of one layer into its gpu slots. Padding is left out.

        Args:
            keys: `[rows, kv_heads, num_new, key_dim]` in the group's dtype, on its device, without grad.
            values: `[rows, kv_heads, num_new, value_dim]`.

        Raises:
            UnsupportedError: anything else; nothing was written.
        """
        shape, step = self._memory.group.shape, self.step
        position, start = self._memory.positions[layer], (len(step.rows), shape.kv_heads, step.num_new)
        wanted = (*start, shape.key_dim), (*start, shape.value_dim)
        dtype = self._memory.dtype
        if (tuple(keys.shape), tuple(values.shape)) != wanted or keys.dtype != dtype or values.dtype != dtype:
            raise UnsupportedError(
                f"layer {layer} appended K {tuple(keys.shape)} {keys.dtype} and V {tuple(values.shape)} "
                f"{values.dtype}; the wrapped model's config says K {wanted[0]} and V {wanted[1]} in {dtype}"
            )
        if keys.requires_grad or values.requires_grad:
            raise UnsupportedError("keys that require grad cannot be cached exactly: call under torch.no_grad()")
        step.append(layer, step.num_new)
        self._new[layer] = (keys.data_ptr(), values.data_ptr())
        places, num_rows = self._places, len(step.rows)
        for number, row in enumerate(step.rows):
            row_keys, row_values = (keys, values) if num_rows == 1 else (keys[number, None], values[number, None])
            if not row.is_full:
                row_keys, row_values = _tokens(row_keys, row), _tokens(row_values, row)
            for write in row.writes:
                slot_keys, slot_values = places.slot(position, write.slot)
                new_keys, new_values = row_keys, row_values
                if len(row.writes) > 1:
                    new_keys = row_keys.narrow(2, write.offset, write.count)
                    new_values = row_values.narrow(2, write.offset, write.count)
                slot_keys.narrow(2, write.start, write.count).copy_(new_keys)
                slot_values.narrow(2, write.start, write.count).copy_(new_values)

    def _begin_attention(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The layer's slice index.

        Raises UnsupportedError unless K and V are what the layer appended in this step: a module that is called from
        inside the step, but not as part of it, must not attend over this batch.
        """
        if self._new.get(layer) != (keys.data_ptr(), values.data_ptr()) or layer in self.step.attended:
            raise UnsupportedError(
                f"layer {layer} attends with K and V that it did not append in this step: KV shared between layers, "
                "changed after the append, or a call from inside the model's forward is not supported"
            )
        self.step.attended.add(layer)
        return self._memory.positions[layer]

    # -- blockwise ----------------------------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of the new columns over the whole of their rows.

        Args:
            query: `[rows, heads, num_new, key_dim]`.
            keys, values: what `append` was given for this layer.
            sinks: `[heads]`, see `sink_attention`.

        Returns:
            `[rows, num_new, heads, value_dim]`, contiguous, in the query's dtype. Zeros for padding that sees no token.

        Raises:
            BlockLostError, TransferTimeoutError: the step must be aborted.
        """
        position = self._begin_attention(layer, keys, values)
        kv_heads, heads, num_new = self._memory.group.shape.kv_heads, query.shape[1], self.step.num_new
        num_rows = query.shape[0]
        row_queries = [query] if num_rows == 1 else [query[row : row + 1] for row in range(num_rows)]
        packed = [pack(row_query, kv_heads) for row_query in row_queries]
        kernel = Kernel(scale, softcap, self._memory.group.is_wide)
        parts: list[list[Partial]] = [[] for _ in row_queries]
        begun = self._start_host(position, packed, kernel)
        try:
            for number, piece_keys, piece_values in self._past(position):
                parts[number].append(partial_attention(packed[number], piece_keys, piece_values, kernel))
                if num_new > 1:
                    # A chunk's partial results are large: never more than one group.
                    parts[number] = [merge(parts[number])]
        finally:
            if begun:
                wait(begun.values())  # they read slots, which an aborted step gives up
        for number, future in begun.items():
            assert self._memory.attender is not None  # it has begun them
            parts[number].append(self._memory.attender.finish(future))
        outputs: list[torch.Tensor] = []
        for number, row in enumerate(self.step.rows):
            if num_new > 1 and row.is_full:
                new = slice(number, number + 1)
                parts[number].append(causal_attention(row_queries[number], keys[new], values[new], kernel))
            elif row.new.runs and not row.is_full:
                new = slice(number, number + 1)
                runs = [(run.first, run.count) for run in row.new.runs]
                part = padded_attention(row_queries[number], keys[new], values[new], runs, kernel)
                parts[number].append(part)
            if not parts[number]:
                outputs.append(query.new_zeros((1, num_new, heads, values.shape[-1])))
                continue
            if sinks is not None:
                parts[number].append(sink_attention(sinks, kv_heads, num_new, values.shape[-1]))
            outputs.append(finish(parts[number], heads, query.dtype))
        return outputs[0] if num_rows == 1 else torch.cat(outputs)

    def _start_host(self, position: int, packed: Sequence[torch.Tensor], kernel: Kernel) -> dict[int, Future[Partial]]:
        """By row, attention over the blocks that lie in host memory beside a device; nothing where there is no device.

        The device is not kept waiting for it: its own share comes behind.
        """
        attender = self._memory.attender
        if attender is None:
            return {}
        pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for number, keys, values in self._places.pieces(Tier.CPU, position, self._at_once):
            pieces.setdefault(number, []).append((keys, values))
        return {number: attender.start(packed[number], own, kernel) for number, own in pieces.items()}

    def _past(self, position: int) -> Iterator[Piece]:
        """Pieces that every new column of a row sees whole: full blocks wherever they lie, and the committed tail.

        A single new token sees itself too, so it is taken with its tail in one piece.
        """
        step, places, at_once = self.step, self._places, self._at_once
        yield from places.pieces(Tier.GPU, position, at_once)
        if self._memory.attender is None:
            yield from places.pieces(Tier.CPU, position, at_once)
        for number, row in enumerate(step.rows):
            if step.num_new == 1 and row.writes:
                write = row.writes[0]
                slot, length = write.slot, write.start + 1
            elif row.tail_slot is not None:
                slot, length = row.tail_slot, row.table.tail_tokens
            else:
                continue
            keys, values = places.slot(position, slot)
            yield number, keys.narrow(2, 0, length), values.narrow(2, 0, length)
        self._count_resident()
        for sources, streamed_keys, streamed_values in self._streamed(position):
            for number in range(len(step.rows)):
                for first, last in _entries(sources, number):
                    for start in range(first, last, at_once):
                        view = slice(start, min(start + at_once, last))
                        yield number, streamed_keys[view], streamed_values[view]

    def _streamed(self, position: int) -> Iterator[tuple[Sequence[Source], torch.Tensor, torch.Tensor]]:
        ring = self._memory.ring
        if ring is None or not self._plan.streamed:
            return
        slice_bytes, metrics = self._memory.group.shape.slice_bytes, self._memory.metrics
        for group in ring.groups(position):
            yield group.sources, group.keys, group.values
            for source in group.sources:
                metrics.bytes_moved[(source.tier, Tier.GPU)] += slice_bytes
                self._count(1, source.tier)
                if source.tier is Tier.NVME:
                    metrics.nvme_sole_reads += 1
                    self._metrics.nvme_read_bytes += slice_bytes

    def _count_resident(self) -> None:
        for tiers in self._places.num_resident:
            for tier, num_slices in tiers.items():
                self._count(num_slices, tier)

    def _count(self, num_slices: int, tier: Tier) -> None:
        if num_slices:
            self._memory.metrics.slices_read[tier] += num_slices
            self._metrics.slices_read[tier] += num_slices

    # -- gathered -----------------------------------------------------------------------------------------------------

    def gather(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's whole K and V as the plain cache would hold them: `[rows, kv_heads, length, dim]`, contiguous,
        64-byte-aligned; zeros for padding, which the model's mask hides. Valid until the next call.

        Raises:
            BlockLostError, TransferTimeoutError: the step must be aborted.
        """
        memory, step, shape = self._memory, self.step, self._memory.group.shape
        position = self._begin_attention(layer, keys, values)
        num_rows, total = len(step.rows), step.committed + step.num_new
        padded_bytes, _ = memory.layer_bytes(num_rows * total)
        # There is room: it was checked when the step was opened.
        arena = memory.arena[memory.gather_start :].view(keys.dtype)
        heads, middle = num_rows * shape.kv_heads, padded_bytes // shape.element_bytes
        grid = (num_rows, shape.kv_heads, total)
        whole_keys = arena[: heads * total * shape.key_dim].view(*grid, shape.key_dim)
        whole_values = arena[middle : middle + heads * total * shape.value_dim].view(*grid, shape.value_dim)
        block_tokens = shape.block_tokens
        if step.batch.is_padded:
            whole_keys[:, :, : step.committed], whole_values[:, :, : step.committed] = 0, 0

        def put(row: int, index: int, length: int, block_keys: torch.Tensor, block_values: torch.Tensor) -> None:
            first = index * block_tokens
            for column, token, count in step.rows[row].table.pieces(first, first + length):
                at, block = slice(column, column + count), slice(token - first, token - first + count)
                whole_keys[row, :, at] = block_keys[:, block]
                whole_values[row, :, at] = block_values[:, block]

        for number, (row, plan) in enumerate(zip(step.rows, self._plan.rows, strict=True)):
            for resident in plan.resident:
                slab, slot = memory.slabs[resident.tier], resident.slot
                put(number, resident.index, block_tokens, slab.keys[position][slot], slab.values[position][slot])
            if row.tail_slot is not None:
                full, tail = row.table.num_full_blocks, row.table.tail_tokens
                tail_keys, tail_values = self._places.slot(position, row.tail_slot)
                put(number, full, tail, tail_keys[0], tail_values[0])
        self._count_resident()
        for sources, group_keys, group_values in self._streamed(position):
            for entry, source in enumerate(sources):
                for number in source.rows:
                    put(number, source.index, block_tokens, group_keys[entry], group_values[entry])
        whole_keys[:, :, step.committed :] = keys
        whole_values[:, :, step.committed :] = values
        return whole_keys, whole_values


def _tokens(columns: torch.Tensor, row: RowStep) -> torch.Tensor:
    """Of `[1, heads, num_new, dim]`, those columns that hold tokens; a view when they are neighbours."""
    runs = row.new.runs
    if len(runs) == 1:
        return columns.narrow(2, runs[0].first, runs[0].count)
    return torch.cat([columns[:, :, :0], *(columns.narrow(2, run.first, run.count) for run in runs)], dim=2)


def _entries(sources: Sequence[Source], row: int) -> Iterator[tuple[int, int]]:
    """Runs `first … last - 1` of neighbouring sources that belong to the row."""
    first = None
    for entry, source in enumerate(sources):
        if row in source.rows:
            first = entry if first is None else first
        elif first is not None:
            yield first, entry
            first = None
    if first is not None:
        yield first, len(sources)
