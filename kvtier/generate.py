"""The wrapped `generate`: with a TieredCache it is checked first, by whichever way it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvtier.block_table import TokenSource
from kvtier.errors import PromptMismatchError, UnsupportedError
from kvtier.hf import TieredCache, WrappedMethod, check_mask_kind
from kvtier.runtime import Runtime

# Modes whose caches are reordered, cropped or fed by another model: exact in a later version. Name and neutral value.
_MODES_LATER = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "assistant_model": None,
    "penalty_alpha": None,
    "guidance_scale": 1,
    "dola_layers": None,
    "cache_implementation": None,
}


def wrap_generate(original: Callable[..., Any], runtime: Runtime, keyword: str) -> Callable[..., Any]:
    """A generate that behaves as `original` unless its cache is a TieredCache of `runtime`.

    Args:
        keyword: what the model calls its cache.
    """

    def generate(*args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("cache") if kwargs.get("cache") is not None else kwargs.get("past_key_values")
        if not isinstance(cache, TieredCache):
            return original(*args, **kwargs)
        cache.state.check_open()
        if cache.state.runtime is not runtime:
            raise UnsupportedError("this cache belongs to another TieredKV: its KV comes from another model")
        positional = dict(zip(("inputs", "generation_config"), args, strict=False))
        _check(original, cache, positional | kwargs)
        kwargs.pop("past_key_values", None)
        kwargs.pop("cache", None)
        kwargs[keyword] = cache
        with runtime.turn:
            runtime.manager.enter(cache.state.table)
        try:
            return original(*args, **kwargs)
        finally:
            with runtime.turn:
                runtime.manager.leave(cache.state.table)

    return WrappedMethod(original, generate)


def _check(original: Callable[..., Any], cache: TieredCache, arguments: dict[str, Any]) -> None:
    own_config = getattr(getattr(original, "__self__", None), "generation_config", None)
    configs = [c for c in (arguments.get("generation_config"), own_config) if c is not None]
    for name, neutral in _MODES_LATER.items():
        given = arguments.get(name)
        if given is None:
            given = next((value for c in configs if (value := getattr(c, name, None)) is not None), None)
        if given is not None and given != neutral:
            raise UnsupportedError(f"generate({name}={given!r:.40}) is not supported yet: greedy and sampling are")
    if arguments.get("use_cache") is False:
        raise UnsupportedError("use_cache=False leaves nothing to tier: call model.generate without a TieredCache")
    for name in ("output_attentions", "custom_generate"):
        if arguments.get(name):
            raise UnsupportedError(f"generate({name}={arguments[name]!r:.40}) cannot be honoured with a TieredCache")
    mask = arguments.get("attention_mask")
    check_mask_kind(mask)
    _check_embeds(cache, arguments)
    ids = next((arguments[n] for n in ("inputs", "input_ids") if arguments.get(n) is not None), None)
    if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[0] == 1:
        check_prompt(cache, ids, None if mask is None else mask.shape[1])


def _check_embeds(cache: TieredCache, arguments: dict[str, Any]) -> None:
    table = cache.state.table
    if table.num_tokens and (arguments.get("inputs_embeds") is not None or table.source is TokenSource.EMBEDS):
        raise UnsupportedError(
            f"the cache holds {table.num_tokens} tokens and embeddings cannot be compared with them, so another "
            "conversation's KV could be served: use a new cache, or pass the new embeddings to tiered(...)"
        )


def check_prompt(cache: TieredCache, input_ids: torch.Tensor, mask_length: int | None) -> None:
    """Raise unless the prompt continues what the cache holds.

    `generate` cuts `get_seq_length()` tokens off a prompt without looking at them, so another conversation's prompt
    would silently be answered from this cache's KV.

    Args:
        input_ids: `[1, length]`: the whole transcript, or new tokens only when `mask_length` says so.
        mask_length: tokens that the attention mask covers, if one is given.

    Raises:
        PromptMismatchError: the transcript departs from the cache, or adds nothing to it; the cache is unchanged.
    """
    held = cache.state.table.num_tokens
    if held == 0 or (mask_length is not None and mask_length != input_ids.shape[1]):
        return
    where = cache.state.table.first_difference(input_ids[0, :held].tolist())
    if where is not None:
        raise PromptMismatchError(
            f"the prompt departs from the cache's {held} tokens at token {where}: it is another conversation's, or "
            f"was edited; use a new cache, or cache.crop({where - held})"
        )
    if input_ids.shape[1] <= held:
        raise PromptMismatchError(
            f"the cache holds {held} tokens, the prompt has {input_ids.shape[1]}: pass the whole transcript with new "
            "tokens at its end, or crop the cache first"
        )
