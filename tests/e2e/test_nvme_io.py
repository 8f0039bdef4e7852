"""Tokens are the same whichever way the nvme tier's files are read, and `stats()` says which it is."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.budget import DIRECT_STREAM_THREADS
from kvtier.errors import BudgetError
from kvtier.stores.kernel_aio import KernelAio
from kvtier.stores.slot_payload import joined_room_bytes
from kvtier.types import Tier
from tests.e2e.families import tiny, tokens


def _config(path: Path, io: str, **nvme: Any) -> dict[str, Any]:
    tiers = {"gpu": {"budget": "512KiB"}, "nvme": {"budget": "16MiB", "path": str(path), "io": io, **nvme}}
    return {"block_tokens": 16, "prefill_chunk": 32, "io_threads": 2, "tiers": tiers}


@pytest.mark.parametrize(("io", "has_aio"), [("auto", True), ("mmap", True), ("direct", True), ("direct", False)])
def test_generation_through_either_way(tmp_path: Path, io: str, has_aio: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    if not has_aio:
        monkeypatch.setattr(KernelAio, "__init__", refused)
    model, ids = tiny("llama"), tokens(700)
    expected = model.generate(ids, max_new_tokens=8, do_sample=False)
    before = threading.enumerate()
    with TieredKV(model, _config(tmp_path, io, page_cache="5MiB")) as tiered:
        assert torch.equal(tiered.generate(ids, max_new_tokens=8, do_sample=False), expected)
        nvme = tiered.stats()["tiers"]["nvme"]
        streams = [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-stream")]
        streams = [thread for thread in streams if thread not in before]
        runtime = tiered._runtime
        assert nvme["slices_read"] > 100  # it was in use
        if io == "direct":
            assert nvme["io"] == "direct"
            most = min(DIRECT_STREAM_THREADS, runtime.gpu_budget.ring_slices)
            assert len(streams) == 1 if has_aio else most > 2 and 2 <= len(streams) <= most
        else:
            assert nvme["io"] == "mmap"
            assert len(streams) == 2
        assert ("not measured" in nvme["io_reason"]) == (io == "auto")
        rooms_bytes = runtime.stores[Tier.NVME]._codec.rooms_bytes()
        assert 0 < rooms_bytes <= 2 * joined_room_bytes(runtime.group.shape), "one for each of io_threads"
        assert rooms_bytes <= nvme["host_bytes"] <= 5 << 20
        tiered.check_integrity()


def test_a_share_of_memory_that_is_too_little_is_a_budget_error(tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(BudgetError, match=r"tiers\.nvme\.page_cache is .*\d+ bytes\)?, its minimum is"):
        TieredKV(model, _config(tmp_path, "mmap", page_cache="0.000001%"))
    with pytest.raises(BudgetError, match=r"page_cache is 4MiB .* for files \+ for blocks on their way, one buffer"):
        TieredKV(model, _config(tmp_path, "mmap", page_cache="4MiB"))
    assert "forward" not in vars(model)
    with TieredKV(model, _config(tmp_path, "direct")):
        pass  # the folder's lock was given back
