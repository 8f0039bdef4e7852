"""More conversations than all tiers hold: idle blocks are dropped, recomputed when needed, and every token is right."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.errors import BlockLostError, BudgetError, CapacityError
from kvtier.hf import describe
from kvtier.types import Tier
from tests.e2e.families import (
    BLOCK,
    CHUNK,
    GREEDY,
    MODES,
    assert_same,
    occupied,
    plain_forward,
    plain_turns,
    small_config,
    tiny,
    tokens,
)
from tests.e2e.test_loss import flip
from tests.e2e.test_recompute import CLOSE, damage_files, recomputed

FAMILIES = ("llama", "gemma3", "granitemoehybrid")
# Each family with each mode, each tier with each mode or family that treats it differently.
CELLS = [
    ("llama", "blockwise", "gpu"), ("llama", "blockwise", "gpu+cpu"), ("llama", "blockwise", "gpu+cpu+nvme"),
    ("llama", "gathered", "gpu+nvme"), ("gemma3", "blockwise", "gpu+nvme"), ("gemma3", "gathered", "gpu+cpu+nvme"),
    ("granitemoehybrid", "blockwise", "gpu+cpu+nvme"), ("granitemoehybrid", "gathered", "gpu"),
]  # fmt: skip
TOO_LARGE = [
    ("llama", "gpu"), ("llama", "gpu+cpu"), ("llama", "gpu+cpu+nvme"), ("gemma3", "gpu+cpu+nvme"),
    ("granitemoehybrid", "gpu+cpu+nvme"),
]  # fmt: skip
NUM_CONVERSATIONS = 3
PROMPT = 100
"""Three turns of it are 240 tokens in 15 blocks: one conversation has room, and three have not."""


def tiers(model: Any, folder: Path, mode: str, which: str) -> dict[str, Any]:
    """About 20 blocks in all, on the tiers named; with one beside gpu, most of them not on the gpu tier."""
    slot_bytes = describe(model, BLOCK).shape.block_bytes + 8192
    if which == "gpu":
        return small_config(model, folder, mode, gpu_slots=19, cpu_blocks=0, nvme=0)
    if which == "gpu+cpu":
        return small_config(model, folder, mode, cpu_blocks=14, nvme=0)
    nvme = 12 * slot_bytes + (64 << 10)
    return small_config(model, folder, mode, cpu_blocks=4 if "cpu" in which else 0, nvme=nvme)


def dropped(tiered: TieredKV) -> int:
    return int(tiered.stats()["dropped_blocks"])


def only_gpu(model: Any, folder: Path, slots: int = 10, mode: str = "blockwise", **values: Any) -> dict[str, Any]:
    return small_config(model, folder, mode, gpu_slots=slots, cpu_blocks=0, nvme=0, **values)


def logits_of(model: Any, *parts: torch.Tensor) -> torch.Tensor:
    """The plain model's, of the last part."""
    return plain_forward(model, torch.cat(parts, dim=1))[:, -parts[-1].shape[1] :]


def close(ours: torch.Tensor, plain: torch.Tensor) -> bool:
    return float((ours - plain).abs().max()) < 1e-4


