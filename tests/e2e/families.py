"""Tiny random models of every verified family, budgets that force them onto NVMe, plain runs to compare with."""

from __future__ import annotations

import functools
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from kvtier import TieredKV
from kvtier.budget import split_gpu_budget
from kvtier.errors import BudgetError
from kvtier.hf import describe
from kvtier.hf.untiered import UntieredLayers
from kvtier.types import AttentionMode, LayerGroup

VOCABULARY = 256
CHUNK = 32
BLOCK = 16
MODES = ("blockwise", "gathered")
MAX_TOKENS = 512  # gathered has room for one layer of so many
UNTIERED_TOKENS = 400  # layers that are not tiered have room for so many a row

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "intermediate_size": 128,
    "max_position_embeddings": 2048,
    # Wide enough that logits differ and greedy decoding wanders; test_exact asserts it.
    "initializer_range": 0.2,
    "pad_token_id": None,  # with one, generate takes every such id in a prompt for padding
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOW = 24
# A token asks all experts: a near tie between two of them would be a jump in 16 bits, which says nothing of a cache.
_EXPERTS = dict(num_experts_per_tok=4, num_local_experts=4)
# Odd head dimensions and, where the family has them, grouped heads. Windows are far smaller than the prompts.
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=3)),
    "qwen2": (Qwen2Config, dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)),
    "qwen3": (
        Qwen3Config,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=3, head_dim=24),
    ),
    "qwen3_moe": (
        Qwen3MoeConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=24)
        | dict(num_experts=4, num_experts_per_tok=4, moe_intermediate_size=48),
    ),
    "mistral": (
        MistralConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, sliding_window=None),
    ),
    "mixtral": (
        MixtralConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, sliding_window=None)
        | _EXPERTS,
    ),
    "phi3": (Phi3Config, dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)),
    "gpt_neox": (GPTNeoXConfig, dict(hidden_size=96, num_attention_heads=4, num_hidden_layers=3)),
    "olmo2": (Olmo2Config, dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)),
    "granite": (
        GraniteConfig,
        dict(hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
        | dict(attention_multiplier=0.15, residual_multiplier=0.6, embedding_multiplier=3.0),
    ),
    "gemma2": (
        Gemma2Config,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, head_dim=24)
        | dict(sliding_window=WINDOW, query_pre_attn_scalar=20, attn_logit_softcapping=5.0, tie_word_embeddings=False),
    ),
    "gemma3": (
        Gemma3TextConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, head_dim=24)
        | dict(sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"] * 2)
        | dict(tie_word_embeddings=False),
    ),
    "gpt_oss": (
        GptOssConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, head_dim=24)
        | dict(sliding_window=WINDOW, **_EXPERTS)
        | dict(rope_parameters=dict(rope_type="yarn", factor=2.0, original_max_position_embeddings=1024)),
    ),
    "smollm3": (
        SmolLM3Config,
        dict(
            hidden_size=96, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, no_rope_layer_interval=2
        ),
    ),
    "gpt2": (GPT2Config, dict(n_embd=60, n_head=4, n_layer=3, n_positions=2048)),
    "opt": (
        OPTConfig,
        dict(hidden_size=60, num_attention_heads=4, num_hidden_layers=3, ffn_dim=128)
        | dict(word_embed_proj_dim=60, init_std=0.2),
    ),
    "phi": (PhiConfig, dict(hidden_size=96, num_attention_heads=4, num_hidden_layers=3, initializer_range=0.25)),
    "granitemoehybrid": (
        GraniteMoeHybridConfig,
        dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=4, num_local_experts=0)
        | dict(layer_types=["linear_attention", "full_attention"] * 2, shared_intermediate_size=96, mamba_expand=1)
        | dict(mamba_n_heads=4, mamba_d_state=8, mamba_d_head=16, mamba_chunk_size=16),
    ),
}
ATTENTION = {"gemma2": "eager", "gpt_oss": "eager"}
"""Attention that a family's plain model needs where it is not sdpa, which knows neither soft-capping nor sinks."""


