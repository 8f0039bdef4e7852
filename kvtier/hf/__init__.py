"""The Hugging Face contract. The only package of kvtier that imports transformers; features are detected by signature.

`describe` says whether and how a model can be served, `attention` takes its attention and masks over, `cache` is the
Cache object that `generate` sees.
"""

from __future__ import annotations

from kvtier.hf.attention import Patch, check_mask_kind, current_step
from kvtier.hf.cache import TieredCache
from kvtier.hf.describe import VERIFIED_FAMILIES, cache_keyword, describe, num_heads
from kvtier.hf.wrapped import WrappedMethod, check_process, weights_mark

__all__ = [
    "VERIFIED_FAMILIES",
    "Patch",
    "TieredCache",
    "WrappedMethod",
    "cache_keyword",
    "check_mask_kind",
    "check_process",
    "current_step",
    "describe",
    "num_heads",
    "weights_mark",
]
