"""Conformance suites and fakes, for kvtier's own tests and for whoever writes a store, a policy or a manager test.

class TestMyStore(StoreContract):            # needs pytest and torch
    def make_store(self, shape, num_slots, tmp_path): return MyStore(shape, num_slots)

class TestMyPolicy(EvictionPolicyContract):  # needs pytest
    def make_policy(self): return MyPolicy()

engine = FakeEngine(seed=7, fail_frac=0.1)   # needs neither
store = FaultyStore(store, seed=7, rates={Fault.EIO: 0.01})  # needs torch
device = FakeDevice(seed=7)                  # needs torch
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.testing.device import FakeDevice as FakeDevice
    from kvtier.testing.device import Wait as Wait
    from kvtier.testing.engine import FakeEngine as FakeEngine
    from kvtier.testing.engine import InstantEngine as InstantEngine
    from kvtier.testing.faults import Fault as Fault
    from kvtier.testing.faults import FaultyStore as FaultyStore
    from kvtier.testing.policies import EvictionPolicyContract as EvictionPolicyContract
    from kvtier.testing.policies import PrefetchPolicyContract as PrefetchPolicyContract
    from kvtier.testing.stores import StoreContract as StoreContract

__all__ = [
    "EvictionPolicyContract",
    "FakeDevice",
    "FakeEngine",
    "Fault",
    "FaultyStore",
    "InstantEngine",
    "PrefetchPolicyContract",
    "StoreContract",
    "Wait",
]

_MODULES = {
    "EvictionPolicyContract": "policies",
    "FakeDevice": "device",
    "FakeEngine": "engine",
    "Fault": "faults",
    "FaultyStore": "faults",
    "InstantEngine": "engine",
    "PrefetchPolicyContract": "policies",
    "StoreContract": "stores",
    "Wait": "device",
}


def __getattr__(name: str) -> Any:
    # Lazy: the fakes must import without pytest, and FakeEngine without torch.
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
