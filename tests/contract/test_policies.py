"""kvtier's own policies against the suites that are shipped to policy authors."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest

from kvtier.policies.fifo import FIFO
from kvtier.policies.lru import LRU
from kvtier.policies.mru import MRU
from kvtier.policies.next_layers import NextLayers
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.policies.recency import Recency
from kvtier.testing import EvictionPolicyContract, PrefetchPolicyContract
from kvtier.types import EvictionPolicy, PrefetchPolicy


class TestLRU(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return LRU()


class TestFIFO(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return FIFO()


class TestMRU(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return MRU()


class TestRecency(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return Recency()


class TestRecencyKeepingNothing(EvictionPolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return Recency(first_blocks=0, recent_blocks=0)


class TestNextLayers(PrefetchPolicyContract):
    def make_policy(self, depth: int) -> PrefetchPolicy:
        return NextLayers(depth=depth)


class TestNoPrefetch(PrefetchPolicyContract):
    depths = (0,)

    def make_policy(self, depth: int) -> PrefetchPolicy:
        return NoPrefetch(depth=depth)


@pytest.mark.parametrize("name", ["lru", "fifo", "mru", "recency", "no_prefetch", "next_layers"])
def test_is_found_by_entry_point(name: str) -> None:
    (found,) = entry_points(group="kvtier.policies", name=name)
    assert found.load().__module__ == f"kvtier.policies.{name}"
