"""The Hugging Face contract. The only package of kvtier that imports transformers; features are detected by signature.

`describe` says whether and how a model can be served, `attention` takes its attention and masks over, `cache` is the
Cache object that `generate` sees.
"""

from __future__ import annotations

from kvtier.hf.adapters import check_one_adapter, check_own_inputs
from kvtier.hf.attention import Patch, check_mask_kind, current_step
from kvtier.hf.cache import CACHE_NAMES, TieredCache, given_cache
from kvtier.hf.describe import VERIFIED_FAMILIES, cache_keyword, describe, new_untiered, transformers_model
from kvtier.hf.fingerprint import PLAIN_ARGUMENTS, Fingerprints
from kvtier.hf.state import CacheState
from kvtier.hf.untiered import UntieredLayers
from kvtier.hf.weights import WeightsMark
from kvtier.hf.wrapped import WrappedMethod, check_process

__all__ = [
    "CACHE_NAMES",
    "PLAIN_ARGUMENTS",
    "VERIFIED_FAMILIES",
    "CacheState",
    "Fingerprints",
    "Patch",
    "TieredCache",
    "UntieredLayers",
    "WeightsMark",
    "WrappedMethod",
    "cache_keyword",
    "check_mask_kind",
    "check_one_adapter",
    "check_own_inputs",
    "check_process",
    "current_step",
    "describe",
    "given_cache",
    "new_untiered",
    "transformers_model",
]
