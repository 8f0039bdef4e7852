"""Caches of several rows: what beams and batches cost, what padding costs, and what is left when one goes wrong."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from kvtier import TieredKV
from kvtier.errors import BudgetError, UnsupportedError
from kvtier.hf import TieredCache
from tests.e2e.families import (
    BLOCK,
    CHUNK,
    GREEDY,
    MODES,
    assert_close,
    assert_same,
    occupied,
    small_config,
    tiny,
    tokens,
)

PAD = 0


@pytest.fixture(params=MODES)
def tiered(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TieredKV]:
    """A tiny Llama with gpu slots for a chunk of four rows, and far fewer than they fill."""
    model = tiny()
    with TieredKV(model, small_config(model, tmp_path, request.param, gpu_slots=14)) as wrapper:
        yield wrapper
        wrapper.check_integrity()


def plain_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=model.config)


def padded(lengths: list[int], width: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`[rows, width]` ids and their mask."""
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros((len(lengths), width), dtype=torch.long)
    for row, length in enumerate(lengths):
        at = slice(width - length, width) if left else slice(0, length)
        ids[row, at], mask[row, at] = tokens(length, 50 + row)[0], 1
    return ids, mask


# -- what they cost ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_eight_beams_on_a_long_prompt_hold_the_blocks_of_one(mode: str, tmp_path: Path) -> None:
    model, ids = tiny("qwen3"), tokens(2000)
    slots = {"gpu_slots": 20} if mode == "blockwise" else {"gpu_slots": 300}  # a layer of eight rows of 2,000 tokens
    config = small_config(model, tmp_path, mode, block_tokens=64, prefill_chunk=128, nvme="32MiB", **slots)
    held = {}
    with TieredKV(model, config) as tiered:
        for beams in (1, 8):
            cache = tiered.new_cache()
            tiered.generate(ids, cache=cache, num_beams=beams, max_new_tokens=1, do_sample=False)
            assert cache.batch_size == beams
            held[beams] = cache.stats()["blocks"]
            assert occupied(tiered) == held[beams]
            del cache
            gc.collect()
        assert held[1] == 32 and held[8] <= 1.3 * held[1], held
        assert tiered.stats()["tiers"]["nvme"]["only_copy_peak_bytes"] > 0 or mode == "gathered"


def test_padding_takes_no_slots(tiered: TieredKV) -> None:
    for left in (True, False):
        ids, mask = padded([96, 16, 1], 96, left=left)
        cache = tiered.new_cache()
        with torch.no_grad():
            tiered(ids, attention_mask=mask, cache=cache)
        assert cache.stats()["tokens"] == 96 + 16 + 1
        assert cache.stats()["blocks"] == 96 // BLOCK + 1 + 1
        assert cache.get_seq_length() == 96
        assert [len(cache.row_token_ids(row)) for row in range(3)] == [96, 16, 1]
        with pytest.raises(UnsupportedError, match=r"3 rows.*row_token_ids"):
            _ = cache.token_ids


def test_a_batch_too_large_for_the_tier_says_so_and_changes_nothing(tiered: TieredKV) -> None:
    before = occupied(tiered)
    cache = tiered.new_cache()
    with torch.no_grad(), pytest.raises(BudgetError, match=r"rows.*raise tiers\.gpu\.budget"):
        tiered(tokens(1).repeat(200, 1), cache=cache)
    assert occupied(tiered) == before and cache.get_seq_length() == 0
    with torch.no_grad():
        tiered(tokens(40).repeat(2, 1), cache=cache)
    assert cache.batch_size == 2


# -- by hand, against the plain cache ----------------------------------------------------------------------------------


