"""Budgets in bytes into slots, ring, scratch and room for the gathered layer: the one place that does this sum."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.errors import BudgetError
from kvtier.types import AttentionMode, BlockShape


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """How the gpu budget is spent. The parts never add up to more than `budget_bytes`."""

    budget_bytes: int
    num_slots: int
    slot_bytes: int
    ring_slices: int
    """0 when there is no slower tier to stream from."""
    slice_bytes: int
    scratch_bytes: int
    gather_bytes: int
    """The gathered layer. What the model's own attention then allocates (repeated heads) is its, as without kvtier."""
    max_chunk: int
    rows_at_once: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but slots."""
        return self.ring_slices * self.slice_bytes + self.scratch_bytes + self.gather_bytes


# Shares of the budget that fixed parts may take. A quarter for scratch keeps most of the tier for blocks; a sixteenth
# for the ring is several layers ahead for models that need streaming at all; gathered needs a whole layer of the
# longest context.
SCRATCH_SHARE = 4
RING_SHARE = 16
RING_MAX_BYTES = 256 << 20
GATHER_SHARE = 2
MIN_SLOTS = 2  # a sealed or shared tail is copied from one slot into another
PIECES_MAX = 8


def scratch_bytes(heads: int, num_queries: int, value_dim: int, rows_at_once: int) -> int:
    """Bytes that attention of `num_queries` new tokens takes beside K and V, with `rows_at_once` pieces a call.

    Each piece's output, its fp32 copy and its weighted copy; the merged result so far, twice, and the causal tile.
    """
    return (3 * rows_at_once + 4) * heads * num_queries * (value_dim + 1) * 4


def split_gpu_budget(
    budget_bytes: int,
    shape: BlockShape,
    *,
    slot_bytes: int,
    heads: int,
    prefill_chunk: int,
    mode: AttentionMode,
    streams: bool,
) -> GpuBudget:
    """Spend the gpu budget.

    Scratch is for the whole `prefill_chunk` where a quarter of the budget has room for it, else for a shorter chunk.

    Args:
        heads: query heads.
        streams: whether there is a slower tier.

    Raises:
        BudgetError: below the minimum; the message prints the sum.
    """
    min_ring = 2 * shape.slice_bytes if streams else 0
    min_scratch = scratch_bytes(heads, 1, shape.value_dim, 1)
    minimum = MIN_SLOTS * slot_bytes + min_ring + min_scratch
    gathered = mode is AttentionMode.GATHERED
    share = -(-budget_bytes // GATHER_SHARE) if gathered else 0
    if budget_bytes - share < minimum:
        factor = GATHER_SHARE / (GATHER_SHARE - 1) if gathered else 1
        raise BudgetError(
            f"tiers.gpu.budget is {budget_bytes} bytes, its minimum is {int(minimum * factor)}: {MIN_SLOTS} blocks of "
            f"{slot_bytes} + a ring of {min_ring} + scratch of {min_scratch} for one token"
            f"{', and as much again for the layer that attention: gathered assembles' if gathered else ''}. "
            "Raise it, or lower block_tokens"
        )
    left = budget_bytes - share
    unit = scratch_bytes(heads, 1, shape.value_dim, 1)
    chunk = prefill_chunk if gathered else max(1, min(prefill_chunk, left // SCRATCH_SHARE // unit))
    scratch = min(unit * chunk, left - MIN_SLOTS * slot_bytes - min_ring) if gathered else unit * chunk
    while chunk > 1 and not gathered and MIN_SLOTS * slot_bytes + min_ring + scratch > left:
        chunk //= 2
        scratch = unit * chunk
    rows = 1
    while rows < PIECES_MAX and scratch_bytes(heads, chunk, shape.value_dim, rows + 1) <= left // RING_SHARE:
        rows += 1
        scratch = scratch_bytes(heads, chunk, shape.value_dim, rows)
    ring_bytes = min(left // RING_SHARE, RING_MAX_BYTES, left - MIN_SLOTS * slot_bytes - scratch)
    ring_slices = max(2, ring_bytes // shape.slice_bytes) if streams else 0
    num_slots = (left - scratch - ring_slices * shape.slice_bytes) // slot_bytes
    return GpuBudget(
        budget_bytes,
        num_slots,
        slot_bytes,
        ring_slices,
        shape.slice_bytes,
        scratch,
        share,
        chunk,
        rows,
    )
