"""From a config.json, as transformers writes it, to a `ModelCard`. Pure Python: nothing of the model is loaded."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError
from kvtier.planner.card import ModelCard

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that kvtier serves, and bytes of an element."""

_WINDOWS = ("sliding_attention", "chunked_attention")
_STATES = ("linear_attention", "conv", "mamba", "recurrent")
_NOTHING = ("moe", "mlp")  # layers without attention, which some families count
_ALIASES = {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "hidden_size": "n_embd"}


class _HeadNorms(enum.Enum):
    """Norms of queries and keys."""

    NONE = enum.auto()
    PER_HEAD = enum.auto()
    """Of one head's dimension, shared by all heads."""
    WHOLE = enum.auto()
    """Of all heads together."""


@dataclass(frozen=True, slots=True)
class _Family:
    """What a config.json leaves to the family's code. All have gated MLPs: three matrices."""

    num_norms: int = 2
    """Norms of the hidden size, a layer."""
    head_norms: _HeadNorms = _HeadNorms.NONE
    has_qkv_bias: bool = False
    is_tied: bool = False
    """Where the config does not say."""
    num_default_pattern: int = 0
    """Every so-manieth layer is of full attention where the config names no kinds; 0: the window is for all."""


_FAMILIES = {
    "llama": _Family(),
    "mistral": _Family(),
    "qwen2": _Family(has_qkv_bias=True),
    "qwen3": _Family(head_norms=_HeadNorms.PER_HEAD),
    "phi3": _Family(),
    "granite": _Family(),
    "olmo2": _Family(head_norms=_HeadNorms.WHOLE),
    "gemma2": _Family(num_norms=4, is_tied=True, num_default_pattern=2),
    "gemma3_text": _Family(num_norms=4, head_norms=_HeadNorms.PER_HEAD, is_tied=True, num_default_pattern=6),
}
"""Families whose weights are counted by formula; a test compares each with transformers."""


def read_card(
    document: Mapping[str, Any], name: str, *, dtype: str | None = None, weights_bytes: int | None = None
) -> ModelCard:
    """What a config says of a model.

    Args:
        document: a config.json's content; of a multimodal model the text model's part is taken.
        name: for messages.
        dtype: instead of the config's.
        weights_bytes: instead of the formula, which knows dense models of some families.

    Raises:
        ConfigError: a key is missing or wrong, the cache is not K and V of attention heads, no layer would be tiered,
            or the weights cannot be counted.
    """
    text = document.get("text_config", document)
    if not isinstance(text, Mapping):
        raise ConfigError(f"{name}: text_config: must be a mapping, got {text!r:.80}. Mend: {_MEND}")
    values = _Values(text, name)
    family = values.words("model_type")
    if text.get("kv_lora_rank") is not None:
        raise ConfigError(f"{name}: kv_lora_rank is {text['kv_lora_rank']!r}: its cache is latent, not K and V; {_NO}")
    if document.get("is_encoder_decoder"):
        raise ConfigError(f"{name}: is_encoder_decoder is true: {_NO}")
    heads = values.count("num_attention_heads")
    kinds = _kinds(values, _FAMILIES.get(family, _Family()))
    num_full = kinds.count("full_attention")
    if not num_full:
        raise ConfigError(
            f"{name}: no layer has full attention (its layers: {', '.join(sorted(set(kinds)))}): there is nothing to "
            "tier; use the model without kvtier"
        )
    num_window = sum(kind in _WINDOWS for kind in kinds)
    chunked = "chunked_attention" in kinds
    window = values.count("attention_chunk_size" if chunked else "sliding_window") if num_window else 0
    kv_heads = values.count("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{name}: num_key_value_heads: {kv_heads} does not divide the {heads} query heads. Mend: {_MEND}"
        )
    dtype = _dtype(document, text, name, dtype)
    if weights_bytes is None:
        num_parameters, table, is_tied = _parameters(values, family, len(kinds), heads, kv_heads)
    else:
        num_parameters, table, is_tied = weights_bytes // DTYPES[dtype], 0, True
    return ModelCard(
        name=name,
        family=family,
        num_full=num_full,
        num_window=num_window,
        window_tokens=window,
        num_linear=sum(kind in _STATES for kind in kinds),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(values, heads),
        dtype=dtype,
        element_bytes=DTYPES[dtype],
        max_tokens=values.count("max_position_embeddings", 0) or None,
        num_parameters=num_parameters,
        table_parameters=table,
        is_tied=is_tied,
        writes_scores=text.get("attn_logit_softcapping") is not None,
    )


_MEND = "give the config.json that transformers saved beside the model"
_NO = "no formula here is for that, and kvtier does not serve it"


