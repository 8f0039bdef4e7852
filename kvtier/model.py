"""`TieredKV(model)`: the one object that a user makes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from kvtier.block_table import TokenSource
from kvtier.config import KVTierConfig, load_config
from kvtier.errors import AlreadyWrappedError, UnsupportedError
from kvtier.forward import check_prompt, wrap
from kvtier.hf import Patch, TieredCache, cache_keyword, describe, num_heads
from kvtier.runtime import Runtime

# generate() modes whose caches are reordered, cropped or fed by another model: exact in a later version.
_MODES_LATER = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "prompt_lookup_num_tokens": None,
    "assistant_model": None,
    "penalty_alpha": None,
    "guidance_scale": None,
    "dola_layers": None,
    "cache_implementation": None,
}


class TieredKV:
    """A causal language model whose KV cache lies on GPU memory, host memory and NVMe files.

    `generate` and calls give the tokens that the model gives with everything on the GPU. While wrapped, the model
    called directly behaves bit-identically to before; after `close` nothing of kvtier is left on it.

    Threads: calls on one wrapper are serialised step by step.

    Args:
        model: a transformers causal language model, on one device.
        config: a preset's name, a YAML file's path, a mapping, a KVTierConfig, or None for the defaults.

    Raises:
        UnsupportedModelError: the model cannot be served exactly; the message names why.
        ConfigError, BudgetError, FolderInUseError: the config cannot be used.
        AlreadyWrappedError: the model has a live wrapper.
        After each of them the model is unchanged and nothing is allocated.
    """

    def __init__(self, model: Any, config: str | Path | Mapping[str, Any] | KVTierConfig | None = None) -> None:
        loaded = load_config(config)
        if hasattr(getattr(model, "forward", None), "__kvtier__"):
            raise AlreadyWrappedError("this model is wrapped by a live TieredKV: close() that one first, or use it")
        group = describe(model, loaded.block_tokens)
        self.model = model
        self._runtime = Runtime(group, loaded, num_heads(model))
        try:
            patch = Patch.apply(model)
        except BaseException:
            self._runtime.close()
            raise
        # An instance attribute hides the class's method; one that is there already (device hooks) comes back on close.
        own_forward = vars(model).get("forward")
        self._keyword = cache_keyword(model.forward)
        wrapped = wrap(model.forward, self._runtime)
        wrapped.__kvtier__ = True  # type: ignore[attr-defined]  # marks a wrapped model
        model.forward = wrapped
        # Also when the wrapper is dropped without close, and at interpreter exit: threads stop, files go.
        self._finalize = weakref.finalize(self, _unwrap, model, own_forward, patch, self._runtime)

    # -- using it -----------------------------------------------------------------------------------------------------

    def new_cache(self, batch_size: int = 1) -> TieredCache:
        """An empty cache for one conversation: pass it as `cache` to `generate` or to a call, turn after turn."""
        self._runtime.check_open()
        if batch_size != 1:
            raise UnsupportedError(f"new_cache(batch_size={batch_size}): one row a cache for now")
        with self._runtime.turn:
            return TieredCache(self._runtime)

    def generate(self, inputs: Any = None, **kwargs: Any) -> Any:
        """`model.generate` with the KV on tiers: every argument that it takes.

        With `cache=tiered.new_cache()` several turns share one conversation: pass the whole transcript each time.

        Raises:
            UnsupportedError: an argument that cannot be honoured yet, by name. Nothing was computed.
            PromptMismatchError: the transcript does not begin with what the cache holds. Nothing was computed.
            CapacityError, BlockLostError, TransferTimeoutError: the cache is as it was before the step that failed.
        """
        self._runtime.check_open()
        self._check_modes(kwargs)
        cache = kwargs.pop("past_key_values", None) if kwargs.get("cache") is None else kwargs.pop("cache")
        if cache is None:
            cache = self.new_cache()
        elif not isinstance(cache, TieredCache):
            raise UnsupportedError(f"cache is a {type(cache).__name__}: pass tiered.new_cache(), or none")
        elif cache.state.runtime is not self._runtime:
            raise UnsupportedError("this cache belongs to another TieredKV: its KV comes from another model")
        self._check_embeds(cache, kwargs)
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.shape[0] == 1:
            mask = kwargs.get("attention_mask")
            check_prompt(cache, ids, mask.shape[1] if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None)
        kwargs[self._keyword] = cache
        manager, table = self._runtime.manager, cache.state.table
        with self._runtime.turn:
            manager.enter(table)
        try:
            return self.model.generate(inputs, **kwargs)
        finally:
            with self._runtime.turn:
                manager.leave(table)

    @staticmethod
    def _check_embeds(cache: TieredCache, kwargs: dict[str, Any]) -> None:
        table = cache.state.table
        if table.num_tokens and (kwargs.get("inputs_embeds") is not None or table.source is TokenSource.EMBEDS):
            raise UnsupportedError(
                f"the cache holds {table.num_tokens} tokens and embeddings cannot be compared with them, so another "
                "conversation's KV could be served: use a new cache, or pass the new embeddings to tiered(...)"
            )

    def _check_modes(self, kwargs: dict[str, Any]) -> None:
        configs = (kwargs.get("generation_config"), self.model.generation_config)
        for name, neutral in _MODES_LATER.items():
            given = kwargs.get(name)
            if given is None:
                given = next((v for c in configs if c is not None and (v := getattr(c, name, None)) is not None), None)
            if given is not None and given != neutral:
                raise UnsupportedError(f"generate({name}={given!r:.40}) is not supported yet: greedy and sampling are")
        if kwargs.get("use_cache") is False:
            raise UnsupportedError("use_cache=False leaves nothing to tier: call model.generate")
        for name in ("output_attentions", "custom_generate"):
            if kwargs.get(name):
                raise UnsupportedError(f"generate({name}={kwargs[name]!r:.40}) cannot be honoured with a tiered cache")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, in chunks of at most `prefill_chunk` new tokens; a new cache unless one is given."""
        self._runtime.check_open()
        if (
            kwargs.get("use_cache") is not False
            and kwargs.get("cache") is None
            and kwargs.get("past_key_values") is None
        ):
            kwargs[self._keyword] = self.new_cache()
        return self.model(*args, **kwargs)

    __call__ = forward

    @property
    def config(self) -> KVTierConfig:
        """The kvtier config in force. The model's own is `tiered.model.config`."""
        return self._runtime.config

    @property
    def device(self) -> torch.device:
        """The device of the model, and of the gpu tier."""
        return torch.device(self._runtime.group.device)

    def stats(self) -> dict[str, Any]:
        """What lies where, what moved and what it cost: a plain dict, documented in docs/stats.md."""
        return self._runtime.stats()

    def check_integrity(self) -> None:
        """Raise IntegrityError if kvtier's own bookkeeping contradicts itself. O(blocks)."""
        self._runtime.check_integrity()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free every tier and leave the model as it was before wrapping. Idempotent."""
        self._finalize()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._runtime.closed else self._runtime.mode.value
        return f"TieredKV({type(self.model).__name__}, {state})"


def _unwrap(model: Any, own_forward: Callable[..., Any] | None, patch: Patch, runtime: Runtime) -> None:
    patch.remove()
    if own_forward is None:
        vars(model).pop("forward", None)
    else:
        model.forward = own_forward
    runtime.close()