# -- right tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode", "which"), CELLS)
def test_conversations_that_do_not_fit_together(family: str, mode: str, which: str, tmp_path: Path) -> None:
    model = tiny(family)
    conversations = [plain_turns(model, seed=10 * i, prompt=PROMPT) for i in range(NUM_CONVERSATIONS)]
    with TieredKV(model, tiers(model, tmp_path, mode, which)) as tiered:
        caches = [tiered.new_cache() for _ in conversations]
        for turn in range(3):
            for cache, turns in zip(caches, conversations, strict=True):
                before = dropped(tiered), recomputed(tiered), cache.stats()["blocks"]
                ids, expected = turns[turn]
                assert_same(tiered.generate(ids, cache=cache, **GREEDY), expected, CLOSE)
                tiered.check_integrity()
                assert recomputed(tiered) - before[1] <= before[2]  # each of its blocks once at most
            if turn:
                assert dropped(tiered) > before[0] and recomputed(tiered) > before[1]
        stats = tiered.stats()
        assert stats["dropped_blocks"] > 20 and stats["recomputed_blocks"] > 15 and stats["steps_aborted"] == 0
        assert all(tier["used_bytes"] <= tier["budget_bytes"] for tier in stats["tiers"].values())
        del caches, cache
        assert occupied(tiered) == 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_calls_outside_of_generate_do_not_drop_what_they_recompute(family: str, tmp_path: Path) -> None:
    """A batch that is mended runs; the temporary row that has the last step must not make it idle."""
    model = tiny(family)
    with TieredKV(model, only_gpu(model, tmp_path)) as tiered:
        caches, held = [tiered.new_cache() for _ in range(2)], [tokens(0), tokens(0)]
        for turn in range(4):
            for number, cache in enumerate(caches):
                new = tokens(110 if turn == 0 else 9, 10 * turn + number)
                before = recomputed(tiered)
                ours = tiered(new, cache=cache).logits
                assert close(ours, logits_of(model, held[number], new))
                held[number] = torch.cat([held[number], new], dim=1)
                num_blocks = held[number].shape[1] // BLOCK + 1
                assert (recomputed(tiered) - before <= num_blocks) and (turn == 0 or recomputed(tiered) > before)
                tiered.check_integrity()


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "opt", "gemma3"])
def test_padded_rows(family: str, mode: str, tmp_path: Path) -> None:
    model = tiny(family)
    with TieredKV(model, small_config(model, tmp_path, mode, rows=2, gpu_slots=30, cpu_blocks=0, nvme=0)) as tiered:
        chats = []
        for number in range(2):
            ids = torch.cat([tokens(120, number), tokens(120, 5 + number)])
            mask = torch.ones_like(ids)
            mask[1, :21] = 0
            chats.append([tiered.new_cache(), DynamicCache(config=model.config), ids, mask])
        for turn in range(3):
            for chat in chats:
                cache, plain, ids, mask = chat
                given = {"attention_mask": mask, **GREEDY}
                expected = model.generate(ids, cache=plain, prefill_chunk_size=CHUNK, **given)
                assert_same(tiered.generate(ids, cache=cache, **given), expected, CLOSE)
                tiered.check_integrity()
                new = torch.cat([tokens(10, 30 + turn), tokens(10, 40 + turn)])
                chat[2] = ids = torch.cat([expected.sequences, new], dim=1)
                chat[3] = torch.cat([mask, torch.ones((2, ids.shape[1] - mask.shape[1]), dtype=mask.dtype)], dim=1)
        assert dropped(tiered) > 10 and recomputed(tiered) > 10


def test_what_forks_share_is_recomputed_once(tmp_path: Path) -> None:
    model = tiny()
    (first, (ids, expected)), ((other, answer),) = (
        plain_turns(model, turns=2, prompt=PROMPT),
        plain_turns(model, turns=1, prompt=140, seed=9),
    )
    with TieredKV(model, only_gpu(model, tmp_path, 14)) as tiered:
        cache = tiered.new_cache()
        assert_same(tiered.generate(first[0], cache=cache, **GREEDY), first[1], CLOSE)
        fork = cache.fork()
        assert_same(tiered.generate(other, **GREEDY), answer, CLOSE)
        assert dropped(tiered) >= 4
        missing = dropped(tiered)
        again = cache.fork()  # of a cache whose blocks are not there
        for each in (fork, cache, again):
            assert_same(tiered.generate(ids, cache=each, **GREEDY), expected, CLOSE)
            tiered.check_integrity()
            each.crop(first[0].shape[1] + 16 - each.get_seq_length())
        assert recomputed(tiered) >= missing
        assert recomputed(tiered) < 3 * missing


@pytest.mark.parametrize("mode", MODES)
def test_sessions_and_edits(mode: str, tmp_path: Path) -> None:
    """A session goes back into blocks that were dropped, by tokens of a block and by all of them."""
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path, 12, mode)) as tiered:
        transcripts = {name: tokens(110, seed) for seed, name in enumerate(["alice", "bob", "carol"])}
        for turn in range(4):
            for name, ids in transcripts.items():
                expected = model.generate(ids, prefill_chunk_size=CHUNK, **GREEDY)
                assert_same(tiered.session(name).generate(ids, **GREEDY), expected, CLOSE)
                tiered.check_integrity()
                kept = {"alice": 110, "bob": 87, "carol": 128}[name]
                transcripts[name] = torch.cat([expected.sequences[:, :kept], tokens(12, 50 + turn)], dim=1)
        assert dropped(tiered) > 10 and recomputed(tiered) > 10
        for name in transcripts:
            tiered.session(name).delete()
        assert occupied(tiered) == 0


