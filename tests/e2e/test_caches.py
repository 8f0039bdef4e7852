"""Forks, crops and drops of caches, whose blocks lie on every tier."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.errors import UnsupportedError
from kvtier.hf import TieredCache
from tests.e2e.families import (
    BLOCK,
    CHUNK,
    GREEDY,
    assert_close,
    assert_same,
    mode_of,
    occupied,
    plain_turns,
    tokens,
)


def test_both_sides_of_a_fork_go_on_exactly_and_share_blocks(tiered: TieredKV) -> None:
    mode, turns = mode_of(tiered), plain_turns(tiered.model, turns=2)
    ids, first = turns[0]
    other_ids = torch.cat([first.sequences, tokens(25, 9)], dim=1)
    plain_cache = DynamicCache(config=tiered.model.config)
    tiered.model.generate(ids, cache=plain_cache, prefill_chunk_size=CHUNK, **GREEDY)
    other = tiered.model.generate(other_ids, cache=plain_cache, prefill_chunk_size=CHUNK, **GREEDY)
    cache = tiered.new_cache()
    assert_same(tiered.generate(ids, cache=cache, **GREEDY), first, mode)
    blocks = occupied(tiered)
    twin = copy.deepcopy(cache)
    assert isinstance(twin, TieredCache) and twin.get_seq_length() == 319
    assert occupied(tiered) == blocks == 20
    # 319 tokens: the tail is copied by whichever side appends first.
    assert_same(tiered.generate(other_ids, cache=twin, **GREEDY), other, mode)
    assert cache.get_seq_length() == 319
    assert occupied(tiered) == 20 - 1 + 1 + -(-twin.get_seq_length() // BLOCK) - 19
    assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], mode)
    del twin
    tiered.stats()
    assert occupied(tiered) == -(-cache.get_seq_length() // BLOCK)


@pytest.mark.sampled
@pytest.mark.parametrize("keep", [319, 318, 304, 303, 161, 160, 159, 1, 0])
def test_crop_then_go_on(tiered: TieredKV, keep: int) -> None:
    """319 tokens are held; most of the blocks that a crop cuts into were demoted long ago."""
    mode, ids = mode_of(tiered), tokens(300)
    cache = tiered.new_cache()
    first = tiered.generate(ids, cache=cache, **GREEDY).sequences
    cache.crop(0)
    assert cache.get_seq_length() == 319
    cache.crop(keep - 319)
    assert cache.get_seq_length() == keep and cache.token_ids == first[0, :keep].tolist()
    assert occupied(tiered) == -(-keep // BLOCK)
    longer = torch.cat([first[:, :keep], tokens(20, 4)], dim=1)
    plain_cache = DynamicCache(config=tiered.model.config)
    with torch.no_grad():
        for piece in [*ids.split(CHUNK, dim=1), *first[:, 300:319].split(1, dim=1)]:
            tiered.model(piece, cache=plain_cache)
    plain_cache.crop(keep - 319)
    expected = tiered.model.generate(longer, cache=plain_cache, prefill_chunk_size=CHUNK, **GREEDY)
    assert_same(tiered.generate(longer, cache=cache, **GREEDY), expected, mode)
    assert tiered.stats()["nvme_sole_reads"] > 0


def test_reset_and_what_crop_refuses(tiered: TieredKV) -> None:
    turns, cache = plain_turns(tiered.model, turns=1), tiered.new_cache()
    tiered.generate(tokens(100, 8), cache=cache, max_new_tokens=2)
    with pytest.raises(UnsupportedError, match="negative"):
        cache.crop(50)
    assert cache.get_seq_length() == 101
    cache.reset()
    assert (cache.get_seq_length(), cache.token_ids, occupied(tiered)) == (0, [], 0)
    assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode_of(tiered))


def test_pickle_and_shallow_copy_are_refused_by_name(tiered: TieredKV) -> None:
    turns, cache = plain_turns(tiered.model, turns=1), tiered.new_cache()
    for attempt in (pickle.dumps, copy.copy):
        with pytest.raises(UnsupportedError, match=r"lies on the tiers of this.*fork\(\)"):
            attempt(cache)
    assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], mode_of(tiered))


def test_a_dropped_cache_is_freed_without_the_collector(tiered: TieredKV) -> None:
    gc.collect()
    gc.disable()
    try:
        caches = [tiered.new_cache() for _ in range(3)]
        for number, cache in enumerate(caches):
            tiered.generate(tokens(150, number), cache=cache, max_new_tokens=2)
        assert (occupied(tiered), tiered.stats()["sequences"]) == (30, 3)
        del caches, cache
        with torch.no_grad():
            logits = tiered(tokens(1)).logits
        assert (occupied(tiered), tiered.stats()["sequences"]) == (0, 0)
        assert_close(logits, tiered.model(tokens(1)).logits.detach(), mode_of(tiered))
    finally:
        gc.enable()
