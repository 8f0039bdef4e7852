"""docs/stats.md names exactly the fields that `stats()` has."""

from __future__ import annotations

import re
from pathlib import Path

from kvtier import TieredKV
from tests.e2e.families import tiny

TEXT = (Path(__file__).parents[2] / "docs" / "stats.md").read_text(encoding="utf-8")


def test_stats_are_documented_field_by_field() -> None:
    tiers = {"gpu": {"budget": "1MiB"}, "cpu": {"budget": "1MiB"}, "nvme": {"budget": "8MiB"}}
    with TieredKV(tiny("llama"), {"block_tokens": 16, "tiers": tiers}) as tiered:
        stats, cache_stats = tiered.stats(), tiered.new_cache().stats()
    words = set(re.findall(r"`[….]*(?:tiers\.[a-z{},]+\.)?([a-z_]+)`", TEXT))
    wanted = (set(stats) - {"tiers", "bytes_moved"}) | set(cache_stats)
    for tier in stats["tiers"].values():
        wanted |= set(tier)
    assert wanted <= words, wanted - words
    assert all(re.fullmatch(r"(gpu|cpu|nvme)_to_(gpu|cpu|nvme)", edge) for edge in stats["bytes_moved"])
