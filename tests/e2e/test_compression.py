"""The wrapped model's logits with a compressed nvme tier, against the plain cache's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtier import TieredKV
from tests.e2e.families import (
    CHUNK,
    GREEDY,
    MODES,
    assert_same,
    plain_forward,
    plain_turns,
    small_config,
    tiny,
    tokens,
)
from tests.e2e.sides import assert_within
from tests.e2e.test_exact import assert_budgets, assert_came_back_from_nvme

both_modes = pytest.mark.parametrize("mode", MODES)


def compressed(model: Any, folder: Path, mode: str, **values: Any) -> dict[str, Any]:
    config = small_config(model, folder, mode, **values)
    config["tiers"]["nvme"]["compression"] = "zstd"
    return config


def assert_compressed(tiered: TieredKV) -> None:
    nvme = tiered.stats()["tiers"]["nvme"]
    assert nvme["compression"] == "zstd"
    assert 0.3 < nvme["stored_frac"] < 0.97
    assert tiered.stats()["moves_failed"] == 0


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("path", ["kept", "temporary"])
def test_three_turns(path: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = tiny("qwen3")
    config = compressed(model, tmp_path, mode)
    if path == "temporary":
        del config["tiers"]["nvme"]["path"]
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        for turn, (ids, expected) in enumerate(plain_turns(model)):
            torch.manual_seed(turn)
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
            assert_budgets(tiered)
        assert_came_back_from_nvme(tiered, cache)
        assert_compressed(tiered)


@both_modes
@torch.no_grad()
def test_three_turns_of_16_bits(mode: str, tmp_path: Path) -> None:
    """gathered: the plain model's bits. blockwise: within what test_exact allows without compression."""
    model = tiny("llama", torch.bfloat16)
    with TieredKV(model, compressed(model, tmp_path, mode)) as tiered:
        cache, plain_cache = tiered.new_cache(), DynamicCache(config=model.config)
        for turn, more in enumerate((tokens(300), tokens(40, 50), tokens(40, 51))):  # as in test_exact
            for ids in more.split(CHUNK, dim=1):
                expected = plain_forward(model, ids, plain_cache)
                assert_within(tiered(ids, cache=cache).logits, expected, mode, model, f"turn {turn}")
            for number in range(8):
                ids = tokens(1, number)
                expected = plain_forward(model, ids, plain_cache)
                assert_within(tiered(ids, cache=cache).logits, expected, mode, model, f"turn {turn}")
            assert_budgets(tiered)
        assert_came_back_from_nvme(tiered, cache)
        assert_compressed(tiered)


@both_modes
def test_a_tier_whose_bytes_run_out_goes_on_with_what_fits(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More slots than bytes: some are refused, and idle conversations' blocks are dropped for the next one."""
    monkeypatch.setattr("kvtier.stores.space_limits._PAYLOAD_FRACS", {4: 0.5})
    model = tiny("qwen3")
    config = compressed(model, tmp_path, mode, nvme="800KiB", block_tokens=64, cpu_blocks=1, gpu_slots=2)
    conversations = [plain_turns(model, seed=seed, turns=1, prompt=400) for seed in range(5)]
    with TieredKV(model, config) as tiered:
        num_slots, caches = tiered.stats()["tiers"]["nvme"]["num_slots"], []
        for ((ids, expected),) in conversations:
            cache = tiered.new_cache()
            caches.append(cache)
            assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, mode)
            assert_budgets(tiered)
        stats = tiered.stats()
        assert stats["dropped_blocks"] and stats["moves_failed"]
        assert 12 < stats["tiers"]["nvme"]["num_slots"] < num_slots
        assert stats["nvme_sole_reads"] > 0
