"""The cpu tier: one slab of host memory, page-locked where a CUDA device copies from it."""

from __future__ import annotations

import logging

import torch

from kvtier.errors import ClosedError, IntegrityError
from kvtier.stores.base import Store
from kvtier.types import BlockShape, Slot, Tier

ALIGN_BYTES = 64  # as in the gpu tier, so that attention on the host may read slices in place

_log = logging.getLogger("kvtier")


class CpuStore(Store):
    """A slab `[num_slots, slot_bytes]` of uint8 in host memory, laid out as the gpu tier's.

    With `pin` the plain memory is registered as pinned host memory (`cudaHostRegister`): torch's `pin_memory()` rounds
    up to a power of two, which would break the budget. Registering makes every page resident at once; without it pages
    become resident as they are written. No checksums, and a slot that was never written reads as garbage.

    Attributes:
        pinned: whether the slab is pinned host memory; False after a failed registration.
    """

    def __init__(self, shape: BlockShape, num_slots: int, pin: bool) -> None:
        """Allocate the slab. A registration that fails is one warning, and the store goes on unpinned."""
        if num_slots < 1:
            raise ValueError(f"cpu store: num_slots must be at least 1, got {num_slots}")
        self.tier = Tier.CPU
        self.shape = shape
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes(shape)
        self._slab: torch.Tensor | None = torch.empty((num_slots, self.slot_bytes), dtype=torch.uint8)
        self.pinned = pin and _register(self._slab)

    def block(self, slot: Slot) -> torch.Tensor:
        """The slot's bytes, `[block_bytes]` uint8: a view, no copy. Raises IndexError or ClosedError."""
        self.check_slot(slot)
        return self._open_slab()[slot, : self.shape.block_bytes]

    def slice(self, slot: Slot, layer: int) -> torch.Tensor:
        """One layer's bytes, `[slice_bytes]` uint8: a view, no copy. Raises IndexError or ClosedError."""
        self._check_layer(layer)
        start = layer * self.shape.slice_bytes
        return self.block(slot)[start : start + self.shape.slice_bytes]

    def write(self, slot: Slot, block: torch.Tensor) -> None:
        self.check_buffer(block, self.shape.block_bytes)
        self.block(slot).copy_(block)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_buffer(out, self.shape.block_bytes)
        out.copy_(self.block(slot))

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self._check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        out.copy_(self.slice(slot, layer))

    def used_bytes(self) -> int:
        """The slab in full, touched or not: memory that nobody else may count on."""
        return 0 if self._slab is None else self.num_slots * self.slot_bytes

    def check_integrity(self) -> None:
        if self._slab is None:
            if self.pinned:
                raise IntegrityError("cpu store: closed, but its memory is still registered with CUDA")
            return
        if self._slab.shape != (self.num_slots, self.slot_bytes) or self._slab.data_ptr() % ALIGN_BYTES:
            raise IntegrityError(f"cpu store: slab of {tuple(self._slab.shape)} at {self._slab.data_ptr():#x}")

    def close(self) -> None:
        if self._slab is not None and self.pinned:
            _unregister(self._slab)
            self.pinned = False
        self._slab = None

    def _check_layer(self, layer: int) -> None:
        if not 0 <= layer < self.shape.num_layers:  # a negative one would silently give another slice
            raise IndexError(f"{self.tier.label} store: layer {layer} is outside 0 … {self.shape.num_layers - 1}")

    def _open_slab(self) -> torch.Tensor:
        if self._slab is None:
            raise ClosedError("cpu store: closed")
        return self._slab


def slot_bytes(shape: BlockShape) -> int:
    """Bytes of one slot of the slab: a block rounded up to 64 bytes. For budgets."""
    return -(-shape.block_bytes // ALIGN_BYTES) * ALIGN_BYTES


def _register(slab: torch.Tensor) -> bool:
    """Page-lock the slab's memory; False, with one warning, if that cannot be had."""
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))  # type: ignore[no-untyped-call]
        if error:
            raise RuntimeError(f"cudaHostRegister returned error {error}")
    except (RuntimeError, AssertionError) as reason:  # torch built without CUDA raises AssertionError
        _log.warning(
            "cpu tier: %d bytes could not be page-locked (%s); copies to the GPU will be slower. Raise `ulimit -l` or "
            "lower the cpu budget",
            slab.numel(),
            reason,
        )
        return False
    return True


def _unregister(slab: torch.Tensor) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))  # type: ignore[no-untyped-call]
    if error:
        _log.warning("cpu tier: cudaHostUnregister returned error %d", error)
