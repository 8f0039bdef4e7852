"""Counters. Plain integers and seconds, written by one thread and read by `stats()`."""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field

from kvtier.types import Tier


class Stall(enum.Enum):
    """What somebody waited for."""

    STREAM_CPU = "stream_cpu"
    """Attention, for slices of which one of the cpu tier came last."""
    STREAM_NVME = "stream_nvme"
    """Attention, for slices of which one of the nvme tier came last, or not in time."""
    ROOM = "room"
    """A step (or a session that is brought in), for blocks that leave a tier to make room."""
    TAIL = "tail"
    """A step, for its tail: to come back to the gpu tier, to be copied, or for a move that has it."""
    OTHER = "other"
    """What is not part of a step: sessions that are kept or left, blocks that are mended, the end."""

    @classmethod
    def of_stream(cls, tier: Tier) -> Stall:
        """For slices of that tier."""
        return cls.STREAM_NVME if tier is Tier.NVME else cls.STREAM_CPU


@dataclass(slots=True)
class StepTimes:
    """Committed steps of one kind."""

    num_steps: int = 0
    took_s: float = 0.0
    compute_s: float = 0.0
    """Of that, without what was waited for."""

    def as_dict(self) -> dict[str, float]:
        """Plain values."""
        return {"steps": self.num_steps, "took_s": self.took_s, "compute_s": self.compute_s}


@dataclass(slots=True)
class SequenceMetrics:
    """What one sequence cost. Bytes and slices are as read by attention or moved for this sequence alone."""

    slices_read: Counter[Tier] = field(default_factory=Counter)
    nvme_read_bytes: int = 0
    """Bytes brought up from the nvme tier for this sequence, streamed or promoted."""
    reused_tokens: Counter[Tier] = field(default_factory=Counter)
    """Tokens of prompts that were held or found instead of computed, by the fastest tier that held them."""

    def as_dict(self) -> dict[str, object]:
        """Plain values, for `cache.stats()`."""
        return {
            "nvme_read_bytes": self.nvme_read_bytes,
            "reused_tokens": {tier.label: self.reused_tokens[tier] for tier in Tier},
            "slices_read": {tier.label: self.slices_read[tier] for tier in Tier},
        }


@dataclass(slots=True)
class Metrics:
    """Counters of one runtime since it was built."""

    bytes_moved: Counter[tuple[Tier, Tier]] = field(default_factory=Counter)
    slices_read: Counter[Tier] = field(default_factory=Counter)
    reused_tokens: Counter[Tier] = field(default_factory=Counter)
    """As of one sequence, over all."""
    moves_failed: int = 0
    steps: int = 0
    steps_aborted: int = 0
    tokens: int = 0
    recomputed_blocks: int = 0
    dropped_blocks: int = 0
    """Idle blocks whose copies were all given up because no tier had room."""
    stalls: dict[Stall, float] = field(default_factory=lambda: dict.fromkeys(Stall, 0.0))
    """Seconds that were waited for transfers."""
    decode: StepTimes = field(default_factory=StepTimes)
    prefill: StepTimes = field(default_factory=StepTimes)
    nvme_sole_reads: int = 0
    """Slices and blocks read from the nvme tier that lay nowhere else."""

    @property
    def stall_s(self) -> float:
        """All of them together."""
        return sum(self.stalls.values())

    def hit_frac(self, tier: Tier) -> float:
        """Share of all slices that attention read from `tier`; 0.0 before the first."""
        total = sum(self.slices_read.values())
        return self.slices_read[tier] / total if total else 0.0

    def edges(self, block_bytes_of: int = 1) -> dict[str, int]:
        """Bytes moved per edge, for every edge that can exist."""
        pairs = [(a, b) for a in Tier for b in Tier if a is not b]
        return {f"{a.label}_to_{b.label}": self.bytes_moved[(a, b)] * block_bytes_of for a, b in pairs}
