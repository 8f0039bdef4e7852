"""A small Llama of random weights, made on the spot, and the plain cache to compare with: for `kvtier selftest`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

VOCABULARY = 256


def tiny_llama(device: torch.device, dtype: torch.dtype, num_layers: int = 3) -> Any:
    """Six heads on two of K and V, head size 16; the same weights in each call. No download."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            intermediate_size=128,
            num_hidden_layers=num_layers,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=8192,
            initializer_range=0.2,  # wide enough that logits differ and a wrong one is seen
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        model: Any = LlamaForCausalLM(config)
    return model.to(device=device, dtype=dtype).eval()


def plain_cache(model: Any) -> Any:
    """transformers' own cache, as a model makes it for itself."""
    return DynamicCache(config=model.config)
