"""Budgets under which a conversation of a known length lies on the tiers in known shares, and stays so."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import read_config
from kvtier.errors import BudgetError
from kvtier.hf import describe
from kvtier.lower_tiers import gpu_budget
from kvtier.stores.slab import slot_bytes
from kvtier.types import Tier

SHARES: dict[str, dict[Tier, float]] = {
    "all_gpu": {Tier.GPU: 1.0},
    "gpu25_cpu75": {Tier.GPU: 0.25, Tier.CPU: 0.75},
    "gpu25_cpu25_nvme50": {Tier.GPU: 0.25, Tier.CPU: 0.25, Tier.NVME: 0.5},
}
"""Of a conversation's full blocks, by placement."""


@dataclass(frozen=True)
class Layout:
    """So many full blocks on each tier, of `num_tokens` tokens, and room beside them for `num_more` tokens."""

    num_blocks: dict[Tier, int]
    block_tokens: int
    prefill_chunk: int
    num_tokens: int
    num_more: int

    @property
    def shares(self) -> dict[str, float]:
        """The share of each tier as it came out, in whole blocks."""
        total = sum(self.num_blocks.values())
        return {tier.label: count / total for tier, count in self.num_blocks.items()}


def layout(placement: str, num_tokens: int, num_more: int, prefill_chunk: int | None = None) -> Layout:
    """The full blocks of `num_tokens` tokens in the shares of a placement.

    Blocks are of 256 tokens, or of fewer where the shares would not come out with them: an eighth of the context each,
    or half of it where there is but one tier.
    What does not divide evenly goes to the slowest tier. Chunks are of two blocks unless said otherwise. Raises
    ValueError: less than 128 tokens.
    """
    shares = SHARES[placement]
    block_tokens = min(256, num_tokens // (2 if len(shares) == 1 else 8) // 16 * 16)
    if num_tokens < 128:
        raise ValueError(f"{num_tokens} tokens do not make eight blocks")
    total = num_tokens // block_tokens
    num_blocks = {tier: max(1, int(share * total)) for tier, share in shares.items()}
    num_blocks[max(shares)] += total - sum(num_blocks.values())
    return Layout(num_blocks, block_tokens, prefill_chunk or 2 * block_tokens, num_tokens, num_more)


def tier_config(
    model: Any, wanted: Layout, folder: Path | None, *, holds: bool = True, **values: Any
) -> dict[str, Any]:
    """A config whose tiers have room for these blocks, and little more. Files have room for all.

    Reads of files go past the page cache: they are cold.

    Args:
        folder: where files stay until somebody removes them; None: a temporary one of the wrapper's own.
        holds: nothing moves between steps: watermarks are such, and there is room beside the blocks, on the gpu tier
            for the new tokens and one step, on the cpu tier for one block. Without, the watermarks are the defaults,
            and there is no room beside them but for the tail, and for what one step takes at least.
        values: further keys of the config.
    """
    group = describe(model, wanted.block_tokens)
    each, shape = slot_bytes(group.shape), group.shape
    marks = {"high": 1.0, "low": 0.001} if holds else {}
    num_step = -(-wanted.prefill_chunk // wanted.block_tokens) + 1
    num_gpu = wanted.num_blocks[Tier.GPU]
    if holds:
        num_gpu += num_step - (-wanted.num_more // wanted.block_tokens)
    else:
        num_gpu = max(num_gpu + (len(wanted.num_blocks) == 1), num_step)
    config: dict[str, Any] = {
        "block_tokens": wanted.block_tokens,
        "prefill_chunk": wanted.prefill_chunk,
        "prefix_cache": False,
        **values,
        "tiers": {"gpu": marks},
    }
    if Tier.CPU in wanted.num_blocks:
        config["tiers"]["cpu"] = {"budget": (wanted.num_blocks[Tier.CPU] + 1) * each, **marks}
    if Tier.NVME in wanted.num_blocks:
        num_bytes = 2 * (wanted.num_tokens + wanted.num_more) * shape.token_bytes + (16 << 20)
        config["tiers"]["nvme"] = {"budget": num_bytes, "io": "direct", **({"path": str(folder)} if folder else {})}
    config["tiers"]["gpu"] = {**marks, "budget": _gpu_bytes(config, model, num_gpu)}
    return config


def _gpu_bytes(config: dict[str, Any], model: Any, num_slots: int) -> int:
    """The least budget, to a page, that leaves so many slots beside ring and scratch."""
    group = describe(model, config["block_tokens"])

    def slots_of(budget: int) -> int:
        tiers = {**config["tiers"], "gpu": {**config["tiers"]["gpu"], "budget": budget}}
        try:
            return gpu_budget(read_config({**config, "tiers": tiers}), group).num_slots
        except BudgetError:
            return 0

    low, high = 0, num_slots * slot_bytes(group.shape)
    while slots_of(high) < num_slots:
        low, high = high, 2 * high
    while high - low > 4096:
        middle = (low + high) // 2
        low, high = (low, middle) if slots_of(middle) >= num_slots else (middle, high)
    return high


def with_prefetch(config: dict[str, Any], policy: str) -> dict[str, Any]:
    """The same with another prefetch policy, at its own depth."""
    return {**config, "prefetch": {"policy": policy}}
