"""Lets the tests speak of `cache=` to plain models of transformers before 5.24, which call it `past_key_values`.

A TieredCache goes through untouched: that kvtier takes it by either name is what is tested.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, LlamaForCausalLM, PreTrainedModel

from kvtier.hf import TieredCache


def teach_plain_models() -> None:
    """Does nothing where models take `cache`."""
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters:
        return
    GenerationMixin.generate = _takes_cache(GenerationMixin.generate)
    PreTrainedModel.__call__ = _takes_cache(PreTrainedModel.__call__)


def _takes_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def takes_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "cache" in kwargs and not isinstance(kwargs["cache"], TieredCache):
            kwargs["past_key_values"] = kwargs.pop("cache")
        return original(self, *args, **kwargs)

    return takes_cache
