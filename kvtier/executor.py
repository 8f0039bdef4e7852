"""Opens, commits and aborts steps on the batches of one layer group.

Sits between the runtime and the parts that must not know each other (manager, transfer, ring, attention): ADR 0001.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.batch import Batch
from kvtier.budget import AttentionCost
from kvtier.errors import BudgetError, IntegrityError, UnsupportedError
from kvtier.host_attention import HostShare
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.open_step import OpenStep
from kvtier.ring import SliceRing
from kvtier.size import size_and_bytes
from kvtier.step import NewColumns, Step
from kvtier.step_memory import StepMemory
from kvtier.stores.slab import LayerViews
from kvtier.types import AttentionMode, BlockId, LayerGroup, Tier


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What one step may take of the gpu budget, fixed when the runtime is built."""

    max_chunk: int
    """Most new tokens of a one-row step: `prefill_chunk`, or fewer where scratch would not fit."""
    num_pieces: int
    """Blocks whose partial results of a full chunk exist at the same time."""
    gather_bytes: int
    """Room for one assembled layer (K, padded to 64 bytes, then V); 0 in blockwise mode."""
    cost: AttentionCost
    scratch_bytes: int


class StepExecutor:
    """Opens steps on batches of one layer group. One step at a time."""

    def __init__(
        self,
        group: LayerGroup,
        manager: TierManager,
        slabs: Mapping[Tier, LayerViews],
        ring: SliceRing | None,
        metrics: Metrics,
        mode: AttentionMode,
        limits: StepLimits,
        share: HostShare,
    ) -> None:
        self.group, self.manager, self.ring, self.mode, self.limits = group, manager, ring, mode, limits
        self._open: Step | None = None
        device = torch.device(group.device)
        # A byte arena that starts aligned: bits of the gathered call depend on 64-byte-aligned K and V.
        arena = torch.empty(limits.gather_bytes // 64 * 64, dtype=torch.uint8, device=device)
        self.memory = StepMemory(group, slabs, ring, metrics, mode, limits.num_pieces, arena, share)

    def chunk(self, batch: Batch) -> int:
        """How many new tokens a row the next step of this batch may have.

        Raises:
            BudgetError: not even one a row: the message prints the sum. Nothing changed.
        """
        limits, rows = self.limits, batch.num_rows
        slots = self.manager.max_new_tokens(batch)
        scratch = limits.max_chunk
        if self.mode is AttentionMode.BLOCKWISE and rows > 1:
            scratch = limits.cost.max_queries(limits.scratch_bytes, limits.num_pieces, rows, limits.max_chunk)
        if min(slots, scratch) < 1:
            needed = limits.cost.scratch_bytes(1, limits.num_pieces, rows)
            raise BudgetError(
                f"one new token in each of {rows} rows needs {rows} gpu slots, of which the gpu tier has "
                f"{self.manager.num_gpu_slots}, and {size_and_bytes(needed)} of scratch, of which it has "
                f"{size_and_bytes(limits.scratch_bytes)}: raise tiers.gpu.budget, lower block_tokens, or use fewer rows"
            )
        return min(limits.max_chunk, scratch, slots)

    def open(self, batch: Batch, new: Sequence[NewColumns]) -> OpenStep:
        """Reserve everything that the step needs, all or nothing, and start streaming layer 0.

        Raises:
            BudgetError: gathered mode, and the assembled layer does not fit its room.
            CapacityError, BlockLostError, TransferTimeoutError: as `TierManager.begin_step`.
            After each of them the batch is as before.
        """
        if self._open is not None:
            raise UnsupportedError(
                "a step of this TieredKV is open on this thread: do not call it from inside its own forward"
            )
        if self.mode is AttentionMode.GATHERED:
            self._check_gather(batch.num_rows, batch.length + new[0].num_columns)
        step = self._open = self.manager.begin_step(batch, new)
        try:
            plan = self.manager.plan(batch, self.memory.host_frac())
            if plan.streamed:
                if self.ring is None:
                    raise IntegrityError("blocks lie on slower tiers, but there is no ring to stream them through")
                self.ring.begin(plan)
            return OpenStep(self.memory, step, plan)
        except BaseException:  # a Ctrl-C too: no step stays open
            self.abort(step)
            raise

    def unreadable(self, batch: Batch) -> list[BlockId]:
        """Read the batch's full blocks outside of the gpu tier; those that cannot be read. Costs a step's reads.

        Raises:
            TransferTimeoutError: as `SliceRing.unreadable`. BlockLostError: as `TierManager.plan`.
        """
        plan = self.manager.plan(batch)
        return [] if self.ring is None or not plan.streamed else self.ring.unreadable(plan)

    def _check_gather(self, num_rows: int, num_columns: int) -> None:
        shape = self.group.shape
        needed = self.memory.gather_start + sum(self.memory.layer_bytes(num_rows * num_columns))
        if needed > self.memory.arena.numel():
            raise BudgetError(
                f"attention: gathered assembles one layer: {num_rows} rows x {num_columns} tokens x {shape.kv_heads} "
                f"kv heads x ({shape.key_dim} + {shape.value_dim}) x {shape.element_bytes} bytes = "
                f"{size_and_bytes(needed)}, and the gpu budget leaves room for "
                f"{size_and_bytes(self.limits.gather_bytes)}; raise tiers.gpu.budget or use attention: blockwise"
            )

    def commit(self, opened: OpenStep) -> None:
        """Commit a step whose forward has returned; raises UnsupportedError (and aborts) if a layer did not append."""
        try:
            opened.step.check_complete(self.group.layers)
            if self.ring is not None and opened.streams:
                self.ring.finish()
        except BaseException:  # a Ctrl-C too: no step stays open
            self.abort(opened.step)
            raise
        self._open = None
        self.manager.commit_step(opened.step)

    def abort(self, step: Step) -> None:
        """Drop everything pending; the batch is as before the step. Idempotent."""
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

    def close(self, timeout_s: float) -> bool:
        """Stop streaming and let go of the arena; whether all reads have ended within `timeout_s`."""
        self.memory.close()
        return self.ring is None or self.ring.close(timeout_s)
