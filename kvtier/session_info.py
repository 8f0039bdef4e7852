"""What `tiered.sessions()` says of one conversation, whether it is in use here or lies in files alone."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from kvtier.hf import TieredCache
from kvtier.session_record import SessionRecord
from kvtier.types import Tier


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What `tiered.sessions()` says of one conversation."""

    name: str
    tokens: int
    bytes_per_tier: dict[str, int]
    """By the tier's name; a block on two tiers counts on both, one that others share too."""
    created_s: float
    """Seconds since the epoch, as `used_s`."""
    used_s: float
    ttl_s: float
    """Seconds after the last use; inf: it stays until it is deleted."""
    is_pinned: bool

    @property
    def age_s(self) -> float:
        """Seconds since it was used."""
        return max(0.0, time.time() - self.used_s)


def info_of_cache(about: SessionRecord, cache: TieredCache) -> SessionInfo:
    """Of a conversation that this process goes on with. With the turn held. O(blocks)."""
    runtime, table = cache.state.runtime, cache.state.batch.tables[0]
    copies = runtime.placement.residency
    held = {tier: sum(tier in copies[block].copies for block in table.blocks) for tier in Tier}
    return _info(about, table.num_tokens, held, runtime.group.shape.block_bytes)


def info_of_record(about: SessionRecord, num_found: int, block_bytes: int) -> SessionInfo:
    """Of one that lies in files alone, with so many of its blocks."""
    held = {tier: num_found if tier is Tier.NVME else 0 for tier in Tier}
    return _info(about, len(about.token_ids), held, block_bytes)


def _info(about: SessionRecord, num_tokens: int, held: Mapping[Tier, int], block_bytes: int) -> SessionInfo:
    num_bytes = {tier.label: count * block_bytes for tier, count in held.items()}
    return SessionInfo(about.name, num_tokens, num_bytes, about.created_s, about.used_s, about.ttl_s, about.is_pinned)