class _Values:
    """A config's keys, each checked as it is read."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.values.get(_ALIASES[key]) if value is None and key in _ALIASES else value

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number of at least 1. Raises ConfigError."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            got = "is missing" if value is None else f"must be a whole number of at least 1, got {value!r:.80}"
            raise ConfigError(f"{self.name}: {key}: {got}. Mend: {_MEND}")
        return value

    def words(self, key: str) -> str:
        """A name. Raises ConfigError."""
        value = self.get(key)
        if not isinstance(value, str) or not value:
            got = "is missing" if value is None else f"must be a name, got {value!r:.80}"
            raise ConfigError(f"{self.name}: {key}: {got}. Mend: {_MEND}")
        return value


def _head_dim(values: _Values, heads: int) -> int:
    if values.get("head_dim") is not None:
        return values.count("head_dim")
    hidden = values.count("hidden_size")
    if hidden % heads:
        raise ConfigError(
            f"{values.name}: hidden_size: {hidden} is not a multiple of the {heads} query heads, and there is no "
            f"head_dim. Mend: {_MEND}"
        )
    return hidden // heads


def _dtype(document: Mapping[str, Any], text: Mapping[str, Any], name: str, wanted: str | None) -> str:
    found = [each.get(key) for each in (text, document) for key in ("dtype", "torch_dtype")]
    dtype = wanted or next((each for each in found if each is not None), None)
    known = ", ".join(DTYPES)
    if dtype is None:
        raise ConfigError(f"{name}: dtype: is missing. Mend: give --dtype, one of {known}")
    if dtype not in DTYPES:
        where = "--dtype" if wanted else f"{name}: dtype"
        raise ConfigError(f"{where}: is not served, got {dtype!r:.80}. Mend: give --dtype, one of {known}")
    return str(dtype)


def _kinds(values: _Values, family: _Family) -> list[str]:
    """Each layer's kind, as transformers' own cache has it."""
    num_layers, text = values.count("num_hidden_layers"), values.values
    kinds = text.get("layer_types")
    if kinds is None:
        return _default_kinds(values, family, num_layers)
    known = ("full_attention", *_WINDOWS, *_STATES, *_NOTHING)
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise ConfigError(f"{values.name}: layer_types: must name {num_layers} kinds, got {kinds!r:.80}. Mend: {_MEND}")
    strange = sorted({str(kind) for kind in kinds if kind not in known})
    if strange:
        raise ConfigError(
            f"{values.name}: layer_types: {', '.join(strange)[:80]}: no formula here is for such layers. Mend: "
            f"plan with a model whose layers are of {', '.join(known)}"
        )
    return [str(kind) for kind in kinds]


def _default_kinds(values: _Values, family: _Family, num_layers: int) -> list[str]:
    text = values.values
    window = text.get("sliding_window")
    if text.get("use_sliding_window") is False or window is None:
        return ["chunked_attention" if text.get("attention_chunk_size") else "full_attention"] * num_layers
    if "use_sliding_window" in text:  # Qwen: the first layers see everything
        first = values.count("max_window_layers")
        return ["full_attention" if index < first else "sliding_attention" for index in range(num_layers)]
    every = values.count("sliding_window_pattern", family.num_default_pattern) if family.num_default_pattern else 0
    return [
        "full_attention" if every and (index + 1) % every == 0 else "sliding_attention" for index in range(num_layers)
    ]


def _parameters(values: _Values, family: str, num_layers: int, heads: int, kv_heads: int) -> tuple[int, int, bool]:
    """All parameters, those of one table of embeddings, and whether head and table are one."""
    facts = _FAMILIES.get(family)
    if facts is None:
        raise ConfigError(
            f"{values.name}: model_type is {family!r:.80}: its weights are in no formula here (known: "
            f"{', '.join(_FAMILIES)}). Mend: give their size, such as --weights 16GB"
        )
    text, hidden, inner = values.values, values.count("hidden_size"), values.count("intermediate_size")
    dim = _head_dim(values, heads)
    queries, keys = heads * dim, kv_heads * dim
    attention = hidden * (queries + 2 * keys) + queries * hidden
    if text.get("attention_bias"):
        attention += queries + 2 * keys + hidden
    elif facts.has_qkv_bias:
        attention += queries + 2 * keys
    mlp = 3 * hidden * inner + (2 * inner + hidden if text.get("mlp_bias") else 0)
    norms = facts.num_norms * hidden
    norms += {_HeadNorms.NONE: 0, _HeadNorms.PER_HEAD: 2 * dim, _HeadNorms.WHOLE: queries + keys}[facts.head_norms]
    table = values.count("vocab_size") * hidden
    tied = text.get("tie_word_embeddings", facts.is_tied)
    num_tables = 1 if tied else 2
    return num_layers * (attention + mlp + norms) + hidden + num_tables * table, table, bool(tied)
