"""The naive reference store: a dict of bytes. For tests, and for users who want to see a store at its smallest."""

from __future__ import annotations

import torch

from kvtier.errors import ClosedError, IntegrityError, StoreError
from kvtier.stores.base import Store
from kvtier.types import BlockShape, Slot, SlotLabel, Tier


class NullStore(Store):
    """Stands for any tier. Reading a slot that was never written is a StoreError. Cost: two copies per call."""

    def __init__(self, shape: BlockShape, num_slots: int, tier: Tier) -> None:
        if num_slots < 1:
            raise ValueError(f"{tier.label} store: num_slots must be at least 1, got {num_slots}")
        self.tier = tier
        self.shape = shape
        self.num_slots = num_slots
        self._bytes_by_slot: dict[int, bytes] = {}
        self._closed = False

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self._check_open()
        self.check_slot(slot)
        self.check_block(block)
        self._bytes_by_slot[slot] = block.cpu().numpy().tobytes()

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_block(out)
        out.copy_(_tensor(self._written(slot)).view(out.shape))

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        start = layer * self.shape.slice_bytes
        out.copy_(_tensor(self._written(slot)[start : start + self.shape.slice_bytes]))

    def used_bytes(self) -> int:
        return len(self._bytes_by_slot) * self.shape.block_bytes

    def check_integrity(self) -> None:
        for slot, data in self._bytes_by_slot.items():
            if not 0 <= slot < self.num_slots or len(data) != self.shape.block_bytes:
                raise IntegrityError(f"{self.tier.label} store: slot {slot} holds {len(data)} bytes")

    def close(self) -> None:
        self._closed = True
        self._bytes_by_slot.clear()

    def _written(self, slot: Slot) -> bytes:
        self._check_open()
        self.check_slot(slot)
        if slot not in self._bytes_by_slot:
            raise StoreError(f"{self.tier.label} store: slot {slot} was never written")
        return self._bytes_by_slot[slot]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"{self.tier.label} store: closed")


def _tensor(data: bytes) -> torch.Tensor:
    # bytearray: torch warns of read-only memory, though nobody writes here.
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
