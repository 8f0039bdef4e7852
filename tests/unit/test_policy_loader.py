"""Policies by name, by `module:Class`, and every way in which that can go wrong."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from kvtier.errors import ConfigError
from kvtier.policies.lru import LRU
from kvtier.policy import load_eviction, load_prefetch


class Broken:
    """No policy at all."""


class NeedsArgument:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted


@pytest.fixture
def mine(monkeypatch: pytest.MonkeyPatch) -> str:
    module = ModuleType("my_policies")
    module.Mine = LRU  # type: ignore[attr-defined]
    module.Broken = Broken  # type: ignore[attr-defined]
    module.NeedsArgument = NeedsArgument  # type: ignore[attr-defined]
    module.not_a_class = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_policies", module)
    return "my_policies"


@pytest.mark.parametrize("name", ["lru", "fifo", "mru", "recency"])
def test_each_shipped_eviction_policy_is_found_by_entry_point(name: str) -> None:
    assert load_eviction(name, "eviction.gpu") is not load_eviction(name, "eviction.gpu")


@pytest.mark.parametrize(("name", "ahead"), [("next_layers", [4, 5, 6]), ("no_prefetch", [])])
def test_each_shipped_prefetch_policy_is_found_by_entry_point(name: str, ahead: list[int]) -> None:
    assert list(load_prefetch(name, None, "prefetch.policy").layers_ahead(3, 8)) == ahead


def test_a_users_class_is_found_by_module_and_class(mine: str) -> None:
    assert isinstance(load_eviction(f"{mine}:Mine", "eviction.cpu"), LRU)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lrru", "no eviction policy 'lrru' (did you mean lru?); known: fifo, lru, mru, recency; or name your own"),
        ("my_policies:Missing", "cannot be imported"),
        ("no_such_module:Mine", "cannot be imported"),
        ("my_policies:not_a_class", "not a class"),
        ("my_policies:Broken", "lacks inserted, touched, removed, victims"),
        ("my_policies:NeedsArgument", "cannot be built"),
        ("next_layers", "is no eviction policy: it lacks inserted, touched, removed, victims; known: fifo, lru"),
    ],
)
def test_a_bad_name_is_a_config_error_that_names_the_key(mine: str, name: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r"eviction\.nvme") as caught:
        load_eviction(name, "eviction.nvme")
    assert says in str(caught.value)


def test_an_eviction_policy_is_no_prefetch_policy() -> None:
    for depth in (None, 3):  # which no eviction policy takes
        with pytest.raises(ConfigError, match=r"prefetch\.policy: lru is no prefetch policy.*known: next_layers, no_"):
            load_prefetch("lru", depth, "prefetch.policy")


def test_a_prefetch_policy_that_is_misspelt_is_told_of_its_own_kind() -> None:
    with pytest.raises(ConfigError, match=r"no prefetch policy 'next_layer' \(did you mean next_layers\?\); known: n"):
        load_prefetch("next_layer", None, "prefetch.policy")
