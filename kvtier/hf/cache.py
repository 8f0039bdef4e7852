"""The Cache object that `generate` and a model's layers see."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvtier.batch import Batch
from kvtier.errors import UnsupportedError
from kvtier.hf.state import CacheState
from kvtier.hf.untiered import UntieredLayers
from kvtier.runtime import Runtime

CACHE_NAMES = ("cache", "past_key_values")
"""What transformers calls a model's cache, and what it called it before 5.24."""


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
        self._state.open_step().append(self._layer, key_states, value_states)
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens held, pending ones and padding included."""
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


def given_cache(arguments: Mapping[str, Any]) -> TieredCache | None:
    """The TieredCache among a call's arguments, by the name of any transformers version; None if there is none.

    A model of an older version would swallow the new name and answer without its cache.

    Raises:
        UnsupportedError: another cache is given beside it.
    """
    given = [arguments[name] for name in CACHE_NAMES if arguments.get(name) is not None]
    tiered = next((each for each in given if isinstance(each, TieredCache)), None)
    if tiered is not None and any(each is not tiered for each in given):
        raise UnsupportedError(
            "cache and past_key_values are both given (PEFT's prefix tuning does so): only one can be honoured"
        )
    return tiered


class TieredCache(Cache):
    """A transformers Cache with its KV on the wrapper's tiers. From `tiered.new_cache()`.

    It has a row for each prompt, beam or return sequence. Rows share equal full blocks. Layers with windows or linear
    attention keep transformers' own layer cache beside it, untiered.

    Dropping the object frees its blocks at the next step of any cache. `copy.deepcopy` forks: blocks are shared.
    """

    def __init__(
        self,
        runtime: Runtime,
        num_rows: int | None = None,
        *,
        fork_of: CacheState | None = None,
        batch: Batch | None = None,
        salt: bytes = b"",
    ) -> None:
        if fork_of is None:
            if batch is None:
                batch = runtime.manager.new_batch(1 if num_rows is None else num_rows)
            untiered = UntieredLayers(runtime.new_untiered())
            self.state = CacheState(runtime, batch, untiered, num_rows, salt)
        else:
            batch = runtime.manager.fork(fork_of.batch)
            untiered = UntieredLayers(fork_of.untiered.fork())
            made_by = fork_of.salt, fork_of.weights, fork_of.structure, fork_of.modules
            self.state = CacheState(runtime, batch, untiered, fork_of.num_rows, *made_by)
        runtime.untiered.caches.add(untiered)
        layers = {index: TieredLayer(self.state, index) for index in runtime.group.layers} | untiered.layers
        super().__init__(layers=[layers[index] for index in range(len(layers))])
        # Takes no lock and runs no code of ours in the collector: the next step drains the deque.
        weakref.finalize(self, runtime.manager.dropped.append, batch).atexit = False

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """transformers' way in, for every layer. Raises UnsupportedError outside of the wrapped model's forward."""
        layer = self.layers[layer_idx]
        if type(layer) is TieredLayer:  # checks it itself, and nothing of what transformers does beside it is ours
            return layer.update(key_states, value_states)
        # Untiered layers are transformers' own, and would take any call: one outside of a step goes past the tiers.
        self.state.open_step()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def get_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `update`: models change what this returns in place."""
        self.state.open_step()
        return super().get_conv_state(*args, **kwargs)

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `update`."""
        self.state.open_step()
        return super().update_conv_state(*args, **kwargs)

    def get_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `get_conv_state`."""
        self.state.open_step()
        return super().get_recurrent_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        """As `update`."""
        self.state.open_step()
        return super().update_recurrent_state(*args, **kwargs)

    @property
    def batch_size(self) -> int:
        """Rows: prompts times beams or return sequences."""
        return self.state.batch.num_rows

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens held, oldest first, without padding; empty if any were fed as embeddings.

        Raises:
            UnsupportedError: the cache has several rows: ask `row_token_ids(row)`.
        """
        if self.batch_size != 1:
            raise UnsupportedError(f"the cache has {self.batch_size} rows: ask cache.row_token_ids(row)")
        return self.row_token_ids(0)

    def row_token_ids(self, row: int) -> list[int]:
        """The ids of the tokens that one row holds, as `token_ids`. Raises IndexError for no such row."""
        return self.state.batch.tables[row].token_ids()

    def stats(self) -> dict[str, object]:
        """This cache's counters: `rows`, `tokens` and `blocks` (shared ones once), `nvme_read_bytes`, `slices_read`."""
        tables = self.state.batch.tables
        return {
            "rows": len(tables),
            "tokens": sum(table.num_tokens for table in tables),
            "blocks": len({block for table in tables for block in table.blocks}),
            "untiered_bytes": self.state.untiered.num_bytes,
            **self.state.batch.metrics.as_dict(),
        }

    def fork(self) -> TieredCache:
        """A cache of its own with the same tokens; full blocks are shared, tails copied when either side appends."""
        self.state.check_between_steps("fork")
        with self.state.runtime.turn:
            self.state.runtime.untiered.check(self.state.untiered.num_bytes)
            return TieredCache(self.state.runtime, fork_of=self.state)

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a TieredCache cannot be pickled or copied to another process: its KV lies on the tiers of this one; "
            "cache.fork() makes another of the same wrapper, a session is kept by its name"
        )

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens of every row, on every tier; 0 does nothing.

        Raises:
            UnsupportedError: a positive number, which older transformers took for a length, or an untiered layer has
                forgotten what lies before; nothing was dropped.
        """
        self.state.check_change("crop")
        if tokens_to_remove > 0:
            raise UnsupportedError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        batch = self.state.batch
        with self.state.runtime.turn:
            self.state.untiered.crop(max(tokens_to_remove, -batch.length))
            if tokens_to_remove:
                self.state.runtime.manager.truncate(batch, max(0, batch.length + tokens_to_remove))

    def reset(self) -> None:
        """Forget every token and free the blocks. The next call may have another number of rows."""
        self.state.check_change("reset")
        runtime = self.state.runtime
        with runtime.turn:
            runtime.manager.truncate(self.state.batch, 0)
            # New ones: linear-attention layers would keep states of the old number of rows.
            self.state.untiered.restore({index: vars(layer) for index, layer in runtime.new_untiered().items()})

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Make row `i` what row `beam_idx[i]` was: full blocks are shared by count, tails copied at the next append."""
        self._select("reorder_cache", beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows named by `indices`, in that order; a mask of one boolean a row works too."""
        chosen = torch.as_tensor(indices)
        self._select(
            "batch_select_indices", (chosen.nonzero()[:, 0] if chosen.dtype == torch.bool else chosen).tolist()
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times, side by side; blocks are shared."""
        self._select("batch_repeat_interleave", [row for row in range(self.batch_size) for _ in range(repeats)])

    def _select(self, operation: str, rows: Sequence[int]) -> None:
        self.state.check_change(operation)
        held = self.batch_size
        if not rows or any(not -held <= row < held for row in rows):
            raise UnsupportedError(f"{operation}: rows {list(rows)[:8]} of a cache of {held} rows")
        rows = [row % held for row in rows]
        if rows == list(range(held)):
            return
        with self.state.runtime.turn:
            self.state.runtime.untiered.check(self.state.untiered.num_bytes * (len(rows) - held) // held)
            self.state.runtime.manager.select(self.state.batch, rows)
            if self.state.batch.length:
                self.state.untiered.select(torch.tensor(rows, device=self.state.runtime.group.device))
            if len(rows) != held:
                self.state.num_rows = None  # the caller has said what it wants
