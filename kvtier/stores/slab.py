"""What the two tiers of memory share: one slab, with a slot every `slot_bytes`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import ClosedError, IntegrityError
from kvtier.stores.base import Store
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockShape, Slot, SlotLabel, Tier

# SDPA gives other bits for K and V that start at other alignments (DESIGN.md section 8).
ALIGN_BYTES = 64


class SlabStore(Store):
    """A slab `[num_slots, slot_bytes]` of uint8 on `device`; each slot starts at a 64-byte-aligned address.

    The slab is not touched before it is written: on the host it begins on a page, for O_DIRECT, and its pages become
    resident one by one. No checksums, and a
    slot that was never written reads as garbage: the residency table names only committed slots.

    Buffers passed to `write`, `read` and `read_slice` may lie on the host or on the device. On CUDA the copies are
    queued on the calling thread's current CUDA stream; ordering against other CUDA streams is the transfer engine's.
    """

    def __init__(self, tier: Tier, shape: BlockShape, num_slots: int, device: torch.device) -> None:
        """Allocate it. Raises ValueError for no slots; MemoryError, or torch's own error on a device, for no memory."""
        if num_slots < 1:
            raise ValueError(f"{tier.label} store: num_slots must be at least 1, got {num_slots}")
        self.tier = tier
        self.shape = shape
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes(shape)
        num_bytes = num_slots * self.slot_bytes
        on_host = device.type == "cpu"
        memory = page_aligned(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._slab: torch.Tensor | None = memory.view(num_slots, self.slot_bytes)

    def block(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes, `[block_bytes]` uint8: a view, no copy. Raises IndexError or ClosedError."""
        self.check_slot(slot)
        return self.slab()[slot, : self.shape.block_bytes]

    def slice(self, slot: Slot, layer: int) -> torch.Tensor:
        """One layer's bytes, `[slice_bytes]` uint8: a view, no copy. Raises IndexError or ClosedError."""
        self.check_layer(layer)
        start = layer * self.shape.slice_bytes
        return self.block(slot)[start : start + self.shape.slice_bytes]

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self.check_buffer(block, self.shape.block_bytes)
        self.block(slot).copy_(block)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_buffer(out, self.shape.block_bytes)
        out.copy_(self.block(slot))

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        out.copy_(self.slice(slot, layer))

    def used_bytes(self) -> int:
        """The slab in full, touched or not: memory that nobody else may count on."""
        return 0 if self._slab is None else self.num_slots * self.slot_bytes

    def check_integrity(self) -> None:
        if self._slab is None:
            return
        if self._slab.shape != (self.num_slots, self.slot_bytes) or self._slab.data_ptr() % ALIGN_BYTES:
            raise IntegrityError(
                f"{self.tier.label} store: slab of {tuple(self._slab.shape)} at {self._slab.data_ptr():#x}"
            )

    def close(self) -> None:
        # Views that a caller still holds keep the slab alive: freeing it under them would be worse.
        self._slab = None

    def slab(self) -> torch.Tensor:
        """The whole slab. Raises ClosedError."""
        if self._slab is None:
            raise ClosedError(f"{self.tier.label} store: closed")
        return self._slab


@dataclass(frozen=True, slots=True)
class LayerViews:
    """A slab as attention reads it, without a copy: by slice index, `[num_slots, kv_heads, block_tokens, dim]`."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @staticmethod
    def of(store: SlabStore, dtype: torch.dtype) -> LayerViews:
        """Views of every layer in `dtype`, last stride 1. They keep the slab alive."""
        shape, elements = store.shape, store.slab().view(dtype)

        def view(layer: int, skipped_bytes: int, dim: int) -> torch.Tensor:
            return elements.as_strided(
                (store.num_slots, shape.kv_heads, shape.block_tokens, dim),
                (elements.stride(0), shape.block_tokens * dim, dim, 1),
                (layer * shape.slice_bytes + skipped_bytes) // shape.element_bytes,
            )

        layers = range(shape.num_layers)
        return LayerViews(
            [view(layer, 0, shape.key_dim) for layer in layers],
            [view(layer, shape.key_bytes, shape.value_dim) for layer in layers],
        )


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot of a slab: a block rounded up to 64 bytes. For budgets."""
    return -(-shape.block_bytes // ALIGN_BYTES) * ALIGN_BYTES
