"""What the steps of one runtime work with: the gpu tier's slab, the ring, and the arena of `gathered`."""

from __future__ import annotations

import torch

from kvtier.metrics import Metrics
from kvtier.ring import SliceRing
from kvtier.stores.gpu import GpuStore
from kvtier.types import AttentionMode, LayerGroup


class StepMemory:
    """Memory that every step of a runtime writes to or reads, and how it attends."""

    def __init__(
        self,
        group: LayerGroup,
        store: GpuStore,
        ring: SliceRing | None,
        metrics: Metrics,
        mode: AttentionMode,
        num_pieces: int,
        arena: torch.Tensor,
    ) -> None:
        self.group, self.store, self.ring, self.metrics, self.mode = group, store, ring, metrics, mode
        self.num_pieces, self.arena = num_pieces, arena
        self.gather_start = -arena.data_ptr() % 64
        self.positions = {layer: position for position, layer in enumerate(group.layers)}
        self.dtype = store.keys[0].dtype
        # What attention copies or writes out beside K and V is in the budget for so many blocks at once; a single
        # query's results are small.
        self.num_decode_pieces = num_pieces if group.is_wide or group.writes_scores else 1 << 30

    def layer_bytes(self, num_tokens: int) -> tuple[int, int]:
        """Bytes of one assembled layer: K, padded so that V behind it is aligned, and V."""
        shape = self.group.shape
        key_bytes, value_bytes = (
            num_tokens * shape.kv_heads * dim * shape.element_bytes for dim in (shape.key_dim, shape.value_dim)
        )
        return key_bytes + -key_bytes % 64, value_bytes
