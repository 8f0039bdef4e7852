"""One step while the model's forward runs: new K and V into gpu slots, attention over runs from every tier."""

from __future__ import annotations

from collections.abc import Sequence
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
from kvtier.past import Past
from kvtier.places import TokenPlace
from kvtier.plan import StepPlan
from kvtier.row_attention import RowsAttention
from kvtier.step import RowStep, Step
from kvtier.step_memory import StepMemory
from kvtier.types import AttentionMode, Tier


class OpenStep:
    """One step while the model's forward runs: what `current_step` points to."""

    def __init__(self, memory: StepMemory, step: Step, plan: StepPlan) -> None:
        self._memory, self.step, self._plan = memory, step, plan
        self._past = Past(memory, step, plan)
        shape = memory.group.shape
        start = len(step.rows), shape.kv_heads, step.num_new
        self._wanted = (*start, shape.key_dim), (*start, shape.value_dim)
        self._new: dict[int, tuple[int, int]] = {}
        self.causal_masks: list[torch.Tensor] = []
        """Plain causal masks that were made in this step: the only ones that a tiered layer may be given."""
        self._new_at: Sequence[torch.Tensor] | None = None
        """Of the rows that get a token each: their numbers, slots, and places in them."""

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
        step, wanted, dtype = self.step, self._wanted, self._memory.dtype
        position = self._memory.positions[layer]
        if (keys.shape, values.shape) != wanted or keys.dtype != dtype or values.dtype != dtype:
            raise UnsupportedError(
                f"layer {layer} appended K {tuple(keys.shape)} {keys.dtype} and V {tuple(values.shape)} "
                f"{values.dtype}; the wrapped model's config says K {wanted[0]} and V {wanted[1]} in {dtype}"
            )
        if keys.requires_grad or values.requires_grad:
            raise UnsupportedError("keys that require grad cannot be cached exactly: call under torch.no_grad()")
        step.append(layer, step.num_new)
        self._new[layer] = (keys.data_ptr(), values.data_ptr())
        token, places, num_rows = self._past.token, self._past.places, len(step.rows)
        if token is not None:
            own_keys, own_values = token.own[position]
            own_keys.copy_(keys)
            own_values.copy_(values)
            return
        if num_rows > 1 and step.num_new == 1:
            self._append_rows(position, keys, values)
            return
        for number, row in enumerate(step.rows):
            row_keys, row_values = (keys, values) if num_rows == 1 else (keys[number, None], values[number, None])
            if not row.is_full:
                row_keys, row_values = _tokens(row_keys, row), _tokens(row_values, row)
            for write in row.writes:
                slot_keys, slot_values = places.slot(position, write.slot)
                new_keys, new_values = row_keys, row_values
                if len(row.writes) > 1:
                    new_keys = row_keys.narrow(2, write.offset, write.num_tokens)
                    new_values = row_values.narrow(2, write.offset, write.num_tokens)
                slot_keys.narrow(2, write.start, write.num_tokens).copy_(new_keys)
                slot_values.narrow(2, write.start, write.num_tokens).copy_(new_values)

    def _append_rows(self, position: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """One new token in each row that has one: a write for K and one for V."""
        if self._new_at is None:
            rows = [(number, row.writes[0]) for number, row in enumerate(self.step.rows) if row.writes]
            found = [[number, write.slot, write.start] for number, write in rows]
            self._new_at = torch.tensor(found, dtype=torch.long, device=keys.device).reshape(-1, 3).unbind(1)
        numbers, slots, starts = self._new_at
        if len(numbers):
            slab, is_all = self._memory.slabs[Tier.GPU], len(numbers) == len(keys)
            slab.keys[position][slots, :, starts] = keys[:, :, 0] if is_all else keys[numbers, :, 0]
            slab.values[position][slots, :, starts] = values[:, :, 0] if is_all else values[numbers, :, 0]

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
        num_rows, kernel = query.shape[0], self._memory.kernel(scale, softcap)
        if self._past.token is not None and self._memory.attender is None:
            return self._attend_token(position, self._past.token, query, kernel, sinks)
        if (
            num_rows > 1
            and num_new == 1
            and self._memory.attender is None
            and all(map(_sees_something, self.step.rows))
        ):
            return self._attend_rows(position, query, kernel, sinks)
        row_queries = [query] if num_rows == 1 else [query[row : row + 1] for row in range(num_rows)]
        packed = [pack(row_query, kv_heads) for row_query in row_queries]
        parts: list[list[Partial]] = [[] for _ in row_queries]
        begun = self._start_host(position, packed, kernel)
        try:
            for number, piece_keys, piece_values in self._past.pieces(position):
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

    def _attend_token(
        self, position: int, token: TokenPlace, query: torch.Tensor, kernel: Kernel, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One new token in one row: what decoding does most, and nothing that it can do without. As `attend`."""
        shape = self._memory.group.shape
        packed = pack(query, shape.kv_heads)
        parts = [
            partial_attention(packed, keys, values, kernel) for keys, values in self._past.token_pieces(token, position)
        ]
        if sinks is not None:
            parts.append(sink_attention(sinks, shape.kv_heads, 1, shape.value_dim))
        return finish(parts, query.shape[1], query.dtype)

    def _attend_rows(
        self, position: int, query: torch.Tensor, kernel: Kernel, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        """One new token in each of several rows. As `attend`."""
        shape, num_rows = self._memory.group.shape, query.shape[0]
        rows = RowsAttention(query, shape.kv_heads, kernel)
        for piece in self._past.rows_pieces(position):
            rows.add(piece)
        if sinks is not None:
            sink = sink_attention(sinks, shape.kv_heads, 1, shape.value_dim)
            rows.add_part(
                Partial(sink.output.expand(num_rows, -1, -1, -1), sink.lse.expand(num_rows, -1, -1)),
                torch.arange(num_rows, device=query.device),
            )
        return rows.finish(query.dtype)

    def _start_host(self, position: int, packed: Sequence[torch.Tensor], kernel: Kernel) -> dict[int, Future[Partial]]:
        """By row, attention over the blocks that lie in host memory beside a device; nothing where there is no device.

        The device is not kept waiting for it: its own share comes behind.
        """
        attender = self._memory.attender
        if attender is None:
            return {}
        pieces: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for number, keys, values in self._past.places.pieces(Tier.CPU, position, self._past.at_once):
            pieces.setdefault(number, []).append((keys, values))
        return {number: attender.start(packed[number], own, kernel) for number, own in pieces.items()}

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
        if step.batch.is_padded:
            whole_keys[:, :, : step.committed], whole_values[:, :, : step.committed] = 0, 0
        for row, index, length, block_keys, block_values in self._past.blocks(position):
            first = index * shape.block_tokens
            for column, token, count in step.rows[row].table.pieces(first, first + length):
                at, block = slice(column, column + count), slice(token - first, token - first + count)
                whole_keys[row, :, at] = block_keys[:, block]
                whole_values[row, :, at] = block_values[:, block]
        whole_keys[:, :, step.committed :] = keys
        whole_values[:, :, step.committed :] = values
        return whole_keys, whole_values


def _sees_something(row: RowStep) -> bool:
    return bool(row.writes) or row.table.num_tokens > 0


def _tokens(columns: torch.Tensor, row: RowStep) -> torch.Tensor:
    """Of `[1, heads, num_new, dim]`, those columns that hold tokens; a view when they are neighbours."""
    runs = row.new.runs
    if len(runs) == 1:
        return columns.narrow(2, runs[0].first, runs[0].count)
    return torch.cat([columns[:, :, :0], *(columns.narrow(2, run.first, run.count) for run in runs)], dim=2)
