"""The wrapped model's logits, step by step, against the plain cache's, at budgets that force blocks onto NVMe."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, PretrainedConfig, Qwen3Config

from kvtier import TieredKV
from kvtier.hf import TieredCache
from kvtier.system import allocated_bytes
from tests.e2e.families import (
    BLOCK,
    CHUNK,
    GREEDY,
    MODES,
    assert_close,
    assert_same,
    plain_forward,
    plain_turns,
    small_config,
    tiny,
    tiny_from,
    tokens,
)
from tests.e2e.sides import assert_within
from tests.e2e.wide import wide_twin

both_modes = pytest.mark.parametrize("mode", MODES)
# `make matrix` has every family, in every mode of generation.
LONG = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox", "gemma2", "gpt_oss", "granitemoehybrid")


def assert_budgets(tiered: TieredKV) -> None:
    """Bookkeeping agrees with itself, and no tier ever took more than it was given."""
    tiered.check_integrity()
    for name, tier in tiered.stats()["tiers"].items():
        assert tier["used_bytes"] <= tier["peak_bytes"] <= tier["budget_bytes"], (name, tier)
        if tier.get("folder"):
            assert allocated_bytes(Path(tier["folder"])) <= tier["budget_bytes"]


def assert_came_back_from_nvme(tiered: TieredKV, *caches: TieredCache) -> None:
    """Blocks lay on NVMe alone and were read from there, for each of the conversations."""
    stats = tiered.stats()
    assert stats["nvme_sole_reads"] > 0
    assert stats["tiers"]["nvme"]["only_copy_peak_bytes"] > 0
    assert stats["bytes_moved"]["nvme_to_gpu"] + stats["bytes_moved"]["nvme_to_cpu"] > 0
    for cache in caches:
        assert cache.stats()["nvme_read_bytes"] > 0


def run_turns(model: Any, config: dict[str, Any], mode: str, turns: list[Any], **kwargs: Any) -> dict[str, Any]:
    """Answer every prompt of `turns` on one cache, compare each step, and return the stats at the end."""
    with TieredKV(model, config) as tiered:
        cache = tiered.new_cache()
        for turn, (ids, expected) in enumerate(turns):
            torch.manual_seed(turn)
            out = tiered.generate(ids, cache=cache, **{**GREEDY, **kwargs})
            assert_same(out, expected, mode)
            # Every token but the last was fed back.
            assert cache.token_ids == out.sequences[0, :-1].tolist()
            assert_budgets(tiered)
        if config["tiers"].get("nvme") and ids.shape[1] > 200:
            assert_came_back_from_nvme(tiered, cache)
        return tiered.stats()


# -- conversations -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("family", LONG)
def test_three_turns(family: str, mode: str, tmp_path: Path) -> None:
    model = tiny(family)
    run_turns(model, small_config(model, tmp_path, mode), mode, plain_turns(model))


SHAPES: dict[str, dict[str, int]] = {
    "64, one KV head": dict(head_dim=64, num_attention_heads=4, num_key_value_heads=1),
    "80, a KV head for each head": dict(head_dim=80, num_attention_heads=3, num_key_value_heads=3),
    "96": dict(head_dim=96, num_attention_heads=4, num_key_value_heads=2),
    "128, one KV head": dict(head_dim=128, num_attention_heads=3, num_key_value_heads=1),
    "256, a KV head for each head": dict(head_dim=256, num_attention_heads=2, num_key_value_heads=2),
}


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("config", [LlamaConfig, Qwen3Config], ids=["llama", "qwen3"])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_head_size(shape: str, config: type[PretrainedConfig], mode: str, tmp_path: Path) -> None:
    model = tiny_from(config, hidden_size=96, num_hidden_layers=2, initializer_range=0.1, **SHAPES[shape])
    turns = plain_turns(model, max_new_tokens=8)
    run_turns(model, small_config(model, tmp_path, mode, nvme="12MiB"), mode, turns, max_new_tokens=8)


@both_modes
def test_sampling_with_a_seed(mode: str, tmp_path: Path) -> None:
    model, how = tiny(), {"do_sample": True, "top_k": 20, "temperature": 1.3}
    turns = plain_turns(model, **how)
    assert not torch.equal(turns[0][1].sequences, plain_turns(model, turns=1)[0][1].sequences)
    run_turns(model, small_config(model, tmp_path, mode), mode, turns, **how)


@both_modes
def test_interleaved_conversations_under_one_budget(mode: str, tmp_path: Path) -> None:
    model = tiny("qwen3")
    conversations = [plain_turns(model, seed=seed, prompt=120 + 30 * seed) for seed in range(4)]
    order = [number for number in range(4) for _ in range(3)]
    random.Random(3).shuffle(order)
    with TieredKV(model, small_config(model, tmp_path, mode, gpu_slots=8)) as tiered:
        caches = [tiered.new_cache() for _ in conversations]
        done = [0] * 4
        for number in order:
            ids, expected = conversations[number][done[number]]
            done[number] += 1
            assert_same(tiered.generate(ids, cache=caches[number], **GREEDY), expected, mode)
            assert_budgets(tiered)
        assert_came_back_from_nvme(tiered, *caches)


@both_modes
def test_eager_attention(mode: str, tmp_path: Path) -> None:
    model = tiny("qwen2", attention="eager")
    run_turns(model, small_config(model, tmp_path, mode), mode, plain_turns(model, turns=2))
    assert model.config._attn_implementation == "eager"


# -- policies, tiers and sizes -----------------------------------------------------------------------------------------


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("policy", ["lru", "fifo", "mru", "recency"])
def test_every_eviction_policy(policy: str, mode: str, tmp_path: Path) -> None:
    model = tiny()
    config = small_config(model, tmp_path, mode, eviction=dict.fromkeys(("gpu", "cpu", "nvme"), policy))
    run_turns(model, config, mode, plain_turns(model, turns=2))


@pytest.mark.parametrize("prefetch", [{"policy": "no_prefetch"}, {"depth": 0}, {"depth": 8}], ids=str)
def test_every_prefetch_policy(prefetch: dict[str, Any], tmp_path: Path) -> None:
    model = tiny()
    run_turns(model, small_config(model, tmp_path, prefetch=prefetch), "blockwise", plain_turns(model, turns=1))


LAYOUTS: dict[str, dict[str, Any]] = {
    "no cpu": {"cpu_blocks": 0},
    "no nvme": {"cpu_blocks": 40, "nvme": 0},
    "gpu alone": {"gpu_slots": 40, "cpu_blocks": 0, "nvme": 0},
    "cpu smaller than gpu": {"gpu_slots": 9, "cpu_blocks": 1},
    "fewest gpu slots": {"gpu_slots": 2},
}


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_tiers(layout: str, mode: str, tmp_path: Path) -> None:
    model = tiny("mistral")
    config = small_config(model, tmp_path, mode, **LAYOUTS[layout])
    chunk = config["prefill_chunk"] = 16 if layout == "fewest gpu slots" else CHUNK
    run_turns(model, config, mode, plain_turns(model, turns=2, chunk=chunk))


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_chunks_that_are_no_multiple_of_a_block(chunk: int, mode: str, tmp_path: Path) -> None:
    model = tiny("mistral")
    config = small_config(model, tmp_path, mode, prefill_chunk=chunk)
    run_turns(model, config, mode, plain_turns(model, turns=2, chunk=chunk))


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("block_tokens", [BLOCK, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17])
def test_short_prompts(length: int, block_tokens: int, mode: str, tmp_path: Path) -> None:
    model = tiny()
    config = small_config(model, tmp_path, mode, block_tokens=block_tokens)
    run_turns(model, config, mode, plain_turns(model, turns=2, prompt=length, max_new_tokens=4), max_new_tokens=4)


# -- forward without generate ------------------------------------------------------------------------------------------


@both_modes
@torch.no_grad()
def test_forward_of_a_long_input_is_chunked(mode: str, tmp_path: Path) -> None:
    model, ids = tiny(), tokens(290)
    whole, expected = model(ids, output_hidden_states=True), plain_forward(model, ids)
    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        before = tiered.stats()["steps"]
        assert_close(tiered(ids).logits, expected, mode)
        assert tiered.stats()["steps"] - before >= 290 / CHUNK
        assert_close(tiered(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, expected, mode)
        for keep in (1, 5, 290, 400):
            assert_close(tiered(ids, logits_to_keep=keep).logits, expected[:, -keep:], "blockwise", f"keep {keep}")
        logits = tiered(ids, return_dict=False)[0]
        assert_close(logits, expected, mode)
        assert_close(tiered(inputs_embeds=model.get_input_embeddings()(ids)).logits, expected, mode)
        out = tiered(ids, output_hidden_states=True)
        assert len(out.hidden_states) == len(whole.hidden_states)
        for ours, plain in zip(out.hidden_states, whole.hidden_states, strict=True):
            assert_close(ours, plain, "blockwise", "hidden states")
        assert_budgets(tiered)


@torch.no_grad()
def test_hidden_states_are_whole_when_few_logits_are_kept(tmp_path: Path) -> None:
    model, ids = tiny(), tokens(100)
    whole = model(ids, output_hidden_states=True, logits_to_keep=1)
    with TieredKV(model, small_config(model, tmp_path)) as tiered:
        out = tiered(ids, output_hidden_states=True, logits_to_keep=1)
        assert_close(out.logits, whole.logits, "blockwise")
        for ours, plain in zip(out.hidden_states, whole.hidden_states, strict=True):
            assert_close(ours, plain, "blockwise", "hidden states")


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated:FutureWarning")
@torch.no_grad()
def test_a_decoding_loop_by_hand(keyword: str, mode: str, tmp_path: Path) -> None:
    model, ids, plain_cache = tiny(), tokens(100), DynamicCache(config=tiny().config)
    with TieredKV(model, small_config(model, tmp_path, mode, gpu_slots=3, cpu_blocks=1)) as tiered:
        cache = tiered.new_cache()
        for _ in range(40):
            expected = plain_forward(model, ids, plain_cache)
            out = tiered(ids, **{keyword: cache})
            assert_close(out.logits, expected, mode)
            ids = expected[:, -1:].argmax(-1)
        assert cache.get_seq_length() == 139 == plain_cache.get_seq_length()
        assert_budgets(tiered)
        assert_came_back_from_nvme(tiered, cache)


@pytest.mark.sampled
@both_modes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "granitemoehybrid"])
@torch.no_grad()
def test_16_bits(family: str, dtype: torch.dtype, mode: str, tmp_path: Path) -> None:
    """Within twice what the plain model's own logits change with its chunks, and as near to the fp32 model as it is.

    The plain model as it is, or, where its kernels round softmax weights to 16 bits, with attention in fp32 (ADR 0009):
    which of them needs that depends on the processor.
    """
    model, wide, ids = tiny(family, dtype), wide_twin(family, dtype), tokens(300)
    expected, exact = plain_forward(model, ids), plain_forward(copy.deepcopy(model).float(), ids)

    def assert_right(ours: torch.Tensor, plain: torch.Tensor, in_fp32: torch.Tensor) -> None:
        try:
            assert_within(ours, plain, mode, model)
        except AssertionError:
            if mode == "gathered":
                raise
            assert_within(ours, in_fp32, mode, wide)

    with TieredKV(model, small_config(model, tmp_path, mode)) as tiered:
        cache, plain_cache, wide_cache = tiered.new_cache(), *(DynamicCache(config=model.config) for _ in range(2))
        # Six chunks in one call, then one at a time.
        parts = [tiered(piece, cache=cache).logits for piece in (ids[:, :192], *ids[:, 192:].split(CHUNK, dim=1))]
        ours = torch.cat(parts, dim=1)
        plain_forward(model, ids, plain_cache)
        assert_right(ours, expected, plain_forward(wide, ids, wide_cache))
        assert (ours - exact).abs().mean() <= 1.1 * (expected - exact).abs().mean()
        for turn in range(2):
            for new in (*(tokens(1, number) for number in range(8)), tokens(40, 50 + turn)):
                plain, in_fp32 = plain_forward(model, new, plain_cache), plain_forward(wide, new, wide_cache)
                assert_right(tiered(new, cache=cache).logits, plain, in_fp32)
        assert_budgets(tiered)
        assert_came_back_from_nvme(tiered, cache)
