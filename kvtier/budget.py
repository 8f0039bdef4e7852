"""Budgets in bytes into slots, ring, scratch, staging and room for the gathered layer: the one place for this sum."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from kvtier.config import KVTierConfig
from kvtier.config_tiers import MIN_PAGE_CACHE_BYTES
from kvtier.errors import BudgetError
from kvtier.size import size_and_bytes, whole_pages
from kvtier.types import AttentionMode, BlockShape, IoMode, Tier


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """What attention takes beside K and V."""

    heads: int
    value_dim: int
    piece_bytes: int = 0
    """The fp32 copy of one block's K and V, where the model's dtype is computed in fp32."""
    score_tokens: int = 0
    """The longest piece whose scores are written out, where no kernel does without; the new tokens' own tile too."""

    def scratch_bytes(self, num_queries: int, num_pieces: int, num_rows: int = 1) -> int:
        """Bytes for `num_queries` new tokens a row, with `num_pieces` blocks a call.

        Each piece's output, its fp32 copy and its weighted copy; each row's merged result so far, its successor, the
        causal tile and its copy.
        """
        unit = self.heads * num_queries * (self.value_dim + 1) * 4
        scores = self.heads * num_queries * max(self.score_tokens, num_queries) * 4 if self.score_tokens else 0
        return (3 * num_pieces + 3 + num_rows) * unit + num_pieces * (self.piece_bytes + 3 * scores)

    def max_queries(self, room_bytes: int, num_pieces: int, num_rows: int, most: int) -> int:
        """The most new tokens a row, up to `most`, whose scratch fits; 0: not one."""
        low = 0
        while low < most:
            middle = (low + most + 1) // 2
            if self.scratch_bytes(middle, num_pieces, num_rows) <= room_bytes:
                low = middle
            else:
                most = middle - 1
        return low


