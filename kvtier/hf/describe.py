"""What a model must look like to be served exactly, and the shape of its KV."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvtier.errors import AlreadyWrappedError, UnsupportedModelError
from kvtier.types import BlockShape, LayerGroup

NAME = "kvtier"  # no "flash", "sdpa" or "flex" in it: transformers takes other code paths for such names

VERIFIED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox")
"""Model types whose logits the tests compare with the plain cache at every step."""

ORIGINALS = ("sdpa", "eager")
"""Attention implementations of a model that can be wrapped: others change more than the attention call."""

# RoPE kinds whose frequencies depend on the length so far: keys made earlier would have to change.
_MOVING_ROPE = ("dynamic", "longrope")


def cache_keyword(forward: Callable[..., Any]) -> str:
    """What this model's forward calls its cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def num_heads(model: PreTrainedModel) -> int:
    """Query heads of each layer."""
    heads: int = model.config.get_text_config(decoder=True).num_attention_heads
    return heads


def describe(model: object, block_tokens: int) -> LayerGroup:
    """The model's one group of full-attention layers.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; the message names why.
        AlreadyWrappedError: it is wrapped.
        The model is unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        kind = "a torch.compile'd model" if hasattr(model, "_orig_mod") else f"a {type(model).__name__}"
        raise UnsupportedModelError(
            f"TieredKV wraps a transformers PreTrainedModel, not {kind}: wrap the model itself, before compiling it or "
            "adding adapters"
        )
    config = model.config.get_text_config(decoder=True)
    name = f"{type(model).__name__} ({config.model_type})"
    if model.config._attn_implementation == NAME:
        raise AlreadyWrappedError(f"this {name} is wrapped by a live TieredKV: close() that one first, or use it")
    for reason, holds in _reasons_against(model, config).items():
        if holds:
            raise UnsupportedModelError(f"{name} is not supported: {reason}")
    layers = DynamicCache(config=config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if kinds or not layers:
        raise UnsupportedModelError(
            f"{name} has layers that are not plain full attention ({', '.join(sorted(kinds)) or 'none found'}): "
            "sliding windows, linear attention and shared KV are not supported yet"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or devices & {"meta"}:
        raise UnsupportedModelError(f"{name} lies on {sorted(devices)}: one device is supported for now")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shape = BlockShape(len(layers), kv_heads, block_tokens, head_dim, head_dim, model.dtype.itemsize)
    return LayerGroup(tuple(range(len(layers))), shape, devices.pop(), str(model.dtype).removeprefix("torch."))


def _reasons_against(model: PreTrainedModel, config: Any) -> dict[str, bool]:
    original = model.config._attn_implementation
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    window = getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True)
    verified = ", ".join(VERIFIED_FAMILIES)
    return {
        "it is not a causal language model: it cannot generate": not model.can_generate(),
        "it is an encoder-decoder model": bool(getattr(model.config, "is_encoder_decoder", False)),
        "it uses latent attention, whose cache is not K and V": getattr(config, "kv_lora_rank", None) is not None,
        "it has a sliding window": bool(window),
        "its weights are quantized": getattr(model.config, "quantization_config", None) is not None,
        "it has adapters loaded": bool(getattr(model, "_hf_peft_config_loaded", False)),
        f"its RoPE scaling ({rope}) changes keys that are cached already": rope in _MOVING_ROPE,
        f"its family is not verified yet; verified: {verified}": config.model_type not in VERIFIED_FAMILIES,
        f"its attention is {original!r}; load it with attn_implementation='sdpa'": original not in ORIGINALS,
        "its config asks for output_attentions": bool(getattr(config, "output_attentions", False)),
    }
