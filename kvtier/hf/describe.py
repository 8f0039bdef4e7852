"""What a model must look like to be served exactly, and the shape of its KV."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from kvtier.errors import AlreadyWrappedError, UnsupportedModelError
from kvtier.types import BlockShape, LayerGroup

NAME = "kvtier"  # no "flash", "sdpa" or "flex" in it: transformers takes other code paths for such names

VERIFIED_FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "phi",
    "phi3",
    "gpt_neox",
    "gpt2",
    "opt",
    "olmo2",
    "granite",
    "granitemoehybrid",
    "gemma2",
    "gemma3_text",
    "gpt_oss",
    "smollm3",
)
"""Model types whose logits the tests compare with the plain cache at every step."""

ORIGINALS = ("sdpa", "eager")
"""Attention implementations of a model that can be wrapped: others change more than the attention call."""

UNTIERED = (DynamicSlidingWindowLayer, LinearAttentionLayer)
"""transformers' own layers that a cache keeps beside the tiered ones. Subclasses hold more than we know of."""

VERIFIED_ADAPTERS = ("LORA", "LOHA", "LOKR", "IA3", "VERA", "OFT")
"""Kinds of PEFT adapters that the tests compare with the plain model: all that they do is in the layers they change."""

UNCOMPILED = (
    "dynamo would trace kvtier's attention and keep its state as a constant; wrap the model as it was before compiling"
)
UNQUANTIZED = (
    "rounding can make logits jump by more than kvtier promises, and no kind is verified; load the model in float32, "
    "bfloat16 or float16"
)

# RoPE kinds whose frequencies depend on the length so far: keys made earlier would have to change.
_MOVING_ROPE = ("dynamic", "longrope")


def cache_keyword(forward: Callable[..., Any]) -> str:
    """What this model's forward calls its cache: `cache` in newer transformers, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def new_layers(model: PreTrainedModel) -> list[Any]:
    """transformers' own cache layers for the model, empty, one a layer."""
    layers: list[Any] = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    return layers


def new_untiered(model: PreTrainedModel, group: LayerGroup) -> dict[int, Any]:
    """Those of `new_layers` that are not tiered, by layer index."""
    if not group.num_untiered:
        return {}
    return {index: layer for index, layer in enumerate(new_layers(model)) if index not in group.layers}