def test_tails_alone(tmp_path: Path) -> None:
    """Many conversations of less than a block each."""
    model = tiny()
    conversations = [plain_turns(model, turns=2, seed=i, prompt=5, max_new_tokens=6) for i in range(16)]
    how = GREEDY | {"max_new_tokens": 6}
    with TieredKV(model, only_gpu(model, tmp_path, 8)) as tiered:
        caches = [tiered.new_cache() for _ in conversations]
        for turn in range(2):
            for cache, turns in zip(caches, conversations, strict=True):
                assert_same(tiered.generate(turns[turn][0], cache=cache, **how), turns[turn][1], CLOSE)
                tiered.check_integrity()
        assert dropped(tiered) >= 16 and recomputed(tiered) >= 8


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_on_full_tiers(family: str, tmp_path: Path) -> None:
    """What a broken file held is computed again although no tier has a free slot."""
    model = tiny(family)
    conversations = [plain_turns(model, turns=2, seed=10 * i, prompt=130) for i in range(2)]
    with TieredKV(model, tiers(model, tmp_path, "blockwise", "gpu+cpu+nvme")) as tiered:
        caches = [tiered.new_cache() for _ in conversations]
        for cache, turns in zip(caches, conversations, strict=True):
            assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], CLOSE)
        damage_files(tiered, flip)
        residency = tiered._runtime.placement.residency
        assert any(residency[b].fastest is Tier.NVME for b in caches[0].state.batch.tables[0].blocks)
        for cache, turns in zip(caches, conversations, strict=True):
            assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
            tiered.check_integrity()
        assert recomputed(tiered) > 5 and dropped(tiered) > 0


# -- what is too large, or cannot be recomputed ------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "which"), TOO_LARGE)
def test_a_conversation_too_large_for_everything(family: str, which: str, tmp_path: Path) -> None:
    model = tiny(family)
    conversations = [plain_turns(model, turns=2, seed=10 * i, prompt=PROMPT) for i in range(2)]
    with TieredKV(model, tiers(model, tmp_path, "blockwise", which)) as tiered:
        caches, large = [tiered.new_cache() for _ in conversations], tiered.new_cache()
        for cache, turns in zip(caches, conversations, strict=True):
            assert_same(tiered.generate(turns[0][0], cache=cache, **GREEDY), turns[0][1], CLOSE)
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"no tier takes another block.*Raise a tier's budget"):
                tiered.generate(tokens(400, 7), cache=large, **GREEDY)
            assert large.get_seq_length() == 0
            tiered.check_integrity()
        for cache, turns in zip(caches, conversations, strict=True):
            assert_same(tiered.generate(turns[1][0], cache=cache, **GREEDY), turns[1][1], CLOSE)
            tiered.check_integrity()
        assert dropped(tiered) > 0 and recomputed(tiered) > 0


@pytest.mark.parametrize("family", ["gemma3", "granitemoehybrid"])
@torch.no_grad()
def test_a_newcomer_does_not_take_the_room_in_which_windows_and_states_are_mended(family: str, tmp_path: Path) -> None:
    """It was let in once, and then every older conversation was refused for as long as it lived."""
    model = tiny(family)
    with TieredKV(model, only_gpu(model, tmp_path, 12)) as tiered:
        caches = []
        with pytest.raises((BudgetError, CapacityError)):
            while len(caches) < 400:
                cache = tiered.new_cache()
                tiered(tokens(40, len(caches)), cache=cache)
                caches.append(cache)
        assert dropped(tiered) > 10
        for number in range(4):  # the one that was refused is still there
            ours = tiered(tokens(5, 7), cache=caches[number]).logits
            assert close(ours, logits_of(model, tokens(40, number), tokens(5, 7)))
            tiered.check_integrity()
        assert recomputed(tiered) >= 8


