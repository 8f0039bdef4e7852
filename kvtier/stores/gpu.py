"""The gpu tier: one slab on the model's device, which attention reads in place through strided views."""

from __future__ import annotations

import torch

from kvtier.errors import ClosedError, IntegrityError
from kvtier.stores.base import Store
from kvtier.types import BlockShape, Slot, Tier

ALIGN_BYTES = 64  # SDPA gives other bits for K and V that start elsewhere (DESIGN.md section 8)


class GpuStore(Store):
    """A slab `[num_slots, slot_bytes]` of uint8 on `device`; without CUDA that is ordinary memory, all else the same.

    `slot_bytes` is `block_bytes` rounded up to 64, so that every slot starts at a 64-byte-aligned address. The slab is
    not touched before it is written: on the host, its pages become resident one by one. No checksums, and a slot that
    was never written reads as garbage: the residency table names only committed slots.

    Attributes:
        keys: by slice index, a view `[num_slots, kv_heads, block_tokens, key_dim]` of `dtype`, last stride 1.
        values: likewise, `[num_slots, kv_heads, block_tokens, value_dim]`.

    Buffers passed to `write`, `read` and `read_slice` may lie on the host or on the device. On CUDA the copies are
    queued on the calling thread's current CUDA stream; ordering against other CUDA streams is the transfer engine's.
    """

    def __init__(self, shape: BlockShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        """Allocate it. Raises ValueError for sizes that contradict each other, torch's own error for no memory."""
        if num_slots < 1:
            raise ValueError(f"gpu store: num_slots must be at least 1, got {num_slots}")
        if dtype.itemsize != shape.element_bytes:
            raise ValueError(f"gpu store: {dtype} has {dtype.itemsize} bytes, the block shape {shape.element_bytes}")
        self.tier = Tier.GPU
        self.shape = shape
        self.num_slots = num_slots
        self.dtype = dtype
        self.device = device
        self.slot_bytes = slot_bytes(shape)
        self._slab: torch.Tensor | None = torch.empty((num_slots, self.slot_bytes), dtype=torch.uint8, device=device)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        elements = self._slab.view(dtype)
        for layer in range(shape.num_layers):
            offset_bytes = layer * shape.slice_bytes
            self.keys.append(self._view(elements, offset_bytes, shape.key_dim))
            self.values.append(self._view(elements, offset_bytes + shape.key_bytes, shape.value_dim))

    def _view(self, elements: torch.Tensor, offset_bytes: int, dim: int) -> torch.Tensor:
        heads, tokens = self.shape.kv_heads, self.shape.block_tokens
        return elements.as_strided(
            (self.num_slots, heads, tokens, dim),
            (elements.stride(0), tokens * dim, dim, 1),
            offset_bytes // self.shape.element_bytes,
        )

    def block(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes, `[block_bytes]` uint8: a view, no copy. Raises IndexError or ClosedError."""
        self.check_slot(slot)
        return self._open_slab()[slot, : self.shape.block_bytes]

    def write(self, slot: Slot, block: torch.Tensor) -> None:
        self.check_buffer(block, self.shape.block_bytes)
        self.block(slot).copy_(block)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_buffer(out, self.shape.block_bytes)
        out.copy_(self.block(slot))

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self._check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        start = layer * self.shape.slice_bytes
        out.copy_(self.block(slot)[start : start + self.shape.slice_bytes])

    def used_bytes(self) -> int:
        """The slab in full, touched or not: memory that nobody else may count on."""
        return 0 if self._slab is None else self.num_slots * self.slot_bytes

    def check_integrity(self) -> None:
        if self._slab is None:
            if self.keys or self.values:
                raise IntegrityError("gpu store: closed, but views of its slab are still handed out")
            return
        if self._slab.shape != (self.num_slots, self.slot_bytes) or self._slab.data_ptr() % ALIGN_BYTES:
            raise IntegrityError(f"gpu store: slab of {tuple(self._slab.shape)} at {self._slab.data_ptr():#x}")
        if len(self.keys) != self.shape.num_layers or len(self.values) != self.shape.num_layers:
            raise IntegrityError(f"gpu store: {len(self.keys)} key views for {self.shape.num_layers} layers")

    def close(self) -> None:
        # Views that a caller still holds keep the slab alive: freeing it under them would be worse.
        self._slab = None
        self.keys = []
        self.values = []

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.num_layers:  # a negative one would silently give another slice
            raise IndexError(f"{self.tier.label} store: layer {layer} is outside 0 … {self.shape.num_layers - 1}")

    def _open_slab(self) -> torch.Tensor:
        if self._slab is None:
            raise ClosedError("gpu store: closed")
        return self._slab


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot of the slab: a block rounded up to 64 bytes. For budgets."""
    return -(-shape.block_bytes // ALIGN_BYTES) * ALIGN_BYTES
