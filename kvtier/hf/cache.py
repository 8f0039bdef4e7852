"""The Cache object that `generate` and a model's layers see."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtier.block_table import BlockTable
from kvtier.errors import ClosedError, UnsupportedError
from kvtier.hf.attention import current_step
from kvtier.runtime import Runtime

_ONE_ROW = "a TieredCache holds one row for now: beams and batches come with a later version"


@dataclass
class CacheState:
    """What layers and cache share. Refers to neither, so that dropping the cache drops everything at once."""

    runtime: Runtime
    table: BlockTable
    weights: int = 0
    """Mark of the weights that the tokens held were computed with."""

    def check_weights(self) -> None:
        """Raise UnsupportedError if the model is no longer the one that made this KV."""
        now = self.runtime.weights_mark()
        if self.table.num_tokens == 0:
            self.weights = now
        elif self.weights != now:
            raise UnsupportedError(
                f"the model's weights changed since this cache's {self.table.num_tokens} tokens were computed: its KV "
                "is an old model's; use a new cache, or cache.reset()"
            )

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


class TieredLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers' subclass hook has no types
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

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the step's K and V; returns them alone: attention finds the rest itself."""
        self._state.check_open()
        opened = current_step.get()
        if opened is None or opened.step.table is not self._state.table:
            raise UnsupportedError(
                "a TieredCache was used outside of its wrapped model's forward: call tiered.generate or tiered(...)"
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
    """A transformers Cache for one conversation, with its KV on the wrapper's tiers. From `tiered.new_cache()`.

    Dropping the object frees its blocks at the next step of any cache. `copy.deepcopy` forks: blocks are shared.
    """

    def __init__(self, runtime: Runtime, table: BlockTable | None = None, weights: int = 0) -> None:
        table = runtime.manager.new_sequence() if table is None else table
        self.state = CacheState(runtime, table, weights)
        layers: list[Any] = [TieredLayer(self.state, layer) for layer in runtime.group.layers]
        super().__init__(layers=layers)
        # Takes no lock and runs no code of ours in the collector: the next step drains the deque.
        weakref.finalize(self, runtime.manager.dropped.append, table.sequence).atexit = False

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens held, oldest first; empty if any were fed as embeddings."""
        return self.state.table.token_ids()

    def stats(self) -> dict[str, object]:
        """This conversation's counters: `tokens`, `blocks`, `nvme_read_bytes`, and `slices_read` per tier."""
        table = self.state.table
        metrics = self.state.runtime.manager.metrics_of(table.sequence)
        return {"tokens": table.num_tokens, "blocks": len(table.blocks), **metrics.as_dict()}

    def fork(self) -> TieredCache:
        """A cache of its own with the same tokens; full blocks are shared, tails copied when either side appends."""
        self.state.check_open()
        with self.state.runtime.turn:
            twin = self.state.runtime.manager.fork(self.state.table)
            return TieredCache(self.state.runtime, twin, self.state.weights)

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens, on every tier; 0 does nothing.

        Raises:
            UnsupportedError: a positive number, which older transformers took for a length; nothing was dropped.
        """
        self.state.check_open()
        if tokens_to_remove > 0:
            raise UnsupportedError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        opened = current_step.get()
        if opened is not None and opened.step.table is self.state.table:
            raise UnsupportedError("crop inside a step of the same cache: call it between steps")
        table = self.state.table
        with self.state.runtime.turn:
            self.state.runtime.manager.truncate(table, max(0, table.num_tokens + tokens_to_remove))

    def reset(self) -> None:
        """Forget every token and free the blocks."""
        self.crop(-self.state.table.num_tokens)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Refused unless it changes nothing."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Refused unless it selects the one row."""
        if list(indices) != [0]:
            raise UnsupportedError(_ONE_ROW)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Refused unless it changes nothing."""
        if repeats != 1:
            raise UnsupportedError(_ONE_ROW)
