"""The Hugging Face contract: what a model must look like, the cache object, and the attention and mask functions.

The only file of kvtier that imports transformers. Features are detected by signature, not by version.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvtier.block_table import BlockTable
from kvtier.errors import AlreadyWrappedError, ClosedError, UnsupportedError, UnsupportedModelError
from kvtier.executor import OpenStep
from kvtier.runtime import Runtime
from kvtier.types import AttentionMode, BlockShape, LayerGroup

NAME = "kvtier"  # no "flash", "sdpa" or "flex" in it: transformers takes other code paths for such names

VERIFIED_FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gpt_neox")
"""Model types whose logits the tests compare with the plain cache at every step."""

ORIGINALS = ("sdpa", "eager")
"""Attention implementations of a model that can be wrapped: others change more than the attention call."""

# RoPE kinds whose frequencies depend on the length so far: keys made earlier would have to change.
_MOVING_ROPE = ("dynamic", "longrope")

# Keywords that reach an attention function without changing what it computes.
_NEUTRAL_KEYWORDS = frozenset(
    {"position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict", "output_hidden_states", "logits_to_keep", "is_causal"}
)  # fmt: skip

current_step: ContextVar[OpenStep | None] = ContextVar("kvtier_current_step", default=None)
"""The open step of this thread or task, set around one inner forward; attention finds its layer's KV through it."""


# -- models -------------------------------------------------------------------------------------------------------------


def cache_keyword(forward: Callable[..., Any]) -> str:
    """What this model's forward calls its cache: `cache` since transformers 5.2x, `past_key_values` before."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


def describe(model: object, block_tokens: int) -> LayerGroup:
    """The model's one group of full-attention layers.

    Raises:
        UnsupportedModelError, AlreadyWrappedError: the model cannot be served exactly; the message names why. It is unchanged.
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
    _refuse(name, model, config)
    layers = DynamicCache(config=config).layers
    kinds = {type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer}
    if kinds or not layers:
        raise UnsupportedModelError(
            f"{name} has layers that are not plain full attention ({', '.join(sorted(kinds)) or 'none found'}): sliding "
            "windows, linear attention and shared KV are not supported yet"
        )
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) != 1 or devices & {"meta"}:
        raise UnsupportedModelError(f"{name} lies on {sorted(devices)}: one device is supported for now")
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    shape = BlockShape(len(layers), kv_heads, block_tokens, head_dim, head_dim, model.dtype.itemsize)
    return LayerGroup(tuple(range(len(layers))), shape, devices.pop(), str(model.dtype).removeprefix("torch."))


def _refuse(name: str, model: PreTrainedModel, config: Any) -> None:
    original = model.config._attn_implementation
    rope = getattr(config, "rope_parameters", None) or {}
    reasons = {
        "it is an encoder-decoder model": bool(getattr(model.config, "is_encoder_decoder", False)),
        "it uses latent attention, whose cache is not K and V": getattr(config, "kv_lora_rank", None) is not None,
        "it has a sliding window": bool(getattr(config, "use_sliding_window", True)) and getattr(config, "sliding_window", None) is not None,
        "its weights are quantized": getattr(model.config, "quantization_config", None) is not None,
        "it has adapters loaded": bool(getattr(model, "_hf_peft_config_loaded", False)),
        f"its RoPE scaling ({rope.get('rope_type')}) changes keys that are cached already": rope.get("rope_type") in _MOVING_ROPE,
        f"its attention implementation is {original!r}; load it with attn_implementation='sdpa'": original not in ORIGINALS,
        f"its family is not verified yet; verified: {', '.join(VERIFIED_FAMILIES)}": config.model_type not in VERIFIED_FAMILIES,
        "its config asks for output_attentions": bool(getattr(config, "output_attentions", False)),
    }  # fmt: skip
    for reason, holds in reasons.items():
        if holds:
            raise UnsupportedModelError(f"{name} is not supported: {reason}")


# -- attention and masks ------------------------------------------------------------------------------------------------

_originals: dict[int, str] = {}
"""By id of a wrapped model's config (kept alive by its Patch): the attention implementation it had."""


def _original_attention(module: Any) -> Callable[..., Any]:
    # Eager functions are not registered: each modeling file has its own beside its attention classes.
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", _no_eager)
    found: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(_originals[id(module.config)], eager)
    return found


def _no_eager(module: Any, *_: Any, **__: Any) -> Any:
    raise UnsupportedError(
        f"{type(module).__name__} has no eager attention of its own: load it with attn_implementation='sdpa'"
    )


def attention_function(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **kwargs: Any) -> Any:  # fmt: skip
    """transformers' attention interface: tiered inside a step, the model's own function outside of one."""
    opened = current_step.get()
    if opened is None:
        return _original_attention(module)(module, query, key, value, attention_mask, **kwargs)
    _check_attention_keywords(kwargs)
    if opened.mode is AttentionMode.GATHERED:
        keys, values = opened.gather(module.layer_idx, key, value)
        return _original_attention(module)(module, query, keys, values, attention_mask, **kwargs)
    if attention_mask is not None:
        raise UnsupportedError(
            "a prepared attention mask reached a tiered layer: only plain causal masks are supported"
        )
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return opened.attend(module.layer_idx, query, key, value, scale), None


