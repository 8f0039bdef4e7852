"""The bound on a decode step and on the first token: `kvtier.bound`, predicted. Pure Python.

Each edge carries what exact attention cannot do without, at a rate that the doctor measured.
"""

from __future__ import annotations

from kvtier.bound import Bound, Edge
from kvtier.planner.layout import Layout, Placement
from kvtier.planner.rates import Rates
from kvtier.stores.space_limits import expected_frac
from kvtier.types import AttentionMode, Tier


def rows_at_once(layout: Layout, users: int) -> int:
    """Users that one decode step can serve as rows of a batch; 0 where the gpu budget serves nobody.

    Each row's tail needs a slot of the gpu tier, and attention's scratch room for its results.
    """
    gpu = layout.gpu
    if gpu is None:
        return 0
    most = min(users, gpu.num_slots)
    if layout.config.attention is AttentionMode.GATHERED:
        layer = layout.shape.slice_bytes // layout.shape.block_tokens * layout.context_tokens
        return min(most, max(0, gpu.gather_bytes - 128) // layer)
    low = 0
    while low < most:  # scratch grows with each row
        middle = (low + most + 1) // 2
        fits = gpu.cost.scratch_bytes(1, gpu.num_pieces, middle) <= gpu.scratch_bytes
        low, most = (middle, most) if fits else (low, middle - 1)
    return low


def decode_round(
    layout: Layout, rates: Rates, users: int, num_threads: int | None = None, placed: Placement | None = None
) -> Bound:
    """One new token for each of `users`, in as few steps as the gpu budget allows.

    Args:
        num_threads: torch's, on a machine without CUDA; None: all cores. The doctor knows one and all.
        placed: where their blocks lie; None: where `layout` places them.
    """
    card, context, shape = layout.card, layout.context_tokens, layout.shape
    steps = -(-users // max(1, rows_at_once(layout, users)))
    placed = placed or layout.place(users)
    kv = users * card.kv_bytes(context)
    if layout.config.attention is AttentionMode.GATHERED:
        kv += 2 * users * card.tiered_bytes(context)  # read and written once more, where a layer is assembled
    attended = card.num_full * context + card.num_window * card.kept_window_tokens(context)
    operations = users * (2 * card.read_parameters + 4 * card.heads * card.head_dim * attended)
    below = (placed.blocks[Tier.CPU] + placed.blocks[Tier.NVME]) * shape.block_bytes
    weights = steps * card.read_parameters * card.element_bytes
    return Bound(
        (
            Edge("device memory", weights + kv, rates.read_memory(card.dtype, num_threads)),
            Edge("compute", operations, rates.flop(card.dtype, num_threads)),
            *_links(layout, rates, up=below, down=0),
            *_disk(layout, rates, read=placed.blocks[Tier.NVME] * shape.block_bytes, written=0),
        )
    )


def first_token(layout: Layout, rates: Rates, users: int, num_threads: int | None = None) -> Bound:
    """One user's whole context computed, nothing of it found, while the others' KV is there and idle.

    Chunk after chunk: each reads the weights, and what the user already has below the gpu tier; what the new blocks
    displace goes down.
    """
    card, context, shape = layout.card, layout.context_tokens, layout.shape
    rooms = {room.tier: room for room in layout.rooms}
    chunk = layout.gpu.max_chunk if layout.gpu is not None else layout.config.prefill_chunk
    starts = range(0, context, chunk)
    # The running conversation's blocks stay; idle ones' go down first.
    held = {tier: rooms[tier].low_slots if tier in rooms else 0 for tier in Tier}
    from_cpu = from_nvme = 0
    for start in starts:
        spilled = max(0, start // layout.config.block_tokens - held[Tier.GPU])
        from_cpu += min(spilled, held[Tier.CPU])
        from_nvme += max(0, spilled - held[Tier.CPU])
    total, own = users * layout.blocks_per_user, layout.blocks_per_user
    down = min(own, max(0, total - held[Tier.GPU])) if len(rooms) > 1 else 0
    to_nvme = min(own, max(0, total - held[Tier.GPU] - held[Tier.CPU])) if Tier.NVME in rooms else 0
    pairs = card.num_full * context * (context + 1) // 2
    if card.num_window:
        kept = card.kept_window_tokens(context)
        pairs += card.num_window * (kept * (kept + 1) // 2 + (context - kept) * kept)
    head = card.read_parameters - card.layer_parameters
    operations = 2 * (context * card.layer_parameters + head) + 4 * card.heads * card.head_dim * pairs
    read = sum(card.kv_bytes(start) for start in starts) + len(starts) * card.read_parameters * card.element_bytes
    size = shape.block_bytes
    return Bound(
        (
            Edge("device memory", read, rates.read_memory(card.dtype, num_threads)),
            Edge("compute", operations, rates.flop(card.dtype, num_threads)),
            *_links(layout, rates, up=(from_cpu + from_nvme) * size, down=down * size),
            *_disk(layout, rates, read=from_nvme * size, written=to_nvme * size),
        )
    )


def _links(layout: Layout, rates: Rates, *, up: float, down: float) -> list[Edge]:
    """Between host and device. Without CUDA they are one memory, and its KV was counted as read there."""
    if layout.device != "cuda":
        return []
    return [
        Edge("host to device", up, rates.copies(to_device=True)),
        Edge("device to host", down, rates.copies(to_device=False)),
    ]


def _disk(layout: Layout, rates: Rates, *, read: float, written: float) -> list[Edge]:
    """Reads are verified, and decoded where they were compressed, on the threads that read."""
    nvme = layout.config.tiers.nvme
    if nvme is None:
        return []
    frac = expected_frac(layout.shape, nvme.compression)
    request, threads = int(layout.shape.slice_bytes * frac), max(1, min(layout.config.io_threads, rates.cores))
    edges = [
        Edge("nvme read", read * frac, rates.disk_rate("read", nvme.io, request)),
        Edge("nvme write", written * frac, rates.disk_rate("write", nvme.io, layout.shape.block_bytes)),
        Edge("checksums", read * frac, None if rates.checksum is None else rates.checksum * threads),
    ]
    if frac < 1.0:
        edges.append(Edge("decompression", read, None if rates.decompress is None else rates.decompress * threads))
    return edges