class Twin:
    """The same calls on a tiered cache and on a plain one; logits of real tokens are compared at every call."""

    def __init__(self, tiered: TieredKV, rows: int) -> None:
        self.tiered, self.model = tiered, tiered.model
        self.ours: TieredCache = tiered.new_cache()
        self.plain = plain_cache(tiered.model)
        self.mask = torch.zeros((rows, 0), dtype=torch.long)

    @torch.no_grad()
    def step(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        new = torch.ones_like(ids) if mask is None else mask
        self.mask = torch.cat([self.mask, new], dim=1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        ours = self.tiered(ids, attention_mask=self.mask, position_ids=positions, cache=self.ours).logits
        held, parts = self.mask.shape[1] - ids.shape[1], []
        for start in range(0, ids.shape[1], CHUNK):
            piece = slice(start, start + CHUNK)
            parts.append(self.model(
                ids[:, piece], attention_mask=self.mask[:, : held + start + CHUNK], position_ids=positions[:, piece],
                cache=self.plain,
            ).logits)  # fmt: skip
        expected = torch.cat(parts, dim=1)
        sees_a_token = self.mask.cumsum(1)[:, -ids.shape[1] :] > 0
        mode = self.tiered.config.attention.value
        assert_close(ours[sees_a_token], expected[sees_a_token], mode)
        assert self.ours.get_seq_length() == self.plain.get_seq_length()
        self.tiered.check_integrity()
        return expected

    def both(self, method: str, *arguments: Any) -> None:
        getattr(self.ours, method)(*arguments)
        getattr(self.plain, method)(*arguments)
        self.tiered.check_integrity()


@pytest.mark.sampled
@pytest.mark.parametrize("left", [True, False])
def test_padded_rows_turn_after_turn(left: bool, tiered: TieredKV) -> None:
    twin = Twin(tiered, 3)
    for turn, lengths in enumerate(([150, 90, 33], [40, 17, 40], [1, 60, 16])):
        twin.step(*padded(lengths, max(lengths), left=left))
        for _ in range(3):
            twin.step(tokens(3, turn).T)
    assert tiered.stats()["nvme_sole_reads"] > 0 or tiered.config.attention.value == "gathered"


def test_padding_in_the_middle_of_a_chunk_and_rows_that_get_nothing(tiered: TieredKV) -> None:
    twin = Twin(tiered, 2)
    mask = torch.ones((2, 50), dtype=torch.long)
    mask[0, 7:19], mask[0, 30], mask[1, :] = 0, 0, 0
    mask[1, 45:] = 1
    twin.step(tokens(100).view(2, 50), mask)
    twin.step(tokens(10, 1).view(2, 5), torch.tensor([[1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]))
    twin.step(tokens(2, 2).view(2, 1), torch.tensor([[0], [1]]))
    twin.step(tokens(80, 3).view(2, 40))
    assert twin.ours.stats()["tokens"] == int(twin.mask.sum())


def test_tokens_at_a_row_s_end_become_padding(tiered: TieredKV) -> None:
    """A row that ended early was fed its pad tokens; the next turn's mask hides them."""
    twin = Twin(tiered, 2)
    twin.step(tokens(120).view(2, 60))
    twin.mask[0, 41:] = 0
    twin.step(tokens(8, 1).view(2, 4))
    assert twin.ours.stats()["tokens"] == 41 + 60 + 8
    twin.mask[1, 64 - 3 :] = 0
    twin.step(tokens(90, 2).view(2, 45))
    # Gone for good: unmasking them cannot be honoured, and nothing changes by asking.
    for row, column, message in ((0, 41, "unmasks column 41 of row 0"), (1, 5, "hides token 5 of row 1")):
        wrong = twin.mask.clone()
        wrong[row, column] ^= 1
        with torch.no_grad(), pytest.raises(UnsupportedError, match=message):
            tiered(tokens(2).view(2, 1), attention_mask=torch.cat([wrong, torch.ones(2, 1)], 1), cache=twin.ours)
    with torch.no_grad(), pytest.raises(UnsupportedError, match=r"holds padding.*no attention_mask"):
        tiered(tokens(2).view(2, 1), cache=twin.ours)
    twin.step(tokens(2, 3).view(2, 1))


def test_a_step_that_fails_gives_masked_tokens_back(tiered: TieredKV) -> None:
    twin = Twin(tiered, 2)
    twin.step(tokens(120).view(2, 60))

    def fail(*_: Any) -> None:
        raise RuntimeError("no more")

    mask = torch.ones((2, 140), dtype=torch.long)
    mask[0, 41:60] = 0
    handle = tiered.model.model.layers[2].register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no more"):
        tiered(tokens(160, 1).view(2, 80), attention_mask=mask, cache=twin.ours)
    handle.remove()
    assert twin.ours.stats()["tokens"] == 120 and len(twin.ours.row_token_ids(0)) == 60
    tiered.check_integrity()
    twin.step(tokens(160, 1).view(2, 80))


def test_reorder_select_repeat_and_crop_in_every_order(tiered: TieredKV) -> None:
    operations = [
        ("reorder_cache", torch.tensor([2, 0, 0, 1])),
        ("crop", -5),
        ("batch_select_indices", torch.tensor([3, 1])),
        ("batch_repeat_interleave", 2),
        ("crop", -37),
        ("crop", 0),
    ]
    for order in itertools.islice(itertools.permutations(range(6)), 0, 720, 97):
        twin = Twin(tiered, 4)
        twin.step(tokens(4 * 50).view(4, 50))
        for number, which in enumerate(order):
            name, argument = operations[which]
            rows = twin.ours.batch_size
            if name in ("reorder_cache", "batch_select_indices"):
                argument = argument % rows
            if name == "batch_repeat_interleave" and rows > 2:
                twin.both("batch_select_indices", torch.tensor([1, 0]))
            twin.both(name, argument)
            if name == "crop":
                twin.mask = twin.mask[:, : twin.mask.shape[1] + int(argument)]
            rows = twin.ours.batch_size
            twin.mask = torch.ones((rows, twin.mask.shape[1]), dtype=torch.long)
            twin.step(tokens(rows * 3, number).view(rows, 3))
        twin.ours.reset()
        assert occupied(tiered) == 0


def test_rows_that_part_and_meet_again_share_what_is_equal(tiered: TieredKV) -> None:
    twin = Twin(tiered, 3)
    twin.step(tokens(40).repeat(3, 1))
    twin.step(tokens(3 * 12, 1).view(3, 12))
    twin.step(tokens(1).repeat(3, 1))
    assert twin.ours.stats()["blocks"] == 2 + 3 * 2  # two full blocks shared, one full of its own and a tail each
    twin.both("reorder_cache", torch.tensor([1, 1, 1]))
    twin.step(tokens(30, 2).repeat(3, 1))
    twin.step(tokens(1).repeat(3, 1))
    assert twin.ours.stats()["blocks"] == 5 + 3


def test_rows_that_a_hook_makes_different_are_not_joined(tiered: TieredKV) -> None:
    """Activation steering of one row of two: equal prompts, other KV."""
    steering = torch.zeros(3, 1, tiered.model.config.hidden_size)
    steering[1] = 0.5

    def steer(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output + steering

    handle = tiered.model.model.layers[0].register_forward_hook(steer)
    try:
        twin = Twin(tiered, 3)
        for turn in range(3):
            logits = twin.step(tokens(70, turn).repeat(3, 1))
            assert (logits[0] - logits[1]).abs().max() > 0.01
        twin.step(tokens(1).repeat(3, 1))  # seals what the last step filled
        # Rows 0 and 2 share; the first layer's K and V are equal in all of them, and the block is all layers'.
        assert twin.ours.stats()["blocks"] == 2 * (211 // BLOCK) + 3
    finally:
        handle.remove()


def test_rows_of_other_token_types_are_not_joined(tmp_path: Path) -> None:
    model, ids = tiny("gpt2"), tokens(100).repeat(2, 1)
    types = torch.stack([torch.zeros(100, dtype=torch.long), torch.ones(100, dtype=torch.long)])
    with TieredKV(model, small_config(model, tmp_path, gpu_slots=14)) as tiered, torch.no_grad():
        cache, plain = tiered.new_cache(), plain_cache(model)
        for piece in (slice(0, 60), slice(60, 61), slice(61, 100)):
            ours = tiered(ids[:, piece], token_type_ids=types[:, piece], cache=cache).logits
            expected = model(ids[:, piece], token_type_ids=types[:, piece], cache=plain).logits
            assert (expected[0] - expected[1]).abs().max() > 0.01
            assert_close(ours, expected, "blockwise")


# -- when it goes wrong ------------------------------------------------------------------------------------------------


class Raises(LogitsProcessor):
    """Raises at its third call."""

    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            raise RuntimeError("enough")
        return scores


@pytest.mark.sampled
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}, {"num_return_sequences": 3, "do_sample": True}], ids=str)
def test_an_error_in_a_logits_processor_leaves_no_pin_and_no_slot(how: dict[str, Any], tiered: TieredKV) -> None:
    ids = tokens(150)
    expected = tiered.model.generate(ids, cache=plain_cache(tiered.model), prefill_chunk_size=CHUNK, **GREEDY)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="enough"):
            tiered.generate(ids, max_new_tokens=9, logits_processor=LogitsProcessorList([Raises()]), **how)
        gc.collect()
        assert occupied(tiered) == 0
    assert_same(tiered.generate(ids, **GREEDY), expected, tiered.config.attention.value)


def test_dropping_a_cache_of_many_rows_frees_its_blocks(tiered: TieredKV) -> None:
    for _ in range(3):
        cache = tiered.new_cache(batch_size=4)
        with torch.no_grad():
            tiered(tokens(4 * 40).view(4, 40), cache=cache)
        twin = cache.fork()
        assert twin.batch_size == 4 and occupied(tiered) > 0
        del cache
        gc.collect()
        assert occupied(tiered) > 0
        del twin
        gc.collect()
        assert occupied(tiered) == 0