@functools.cache
def tiny(family: str = "llama", dtype: torch.dtype = torch.float32, attention: str | None = None) -> Any:
    """The family's model, the same object at every call: a test that wraps it must close the wrapper."""
    config, values = FAMILIES[family]
    model = tiny_from(config, dtype, attention or ATTENTION.get(family, "sdpa"), **values)
    _tiny_models.append(model)
    return model


_tiny_models: list[Any] = []


def tiny_from(
    config: type[PretrainedConfig], dtype: torch.dtype = torch.float32, attention: str = "sdpa", **values: Any
) -> Any:
    """A model of its own with seeded weights, in eval mode, that never ends a text by itself."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config(**{**_COMMON, **values}), attn_implementation=attention)
    model = model.to(dtype).eval()
    model.generation_config.eos_token_id = None
    return model


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """`[1, count]` random ids."""
    return torch.randint(1, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(seed))


def small_config(
    model: Any,
    folder: Path,
    mode: str = "blockwise",
    *,
    rows: int = 1,
    gpu_slots: int | None = None,
    cpu_blocks: int = 4,
    nvme: int | str | None = None,
    **values: Any,
) -> dict[str, Any]:
    """A config whose gpu tier has about `gpu_slots` slots and whose cpu tier has `cpu_blocks`; 0 leaves a tier out.

    `rows` is how many a cache has at most: each more row brings slots for the blocks that a chunk fills, nvme and room
    to gather. A prompt of 300 tokens exceeds gpu and cpu at every number of rows. Layers that are not tiered get room
    of their own beside that.
    """
    gpu_slots = 2 + 3 * rows if gpu_slots is None else gpu_slots
    nvme = rows * 4 * 1024**2 if nvme is None else nvme
    # What a test computes twice it means to, unless it says otherwise.
    common = {"block_tokens": BLOCK, "prefill_chunk": CHUNK, "io_threads": 2, "prefix_cache": False}
    config: dict[str, Any] = {**common, **values}
    config["attention"] = mode
    group = describe(model, config["block_tokens"])
    shape = group.shape
    layer_bytes = shape.token_bytes // shape.num_layers
    gpu_bytes = 0
    while True:
        gpu_bytes += shape.block_bytes
        try:
            split = split_gpu_budget(
                gpu_bytes, shape, slot_bytes=shape.block_bytes, heads=group.heads, wide=group.is_wide,
                prefill_chunk=config["prefill_chunk"], mode=AttentionMode(mode), streams=bool(cpu_blocks or nvme),
                writes_scores=group.writes_scores,
            )  # fmt: skip
        except BudgetError:
            continue
        room = rows * MAX_TOKENS * layer_bytes
        if split.num_slots >= gpu_slots and (mode == "blockwise" or split.gather_bytes >= room + 64):
            break
    gpu: dict[str, Any] = {"budget": gpu_bytes}
    if group.num_untiered:
        untiered_bytes = rows * _untiered_bytes(model, group)
        gpu["budget"] = max(gpu_bytes + untiered_bytes, int(untiered_bytes / 0.9)) + 1  # for what rounding takes
        gpu["untiered_frac"] = min(0.9, untiered_bytes / (gpu["budget"] - 1))
    if rows > 1 and split.num_slots > gpu_slots:
        # Room to gather brings more slots than the rows fill, which share their prompt's blocks.
        gpu |= {"high": gpu_slots / split.num_slots, "low": 0.9 * gpu_slots / split.num_slots}
    tiers = {"gpu": gpu}
    if cpu_blocks:
        tiers["cpu"] = {"budget": cpu_blocks * (shape.block_bytes + 64)}
    if nvme:
        tiers["nvme"] = {"budget": nvme, "path": str(folder / "nvme")}
    return {**config, "tiers": tiers}


@torch.no_grad()
def _untiered_bytes(model: Any, group: LayerGroup) -> int:
    """What layers that are not tiered hold of a row at most: what they record for a crop counts until the next one."""
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(tokens(UNTIERED_TOKENS), cache=cache, logits_to_keep=1)
    held = UntieredLayers({index: layer for index, layer in enumerate(cache.layers) if index not in group.layers})
    return held.num_bytes


GREEDY: dict[str, Any] = {
    "max_new_tokens": 20,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def plain_turns(
    model: Any, turns: int = 3, seed: int = 0, chunk: int = CHUNK, prompt: int = 300, **kwargs: Any
) -> list[Any]:
    """A conversation on a DynamicCache: per turn the prompt that was given and what `generate` returned.

    That of a model of `tiny` is run once: tests that ask for the same share it, and must not change it.
    """
    if any(model is each for each in _tiny_models):
        answers = _turns_of_tiny(model, turns, seed, chunk, prompt, tuple(sorted(kwargs.items())))
    else:
        answers = _run_turns(model, turns, seed, chunk, prompt, kwargs)
    torch.manual_seed(turns)  # whether or not it was run here: what a test draws next is always the same
    return list(answers)


@functools.cache
def _turns_of_tiny(
    model: Any, turns: int, seed: int, chunk: int, prompt: int, kwargs: tuple[tuple[str, Any], ...]
) -> list[Any]:
    return _run_turns(model, turns, seed, chunk, prompt, dict(kwargs))


def _run_turns(model: Any, turns: int, seed: int, chunk: int, prompt: int, kwargs: dict[str, Any]) -> list[Any]:
    cache = DynamicCache(config=model.config)
    ids, answers = tokens(prompt, seed), []
    for turn in range(turns):
        torch.manual_seed(turn)
        out = model.generate(ids, cache=cache, prefill_chunk_size=chunk, **{**GREEDY, **kwargs})
        answers.append((ids, out))
        ids = torch.cat([out.sequences, tokens(40, seed + 100 * (turn + 1))], dim=1)
    return answers


def plain_forward(model: Any, ids: torch.Tensor, cache: Any = None, chunk: int = CHUNK) -> torch.Tensor:
    """Logits of all of `ids`, computed in chunks on a DynamicCache."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(piece, cache=cache).logits for piece in ids.split(chunk, dim=1)], dim=1)