@dataclass(frozen=True, slots=True)
class GpuBudget:
    """How the gpu budget is spent. The parts never add up to more than `budget_bytes`."""

    budget_bytes: int
    num_slots: int
    slot_bytes: int
    ring_slices: int
    """0 when there is no slower tier to stream from."""
    slice_bytes: int
    cost: AttentionCost
    scratch_bytes: int
    gather_bytes: int
    """The gathered layer. What the model's own attention then allocates (repeated heads) is its, as without kvtier."""
    untiered_bytes: int
    """Room for the layers that keep transformers' own cache (windows, linear attention), of all caches together."""
    max_chunk: int
    num_pieces: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but slots and untiered layers."""
        return self.ring_slices * self.slice_bytes + self.scratch_bytes + self.gather_bytes


# Shares of the budget that fixed parts may take. A quarter for scratch keeps most of the tier for blocks; an eighth for
# the ring is several layers ahead where half of the KV is streamed (a sixteenth was one, and waited); gathered needs a
# whole layer of the longest context.
SCRATCH_SHARE = 4
RING_SHARE = 8
RING_MAX_BYTES = 256 << 20
PIECES_SHARE = 16
GATHER_SHARE = 2
MIN_SLOTS = 2  # a sealed or shared tail is copied from one slot into another
PIECES_MAX = 8


def split_gpu_budget(
    budget_bytes: int,
    shape: BlockShape,
    *,
    slot_bytes: int,
    heads: int,
    prefill_chunk: int,
    mode: AttentionMode,
    streams: bool,
    wide: bool = False,
    writes_scores: bool = False,
    untiered_frac: float = 0.0,
) -> GpuBudget:
    """Spend the gpu budget.

    Scratch is for the whole `prefill_chunk` where a quarter of the budget has room for it, else for a shorter chunk.

    Args:
        heads: query heads.
        streams: whether there is a slower tier.
        wide: whether attention computes in fp32 on copies of 16-bit K and V.
        writes_scores: whether attention has no fused kernel (soft-capping).
        untiered_frac: share for layers that keep transformers' own cache; 0.0 where there are none.

    Raises:
        BudgetError: below the minimum; the message prints the sum.
    """
    piece_bytes = shape.slice_bytes * 4 // shape.element_bytes if wide else 0
    cost = AttentionCost(heads, shape.value_dim, piece_bytes, shape.block_tokens if writes_scores else 0)
    gathered = mode is AttentionMode.GATHERED
    min_ring = 2 * shape.slice_bytes if streams else 0
    min_scratch = cost.scratch_bytes(1, 1)
    minimum = MIN_SLOTS * slot_bytes + min_ring + min_scratch
    untiered_bytes = int(budget_bytes * untiered_frac)
    rest = budget_bytes - untiered_bytes
    share = -(-rest // GATHER_SHARE) if gathered else 0
    if rest - share < minimum:
        least = minimum * GATHER_SHARE if gathered else minimum
        if untiered_frac:
            wanted, least = least, int(least / (1 - untiered_frac))
            while least - int(least * untiered_frac) < wanted:
                least += 1
            while least - 1 - int((least - 1) * untiered_frac) >= wanted:
                least -= 1
        raise BudgetError(
            f"tiers.gpu.budget is {size_and_bytes(budget_bytes)}, its minimum is {size_and_bytes(least)}: {MIN_SLOTS} "
            f"blocks of {slot_bytes} bytes + a ring of {min_ring} + scratch of {min_scratch} for one token"
            f"{', and as much again for the layer that attention: gathered assembles' if gathered else ''}"
            f"{', and untiered_frac for layers that are not tiered' if untiered_frac else ''}. Raise it or lower "
            "block_tokens"
        )
    left = rest - share
    room = left - MIN_SLOTS * slot_bytes - min_ring
    if gathered:
        chunk = prefill_chunk
        scratch = min(cost.scratch_bytes(chunk, 1), room)
    else:
        chunk = max(1, cost.max_queries(min(left // SCRATCH_SHARE, room), 1, 1, prefill_chunk))
        scratch = cost.scratch_bytes(chunk, 1)
    pieces = 1
    while pieces < PIECES_MAX and cost.scratch_bytes(chunk, pieces + 1) <= min(left // PIECES_SHARE, room):
        pieces += 1
        scratch = cost.scratch_bytes(chunk, pieces)
    ring_bytes = min(left // RING_SHARE, RING_MAX_BYTES, left - MIN_SLOTS * slot_bytes - scratch)
    ring_slices = max(2, ring_bytes // shape.slice_bytes) if streams else 0
    num_slots = (left - scratch - ring_slices * shape.slice_bytes) // slot_bytes
    return GpuBudget(
        budget_bytes,
        num_slots,
        slot_bytes,
        ring_slices,
        shape.slice_bytes,
        cost,
        scratch,
        share,
        untiered_bytes,
        chunk,
        pieces,
    )


DIRECT_STREAM_THREADS = 32


def most_stream_threads(config: KVTierConfig, ring_slices: int) -> int:
    """The most threads that stream slices from files, whichever way these are read in the end."""
    nvme = config.tiers.nvme
    if nvme is None or nvme.io is IoMode.MMAP:
        return config.io_threads
    # Past the page cache only many reads at a time keep a disk busy; more than the ring holds would do nothing.
    return max(config.io_threads, min(DIRECT_STREAM_THREADS, ring_slices))


def staging_bytes(config: KVTierConfig, shape: BlockShape, ring_slices: int) -> int:
    """Host memory for copies between files and a device with queues: for each thread one buffer, which it may hold
    while the disk hangs.

    A block for each that moves blocks, a slice for each that streams them. It is the cpu tier's, of `tiers.cpu.budget`;
    without one the files', of `tiers.nvme.page_cache`.
    """
    if not config.tiers.budget(Tier.NVME).amount:
        return 0
    slices_bytes = most_stream_threads(config, ring_slices) * whole_pages(shape.slice_bytes)
    return config.io_threads * whole_pages(shape.block_bytes) + slices_bytes


def cpu_slots(budget_bytes: int, shape: BlockShape, slot_bytes: int, staging: int = 0) -> int:
    """Slots of the cpu tier beside so many bytes of staging. Raises BudgetError: not one."""
    num_slots = (budget_bytes - staging) // slot_bytes
    if num_slots < 1:
        more = f" + {_STAGING} {size_and_bytes(staging)}" if staging else ""
        raise BudgetError(
            f"tiers.cpu.budget is {size_and_bytes(budget_bytes)}, its minimum is "
            f"{size_and_bytes(slot_bytes + staging)}: one block of {shape.block_tokens} tokens{more}. Raise it, lower "
            f"block_tokens{' or io_threads' if staging else ''}, or leave the cpu tier out"
            + (" (tiers.nvme.page_cache then has the staging)" if staging else "")
        )
    return num_slots


def files_bytes(page_cache_bytes: int, staging: int, rooms: int) -> int:
    """What `tiers.nvme.page_cache` leaves for files beside what moving threads take.

    Args:
        staging: of a device with queues, where there is no cpu tier.
        rooms: for blocks of joined slabs, where there is no such device.

    Raises:
        BudgetError: less than files need.
    """
    least_bytes = MIN_PAGE_CACHE_BYTES + staging + rooms
    if (staging or rooms) and page_cache_bytes < least_bytes:
        what = _STAGING if staging else "for blocks on their way, one buffer for each of io_threads,"
        raise BudgetError(
            f"tiers.nvme.page_cache is {size_and_bytes(page_cache_bytes)}, its minimum is "
            f"{size_and_bytes(least_bytes)}: {size_and_bytes(MIN_PAGE_CACHE_BYTES)} for files + {what} "
            f"{size_and_bytes(staging + rooms)}. Raise it, lower block_tokens or io_threads"
            + (", or add a cpu tier, whose budget then has the staging" if staging else "")
        )
    return page_cache_bytes - staging - rooms


_STAGING = "for staging, a block and slices on their way to or from the device for each of io_threads,"


def gpu_bytes_for(num_slots: int, shape: BlockShape, *, gather_bytes: int = 0, **how: Any) -> int:
    """The least budget, in whole blocks, that has so many slots, and in gathered mode room for such a layer.

    Args:
        how: as `split_gpu_budget`.
    """
    for budget_bytes in itertools.count(shape.block_bytes, shape.block_bytes):
        try:
            split = split_gpu_budget(budget_bytes, shape, **how)
        except BudgetError:
            continue
        if split.num_slots >= num_slots and split.gather_bytes >= gather_bytes:
            return budget_bytes
    raise AssertionError("unreachable: the count does not end")
