"""The gpu tier: one slab on the model's device, which attention reads in place through strided views."""

from __future__ import annotations

import torch

from kvtier.errors import IntegrityError
from kvtier.stores.slab import SlabStore
from kvtier.types import BlockShape, Slot, Tier


class GpuStore(SlabStore):
    """A slab on `device`; without CUDA that is ordinary memory, all else the same.

    Attributes:
        keys: by slice index, a view `[num_slots, kv_heads, block_tokens, key_dim]` of `dtype`, last stride 1.
        values: likewise, `[num_slots, kv_heads, block_tokens, value_dim]`.
    """

    def __init__(
        self, shape: BlockShape, num_slots: int, dtype: torch.dtype, device: torch.device, joined: bool = False
    ) -> None:
        """Allocate it. Raises ValueError for sizes that contradict each other, torch's own error for no memory."""
        if dtype.itemsize != shape.element_bytes:
            raise ValueError(f"gpu store: {dtype} has {dtype.itemsize} bytes, the block shape {shape.element_bytes}")
        super().__init__(Tier.GPU, shape, num_slots, device, joined)
        views = self.by_layer(dtype)
        self.keys, self.values = views.keys, views.values

    def same_bytes(self, slot: Slot, other: Slot) -> bool:
        """Whether two slots hold the same bytes. On CUDA it waits for the kernels queued. Cost: reads both blocks."""
        return torch.equal(self.block(slot), self.block(other))

    def check_integrity(self) -> None:
        super().check_integrity()
        expected = 0 if self._slab is None else self.shape.num_layers
        if len(self.keys) != expected or len(self.values) != expected:
            raise IntegrityError(f"gpu store: {len(self.keys)} key views, {expected} are due")

    def close(self) -> None:
        super().close()
        self.keys, self.values = [], []