def describe(model: object, block_tokens: int) -> LayerGroup:
    """The model's one group of full-attention layers; its others keep transformers' own cache.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; the message names why.
        AlreadyWrappedError: it is wrapped.
        The model is unchanged.
    """
    if not isinstance(model, PreTrainedModel):
        if hasattr(model, "_orig_mod"):
            raise UnsupportedModelError(f"the model was compiled (torch.compile): {UNCOMPILED}")
        raise UnsupportedModelError(
            f"TieredKV wraps a transformers PreTrainedModel, not a {type(model).__name__}: wrap the model itself"
        )
    config = model.config.get_text_config(decoder=True)
    name = f"{type(model).__name__} ({config.model_type})"
    if model.config._attn_implementation == NAME:
        raise AlreadyWrappedError(f"this {name} is wrapped by a live TieredKV: close() that one first, or use it")
    for reason, holds in _reasons_against(model, config).items():
        if holds:
            raise UnsupportedModelError(f"{name} is not supported: {reason}")
    check_modules(model)
    layers = new_layers(model)
    full = tuple(index for index, layer in enumerate(layers) if type(layer) is DynamicLayer)
    strange = {type(layer).__name__ for layer in layers if type(layer) not in (DynamicLayer, *UNTIERED)}
    if strange:
        raise UnsupportedModelError(f"{name} is not supported: its cache has layers of {', '.join(sorted(strange))}")
    if not full:
        kinds = ", ".join(sorted({type(layer).__name__ for layer in layers})) or "none"
        raise UnsupportedModelError(
            f"{name} has no full-attention layer (its cache layers: {kinds}): there is nothing to tier; use it without "
            "TieredKV"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or devices & {"meta"}:
        raise UnsupportedModelError(
            f"{name} lies on {sorted(devices)} (meta: offloaded to memory or disk): one device is supported for now; "
            "load it without device_map, or with one that names a single device"
        )
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return LayerGroup(
        full,
        BlockShape(len(full), kv_heads, block_tokens, head_dim, head_dim, model.dtype.itemsize),
        devices.pop(),
        str(model.dtype).removeprefix("torch."),
        heads,
        writes_scores=getattr(config, "attn_logit_softcapping", None) is not None,
        num_untiered=len(layers) - len(full),
    )


def transformers_model(model: Any) -> Any:
    """The transformers model inside a PEFT model; any other model is returned as it is.

    Raises:
        UnsupportedModelError: PEFT adds more to it than to its layers.
    """
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    if not hasattr(model, "active_peft_config"):
        raise UnsupportedModelError(f"a {type(model).__name__} is not supported: use one of a single kind of adapter")
    if model.active_peft_config.is_prompt_learning:
        kind = _adapter_kind(model.active_peft_config)
        raise UnsupportedModelError(
            f"{kind} (PEFT) is not supported: it adds virtual tokens that no cache can compare with a prompt; "
            f"verified: {', '.join(VERIFIED_ADAPTERS)}"
        )
    return model.get_base_model()


def check_modules(model: PreTrainedModel) -> None:
    """What may change under a wrapped model as well: adapters, and what became of its modules.

    Raises:
        UnsupportedModelError: they cannot be served exactly; the message names why.
    """
    for adapter, config in (getattr(model, "peft_config", None) or {}).items():
        kind = _adapter_kind(config)
        if kind not in VERIFIED_ADAPTERS:
            raise UnsupportedModelError(
                f"adapter {adapter!r} is {kind} (PEFT): not verified yet; verified: {', '.join(VERIFIED_ADAPTERS)}"
            )
        if getattr(config, "alora_invocation_tokens", None) is not None:
            raise UnsupportedModelError(
                f"adapter {adapter!r} is an activated LoRA (alora_invocation_tokens): where it begins depends on the "
                "call, and a cache cannot tell"
            )
    if is_compiled(vars(model).get("forward")):
        raise UnsupportedModelError(f"the model's forward was compiled (torch.compile): {UNCOMPILED}")
    for name, module in model.named_modules():
        if getattr(module, "_compiled_call_impl", None) is not None:
            raise UnsupportedModelError(f"{name or 'the model'} was compiled (torch.compile): {UNCOMPILED}")
        moving = sorted(_names(getattr(module, "rope_type", None)).intersection(_MOVING_ROPE))
        if moving:
            raise UnsupportedModelError(
                f"the RoPE of {name} ({', '.join(moving)}) changes keys that are cached already"
            )
        if "quant" in type(module).__module__ and any(
            kind in type(module).__name__ for kind in ("Linear", "Embedding")
        ):
            raise UnsupportedModelError(f"{name} is a {_full_name(type(module))}, quantized: {UNQUANTIZED}")
    for name, parameter in model.named_parameters():
        kinds = type(parameter), type(parameter.data)
        strange = next((kind for kind in kinds if kind not in (torch.Tensor, torch.nn.Parameter)), None)
        if strange is not None or not parameter.is_floating_point():
            found = _full_name(strange) if strange is not None else str(parameter.dtype)
            raise UnsupportedModelError(f"{name} is stored as {found}: {UNQUANTIZED}")


def is_compiled(function: object) -> bool:
    """Whether torch.compile made it."""
    return hasattr(function, "_torchdynamo_orig_callable")


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _adapter_kind(config: Any) -> str:
    kind = getattr(config, "peft_type", None)
    return str(getattr(kind, "value", kind))


def _names(value: Any) -> set[str]:
    """Of one name, or a name for each kind of layer."""
    return set(map(str, value.values())) if isinstance(value, dict) else {str(value)}


def _rope_types(parameters: Any) -> set[str]:
    """Kinds of RoPE in a config's parameters: of the model, or of each kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = [_rope_types(value) for value in parameters.values()]
    own = {str(parameters[key]) for key in ("rope_type", "type") if key in parameters}
    return own.union(*nested)


def _reasons_against(model: PreTrainedModel, config: Any) -> dict[str, bool]:
    original = model.config._attn_implementation
    moving = sorted(_rope_types(getattr(config, "rope_parameters", None)).intersection(_MOVING_ROPE))
    softcap = getattr(config, "attn_logit_softcapping", None)
    verified = ", ".join(VERIFIED_FAMILIES)
    return {
        "it is not a causal language model: it cannot generate": not model.can_generate(),
        "it is an encoder-decoder model": bool(getattr(model.config, "is_encoder_decoder", False)),
        "it uses latent attention, whose cache is not K and V": getattr(config, "kv_lora_rank", None) is not None,
        f"its weights are quantized: {UNQUANTIZED}": getattr(model.config, "quantization_config", None) is not None,
        f"its RoPE scaling ({', '.join(moving)}) changes keys that are cached already": bool(moving),
        f"its family is not verified yet; verified: {verified}": config.model_type not in VERIFIED_FAMILIES,
        f"it is a multimodal model ({model.config.model_type}): only its text model alone is verified": (
            model.config.model_type != config.model_type
        ),
        f"its attention is {original!r}; load it with attn_implementation='sdpa'": original not in ORIGINALS,
        f"it soft-caps attention logits ({softcap}), {original} cannot: load it with attn_implementation='eager'": (
            softcap is not None and original != "eager"
        ),
        "its config asks for output_attentions": bool(getattr(config, "output_attentions", False)),
        "it has cross-attention": bool(getattr(config, "add_cross_attention", False)),
        "its reorder_and_upcast_attn goes past the attention interface": (
            bool(getattr(config, "reorder_and_upcast_attn", False))
        ),
    }
