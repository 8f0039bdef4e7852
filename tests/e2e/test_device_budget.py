"""What a device with queues takes of host memory is in a budget, at every moment, and as it was planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.config import load_config
from kvtier.errors import BudgetError
from kvtier.hf import describe
from kvtier.planner.layout import Layout, lay_out
from kvtier.planner.models import find_card
from kvtier.planner.rates import Rates
from kvtier.selftest import exactness
from kvtier.testing import FakeDevice
from kvtier.types import Tier
from tests.e2e.families import tiny, tokens

KIB = 1 << 10
BLOCK_BYTES = 12 * KIB  # of the tiny Llama below: three slices of 4 KiB


def _config(cpu_kib: int = 0, page_cache: str = "256MiB", **more: Any) -> dict[str, Any]:
    tiers: dict[str, Any] = {"gpu": {"budget": "128KiB"}, "nvme": {"budget": "8MiB", "page_cache": page_cache}}
    if cpu_kib:
        tiers["cpu"] = {"budget": cpu_kib * KIB}
    config = {"block_tokens": 16, "prefill_chunk": 32, "io_threads": 2, "host_attention": "never", "tiers": tiers}
    return config | more


def refuse(*_: object) -> None:
    raise OSError(1, "not here")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice(3)
    monkeypatch.setattr("kvtier.runtime.open_device", lambda _: device)
    return device


def _plan(model: Any, folder: Path, config: dict[str, Any]) -> Layout:
    model.save_pretrained(folder)
    card, _ = find_card(str(folder))
    rows = {("memory", "may be used"): 1e12, ("gpu 0", "memory"): 1e12, ("gpu 0", "free"): 1e12}
    return lay_out(card, load_config(config), 300, Rates("a test", rows, ()))


@pytest.mark.parametrize("cpu_kib", [0, 100, 200])
@pytest.mark.parametrize("io", ["mmap", "direct", "direct, slices one by one"])
@torch.no_grad()
def test_staging_is_in_a_budget_at_every_moment(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cpu_kib: int, io: str
) -> None:
    model, config = tiny("llama"), _config(cpu_kib)
    config["tiers"]["gpu"]["budget"] = "384KiB"  # a ring of more slices than io_threads
    config["tiers"]["nvme"]["io"], _, is_alone = io.partition(",")
    if is_alone:
        monkeypatch.setattr("kvtier.stores.direct_io.KernelAio", refuse)
    plan = _plan(model, tmp_path, config)
    taken: list[int] = []
    pool, make = fake.staging(), fake.staging()._allocate

    def noted(num_bytes: int) -> torch.Tensor:
        taken.append(num_bytes)
        return make(num_bytes)

    pool._allocate = noted
    with TieredKV(model, config) as tiered:
        caches = [tiered.new_cache() for _ in range(3)]
        for turn in range(3):
            for number, cache in enumerate(caches):
                with fake.kernels():
                    tiered(tokens(150 if turn == 0 else 1, seed=number), cache=cache)
                before = sum(taken)  # threads go on meanwhile
                stats = tiered.stats()
                cpu, nvme = stats["tiers"]["cpu"], stats["tiers"]["nvme"]
                assert before <= stats["staging_bytes"] <= sum(taken) <= stats["staging_budget_bytes"]
                assert stats["staging_budget_bytes"] == plan.staging_bytes
                assert cpu["num_slots"] * BLOCK_BYTES + plan.staging_bytes * (cpu_kib > 0) <= cpu["budget_bytes"]
                assert cpu["used_bytes"] <= cpu["peak_bytes"] <= cpu["budget_bytes"]
                assert nvme["host_bytes"] <= 256 << 20
                if cpu_kib:
                    assert before <= cpu["used_bytes"] - cpu["used_slots"] * BLOCK_BYTES <= sum(taken)
                else:
                    assert nvme["host_bytes"] >= before
        assert stats["tiers"]["nvme"]["slices_read"] > 0 and taken, "nothing was staged: the test proves nothing"
        for room in plan.rooms:
            stats = tiered.stats()["tiers"][room.tier.label]
            assert (stats["num_slots"], stats["budget_bytes"]) == (room.num_slots, room.budget_bytes)
        ring, most = tiered._runtime.executor.ring, tiered._runtime.gpu_budget.ring_slices
        assert ring is not None and ring._reads._files._num_threads == (2 if io == "mmap" else most) and most > 2
        tiered.check_integrity()
    assert not fake.violations and pool.num_bytes == 0


def test_a_cpu_budget_without_room_for_staging_names_the_sum_and_the_mend(fake: FakeDevice, tmp_path: Path) -> None:
    model, config = tiny("llama"), _config(16)
    config["tiers"]["nvme"]["path"] = str(tmp_path / "nvme")
    plan = _plan(model, tmp_path, config)
    least = BLOCK_BYTES + plan.staging_bytes
    with pytest.raises(BudgetError) as refused:
        TieredKV(model, config)
    words = str(refused.value)
    assert f"({least} bytes): one block of 16 tokens + for staging" in words and "io_threads" in words
    assert [limit.words for limit in plan.limits if limit.name == "cpu budget"] == [words]
    assert not (tmp_path / "nvme").exists(), "a refused budget left a folder"
    with TieredKV(model, _config(least // KIB)) as tiered:
        assert tiered.stats()["tiers"]["cpu"]["num_slots"] == 1
    with TieredKV(model, _config(least // KIB, io_threads=1)) as tiered:
        assert tiered.stats()["tiers"]["cpu"]["num_slots"] > 1


@torch.no_grad()
def test_the_selftests_cpu_tier_has_its_blocks_beside_staging(fake: FakeDevice, tmp_path: Path) -> None:
    model = tiny("llama")
    asked = exactness.Way(torch.device("cpu"), torch.float32, "blockwise", 16).config(model, tmp_path, 1, 400)
    with TieredKV(model, exactness.with_staging(asked, describe(model, 16))) as tiered:
        assert tiered.stats()["tiers"]["cpu"]["num_slots"] == 4
        assert tiered.stats()["staging_budget_bytes"] > 0


def test_without_a_cpu_tier_a_page_cache_without_room_for_staging_is_refused(fake: FakeDevice, tmp_path: Path) -> None:
    model, config = tiny("llama"), _config(0, "4MiB")
    plan = _plan(model, tmp_path, config)
    least = (4 << 20) + plan.staging_bytes
    with pytest.raises(BudgetError) as refused:
        TieredKV(model, config)
    assert f"({least} bytes): 4MiB (4194304 bytes) for files + for staging" in str(refused.value)
    assert [limit.words for limit in plan.limits if limit.name == "page cache"] == [str(refused.value)]
    with TieredKV(model, _config(0, str(least))) as tiered:
        assert tiered.stats()["staging_budget_bytes"] == plan.staging_bytes


def test_without_files_or_without_such_a_device_nothing_is_staged(
    fake: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, without = tiny("llama"), _config(64)
    del without["tiers"]["nvme"]
    with TieredKV(model, without) as tiered:
        assert tiered.stats()["staging_budget_bytes"] == 0 and tiered.stats()["tiers"]["cpu"]["num_slots"] == 5
    monkeypatch.undo()
    with TieredKV(model, _config(64)) as tiered:
        assert tiered.stats()["staging_budget_bytes"] == 0 and tiered.stats()["tiers"]["cpu"]["num_slots"] == 5
        assert Tier.NVME in tiered._runtime.stores