def assert_same(out: Any, expected: Any, mode: str, tolerance: float = 1e-4) -> None:
    """Equal tokens, and at every step logits within tolerance (blockwise) or the same bits (gathered)."""
    assert torch.equal(out.sequences, expected.sequences)
    assert len(out.logits) == len(expected.logits)
    for step, (ours, plain) in enumerate(zip(out.logits, expected.logits, strict=True)):
        assert_close(ours, plain, mode, f"step {step}", tolerance)


def assert_close(
    ours: torch.Tensor, plain: torch.Tensor, mode: str, what: str = "logits", tolerance: float = 1e-4
) -> None:
    """Same shape and dtype, and within tolerance (blockwise) or the same bits (gathered)."""
    assert ours.shape == plain.shape and ours.dtype == plain.dtype, (what, ours.shape, plain.shape)
    difference = (ours.float() - plain.float()).abs().max().item()
    assert difference <= (0.0 if mode == "gathered" else tolerance), f"{what} differ by {difference}"


def mode_of(tiered: TieredKV) -> str:
    """The wrapper's attention mode, as the helpers take it."""
    return tiered.config.attention.value


def occupied(tiered: TieredKV) -> int:
    """Live blocks once no move is in flight; slots and their owners are compared by check_integrity."""
    while tiered.stats()["moves_in_flight"]:  # a block that is released while it moves goes when its move ends
        time.sleep(0.001)
    tiered.check_integrity()
    return int(tiered.stats()["blocks"])
