"""Budgets against what the machine has: an error, one warning or a ceiling, by name, and nothing left behind."""

from __future__ import annotations

import errno
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV, system
from kvtier.errors import BudgetError, FolderInUseError
from kvtier.stores.folder_check import unusable
from tests.e2e.families import tiny, tokens


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def _config(path: Path | None = None, **budgets: str) -> dict[str, Any]:
    tiers: dict[str, Any] = {name: {"budget": budget} for name, budget in budgets.items()}
    if path is not None:
        tiers["nvme"]["path"] = str(path)
    return {"block_tokens": 16, "prefill_chunk": 32, "tiers": tiers}


@pytest.mark.parametrize("tier", ["gpu", "cpu"])
def test_memory_that_cannot_be_allocated_is_a_budget_error(model: Any, tmp_path: Path, tier: str) -> None:
    budgets = {"gpu": "1MiB", "cpu": "1MiB", "nvme": "8MiB", tier: "900000GiB"}
    with pytest.raises(BudgetError, match=rf"tiers\.{tier}\.budget.*cannot be allocated: lower it"):
        TieredKV(model, _config(tmp_path / "kv", **budgets))
    assert "forward" not in vars(model)
    with TieredKV(model, _config(tmp_path / "kv", gpu="1MiB", cpu="1MiB", nvme="8MiB")):
        pass  # the folder's lock was given back


def test_more_host_memory_than_the_process_may_use_is_one_warning(
    model: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system, "memory_limit_bytes", lambda: 3 << 20)
    with TieredKV(model, _config(gpu="2MiB", cpu="2MiB")):
        pass
    assert [r.getMessage() for r in caplog.records if "add up to 4MiB (4194304 bytes)" in r.getMessage()]


def test_a_disk_with_less_room_than_the_budget_is_one_warning_and_a_ceiling(
    model: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), TieredKV(model, _config(tmp_path, gpu="1MiB", nvme="1000TiB")) as tiered:
        nvme = tiered.stats()["tiers"]["nvme"]
        assert nvme["ceiling_bytes"] < system.free_disk_bytes(tmp_path) < nvme["budget_bytes"]
    assert sum("going on with that" in record.getMessage() for record in caplog.records) == 1


def test_a_folder_in_memory_counts_against_the_cpu_budget_and_is_named_in_one_warning(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(system, "filesystem_kind", lambda path: "tmpfs")
    with TieredKV(model, _config(tmp_path, gpu="1MiB", cpu="4MiB", nvme="64MiB")) as tiered:
        tiers = tiered.stats()["tiers"]
        assert tiers["cpu"]["budget_bytes"] + tiers["nvme"]["budget_bytes"] == 4 << 20
        tiered.generate(tokens(600), max_new_tokens=2, do_sample=False)
    assert sum("tmpfs" in record.getMessage() for record in caplog.records) == 1


def test_a_folder_in_memory_without_room_beside_the_cpu_tier_is_not_called_a_small_budget(
    model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "filesystem_kind", lambda path: "tmpfs")
    message = r"^tiers\.nvme\.path: .* is memory.*0 bytes.*disk, or raise tiers\.cpu\.budget"
    with pytest.raises(BudgetError, match=message):
        TieredKV(model, _config(tmp_path, gpu="1MiB", nvme="64MiB"))
    assert "__kvtier__" not in vars(model.forward)


def test_a_folder_on_a_full_disk_is_told_apart_from_one_that_may_not_be_written(tmp_path: Path) -> None:
    full, denied = (str(unusable(tmp_path, OSError(each, ""))) for each in (errno.ENOSPC, errno.EACCES))
    assert "make room there" in full and "another disk" in full and "may write" not in full
    assert "give a folder that you may write to" in denied


def test_a_second_owner_of_a_folder_is_told_which_key_to_change(model: Any, tmp_path: Path) -> None:
    config = _config(tmp_path, gpu="1MiB", nvme="8MiB")
    with TieredKV(model, config), pytest.raises(FolderInUseError, match=r"tiers\.nvme\.path.*on_locked: subfolder"):
        TieredKV(tiny("qwen2"), config)


def test_without_transformers_the_message_says_what_is_missing() -> None:
    code = """
import sys
sys.modules["transformers"] = None
try:
    from kvtier import TieredKV
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "kvtier[hf]" in done.stdout


def test_budgets_hold_at_every_step_and_as_du_counts(model: Any, tmp_path: Path) -> None:
    config = _config(tmp_path, gpu="333333", cpu="77777", nvme="1234567")
    with TieredKV(model, config) as tiered, torch.no_grad():
        cache = tiered.new_cache()
        for start in range(0, 900, 30):
            tiered(tokens(900)[:, start : start + 30], cache=cache, logits_to_keep=1)
            on_disk = system.allocated_bytes(tmp_path / "kv")  # before stats: a move in flight may add a segment
            stats = tiered.stats()["tiers"]
            for name, tier in stats.items():
                assert tier["used_bytes"] <= tier["peak_bytes"] <= tier["budget_bytes"], name
            while on_disk > stats["nvme"]["used_bytes"] and tiered.stats()["moves_in_flight"]:
                stats = tiered.stats()["tiers"]  # a segment that a move was adding then is counted once it is there
            assert on_disk <= tiered.stats()["tiers"]["nvme"]["used_bytes"]
            assert system.allocated_bytes(tmp_path / "kv") <= stats["nvme"]["budget_bytes"]
        assert stats["nvme"]["only_copy_bytes"] > 0
        json.dumps(tiered.stats())
