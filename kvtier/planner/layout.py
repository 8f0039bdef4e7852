"""Where the KV of so many users lies under a config, by the same sums as the runtime's, and what breaks first.

No torch: what a slot takes and how many a budget holds is asked of their owners (`budget`, `stores.space_limits`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.budget import GpuBudget, cpu_slots, files_bytes, split_gpu_budget, staging_bytes
from kvtier.config import KVTierConfig
from kvtier.config_tiers import NvmeTierConfig
from kvtier.errors import BudgetError, ConfigError
from kvtier.planner.card import ModelCard
from kvtier.planner.rates import HOW, Rates
from kvtier.size import SizeUnit, size_and_bytes, size_words
from kvtier.stores.nvme_layout import RESERVE_FREE_FRAC, min_budget_bytes, sessions_room_bytes
from kvtier.stores.slot_format import Geometry
from kvtier.stores.slot_payload import joined_room_bytes
from kvtier.stores.space_limits import SpaceLimits, expected_frac
from kvtier.types import AttentionMode, BlockShape, Tier

_LENGTH_BYTES = 8  # transformers keeps each window's length in a tensor
_SEGMENT_BYTES = 1 << 30  # as NvmeStore cuts its files


@dataclass(frozen=True, slots=True)
class Limit:
    """What stops a config from serving more users. `max_users` is the last count that works; 0: not one."""

    name: str
    max_users: int
    words: str


@dataclass(frozen=True, slots=True)
class TierRoom:
    """One tier under the config."""

    tier: Tier
    budget_bytes: int
    num_slots: int
    high_slots: int
    """Above so many blocks it gives up some to the next tier; `num_slots` where there is none."""
    low_slots: int
    """Down to so many."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Blocks of all users together, by tier, once blocks have gone where they go between steps."""

    users: int
    blocks: dict[Tier, int]
    missing: int
    """Blocks for which no tier has room: of idle conversations they are dropped, and computed again when needed."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A model, a context and a config put together. Sizes in bytes."""

    card: ModelCard
    config: KVTierConfig
    context_tokens: int
    device: str
    device_bytes: int
    """Memory of the device, for weights and the gpu budget."""
    shape: BlockShape
    gpu: GpuBudget | None
    """None: the gpu budget is below its minimum."""
    staging_bytes: int
    """Of the cpu tier's budget, or without one of the page cache's, for copies between files and a CUDA device."""
    rooms: tuple[TierRoom, ...]
    limits: tuple[Limit, ...]
    """Tightest first."""

    @property
    def blocks_per_user(self) -> int:
        """Blocks of one user's whole context; the last takes a whole one."""
        return -(-self.context_tokens // self.config.block_tokens)

    @property
    def num_slots(self) -> int:
        """Blocks that all tiers hold together."""
        return sum(room.num_slots for room in self.rooms)

    @property
    def max_users(self) -> int:
        """The most users that every limit allows."""
        return self.limits[0].max_users

    @property
    def max_users_without(self) -> int:
        """The most users whose KV fits in the device's memory beside the weights, without kvtier."""
        each = self.card.kv_bytes(self.context_tokens)
        return max(0, self.device_bytes - self.card.weights_bytes) // each

    def place(self, users: int) -> Placement:
        """Where the blocks of `users` lie: a tier that would be above `high` is filled to `low`. O(tiers)."""
        left = users * self.blocks_per_user
        blocks = dict.fromkeys(Tier, 0)
        for room in self.rooms:
            blocks[room.tier] = left if left <= room.high_slots else room.low_slots
            left -= blocks[room.tier]
        for room in reversed(self.rooms):  # no slower tier takes the rest: watermarks give way
            more = min(left, room.num_slots - blocks[room.tier])
            blocks[room.tier] += more
            left -= more
        return Placement(users, blocks, left)


def lay_out(
    card: ModelCard, config: KVTierConfig, context_tokens: int, rates: Rates | None, device_bytes: int | None = None
) -> Layout:
    """Put together what a plan is about.

    Args:
        rates: what percentages are of, and which device it is; without them it is taken to be CUDA.
        device_bytes: the device's memory; by default what `rates` say, else weights and gpu budget and no more.

    Raises:
        ConfigError: a percentage, and no rates to say of what.
    """
    device = "cuda" if rates is None else rates.device
    group = card.group(config.block_tokens, device)
    shape, tiers = group.shape, config.tiers
    measured = None if rates is None else rates.device_bytes
    total = device_bytes if device_bytes is not None else measured
    free = None if total is None else max(0, int(total) - card.weights_bytes)
    gpu_bytes = _resolve(config, Tier.GPU, free)
    cpu_bytes = _resolve(config, Tier.CPU, None if rates is None else rates.host_bytes)
    nvme_bytes = _resolve(config, Tier.NVME, None if rates is None else rates.disk_free_bytes)
    limits: list[Limit] = []
    gpu: GpuBudget | None = None
    try:
        gpu = split_gpu_budget(
            gpu_bytes,
            shape,
            slot_bytes=shape.block_bytes,  # a slab's slots are aligned to 64 bytes, which every block is
            heads=card.heads,
            prefill_chunk=config.prefill_chunk,
            mode=config.attention,
            streams=bool(cpu_bytes or nvme_bytes),
            wide=group.is_wide,
            writes_scores=card.writes_scores,
            untiered_frac=tiers.gpu.untiered_frac if group.num_untiered else 0.0,
        )
    except BudgetError as error:
        limits.append(Limit("gpu budget", 0, str(error)))
    slots = {Tier.GPU: 0 if gpu is None else gpu.num_slots, Tier.CPU: 0, Tier.NVME: 0}
    staging = staging_bytes(config, shape, gpu.ring_slices) if gpu is not None and device != "cpu" else 0
    try:
        if cpu_bytes:
            slots[Tier.CPU] = cpu_slots(cpu_bytes, shape, shape.block_bytes, staging)
    except BudgetError as error:
        limits.append(Limit("cpu budget", 0, str(error)))
    limits += _page_cache_limit(config, shape, rates, 0 if cpu_bytes else staging, device)
    if tiers.nvme is not None and nvme_bytes:
        slots[Tier.NVME] = _nvme_slots(shape, tiers.nvme, nvme_bytes)
    budgets = {Tier.GPU: gpu_bytes, Tier.CPU: cpu_bytes, Tier.NVME: nvme_bytes}
    layout = Layout(
        card,
        config,
        context_tokens,
        device,
        int(total) if total is not None else card.weights_bytes + gpu_bytes,
        shape,
        gpu,
        staging,
        tuple(_rooms(config, budgets, slots)),
        (),
    )
    limits += _limits(layout, budgets, rates)
    ordered = tuple(sorted(limits, key=lambda limit: limit.max_users))
    return dataclasses.replace(layout, limits=ordered)


def _resolve(config: KVTierConfig, tier: Tier, total: float | None) -> int:
    budget = config.tiers.budget(tier)
    if budget.unit is SizeUnit.PERCENT and total is None:
        raise ConfigError(
            f"tiers.{tier.label}.budget is {budget}, of what is not known. Mend: give a size, or the machine's "
            f"rates: {HOW}"
        )
    return budget.resolve(int(total or 0))


def _page_cache_limit(
    config: KVTierConfig, shape: BlockShape, rates: Rates | None, staging: int, device: str
) -> Iterator[Limit]:
    nvme, host_bytes = config.tiers.nvme, None if rates is None else rates.host_bytes
    if nvme is None or not nvme.budget.amount:
        return
    if nvme.page_cache.unit is SizeUnit.PERCENT and host_bytes is None:
        return  # of what is not known
    rooms = config.io_threads * joined_room_bytes(shape) if device == "cpu" and shape.key_dim == shape.value_dim else 0
    try:
        files_bytes(nvme.page_cache.resolve(int(host_bytes or 0)), staging, rooms)
    except BudgetError as error:
        yield Limit("page cache", 0, str(error))


def _nvme_slots(shape: BlockShape, nvme: NvmeTierConfig, num_bytes: int) -> int:
    """As NvmeStore opens an empty folder."""
    if num_bytes < min_budget_bytes(shape):
        return 0
    sessions_bytes = sessions_room_bytes(num_bytes, shape) if nvme.path is not None else 0
    frac = expected_frac(shape, nvme.compression)
    space = SpaceLimits(num_bytes, _SEGMENT_BYTES, RESERVE_FREE_FRAC, frac, sessions_bytes)
    return sum(space.new_segments(Geometry.of(shape)))


def _rooms(config: KVTierConfig, budgets: dict[Tier, int], slots: dict[Tier, int]) -> Iterator[TierRoom]:
    marks = {Tier.GPU: config.tiers.gpu, Tier.CPU: config.tiers.cpu}
    for tier in Tier:
        if not budgets[tier]:
            continue
        mark, num = marks.get(tier), slots[tier]
        is_last = not any(budgets[slower] for slower in Tier if slower > tier)
        high, low = (1.0, 1.0) if is_last or mark is None else (mark.high, mark.low)
        yield TierRoom(tier, budgets[tier], num, int(high * num), int(low * num))


def _limits(layout: Layout, budgets: dict[Tier, int], rates: Rates | None) -> Iterator[Limit]:
    card, shape, context = layout.card, layout.shape, layout.context_tokens
    together = card.weights_bytes + budgets[Tier.GPU]
    if together > layout.device_bytes:
        yield Limit(
            "device memory",
            0,
            f"weights of {size_words(card.weights_bytes)} and tiers.gpu.budget of {size_words(budgets[Tier.GPU])} "
            f"are {size_words(together)}, and the device has {size_words(layout.device_bytes)}: lower the budget, or "
            "take a smaller model or dtype",
        )
    least_bytes = min_budget_bytes(shape)
    if 0 < budgets[Tier.NVME] < least_bytes:
        yield Limit(
            "nvme budget",
            0,
            f"tiers.nvme.budget is {size_and_bytes(budgets[Tier.NVME])}, its minimum for blocks of "
            f"{shape.block_tokens} tokens is {size_and_bytes(least_bytes)}: raise it, lower block_tokens, or leave the "
            "tier out",
        )
    host = budgets[Tier.CPU] + (together if layout.device == "cpu" else 0)
    if rates is not None and rates.host_bytes is not None and host > rates.host_bytes:
        yield Limit(
            "host memory",
            0,
            f"the budgets in host memory{' and the weights' * (layout.device == 'cpu')} are {size_words(host)}, and "
            f"the process may use {size_words(rates.host_bytes)}: lower them",
        )
    gpu = layout.gpu
    if gpu is not None and layout.config.attention is AttentionMode.GATHERED:
        layer = shape.kv_heads * (shape.key_dim + shape.value_dim) * shape.element_bytes * context
        if layer + 128 > gpu.gather_bytes:  # K's padding, and where the arena begins
            yield Limit(
                "gathered layer",
                0,
                f"attention: gathered assembles one layer of {context:,} tokens, {size_words(layer)}, and the gpu "
                f"budget leaves {size_words(gpu.gather_bytes)}: raise tiers.gpu.budget or use attention: blockwise",
            )
    if gpu is not None and card.num_window:
        yield _window_limit(layout, gpu)
    yield _slots_limit(layout)


def _window_limit(layout: Layout, gpu: GpuBudget) -> Limit:
    """Windows of all users, and of the one that prefills what its last chunk leaves behind."""
    card, context = layout.card, layout.context_tokens
    each = card.window_bytes(context) + card.num_window * _LENGTH_BYTES
    chunk = min(layout.config.prefill_chunk, card.window_tokens, max(0, context - card.window_tokens))
    more = card.num_window * chunk * card.layer_token_bytes
    max_users = max(0, gpu.untiered_bytes - more) // each
    return Limit(
        "windows in the gpu budget",
        max_users,
        f"{card.num_window} sliding-window layers keep {size_words(each)} a user beside the tiers (and "
        f"{size_words(more)} while one prefills), and untiered_frac of tiers.gpu.budget leaves them "
        f"{size_words(gpu.untiered_bytes)}: raise either",
    )


def _slots_limit(layout: Layout) -> Limit:
    rooms, each = layout.rooms, layout.blocks_per_user
    held = " + ".join(f"{room.tier.label} {room.num_slots:,}" for room in rooms)
    last = rooms[-1].tier
    return Limit(
        f"{last.label} full",
        layout.num_slots // each,
        f"{each:,} blocks a user, and the tiers hold {held} = {layout.num_slots:,}: raise tiers.{last.label}.budget"
        + ("" if last is Tier.NVME else f", or add a {Tier(last + 1).label} tier"),
    )
