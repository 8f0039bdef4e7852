"""A limit to what is written, so small that a prompt reaches it: it holds, and every token is right."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.errors import BudgetError, CapacityError
from kvtier.hf import describe
from kvtier.wear import WriteMeter
from tests.e2e.families import BLOCK, GREEDY, MODES, assert_same, plain_turns, small_config, tiny, tokens
from tests.e2e.test_failing_disk import messages, nvme
from tests.e2e.test_recompute import CLOSE
from tests.small_tiers import FakeClock

CELLS = [
    ("llama", "blockwise", "zstd"), ("llama", "gathered", "none"), ("gemma3", "blockwise", "none"),
    ("granitemoehybrid", "gathered", "none"),
]  # fmt: skip
NUM_BLOCKS = 12
"""What the limit lets be written, of the 24 blocks of one conversation."""


@functools.cache
def limit_bytes(model: Any) -> int:
    return NUM_BLOCKS * (describe(model, BLOCK).shape.block_bytes + 5 * 4096)


def limited(model: Any, folder: Path, mode: str = "blockwise", cpu_blocks: int = 24, **nvme: Any) -> dict[str, Any]:
    """The cpu tier holds what one conversation has beyond the gpu tier; the nvme tier has room for all."""
    config = small_config(model, folder, mode, cpu_blocks=cpu_blocks)
    config["tiers"]["nvme"] |= {"max_writes": f"{limit_bytes(model)}/h", **nvme}
    return config


def told_time(tiered: TieredKV) -> FakeClock:
    """From here on the limit goes by this clock."""
    writes, clock = tiered._runtime.placement.writes, FakeClock()
    clock.now_s = writes._clock()
    writes._clock = clock
    return clock


@pytest.mark.parametrize(("family", "mode", "compression"), CELLS)
def test_conversations_under_a_limit_that_a_prompt_reaches(
    family: str,
    mode: str,
    compression: str,
    tmp_path: Path,
    written: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny(family)
    conversations = [plain_turns(model, seed=10 * i, prompt=230) for i in range(3)]
    with TieredKV(model, limited(model, tmp_path, mode, compression=compression)) as tiered:
        caches = [tiered.new_cache() for _ in conversations]
        for turn in range(3):
            for cache, turns in zip(caches, conversations, strict=True):
                assert_same(tiered.generate(turns[turn][0], cache=cache, **GREEDY), turns[turn][1], CLOSE)
                tiered.check_integrity()
                stats = nvme(tiered)
                assert sum(written) <= stats["written_bytes"] <= limit_bytes(model)
        stats = tiered.stats()
        assert stats["tiers"]["nvme"]["state"] == "limited"
        assert stats["tiers"]["nvme"]["max_writes"].endswith("/h")
        assert stats["dropped_blocks"] > 10 and stats["recomputed_blocks"] > 3
        assert stats["bytes_moved"]["cpu_to_nvme"] + stats["bytes_moved"]["gpu_to_nvme"] > 0
        (warning,) = messages(caplog, "is used up: the nvme tier takes no blocks")
        assert warning.levelname == "WARNING"
    assert limit_bytes(model) / 2 < sum(written)


@pytest.mark.parametrize("mode", MODES)
def test_a_conversation_that_only_the_disk_has_room_for(mode: str, tmp_path: Path, written: list[int]) -> None:
    """It stops at the limit with an error that names it, and goes on an hour later."""
    model, turns = tiny(), plain_turns(tiny(), turns=2, prompt=180)
    with TieredKV(model, limited(model, tmp_path, mode, cpu_blocks=4)) as tiered:
        clock, cache = told_time(tiered), tiered.new_cache()
        assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode)
        held = cache.get_seq_length()
        with pytest.raises(CapacityError, match=r"tiers\.nvme\.max_writes, \S+/h, is used up"):
            tiered.generate(torch.cat([turns[0][1].sequences, tokens(420, 3)], dim=1), cache=cache, **GREEDY)
        assert cache.get_seq_length() >= held and sum(written) <= limit_bytes(model)
        tiered.check_integrity()
        cache.crop(held - cache.get_seq_length())
        clock.now_s += 3600 * 1.1
        assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
        assert nvme(tiered)["written_bytes"] > nvme(tiered)["written_in_period_bytes"]
        tiered.check_integrity()


def test_the_next_wrapper_of_the_path_goes_on_with_the_count(tmp_path: Path, written: list[int]) -> None:
    model, turns = tiny(), plain_turns(tiny(), turns=1, prompt=300)
    for number in range(3):
        with TieredKV(model, limited(model, tmp_path)) as tiered:
            if number:
                assert nvme(tiered)["written_in_period_bytes"] > 0 and nvme(tiered)["written_bytes"] == 0
            caches = [tiered.new_cache() for _ in range(3)]
            for seed, cache in enumerate(caches):
                tiered.generate(tokens(300, seed), cache=cache, **GREEDY)
            assert_same(tiered.generate(turns[0][0], **GREEDY), turns[0][1], CLOSE)
        assert sum(written) <= limit_bytes(model)
    assert sum(written) > 0


@torch.no_grad()
def test_early_moves_leave_half_for_those_that_are_needed(tmp_path: Path, written: list[int]) -> None:
    """Watermarks are reached all the time, and no step waits for room: at most half of it is spent."""
    model = tiny()
    config = limited(model, tmp_path, cpu_blocks=40)
    config["tiers"]["cpu"] |= {"high": 0.3, "low": 0.1}
    with TieredKV(model, config) as tiered:
        caches = [tiered.new_cache() for _ in range(2)]
        for seed, cache in enumerate(caches):
            tiered(tokens(250, seed), cache=cache)
            for _ in range(20):
                tiered.stats()
                time.sleep(0.01)
        assert 0 < sum(written) <= WriteMeter.EARLY_FRAC * limit_bytes(model)
        assert nvme(tiered)["state"] == "ok"


def test_without_a_limit_it_is_counted_all_the_same(tmp_path: Path, written: list[int]) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        tiered.generate(tokens(300), **GREEDY)
        stats = nvme(tiered)
        assert stats["written_bytes"] == stats["written_in_period_bytes"] >= sum(written) > 0
        assert (stats["max_writes"], stats["state"]) == ("none", "ok")
    with TieredKV(model, small_config(model, tmp_path, nvme=0)) as tiered:
        stats = nvme(tiered)
        assert (stats["written_bytes"], stats["max_writes"], stats["state"]) == (0, "none", "absent")


def test_less_than_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"max_writes is 8KiB/day, its minimum is \d+KiB/day: one block of"):
        TieredKV(tiny(), limited(tiny(), tmp_path, max_writes="8KiB/day"))
