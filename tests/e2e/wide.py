"""A family's 16-bit model whose full attention is computed in fp32 and rounded once: blockwise attention is held to it.

torch's CPU kernel rounds the softmax weights to 16 bits, in every chunk size alike: docs/adr/0009-sixteen-bits.md.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.e2e.families import ATTENTION, FAMILIES, tiny_from


@functools.cache
def wide_twin(family: str, dtype: torch.dtype) -> Any:
    """The same weights as `tiny(family, dtype)`."""
    original = ATTENTION.get(family, "sdpa")
    config, values = FAMILIES[family]
    model = tiny_from(config, dtype, original, **values)
    name = f"in_fp32_{'eager' if original == 'eager' else 'fused'}"  # a name with sdpa in it takes other code paths
    AttentionInterface.register(name, _in_fp32(original))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    model.set_attn_implementation(name)
    return model


def _in_fp32(original: str) -> Callable[..., Any]:
    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(original, eager)
        if getattr(module, "sliding_window", None):  # not tiered: it has its own attention, as it is
            return function(module, query, key, value, mask, **kwargs)
        if mask is not None and mask.is_floating_point():
            mask = mask.float()
        if kwargs.get("s_aux") is not None:
            kwargs["s_aux"] = kwargs["s_aux"].float()
        output, weights = function(module, query.float(), key.float(), value.float(), mask, **kwargs)
        return output.to(query.dtype), weights

    return attention
