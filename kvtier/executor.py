"""Carries one step out: new K and V into gpu slots, and attention over runs from every tier.

Sits between the runtime and the parts that must not know each other (manager, transfer, ring, attention): ADR 0001.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kvtier.attention import Partial, causal_attention, finish, merge, pack, partial_attention
from kvtier.block_table import BlockTable
from kvtier.errors import BudgetError, IntegrityError, UnsupportedError
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.plan import StepPlan
from kvtier.ring import SliceRing
from kvtier.step import Step
from kvtier.stores.gpu import GpuStore
from kvtier.types import AttentionMode, LayerGroup, Tier


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may take of the gpu budget, fixed when the runtime is built."""

    max_chunk: int
    """Most new tokens of one step: `prefill_chunk`, or fewer where scratch would not fit."""
    rows_at_once: int
    """Blocks whose partial results of a full chunk exist at the same time."""
    gather_bytes: int
    """Room for one assembled layer (K, padded to 64 bytes, then V); 0 in blockwise mode."""


class StepExecutor:
    """Opens steps on sequences of one layer group. One step at a time."""

    def __init__(
        self,
        group: LayerGroup,
        manager: TierManager,
        store: GpuStore,
        ring: SliceRing | None,
        metrics: Metrics,
        mode: AttentionMode,
        limits: StepLimits,
    ) -> None:
        self.group, self.manager, self.store, self.ring = group, manager, store, ring
        self.metrics, self.mode, self.limits = metrics, mode, limits
        self._open: Step | None = None
        self.positions = {layer: position for position, layer in enumerate(group.layers)}
        device = torch.device(group.device)
        # A byte arena that starts aligned: bits of the gathered call depend on 64-byte-aligned K and V.
        self.gather_arena = torch.empty(limits.gather_bytes // 64 * 64, dtype=torch.uint8, device=device)
        self.gather_start = -self.gather_arena.data_ptr() % 64

    def chunk(self, table: BlockTable) -> int:
        """How many new tokens the next step of this sequence may have."""
        return max(1, min(self.limits.max_chunk, self.manager.max_new_tokens(table)))

    def open(self, table: BlockTable, num_new: int) -> OpenStep:
        """Reserve everything that the step needs, all or nothing, and start streaming layer 0.

        Raises:
            BudgetError: gathered mode, and the assembled layer does not fit its room.
            CapacityError, BlockLostError, TransferTimeoutError: as `TierManager.begin_step`.
            After each of them the sequence is as before.
        """
        if self._open is not None:
            raise UnsupportedError(
                "a step of this TieredKV is open on this thread: do not call it from inside its own forward"
            )
        if self.mode is AttentionMode.GATHERED:
            self._check_gather(table.num_tokens + num_new)
        step = self._open = self.manager.begin_step(table, num_new)
        try:
            plan = self.manager.plan(table)
            if plan.streamed:
                if self.ring is None:
                    raise IntegrityError("blocks lie on slower tiers, but there is no ring to stream them through")
                self.ring.begin(plan.streamed)
            return OpenStep(self, step, plan)
        except BaseException:
            self.abort(step)
            raise

    def _check_gather(self, num_tokens: int) -> None:
        shape = self.group.shape
        needed = self.gather_start + sum(self.layer_bytes(num_tokens))
        if needed > self.gather_arena.numel():
            raise BudgetError(
                f"attention: gathered assembles one layer: {num_tokens} tokens x {shape.kv_heads} kv heads x "
                f"({shape.key_dim} + {shape.value_dim}) x {shape.element_bytes} bytes = {needed} bytes, and the gpu "
                f"budget leaves room for {self.limits.gather_bytes}; raise tiers.gpu.budget or use attention: blockwise"
            )

    def layer_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of one assembled layer: K, padded so that V behind it is aligned, and V."""
        shape = self.group.shape
        key_bytes, value_bytes = (
            num_tokens * shape.kv_heads * dim * shape.element_bytes for dim in (shape.key_dim, shape.value_dim)
        )
        return key_bytes + -key_bytes % 64, value_bytes

    def commit(self, opened: OpenStep, token_ids: Sequence[int] | None) -> None:
        """Commit a step whose forward has returned; raises UnsupportedError (and aborts) if a layer did not append."""
        try:
            opened.step.check_complete(len(self.group.layers))
            if self.ring is not None:
                self.ring.drain()
        except BaseException:
            self.abort(opened.step)
            raise
        self._open = None
        self.manager.commit_step(opened.step, token_ids)

    def abort(self, step: Step) -> None:
        """Drop everything pending; the sequence is as before the step. Idempotent."""
        self._open = None
        try:
            if self.ring is not None:
                self.ring.drain()
        finally:
            self.manager.abort_step(step)

    @property
    def is_open(self) -> bool:
        """Whether a step is open. With the turn held, it can only be one of this very thread."""
        return self._open is not None

    def close(self) -> bool:
        """Stop streaming and let go of the arena; whether all reads have ended."""
        self.gather_arena = torch.empty(0, dtype=torch.uint8)
        return self.ring is None or self.ring.close()


class OpenStep:
    """One step while the model's forward runs: what `current_step` points to."""

    def __init__(self, executor: StepExecutor, step: Step, plan: StepPlan) -> None:
        self._executor, self.step, self._plan = executor, step, plan
        self._metrics = executor.manager.metrics_of(step.table.sequence)
        self._new: dict[int, tuple[int, int]] = {}

    @property
    def mode(self) -> AttentionMode:
        """How this step attends."""
        return self._executor.mode

    def _position(self, layer: int) -> int:
        position = self._executor.positions.get(layer)
        if position is None:
            raise UnsupportedError(f"layer {layer} is not one of the tiered layers {self._executor.group.layers}")
        return position

    def append(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write the step's new K and V of one layer into its gpu slots.

        Args:
            keys: `[1, kv_heads, num_new, key_dim]` in the group's dtype, on its device, without grad.
            values: `[1, kv_heads, num_new, value_dim]`.

        Raises:
            UnsupportedError: anything else; nothing was written.
        """
        shape, store = self._executor.group.shape, self._executor.store
        position = self._position(layer)
        num_new = self.step.num_new
        wanted = ((1, shape.kv_heads, num_new, shape.key_dim), (1, shape.kv_heads, num_new, shape.value_dim))
        dtype = store.keys[position].dtype
        if (tuple(keys.shape), tuple(values.shape)) != wanted or keys.dtype != dtype or values.dtype != dtype:
            raise UnsupportedError(
                f"layer {layer} appended K {tuple(keys.shape)} {keys.dtype} and V {tuple(values.shape)} "
                f"{values.dtype}; the wrapped model's config says K {wanted[0]} and V {wanted[1]} in {dtype}"
            )
        if keys.requires_grad or values.requires_grad:
            raise UnsupportedError("keys that require grad cannot be cached exactly: call under torch.no_grad()")
        self.step.append(layer, num_new)
        self._new[layer] = (keys.data_ptr(), values.data_ptr())
        for write in self.step.writes:
            new, old = slice(write.offset, write.offset + write.count), slice(write.start, write.start + write.count)
            store.keys[position][write.slot, :, old] = keys[0, :, new]
            store.values[position][write.slot, :, old] = values[0, :, new]

    def _begin_attention(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> int:
        """The layer's slice index.

        Raises UnsupportedError unless K and V are what the layer appended in this step: a module that is called from
        inside the step, but not as part of it, must not attend over this sequence.
        """
        position = self._position(layer)
        if self._new.get(layer) != (keys.data_ptr(), values.data_ptr()) or layer in self.step.attended:
            raise UnsupportedError(
                f"layer {layer} attends with K and V that it did not append in this step: KV shared between layers, "
                "changed after the append, or a call from inside the model's forward is not supported"
            )
        self.step.attended.add(layer)
        return position

    def attend(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Causal attention of the new tokens over the whole sequence.

        Args:
            query: `[1, heads, num_new, key_dim]`.
            keys, values: what `append` was given for this layer.

        Returns:
            `[1, num_new, heads, value_dim]`, contiguous, in the query's dtype.

        Raises:
            BlockLostError, TransferTimeoutError: the step must be aborted.
        """
        position = self._begin_attention(layer, keys, values)
        kv_heads, num_new = self._executor.group.shape.kv_heads, self.step.num_new
        packed = pack(query, kv_heads)
        parts: list[Partial] = []
        for piece_keys, piece_values in self._past(position, layer):
            parts.append(partial_attention(packed, piece_keys, piece_values, scale))
            if num_new > 1:
                parts = [merge(parts)]  # a chunk's partial results are large: never more than one group of them
        if num_new > 1:
            parts.append(causal_attention(query, keys, values, scale))
        return finish(parts, query.shape[1], query.dtype)

    def _past(self, position: int, layer: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Pieces that every new token sees whole: full blocks wherever they lie, and the tail's committed tokens.

        A single new token sees itself too, so it is taken with its tail in one piece.
        """
        store, step = self._executor.store, self.step
        keys, values = store.keys[position], store.values[position]
        at_once = self._executor.limits.rows_at_once if step.num_new > 1 else 1 << 30
        for run in self._plan.runs:
            for first in range(run.first, run.first + run.count, at_once):
                view = slice(first, min(first + at_once, run.first + run.count))
                yield keys[view], values[view]
        if step.num_new == 1:
            write = step.writes[0]
            yield _tail(keys, write.slot, write.start + 1), _tail(values, write.slot, write.start + 1)
        elif step.tail_slot is not None:
            length = step.writes[0].start
            yield _tail(keys, step.tail_slot, length), _tail(values, step.tail_slot, length)
        for _, streamed_keys, streamed_values in self._streamed(position):
            for first in range(0, streamed_keys.shape[0], at_once):
                view = slice(first, first + at_once)
                yield streamed_keys[view], streamed_values[view]
        self._count(len(self._plan.resident), Tier.GPU)

    def _streamed(self, position: int) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor]]:
        ring = self._executor.ring
        if ring is None or not self._plan.streamed:
            return
        slice_bytes = self._executor.group.shape.slice_bytes
        for group in ring.groups(position):
            yield [source.index for source in group.sources], group.keys, group.values
            for source in group.sources:
                self._executor.metrics.bytes_moved[(source.tier, Tier.GPU)] += slice_bytes
                self._count(1, source.tier)
                if source.tier is Tier.NVME:
                    self._executor.metrics.nvme_sole_reads += 1
                    self._metrics.nvme_read_bytes += slice_bytes

    def _count(self, num_slices: int, tier: Tier) -> None:
        self._executor.metrics.slices_read[tier] += num_slices
        self._metrics.slices_read[tier] += num_slices

    def gather(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's whole K and V as the plain cache would hold them: `[1, kv_heads, length, dim]`, contiguous,
        64-byte-aligned. Valid until the next call.

        Raises:
            BlockLostError, TransferTimeoutError: the step must be aborted.
        """
        executor, step, shape = self._executor, self.step, self._executor.group.shape
        position = self._begin_attention(layer, keys, values)
        total = step.committed + step.num_new
        padded_bytes, _ = executor.layer_bytes(total)
        # There is room: it was checked when the step was opened.
        arena = executor.gather_arena[executor.gather_start :].view(keys.dtype)
        heads, middle = shape.kv_heads, padded_bytes // shape.element_bytes
        whole_keys = arena[: heads * total * shape.key_dim].view(heads, total, shape.key_dim)
        whole_values = arena[middle : middle + heads * total * shape.value_dim].view(heads, total, shape.value_dim)
        store, block_tokens = executor.store, shape.block_tokens

        def put(index: int, length: int, block_keys: torch.Tensor, block_values: torch.Tensor) -> None:
            at = slice(index * block_tokens, index * block_tokens + length)
            whole_keys[:, at] = block_keys[:, :length]
            whole_values[:, at] = block_values[:, :length]

        for block in self._plan.resident:
            put(block.index, block_tokens, store.keys[position][block.slot], store.values[position][block.slot])
        if step.tail_slot is not None:
            full = step.table.num_full_blocks
            tail = step.table.tail_tokens
            put(full, tail, store.keys[position][step.tail_slot], store.values[position][step.tail_slot])
        for indices, group_keys, group_values in self._streamed(position):
            for row, index in enumerate(indices):
                put(index, block_tokens, group_keys[row], group_values[row])
        self._count(len(self._plan.resident), Tier.GPU)
        whole_keys[:, step.committed :] = keys[0]
        whole_values[:, step.committed :] = values[0]
        return whole_keys.unsqueeze(0), whole_values.unsqueeze(0)


def _tail(memory: torch.Tensor, slot: int, length: int) -> torch.Tensor:
    return memory[slot : slot + 1, :, :length]