@torch.no_grad()
def test_a_step_that_cannot_fit_drops_nothing(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path, 12)) as tiered:
        idle, running = tiered.new_cache(), tiered.new_cache()
        num_slots = tiered.stats()["tiers"]["gpu"]["num_slots"]
        tiered(tokens(BLOCK), cache=idle)
        ids = tokens((num_slots - 1) * BLOCK, 1)
        tiered(ids, cache=running)
        with pytest.raises(CapacityError):
            tiered(tokens(2 * BLOCK, 2), cache=running)
        assert dropped(tiered) == 0 and running.get_seq_length() == ids.shape[1]
        new = tokens(BLOCK, 3)
        assert close(tiered(new, cache=running).logits, logits_of(model, ids, new))
        assert dropped(tiered) == 1
        tiered.check_integrity()


@torch.no_grad()
def test_nothing_is_dropped_that_the_config_says_is_not_recomputed(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path) | {"on_block_loss": "raise"}) as tiered:
        cache = tiered.new_cache()
        tiered(tokens(120), cache=cache)
        with pytest.raises(CapacityError):
            tiered(tokens(120, 1), cache=tiered.new_cache())
        assert dropped(tiered) == 0
        assert close(tiered(tokens(5, 2), cache=cache).logits, logits_of(model, tokens(120), tokens(5, 2)))


@torch.no_grad()
def test_what_was_fed_as_embeddings_is_not_dropped(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path, 12)) as tiered:
        embedded, other, third = (tiered.new_cache() for _ in range(3))
        tiered(inputs_embeds=model.get_input_embeddings()(tokens(60)), cache=embedded)
        tiered(tokens(60, 1), cache=other)
        tiered(tokens(80, 2), cache=third)
        assert dropped(tiered) > 0
        residency = tiered._runtime.placement.residency
        assert all(residency[block].copies for block in embedded.state.batch.tables[0].blocks)
        with pytest.raises(CapacityError):
            tiered(tokens(140, 3), cache=tiered.new_cache())
        for cache, held in ((embedded, tokens(60)), (other, tokens(60, 1)), (third, tokens(80, 2))):
            assert close(tiered(tokens(5, 4), cache=cache).logits, logits_of(model, held, tokens(5, 4)))
        tiered.check_integrity()


@torch.no_grad()
def test_hooks_keep_blocks_from_being_dropped_and_from_being_recomputed(tmp_path: Path) -> None:
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path)) as tiered:
        cache, other = tiered.new_cache(), tiered.new_cache()
        tiered(tokens(100), cache=cache)
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(CapacityError):
            tiered(tokens(100, 1), cache=other)
        assert dropped(tiered) == 0
        handle.remove()
        tiered(tokens(100, 1), cache=other)
        assert dropped(tiered) > 0
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        with pytest.raises(BlockLostError, match=r"dropped to make room; it cannot be recomputed: hooks or autocast"):
            tiered(tokens(5, 2), cache=cache)
        assert cache.get_seq_length() == 100
        handle.remove()
        assert close(tiered(tokens(5, 2), cache=cache).logits, logits_of(model, tokens(100), tokens(5, 2)))
        tiered.check_integrity()


@torch.no_grad()
def test_a_model_that_has_changed_recomputes_nothing_that_was_dropped(tmp_path: Path) -> None:
    model = tiny()
    attention = model.model.layers[0].self_attn
    with TieredKV(model, only_gpu(model, tmp_path)) as tiered:
        cache, other = tiered.new_cache(), tiered.new_cache()
        tiered(tokens(100), cache=cache)
        tiered(tokens(100, 1), cache=other)
        assert dropped(tiered) > 0
        before, attention.scaling = attention.scaling, attention.scaling * 3
        try:
            with pytest.raises(BlockLostError, match=r"dropped to make room; it cannot be recomputed: .*modules or"):
                tiered(tokens(5, 2), cache=cache)
        finally:
            attention.scaling = before
        assert recomputed(tiered) == 0
        assert close(tiered(tokens(5, 2), cache=cache).logits, logits_of(model, tokens(100), tokens(5, 2)))


def test_the_log_says_what_was_dropped_and_not_for_ever(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    with TieredKV(model, only_gpu(model, tmp_path)) as tiered, torch.no_grad():
        caches = [tiered.new_cache() for _ in range(2)]
        with caplog.at_level(logging.WARNING, "kvtier"):
            for turn in range(10):
                for cache in caches:
                    tiered(tokens(90 if turn == 0 else 1, turn), cache=cache)
        messages = [record.getMessage() for record in caplog.records]
    assert 1 <= len(messages) <= 3
    assert all("blocks of idle conversations were dropped, and will be recomputed" in message for message in messages)
