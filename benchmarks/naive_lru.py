"""The honest straw man: the same blocks in the same kind of files, behind an LRU cache in memory instead of a plan.

A slice (one layer's part of a block) is promoted into memory when attention touches it, and the slice that was used
longest ago is given up for it. Blocks are full and never change, so giving one up is free. Everything else is as good
as kvtier's own: the nvme store with O_DIRECT and checksums, reads straight into the memory that attention uses, runs of
neighbouring slices in one kernel call without a copy, one merge a layer. It is charitable in its unit: promoting whole
blocks, which span all layers, reads them once a layer and token, thirty times as much for the demo's model. `unit:
block` does that, to the letter.

Decoding reads every slice in the same order at every token. On such a loop LRU keeps exactly what is not needed soon:
unless everything fits, nothing hits, and every byte comes from the files at every token, those in memory too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AttentionInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import AttentionMaskInterface

from kvtier.errors import UnsupportedError
from kvtier.hf import cache_keyword, describe
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.staging import page_aligned
from kvtier.types import IoMode, Slot

_NAME = "kvtier_naive_lru"
_current: ContextVar[NaiveLru] = ContextVar("kvtier_naive_lru")


class NaiveLru:
    """A model's cache of one row that decodes over files, a part of them in memory by LRU. Host memory only.

    Attributes:
        num_hits, num_misses: units found in memory, and read from files.
    """

    def __init__(
        self,
        model: Any,
        plain: DynamicCache,
        folder: Path,
        *,
        block_tokens: int,
        memory_frac: float,
        num_more: int,
        unit: Literal["slice", "block"] = "slice",
        num_readers: int = 1,
        io: IoMode = IoMode.DIRECT,
    ) -> None:
        """Write the full blocks of `plain` to files; the rest is the tail, which stays in memory.

        Args:
            model: its attention is this one's from now on: give a `twin`.
            memory_frac: the part of all slices that memory has room for.
            num_more: tokens that will be appended to the tail.
            unit: what is promoted and given up: one layer's part of a block, or a whole block, which is read and
                attended to when it is touched.
            num_readers: slices of a layer that are read at a time; 1: each when it is touched.

        Raises:
            UnsupportedError: not on the host, or layers that are not tiered.
            ValueError: less than one layer's slices in memory: attention could not have them at once. Or less than one
                block where that is the unit.
        """
        group = describe(model, block_tokens)
        if group.device != "cpu" or group.num_untiered:
            raise UnsupportedError("naive LRU promotion is written for models of full attention in host memory")
        self._shape = shape = group.shape
        self._dtype: torch.dtype = getattr(torch, group.dtype)
        num_tokens = plain.get_seq_length()
        self._num_blocks = num_tokens // block_tokens
        self._unit_layers = shape.num_layers if unit == "block" else 1
        num_units = round(memory_frac * self._num_blocks * shape.num_layers / self._unit_layers)
        num_slices = num_units * self._unit_layers
        if num_slices < (self._unit_layers if unit == "block" else self._num_blocks):
            raise ValueError(f"memory for {num_slices} slices, and a layer has {self._num_blocks}")
        num_bytes = 2 * self._num_blocks * shape.block_bytes + (16 << 20)
        self.store = NvmeStore(shape, num_bytes, folder, persistent=False, reserve_free_frac=0.0, io=io)
        tail = (1, shape.kv_heads, num_tokens % block_tokens + num_more)
        self._layers = [
            _Tail(
                torch.empty((*tail, shape.key_dim), dtype=self._dtype),
                torch.empty((*tail, shape.value_dim), dtype=self._dtype),
                self._num_blocks * block_tokens,
            )
            for _ in group.layers
        ]
        self._write(plain, block_tokens)
        memory = page_aligned(num_slices * shape.slice_bytes).view(num_slices, shape.slice_bytes)
        heads = (num_slices, shape.kv_heads, block_tokens)
        self._memory = memory
        self._keys = memory[:, : shape.key_bytes].view(self._dtype).view(*heads, shape.key_dim)
        self._values = memory[:, shape.key_bytes :].view(self._dtype).view(*heads, shape.value_dim)
        self._free = list(reversed(range(num_units)))
        self._places: OrderedDict[tuple[int, int], int] = OrderedDict()
        """Where each (block, layer) lies; used longest ago first. A whole block goes by layer 0."""
        self.num_hits = self.num_misses = 0
        self._readers = ThreadPoolExecutor(num_readers) if num_readers > 1 else None
        self._cache = Cache(layers=self._layers)
        self._model, self._keyword = model, cache_keyword(model.forward)
        AttentionInterface.register(_NAME, _attention)
        AttentionMaskInterface.register(_NAME, _no_mask)
        model.set_attn_implementation(_NAME)

    def _write(self, plain: DynamicCache, block_tokens: int) -> None:
        shape, first = self._shape, self._num_blocks * block_tokens
        block = page_aligned(shape.block_bytes)
        for number in range(self._num_blocks):
            span = slice(number * block_tokens, (number + 1) * block_tokens)
            parts = [kv[0, :, span].flatten() for layer in plain.layers for kv in (layer.keys, layer.values)]
            block.copy_(torch.cat(parts).view(torch.uint8))
            self.store.write(Slot(number), block)
        for tail, layer in zip(self._layers, plain.layers, strict=True):
            if layer.keys.shape[2] > first:
                tail.update(layer.keys[:, :, first:], layer.values[:, :, first:])

    def step(self, token: torch.Tensor) -> torch.Tensor:
        """Append one token, `[1, 1]`; its logits."""
        before = _current.set(self)
        try:
            logits: torch.Tensor = self._model(token, use_cache=True, **{self._keyword: self._cache}).logits
        finally:
            _current.reset(before)
        return logits

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> torch.Tensor:
        """One query `[1, heads, 1, dim]` over all blocks and the tail: `[1, 1, heads, dim]`."""
        kv_heads = self._shape.kv_heads
        packed = query.reshape(1, kv_heads, -1, query.shape[-1])
        tail = self._layers[layer]
        outputs, sums = [], []
        for keys, values in self._pieces(layer, tail):
            rows = packed.expand(keys.shape[0], -1, -1, -1)
            output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                rows, keys, values, 0.0, False, scale=scale
            )
            outputs.append(output)
            sums.append(lse)
        weights = torch.cat(sums).softmax(0).unsqueeze(-1)
        merged = (weights * torch.cat(outputs).float()).sum(0).to(query.dtype)
        return merged.reshape(1, 1, query.shape[1], -1)

    def _pieces(self, layer: int, tail: _Tail) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of a layer, each valid until the next is asked for."""
        yield tail.keys[:, :, : tail.num_tokens], tail.values[:, :, : tail.num_tokens]
        if self._unit_layers > 1:
            for block in range(self._num_blocks):
                at = self._touch(block, 0) * self._unit_layers + layer
                yield self._keys[at : at + 1], self._values[at : at + 1]
            return
        for first, last in _runs(sorted(self._promote(layer))):
            yield self._keys[first : last + 1], self._values[first : last + 1]

    def _promote(self, layer: int) -> list[int]:
        """Touch the layer's slices in order; where they lie then."""
        missing: list[tuple[int, int]] = []
        slots = [self._touch(block, layer, missing) for block in range(self._num_blocks)]
        if self._readers is not None:
            reads = [self._readers.submit(self.store.read_slice, Slot(b), layer, self._memory[s]) for b, s in missing]
            for read in reads:
                read.result()
        return slots

    def _touch(self, block: int, layer: int, missing: list[tuple[int, int]] | None = None) -> int:
        """Where a unit lies, which is now the one used last. It is read, or with several readers noted as `missing`."""
        key = block, layer
        slot = self._places.pop(key, None)
        if slot is None:
            self.num_misses += 1
            slot = self._free.pop() if self._free else self._places.popitem(last=False)[1]
            if self._unit_layers > 1:
                whole = slice(slot * self._unit_layers, (slot + 1) * self._unit_layers)
                self.store.read(Slot(block), self._memory[whole].view(-1))
            elif self._readers is None:
                self.store.read_slice(Slot(block), layer, self._memory[slot])
            elif missing is not None:
                missing.append((block, slot))
        else:
            self.num_hits += 1
        self._places[key] = slot
        return slot

    def close(self) -> None:
        """Stop the readers and give the files back. Idempotent."""
        if self._readers is not None:
            self._readers.shutdown()
        self.store.close()