def _check_attention_keywords(kwargs: dict[str, Any]) -> None:
    if kwargs.get("dropout"):
        raise UnsupportedError(f"attention dropout {kwargs['dropout']} cannot be honoured exactly: call model.eval()")
    if kwargs.get("is_causal") is False:
        raise UnsupportedError("is_causal=False cannot be honoured by a cache")
    for name, value in kwargs.items():
        if name in _NEUTRAL_KEYWORDS or name in ("scaling", "dropout") or value is None or value is False:
            continue
        raise UnsupportedError(f"the attention keyword {name}={value!r:.60} cannot be honoured on tiered layers")


def mask_function(**kwargs: Any) -> Any:
    """transformers' mask interface: nothing for a blockwise step (causal by construction), else the model's own mask."""
    config = kwargs.get("config")
    opened = current_step.get()
    if opened is not None and kwargs.get("mask_function") is not causal_mask_function:
        raise UnsupportedError("the model asks for a mask that is not plain causal on a tiered layer")
    if opened is not None and opened.mode is AttentionMode.BLOCKWISE:
        return None
    original = ALL_MASK_ATTENTION_FUNCTIONS[_originals[id(config)]]
    return original(**kwargs)


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


# -- the cache ----------------------------------------------------------------------------------------------------------


@dataclass
class CacheState:
    """What layers and cache share. Refers to neither, so that dropping the cache drops everything at once."""

    runtime: Runtime
    table: BlockTable

    def check_open(self) -> None:
        """Raise ClosedError once the wrapper is closed."""
        if self.runtime.closed:
            raise ClosedError("this cache's TieredKV was closed: its KV is gone; make a new wrapper and a new cache")

    def length(self, layer: int) -> int:
        """Logical length: committed, plus what this layer appended in the open step."""
        opened = current_step.get()
        if opened is not None and opened.step.table is self.table:
            return opened.step.length(layer)
        return self.table.num_tokens


class TieredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' hook has no types
    """One layer's view of a TieredCache. Holds no tensors: `keys` and `values` stay None."""

    is_croppable = True
    supports_early_init = False
    is_sliding = False

    def __init__(self, state: CacheState, layer: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers has no types here
        self._state, self._layer = state, layer
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: slots are reserved by the step."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Append the step's K and V; returns them alone: attention finds the rest itself."""
        self._state.check_open()
        opened = current_step.get()
        if opened is None or opened.step.table is not self._state.table:
            raise UnsupportedError(
                "a TieredCache was used outside of its wrapped model's forward: call tiered.generate(...) or tiered(...)"
            )
        opened.append(self._layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens held, pending ones included."""
        return self._state.length(self._layer)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """`(kv_length, kv_offset)` of the coming attention call."""
        return self._state.length(self._layer) + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of `get_max_length`."""
        return -1


class TieredCache(Cache):
    """A transformers Cache for one conversation, whose KV lies on the wrapper's tiers. Make it with `tiered.new_cache()`.

    Dropping the object frees its blocks at the next step of any cache. `copy.deepcopy` forks: blocks are shared.
    """

    def __init__(self, runtime: Runtime, table: BlockTable | None = None) -> None:
        table = runtime.manager.new_sequence() if table is None else table
        self.state = CacheState(runtime, table)
        layers: list[Any] = [TieredLayer(self.state, layer) for layer in runtime.group.layers]
        super().__init__(layers=layers)
        # Takes no lock and runs no code of ours in the collector: the next step drains the deque.
        weakref.finalize(self, runtime.manager.dropped.append, table.sequence).atexit = False

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens held, oldest first; empty if any were fed as embeddings."""
        return self.state.table.token_ids()

    def stats(self) -> dict[str, object]:
        """This conversation's counters: `nvme_read_bytes`, `slices_read` per tier, `tokens`, `blocks`."""
        table = self.state.table
        metrics = self.state.runtime.manager.metrics_of(table.sequence)
        return {"tokens": table.num_tokens, "blocks": len(table.blocks), **metrics.as_dict()}

    def fork(self) -> TieredCache:
        """A cache of its own with the same tokens; full blocks are shared, tails copied when either side appends."""
        self.state.check_open()
        with self.state.runtime.turn:
            return TieredCache(self.state.runtime, self.state.runtime.manager.fork(self.state.table))

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, on every tier; 0 does nothing. Raises ValueError when positive."""
        self.state.check_open()
        if tokens_to_remove > 0:
            raise UnsupportedError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        table = self.state.table
        with self.state.runtime.turn:
            self.state.runtime.manager.truncate(table, max(0, table.num_tokens + tokens_to_remove))

    def reset(self) -> None:
        """Forget every token and free the blocks."""
        self.crop(-self.state.table.num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused unless it changes nothing: beams come with a later version."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused unless it selects the one row."""
        if list(indices) != [0]:
            raise UnsupportedError("a TieredCache holds one row for now: beams and batches come with a later version")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused unless it changes nothing."""
        if repeats != 1:
            raise UnsupportedError("a TieredCache holds one row for now: beams and batches come with a later version")
