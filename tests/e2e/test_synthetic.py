"""`benchmarks.synthetic`: a filled cache computes what the plain model computes over the same K and V."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier import TieredKV
from kvtier.benchmarks.synthetic import PIECE_TOKENS, fill, fill_plain
from kvtier.errors import BlockLostError, UnsupportedError
from kvtier.types import Tier
from tests.e2e.families import BLOCK, small_config, tiny, tokens

NUM_TOKENS = PIECE_TOKENS + 75  # a piece and a part of one, and a tail


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(11)


def logits(call: Any, cache: Any, ids: list[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([call(each, cache=cache).logits for each in ids], dim=1)


def tiers_of(tiered: TieredKV, cache: Any) -> set[Tier]:
    residency = tiered._runtime.placement.residency
    fastest = [residency[block].fastest for table in cache.state.batch.tables for block in table.blocks]
    return {tier for tier in fastest if tier is not None}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_logits_are_those_of_the_plain_model_with_blocks_on_all_tiers(
    tmp_path: Path, family: str, num_rows: int
) -> None:
    model = tiny(family)
    ids = torch.cat([tokens(NUM_TOKENS, seed) for seed in range(num_rows)])
    # A step of one token, one of several, and one more: the tail grows and a block fills.
    later = [torch.cat([tokens(count, 50 + row) for row in range(num_rows)]) for count in (1, BLOCK + 3, 1)]
    wanted = logits(model, fill_plain(model, NUM_TOKENS, seeded(), num_rows), later)
    # Rows have no block in common, so the nvme tier holds most of every one.
    config = small_config(model, tmp_path, rows=num_rows, nvme=num_rows * 8 * 1024**2)
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        fill(tiered, cache, ids, seeded())
        assert cache.get_seq_length() == NUM_TOKENS
        assert not tiered._runtime.placement.moves
        assert tiers_of(tiered, cache) == set(Tier)
        found = logits(tiered, cache, later)
        tiered.check_integrity()
    assert float((found - wanted).abs().max()) < 1e-4
    assert float(wanted.abs().max()) > 0.1
    assert int((found.argmax(-1) != wanted.argmax(-1)).sum()) == 0


def test_other_values_give_other_logits(tmp_path: Path) -> None:
    """The agreement above says something: it is not that the KV plays no part."""
    model = tiny()
    one = logits(model, fill_plain(model, NUM_TOKENS, seeded()), [tokens(1)])
    other = logits(model, fill_plain(model, NUM_TOKENS, torch.Generator().manual_seed(12)), [tokens(1)])
    assert float((one - other).abs().max()) > 1e-2


def test_nobody_else_finds_what_was_filled(tmp_path: Path) -> None:
    """It is not the KV of the tokens that it stands for: not in this process, nor in a later one."""
    model, ids = tiny(), tokens(NUM_TOKENS)
    config = small_config(model, tmp_path) | {"prefix_cache": True}
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        fill(tiered, cache, ids, seeded())
        with torch.no_grad():
            tiered(tokens(BLOCK), cache=cache)
        out = tiered.generate(ids, max_new_tokens=3, do_sample=False)
        assert sum(tiered.stats()["prefix_cache"]["reused_tokens"].values()) == 0
        cache.reset()
    assert out.tolist() == model.generate(ids, max_new_tokens=3, do_sample=False).tolist()
    with TieredKV(model, config) as later:
        again = later.generate(torch.cat([ids, tokens(2, 9)], dim=1), max_new_tokens=3, do_sample=False)
        # What the first process computed itself may be there; what was filled is not.
        plain = model.generate(torch.cat([ids, tokens(2, 9)], dim=1), max_new_tokens=3, do_sample=False)
        assert again.tolist() == plain.tolist()


def test_a_lost_block_is_not_computed_from_the_tokens(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        fill(tiered, cache, tokens(NUM_TOKENS), seeded())
        placement = tiered._runtime.placement
        placement.drop(cache.state.batch.tables[0].blocks[3])
        with pytest.raises(BlockLostError), torch.no_grad():
            tiered(tokens(1), cache=cache)


def test_what_cannot_be_filled_is_refused(tmp_path: Path) -> None:
    windows = tiny("gemma3")
    with pytest.raises(UnsupportedError, match="not tiered"):
        fill_plain(windows, 8, seeded())
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        cache = tiered.new_cache()
        with torch.no_grad():
            tiered(tokens(5), cache=cache)
        with pytest.raises(UnsupportedError, match="holds 5 tokens"):
            fill(tiered, cache, tokens(8), seeded())
        assert cache.get_seq_length() == 5