class _Tail(CacheLayerMixin):  # type: ignore[misc]
    """One layer: what is new is appended in place; what is full lies in the files."""

    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_before: int) -> None:
        super().__init__()
        self.keys, self.values, self.num_tokens, self._num_before = keys, values, 0, num_before
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append; returns what was given: attention finds the rest itself."""
        end = self.num_tokens + keys.shape[2]
        if end > self.keys.shape[2]:
            raise RuntimeError(f"the tail has room for {self.keys.shape[2]} tokens")
        self.keys[:, :, self.num_tokens : end] = keys
        self.values[:, :, self.num_tokens : end] = values
        self.num_tokens = end
        return keys, values

    def get_seq_length(self) -> int:
        return self._num_before + self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name."""
        return -1


def _attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if query.shape[:1] != (1,) or query.shape[2] != 1:
        raise UnsupportedError("naive LRU promotion decodes one row, one token at a time")
    return _current.get().attend(module.layer_idx, query, scale), None


def _no_mask(**_: Any) -> None:
    """One query of one row sees all."""


def _runs(slots: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of neighbours."""
    runs: list[tuple[int, int]] = []
    for slot in slots:
        if runs and runs[-1][1] == slot - 1:
            runs[-1] = runs[-1][0], slot
        else:
            runs.append((slot, slot))
    return runs
