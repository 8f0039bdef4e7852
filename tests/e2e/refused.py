"""Tiny models that kvtier must refuse by name when it wraps them, and a word that the message must hold."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BloomConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    FalconConfig,
    LlamaConfig,
    MistralConfig,
    MptConfig,
    PretrainedConfig,
    T5Config,
)

from kvtier import TieredKV
from kvtier.errors import UnsupportedModelError
from tests.e2e.families import VOCABULARY, WINDOW

_LATENT: dict[str, Any] = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, intermediate_size=96,
    moe_intermediate_size=32, kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=2, num_hidden_layers=2)
_LONG = dict(
    rope_type="longrope", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64,
    short_factor=[1.0] * 8, long_factor=[2.0] * 8,
)  # fmt: skip

# Name, config, its values, a pattern of the message. Falcon, BLOOM and MPT have attention of their own, which never
# asks transformers' AttentionInterface; a window on every layer leaves nothing to tier.
REFUSED: dict[str, tuple[type[PretrainedConfig], dict[str, Any], str]] = {
    "falcon": (FalconConfig, dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2), "falcon"),
    "falcon alibi": (
        FalconConfig,
        dict(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, alibi=True),
        "falcon",
    ),
    "bloom": (BloomConfig, dict(hidden_size=64, n_head=4, n_layer=2), "bloom"),
    "mpt": (MptConfig, dict(d_model=64, n_heads=4, n_layers=2, max_seq_len=512), "mpt"),
    "deepseek v2": (DeepseekV2Config, _LATENT, "latent"),
    "deepseek v3": (DeepseekV3Config, _LATENT, "latent"),
    "t5": (
        T5Config,
        dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, decoder_start_token_id=0),
        "encoder-decoder",
    ),
    "bart": (
        BartConfig,
        dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
        | dict(encoder_ffn_dim=96, decoder_ffn_dim=96),
        "encoder-decoder",
    ),
    "window everywhere": (MistralConfig, dict(_LLAMA, sliding_window=WINDOW), "Sliding"),
    "dynamic rope": (
        LlamaConfig,
        dict(_LLAMA, rope_parameters=dict(rope_type="dynamic", rope_theta=1e4, factor=2.0), max_position_embeddings=64),
        "dynamic",
    ),
    "long rope": (LlamaConfig, dict(_LLAMA, rope_parameters=_LONG, max_position_embeddings=256), "longrope"),
}


def refused_model(name: str) -> Any:
    """A model of its own that runs with plain transformers (`tests/e2e/test_families.py` sees to it)."""
    config, values, _ = REFUSED[name]
    torch.manual_seed(7)
    ready = config(**{"vocab_size": VOCABULARY, **values})
    auto = AutoModelForSeq2SeqLM if ready.is_encoder_decoder else AutoModelForCausalLM
    model = auto.from_config(ready).eval()
    model.generation_config.eos_token_id = None
    return model


def refusal(name: str) -> str:
    """What kvtier says when it is to wrap the model."""
    try:
        TieredKV(refused_model(name), {"tiers": {"gpu": {"budget": "64MiB"}}})
    except UnsupportedModelError as error:
        return str(error)
    raise AssertionError(f"{name} was wrapped")
