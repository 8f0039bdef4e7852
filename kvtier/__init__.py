"""kvtier: GPU memory, pinned host memory and NVMe files as one KV cache for Hugging Face models."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

try:
    __version__ = version("kvtier")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

if TYPE_CHECKING:
    from kvtier.config import KVTierConfig as KVTierConfig
    from kvtier.model import TieredKV as TieredKV

__all__ = ["KVTierConfig", "TieredKV", "__version__"]


def __getattr__(name: str) -> Any:
    # Lazy, so that the pure modules (config, policies, manager) import with torch absent.
    if name == "TieredKV":
        try:
            from kvtier.model import TieredKV
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ImportError("TieredKV wraps models of transformers, which is not installed: kvtier[hf]") from error
        return TieredKV
    if name == "KVTierConfig":
        from kvtier.config import KVTierConfig

        return KVTierConfig
    raise AttributeError(f"module 'kvtier' has no attribute {name!r}")
