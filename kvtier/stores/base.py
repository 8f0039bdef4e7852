"""The interface of a store: the bytes of one tier, by slot. A store knows no block ids and no tokens."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from kvtier.errors import StoreError
from kvtier.types import BlockShape, Slot, SlotLabel, Tier

EndOfSlices = Callable[[], list[StoreError | None]]
"""As `Store.begin_slices` returns it."""


class Store(ABC):
    """Bytes of one tier in `num_slots` block-sized slots, `0 … num_slots-1`.

    Reads and writes of different slots may run at once on several threads. The caller keeps reads and writes of one
    slot apart (the residency table does). All tensors passed in are contiguous `uint8` on the host, except that a store
    whose bytes lie on a device documents otherwise.
    """

    tier: Tier
    shape: BlockShape
    num_slots: int
    """Slots that the budget has room for. Backing may come later and may turn out smaller (`NoSpaceError`)."""

    @abstractmethod
    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        """Write a whole block.

        Args:
            block: `[block_bytes]` uint8, or as `check_block` says.
            label: by what a later process may find the block. Only the nvme tier keeps it; the others ignore it.

        Raises:
            NoSpaceError: no backing for this slot; carries how many slots have backing.
            StoreError: the write failed or was short. The slot then holds nothing readable.
            ClosedError: after `close`.
        """

    @abstractmethod
    def read(self, slot: Slot, out: torch.Tensor) -> None:
        """Read a whole block into `out` (shaped as for `write`), checked where the tier keeps checksums.

        Raises:
            ChecksumError, ShortReadError, StoreError: `out` then holds garbage and must not be used.
            ClosedError: after `close`.
        """

    @abstractmethod
    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        """Read one slice into `out` (`[slice_bytes]` uint8). `layer` is the slice's index in the block. As `read`."""

    def read_slices(self, slots: Sequence[Slot], layer: int, out: torch.Tensor) -> list[StoreError | None]:
        """Read the same slice of several slots, each into its row of `out` (`[len(slots), slice_bytes]` uint8).

        Returns what kept each slice from being read, None for those that are there. Other errors are raised as by
        `read_slice`, and none of `out` may be used then.

        Cost: as many calls of `read_slice`, unless a store can do better.
        """
        failures: list[StoreError | None] = []
        for slot, row in zip(slots, out, strict=True):
            try:
                self.read_slice(slot, layer, row)
                failures.append(None)
            except StoreError as error:
                failures.append(error)
        return failures

    def begin_slices(self, slots: Sequence[Slot], layer: int, out: torch.Tensor) -> EndOfSlices:
        """Begin to read as `read_slices`, and return what ends it: it returns and raises what `read_slices` does.

        To be called on the same thread, also by who needs nothing of it any more. Until it has returned `out` may be
        written to. One thread may so have several reads under way, and verify one while the next comes from the disk.

        Raises as `read_slices`: nothing was begun.

        Cost: as `read_slices`, all of it at the end, unless a store can do better.
        """
        return functools.partial(self.read_slices, slots, layer, out)

    @abstractmethod
    def used_bytes(self) -> int:
        """Bytes that this store takes from its tier's medium now, as RSS or `du` would count them."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise IntegrityError if the store's own bookkeeping contradicts itself."""

    @abstractmethod
    def close(self) -> None:
        """Give the bytes back. Idempotent. Waits for no one: the runtime stops transfers first."""

    def check_slot(self, slot: Slot) -> None:
        """Raise IndexError for a slot that this store cannot have: a bug in the caller."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"{self.tier.label} store: slot {slot} is outside 0 … {self.num_slots - 1}")

    def check_layer(self, layer: int) -> None:
        """Raise IndexError for a slice that no block has: a negative one would silently give another."""
        if not 0 <= layer < self.shape.num_layers:
            raise IndexError(f"{self.tier.label} store: layer {layer} is outside 0 … {self.shape.num_layers - 1}")

    def check_buffer(self, buffer: torch.Tensor, num_bytes: int) -> None:
        """Raise ValueError unless `buffer` is contiguous uint8 of `num_bytes`."""
        if buffer.dtype != torch.uint8 or buffer.numel() != num_bytes or not buffer.is_contiguous():
            raise ValueError(
                f"{self.tier.label} store: buffer must be {num_bytes} contiguous uint8, "
                f"got {tuple(buffer.shape)} {buffer.dtype}"
            )

    def check_block(self, block: torch.Tensor) -> None:
        """Raise ValueError unless `block` is uint8 and a block's: contiguous `[block_bytes]`, or in the same order
        `[num_layers, 2, kv_heads, bytes]`, a slot of a joined slab, of which only the last dimension lies together."""
        shape = self.shape
        parts = shape.num_layers, 2, shape.kv_heads, shape.block_bytes // (2 * shape.num_layers * shape.kv_heads)
        if block.shape != parts or block.dtype != torch.uint8 or block.stride(-1) != 1:
            self.check_buffer(block, shape.block_bytes)
