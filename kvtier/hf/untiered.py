"""Layers that are not tiered (windows, linear attention): transformers' own layer caches, kept beside the tiered ones.

Their classes change window tensors by replacing them and linear-attention states in place; `Snapshot` tells them apart.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvtier.errors import UnsupportedError
from kvtier.recomputable import Past

_FORGOTTEN = (
    "crop({}): layer {} ({}) has dropped the tokens that it would need; start a new cache, or call "
    "cache.activate_past_recording() before the tokens that may be cropped"
)


class UntieredLayers:
    """The untiered layers of one cache, by layer index. Empty for models of full attention alone."""

    def __init__(self, layers: Mapping[int, Any]) -> None:
        self.layers = dict(layers)
        self.num_bytes = 0
        """Memory that they hold, as of the last `measure`."""
        self.row_bytes = 0
        """The share of one row in it, rounded up."""
        self.measure()

    @property
    def past(self) -> Past:
        """What it takes to compute tokens again: a state of linear attention sums up all that was ever fed to it."""
        if any(_in_place(layer) for layer in self.layers.values()):
            return Past.STATES
        return Past.WINDOWS if self.layers else Past.BLOCKS

    def measure(self) -> None:
        """Let go of what windows do not need, and count what is held."""
        for layer in self.layers.values():
            for name, value in vars(layer).items():
                # A window behind a long chunk is a view of it, and would keep all of it.
                if isinstance(value, torch.Tensor) and value.untyped_storage().nbytes() > 2 * value.nbytes:
                    setattr(layer, name, value.clone())
        tensors = [tensor for layer in self.layers.values() for tensor in _tensors(vars(layer))]
        storages = [tensor.untyped_storage() for tensor in tensors]
        self.num_bytes = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        num_rows = min((len(tensor) for tensor in tensors if tensor.dim() > 1), default=1)
        self.row_bytes = -(-self.num_bytes // max(num_rows, 1))

    def snapshot(self) -> dict[int, dict[str, Any]]:
        """What `restore` needs: references to window tensors, copies of states that are changed in place."""
        return {index: _state(layer) for index, layer in self.layers.items()}

    def restore(self, snapshot: Mapping[int, dict[str, Any]]) -> None:
        """Put every layer back as it was. The snapshot stays good: what is changed in place is copied again."""
        for index, state in snapshot.items():
            layer = self.layers[index]
            vars(layer).clear()
            vars(layer).update(_kept(state, _in_place(layer)))
        self.measure()

    def fork(self) -> dict[int, Any]:
        """Layers of their own with the same states."""
        twins: dict[int, Any] = {}
        for index, layer in self.layers.items():
            twins[index] = copy.copy(layer)
            vars(twins[index]).update(_state(layer))
        return twins

    def records_past(self) -> dict[int, bool]:
        """By layer, whether it keeps what a crop may need (`activate_past_recording`)."""
        return {index: layer.record_past for index, layer in self.layers.items() if hasattr(layer, "record_past")}

    def record_past(self, before: Mapping[int, bool]) -> None:
        """Put back what `records_past` said."""
        for index, records in before.items():
            self.layers[index].record_past = records

    def crop(self, tokens_to_remove: int) -> None:
        """As transformers' `crop`.

        Raises:
            UnsupportedError: a layer has forgotten what it would have to go back to; nothing was cropped.
        """
        before = self.snapshot()
        try:
            for index, layer in self.layers.items():
                _crop(index, layer, tokens_to_remove)
        except BaseException:  # half a crop is none
            self.restore(before)
            raise
        self.measure()

    def select(self, rows: torch.Tensor) -> None:
        """Make row `i` what row `rows[i]` was."""
        for layer in self.layers.values():
            # Linear-attention layers have no other operation on rows, and it serves repeats and selections as well.
            if not getattr(layer, "is_initialized", True):
                continue
            layer.reorder_cache(rows)
        self.measure()


def _crop(index: int, layer: Any, tokens_to_remove: int) -> None:
    records = getattr(layer, "record_past", False)
    if tokens_to_remove == 0 and not records:
        return
    kind = type(layer).__name__
    if isinstance(layer, DynamicSlidingWindowLayer) and layer.keys is not None:
        # transformers crops a window that was trimmed since, and is then short of keys without a word.
        left = layer.cumulative_length + tokens_to_remove
        if layer.keys.shape[-2] + tokens_to_remove < min(layer.sliding_window - 1, left):
            raise UnsupportedError(_FORGOTTEN.format(tokens_to_remove, index, kind))
    if tokens_to_remove and not layer.is_croppable:
        raise UnsupportedError(f"crop({tokens_to_remove}): layer {index} ({kind}) cannot go back; start a new cache")
    try:
        layer.crop(tokens_to_remove)
    except RuntimeError as error:
        raise UnsupportedError(_FORGOTTEN.format(tokens_to_remove, index, kind)) from error


def _state(layer: Any) -> dict[str, Any]:
    state: dict[str, Any] = _kept(vars(layer), _in_place(layer))
    return state


def _in_place(layer: Any) -> bool:
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def _kept(value: Any, in_place: bool) -> Any:
    if isinstance(value, dict):
        return {key: _kept(entry, in_place) for key, entry in value.items()}
    return value.clone() if in_place and isinstance(value, torch.Tensor) else value


def _tensors(values: Mapping[Any, Any]) -> Iterator[torch.Tensor]:
    for value in values.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, dict):
            yield from _tensors(value)
