"""The attention and mask functions that transformers calls by name, and setting a model to them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.errors import UnsupportedError, UnsupportedModelError
from kvtier.hf.describe import NAME
from kvtier.open_step import OpenStep
from kvtier.types import AttentionMode

current_step: ContextVar[OpenStep | None] = ContextVar("kvtier_current_step", default=None)
"""The open step of this thread or task, set around one inner forward; attention finds its layer's KV through it."""

# Keywords that reach an attention function without changing what it computes.
_NEUTRAL = frozenset(
    {
        "cache_position",
        "is_causal",
        "logits_to_keep",
        "output_router_logits",
        "output_hidden_states",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "scaling",
        "use_cache",
    }
)

# With those that change it, and that a partial attention honours.
_KNOWN = _NEUTRAL | {"softcap", "s_aux", "dropout"}

_originals: dict[int, str] = {}
"""By id of a wrapped model's config (kept alive by its Patch): the attention implementation it had."""


def _original_attention(module: Any) -> Callable[..., Any]:
    # Eager functions are not registered: each modeling file has its own beside its attention classes.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _no_eager)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(_originals[id(module.config)], eager)
    return found


def _no_eager(module: Any, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(f"{type(module).__name__} has no eager attention: load it with attn_implementation='sdpa'")


def attention_function(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any
) -> Any:
    """transformers' attention interface: tiered inside a step, the model's own function outside of one."""
    opened = current_step.get()
    if opened is None or not opened.is_tiered(module.layer_idx):
        return _original_attention(module)(module, query, key, value, attention_mask, **kwargs)
    _check_keywords(kwargs)
    if opened.mode is AttentionMode.GATHERED:
        _check_gathered(opened, module, attention_mask, kwargs)
        keys, values = opened.gather(module.layer_idx, key, value)
        return _original_attention(module)(module, query, keys, values, attention_mask, **kwargs)
    if attention_mask is not None:
        raise UnsupportedError("a prepared attention mask reached a tiered layer: only plain causal masks work")
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    return opened.attend(module.layer_idx, query, key, value, scale, softcap=softcap, sinks=sinks), None


def _check_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs.get("is_causal") is False:
        raise UnsupportedError("is_causal=False cannot be honoured by a cache")
    if kwargs.get("dropout"):
        raise UnsupportedError(f"attention dropout {kwargs['dropout']} cannot be honoured exactly: call model.eval()")
    for name in kwargs.keys() - _KNOWN:
        value = kwargs[name]
        if value is not None and value is not False:
            raise UnsupportedError(f"the attention keyword {name}={value!r:.60} cannot be honoured on tiered layers")


def _check_gathered(opened: OpenStep, module: Any, mask: Any, kwargs: dict[str, Any]) -> None:
    original = _originals[id(module.config)]
    if kwargs.get("s_aux") is not None and original != "eager":
        raise UnsupportedError(f"{original} attention drops attention sinks (s_aux): load the model with 'eager'")
    if mask is not None and all(mask.data_ptr() != made.data_ptr() for made in opened.causal_masks):
        raise UnsupportedError("a mask that is not the plain causal one reached a tiered layer")


def check_mask_kind(mask: Any) -> None:
    """Raise UnsupportedError unless the attention mask that a caller passed is absent or 2D."""
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        kind = f"{mask.ndim}D" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedError(f"a {kind} attention_mask is not supported: pass a 2D mask of all tokens, or none")


def mask_function(**kwargs: Any) -> Any:
    """transformers' mask interface: the model's own mask, or none for a blockwise step (causal by construction)."""
    opened = current_step.get()
    own = ALL_MASK_ATTENTION_FUNCTIONS[_originals[id(kwargs.get("config"))]]
    if opened is None:
        return own(**kwargs)
    is_causal = kwargs.get("mask_function") is causal_mask_function
    if not is_causal and not opened.has_untiered:
        raise UnsupportedError("the model asks for a mask that is not plain causal on a tiered layer")
    if is_causal and opened.mode is AttentionMode.BLOCKWISE:
        return None
    mask = own(**kwargs)
    if is_causal and mask is not None:
        opened.causal_masks.append(mask)
    return mask


@dataclass
class Patch:
    """The model's attention set to ours; `remove` puts back what was there."""

    model: PreTrainedModel
    original: str
    configs: list[Any]

    @staticmethod
    def apply(model: PreTrainedModel) -> Patch:
        """Raises UnsupportedModelError, with the model unchanged, if transformers would not take it."""
        AttentionInterface.register(NAME, attention_function)
        # Under the same name, or transformers builds no mask for it and padding is silently lost.
        AttentionMaskInterface.register(NAME, mask_function)
        original = model.config._attn_implementation
        configs = list({id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values())
        patch = Patch(model, original, configs)
        for config in configs:
            _originals[id(config)] = original
        model.set_attn_implementation(NAME)
        # It only warns when it cannot: an unpatched layer would ignore all KV before this step.
        if any(getattr(config, "_attn_implementation", NAME) != NAME for config in configs):
            patch.remove()
            raise UnsupportedModelError(f"{type(model).__name__} does not use transformers' AttentionInterface")
        return patch

    def remove(self) -> None:
        """Put the model's own attention back. Idempotent."""
        self.model.set_attn_implementation(self.original)
        for config in self.configs:
            _originals.pop(id(config), None)
