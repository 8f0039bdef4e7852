"""What a deleted session left in files without a header is erased too: nobody can find it, but it is there to read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvtier import TieredKV
from kvtier.labels import Labels
from kvtier.stores.nvme import NvmeStore
from kvtier.types import Slot, Tier
from tests.e2e.families import GREEDY, small_config, tiny, tokens


def slots_without_header(tiered: TieredKV) -> dict[Slot, bytes]:
    """The bytes of each."""
    store, found = tiered._runtime.stores[Tier.NVME], {}
    assert isinstance(store, NvmeStore)
    for slot in tiered._runtime.placement.bare:
        out = torch.empty(store.shape.block_bytes, dtype=torch.uint8)
        store.read(slot, out)
        found[slot] = out.numpy().tobytes()
    return found


def test_delete_erases_blocks_that_were_never_labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Labels, "_may_hash_now", lambda *_: False)
    monkeypatch.setattr(Labels, "_may_hash_beside", lambda *_: False)
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, nvme="12MiB", prefix_cache=True)) as tiered:
        other = tiered.session("bob")
        other.generate(tokens(150, seed=9), **GREEDY)
        before = set(slots_without_header(tiered).values())
        session = tiered.session("alice")
        session.generate(tokens(300, seed=1), **GREEDY)
        other.generate(tokens(200, seed=9), **GREEDY)  # has hers leave memory
        held = {slot: each for slot, each in slots_without_header(tiered).items() if each not in before}
        names = {label.identity for label in tiered._runtime.placement.bare.values()}
        assert len(held) >= 8 and len(names) >= 8
        session.delete()
        tiered.check_integrity()
        files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096]
        left = slots_without_header(tiered)
        gone = {slot: each for slot, each in held.items() if left.get(slot) != each}
        assert len(gone) >= 8
        for slot, each in gone.items():
            assert not any(each[:4096] in file for file in files), slot
