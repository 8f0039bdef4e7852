"""What the two tiers of memory share: one slab of slots, laid out for whoever reads it most."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import ClosedError, IntegrityError
from kvtier.stores.base import Store
from kvtier.stores.staging import page_aligned
from kvtier.types import BlockShape, Slot, SlotLabel, Tier

# SDPA gives other bits for K and V that start at other alignments (DESIGN.md section 8).
ALIGN_BYTES = 64


def joins(shape: BlockShape, device: torch.device) -> bool:
    """Whether the memory tiers of a model on `device` are laid out joined: see `SlabStore`.

    Not beside a device that is reached by copies: those want a block in one piece.
    """
    return device.type == "cpu" and shape.key_dim == shape.value_dim


class SlabStore(Store):
    """A slab of uint8 on `device`, in one of two layouts.

    By slots, `[num_slots, slot_bytes]`: a block lies in one piece, as a device's copies want it, and each slot starts
    at a 64-byte-aligned address. Joined, `[num_layers, 2, kv_heads, num_slots, bytes of a head's tokens]`: of each
    head, neighbouring slots hold neighbouring tokens, so that attention over a run of them is that over one long piece.
    A processor does it in half the time (docs/adr/0033), and copying a block costs it the same.

    The slab is not touched before it is written: on the host it begins on a page, for O_DIRECT, and its pages become
    resident one by one. No checksums, and a slot that was never written reads as garbage: the residency table names
    only committed slots.

    Buffers passed to `write`, `read` and `read_slice` may lie on the host or on the device. On CUDA the copies are
    queued on the calling thread's current CUDA stream; ordering against other CUDA streams is the transfer engine's.
    """

    def __init__(
        self, tier: Tier, shape: BlockShape, num_slots: int, device: torch.device, joined: bool = False
    ) -> None:
        """Allocate it.

        Raises ValueError for no slots, or for heads that cannot lie joined; MemoryError, or torch's own error on a
        device, for no memory.
        """
        if num_slots < 1:
            raise ValueError(f"{tier.label} store: num_slots must be at least 1, got {num_slots}")
        if joined and not joins(shape, device):
            raise ValueError(
                f"{tier.label} store: K of {shape.key_dim} and V of {shape.value_dim} on {device}: not joined"
            )
        self.tier = tier
        self.shape = shape
        self.num_slots = num_slots
        self.slot_bytes = shape.block_bytes if joined else slot_bytes(shape)
        num_bytes = num_slots * self.slot_bytes
        on_host = device.type == "cpu"
        memory = page_aligned(num_bytes) if on_host else torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self._slab: torch.Tensor | None = memory
        if joined:
            grid = shape.num_layers, 2, shape.kv_heads, num_slots
            self._blocks = memory.view(*grid, -1).permute(3, 0, 1, 2, 4)
        else:
            self._blocks = memory.view(num_slots, self.slot_bytes)[:, : shape.block_bytes]

    def block(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes in their order, uint8: a view, no copy. Raises IndexError or ClosedError.

        `[block_bytes]`; joined, `[num_layers, 2, kv_heads, bytes]`, of which the last alone lie together.
        """
        self.check_slot(slot)
        self.slab()
        return self._blocks[slot]

    def slice(self, slot: Slot, layer: int) -> torch.Tensor:
        """One layer's bytes likewise, `[slice_bytes]` or `[2, kv_heads, bytes]`. Raises IndexError or ClosedError."""
        self.check_layer(layer)
        block = self.block(slot)
        return block[layer] if block.dim() > 1 else block.view(self.shape.num_layers, -1)[layer]

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self.check_block(block)
        _copy(block, self.block(slot))

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_block(out)
        _copy(self.block(slot), out)

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        _copy(self.slice(slot, layer), out)

    def used_bytes(self) -> int:
        """The slab in full, touched or not: memory that nobody else may count on."""
        return 0 if self._slab is None else self.num_slots * self.slot_bytes

    def check_integrity(self) -> None:
        if self._slab is None:
            return
        if self._slab.numel() != self.num_slots * self.slot_bytes or self._slab.data_ptr() % ALIGN_BYTES:
            raise IntegrityError(
                f"{self.tier.label} store: slab of {tuple(self._slab.shape)} at {self._slab.data_ptr():#x}"
            )

    def close(self) -> None:
        # Views that a caller still holds keep the slab alive: freeing it under them would be worse.
        self._slab = None
        self._blocks = self._blocks.new_empty(0)

    def slab(self) -> torch.Tensor:
        """The whole slab, `[num_bytes]` uint8. Raises ClosedError."""
        if self._slab is None:
            raise ClosedError(f"{self.tier.label} store: closed")
        return self._slab

    def by_layer(self, dtype: torch.dtype) -> LayerViews:
        """The slab as attention reads it. The views keep it alive."""
        shape, layers = self.shape, range(self.shape.num_layers)
        elements = self.slab().view(dtype)
        if self._blocks.dim() > 2:
            grid = shape.num_layers, 2, shape.kv_heads, self.num_slots, shape.block_tokens, shape.key_dim
            parts = elements.view(grid).transpose(2, 3)
            return LayerViews([parts[layer, 0] for layer in layers], [parts[layer, 1] for layer in layers])

        def view(layer: int, skipped_bytes: int, dim: int) -> torch.Tensor:
            return elements.as_strided(
                (self.num_slots, shape.kv_heads, shape.block_tokens, dim),
                (self.slot_bytes // shape.element_bytes, shape.block_tokens * dim, dim, 1),
                (layer * shape.slice_bytes + skipped_bytes) // shape.element_bytes,
            )

        return LayerViews(
            [view(layer, 0, shape.key_dim) for layer in layers],
            [view(layer, shape.key_bytes, shape.value_dim) for layer in layers],
        )


def _copy(source: torch.Tensor, dest: torch.Tensor) -> None:
    """Bytes in their order, whichever of the two has more dimensions: the other one is in one piece."""
    if dest.dim() < source.dim():
        dest = dest.view(source.shape)
    dest.copy_(source.view(dest.shape))


@dataclass(frozen=True, slots=True)
class LayerViews:
    """A slab as attention reads it, without a copy: by slice index, `[num_slots, kv_heads, block_tokens, dim]` in the
    model's dtype, last stride 1. Joined, a slot's stride is that of `block_tokens` tokens."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot of a slab: a block rounded up to 64 bytes. For budgets."""
    return -(-shape.block_bytes // ALIGN_BYTES) * ALIGN_BYTES
