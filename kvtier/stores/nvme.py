"""The nvme tier: checked blocks in preallocated segment files of a folder that one process owns."""

from __future__ import annotations

import errno
import threading
from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from kvtier.errors import BudgetError, ChecksumError, ClosedError, IntegrityError, NoSpaceError, StoreError
from kvtier.stores.base import Store
from kvtier.stores.nvme_layout import min_budget_bytes, slot_bytes, slots_within
from kvtier.stores.segment import (
    NO_SPACE_ERRNOS,
    OwnedFolder,
    Segment,
    no_space,
    sweep_stale,
    temporary_folder,
)
from kvtier.system import disk_total_bytes, free_disk_bytes
from kvtier.types import BlockShape, Slot, SlotLabel, Tier

__all__ = ["NvmeStore", "min_budget_bytes", "slot_bytes", "sweep_stale", "temporary_folder"]

_SMALLEST_FRACTION = 8  # a small budget is taken from the disk in about this many pieces


class NvmeStore(Store):
    """Slots of `block_bytes` rounded up to 4 KiB, in files `segment-00000.kvt` … of `folder`.

    Space is taken from the disk segment by segment, when a slot of the next one is first written, and only while
    `reserve_free_frac` of the disk stays free. `du` of the folder never exceeds `budget_bytes`.

    Every slice has an xxh3 checksum, made from the bytes handed to `write`, kept in memory, and compared at every read
    with the bytes that the caller will use. Checksums die with the process, so nothing that an earlier process wrote is
    ever readable, `persistent` or not.

    Cost: a write is one hash pass (7 GB/s) and one `pwrite`; a read one copy out of the page cache or the disk and one
    hash pass. Both release the GIL. Memory: 8 bytes a slice.
    """

    def __init__(
        self,
        shape: BlockShape,
        budget_bytes: int,
        folder: Path,
        persistent: bool,
        segment_bytes_max: int = 1 << 30,
        reserve_free_frac: float = 0.05,
    ) -> None:
        """Own the folder; allocate nothing yet.

        Args:
            budget_bytes: ceiling for the folder's allocated bytes, file system overhead included.
            folder: made if absent (0700). Without `persistent` it is removed at close.
            persistent: the segment files stay after close (as space for the next process, never as contents).
            segment_bytes_max: how much is taken from the disk at a time, at most; one slot if that is larger.
            reserve_free_frac: fraction of the disk that always stays free.

        Raises:
            BudgetError: no room for one slot.
            FolderInUseError, ConfigError: the folder cannot be had; nothing in it was touched.
        """
        self.tier = Tier.NVME
        self.shape = shape
        self.slot_bytes = slot_bytes(shape)
        self._slots_per_segment = max(1, min(segment_bytes_max, budget_bytes // _SMALLEST_FRACTION) // self.slot_bytes)
        self.num_slots = slots_within(budget_bytes, self.slot_bytes, self._slots_per_segment)
        if self.num_slots < 1:
            raise BudgetError(
                f"tiers.nvme.budget is {budget_bytes} bytes, its minimum is {min_budget_bytes(shape)}: one slot of "
                f"{self.slot_bytes} and {min_budget_bytes(shape) - self.slot_bytes} for the folder, lock and index. "
                "Raise it, lower block_tokens, or leave the nvme tier out"
            )
        self.budget_bytes = budget_bytes
        self.persistent = persistent
        self._reserve_free_frac = reserve_free_frac
        self._folder = OwnedFolder(folder)
        self.folder = self._folder.path
        self._segments: list[Segment] = []  # only ever grows at its end until close
        self._grow_lock = threading.Lock()
        self._checksums: dict[int, array[int]] = {}  # one per slice; absent: the slot holds nothing readable
        self._closed = False

    # --- the store's interface

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self._check_open()
        self.check_slot(slot)
        self.check_buffer(block, self.shape.block_bytes)
        self._checksums.pop(slot, None)  # before the first byte changes: from here to the end nothing is readable
        segment = self._segment_for_write(slot)
        data: npt.NDArray[np.uint8] = block.numpy()
        step = self.shape.slice_bytes
        checksums = array("Q", (_checksum(data[i * step : (i + 1) * step]) for i in range(self.shape.num_layers)))
        try:
            segment.write(self._offset_bytes(slot), data)
        except OSError as error:
            if error.errno in NO_SPACE_ERRNOS:  # copy-on-write file systems allocate again
                raise no_space(error, segment.path, self._backed_slots()) from error
            raise _io_error(error, f"writing slot {slot}", segment.path) from error
        self._checksums[slot] = checksums

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_buffer(out, self.shape.block_bytes)
        segment, checksums = self._written(slot)
        data: npt.NDArray[np.uint8] = out.numpy()
        self._read(segment, slot, self._offset_bytes(slot), data)
        step = self.shape.slice_bytes
        for layer, expected in enumerate(checksums):
            _verify(data[layer * step : (layer + 1) * step], expected, slot, layer, segment)

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        segment, checksums = self._written(slot)
        data: npt.NDArray[np.uint8] = out.numpy()
        self._read(segment, slot, self._offset_bytes(slot) + layer * self.shape.slice_bytes, data)
        _verify(data, checksums[layer], slot, layer, segment)

    def used_bytes(self) -> int:
        """Allocated bytes of the folder, its lock and its segments, as `du` counts them; 0 after close."""
        if self._closed:
            return 0
        return self._folder.overhead_bytes() + sum(segment.allocated_bytes() for segment in self._segments)

    def check_integrity(self) -> None:
        if self._closed:
            return
        used_bytes = self.used_bytes()
        if used_bytes > self.budget_bytes:
            raise IntegrityError(f"nvme store: {self.folder} takes {used_bytes} of {self.budget_bytes} bytes")
        for slot, checksums in list(self._checksums.items()):
            if not 0 <= slot < self._backed_slots() or len(checksums) != self.shape.num_layers:
                raise IntegrityError(f"nvme store: slot {slot} has {len(checksums)} checksums and no backing")
        for index, segment in enumerate(list(self._segments)):
            planned = self._segment_bytes(index)
            if segment.num_bytes > planned or (segment.num_bytes < planned and index < len(self._segments) - 1):
                raise IntegrityError(f"nvme store: {segment.path} was made with {segment.num_bytes} bytes")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._grow_lock:  # a write on its way may be making a segment
            self._segments = []
            self._checksums = {}
            self._folder.close(keep_files=self.persistent)

    # --- more than the interface

    def ceiling_bytes(self) -> int:
        """What `used_bytes` can reach now: the budget, or less where the disk has no room for further segments.

        Raises: ClosedError.
        """
        self._check_open()
        headroom_bytes = self._headroom_bytes()
        ceiling_bytes = self.used_bytes()
        last = len(self._segments) - 1
        if last >= 0 and self._segments[last].num_bytes < self._segment_bytes(last):
            return ceiling_bytes
        for index in range(len(self._segments), self._num_segments()):
            fits_bytes = min(self._segment_bytes(index), headroom_bytes) // self.slot_bytes * self.slot_bytes
            headroom_bytes -= fits_bytes
            ceiling_bytes += fits_bytes
            if fits_bytes < self._segment_bytes(index):
                return min(ceiling_bytes, self.budget_bytes)
        return self.budget_bytes

    def prefetch(self, slot: Slot, layer: int) -> None:
        """Ask the kernel to bring one slice into the page cache; returns at once. As `read_slice` for errors."""
        self.check_layer(layer)
        segment, _ = self._written(slot)
        segment.will_need(self._offset_bytes(slot) + layer * self.shape.slice_bytes, self.shape.slice_bytes)

    # --- segments

    def _segment_for_write(self, slot: Slot) -> Segment:
        index = slot // self._slots_per_segment
        if index >= len(self._segments):
            with self._grow_lock:
                # In order, so that "slots with backing" is a prefix; the pool hands out low slots first.
                while index >= len(self._segments):
                    self._check_open()
                    self._check_last_is_whole()
                    self._segments.append(self._new_segment(len(self._segments)))
        if slot >= self._backed_slots():
            self._check_last_is_whole()
        return self._segments[index]

    def _check_last_is_whole(self) -> None:
        """A segment that had to be made shorter than planned is the last one."""
        last = len(self._segments) - 1
        if last >= 0 and self._segments[last].num_bytes < self._segment_bytes(last):
            available = self._backed_slots()
            raise NoSpaceError(f"nvme store: {self.folder} had room for {available} slots and no more", available)

    def _new_segment(self, index: int) -> Segment:
        """As long as planned, or as long as the disk has room for."""
        available = self._backed_slots()
        name = f"segment-{index:05d}.kvt"
        path = self.folder / name
        num_slots = min(self._segment_bytes(index), self._headroom_bytes()) // self.slot_bytes
        if num_slots < 1:
            raise NoSpaceError(
                f"nvme store: {path} would leave less than {self._reserve_free_frac:.0%} of the disk free; {available} "
                "slots have backing. Free some space or lower the nvme budget",
                available,
            )
        while True:
            try:
                segment = self._folder.create(name, num_slots * self.slot_bytes)
                break
            except OSError as error:
                if error.errno not in NO_SPACE_ERRNOS:
                    raise _io_error(error, "making a segment", path) from error
                if num_slots == 1:
                    raise no_space(error, path, available) from error
                num_slots //= 2  # a quota or a file size limit: no call tells how much is left
        # Measured, since no formula knows every file system (huge pages of a tmpfs, extent sizes of xfs).
        used_bytes = self.used_bytes() + segment.allocated_bytes()
        if used_bytes > self.budget_bytes:
            self._folder.remove(segment)
            raise NoSpaceError(f"nvme store: {path} would bring the folder to {used_bytes} bytes", available)
        return segment

    def _headroom_bytes(self) -> int:
        reserve_bytes = int(self._reserve_free_frac * disk_total_bytes(self.folder))
        return max(0, free_disk_bytes(self.folder) - reserve_bytes)

    def _num_segments(self) -> int:
        return -(-self.num_slots // self._slots_per_segment)

    def _segment_bytes(self, index: int) -> int:
        first = index * self._slots_per_segment
        return min(self._slots_per_segment, self.num_slots - first) * self.slot_bytes

    def _backed_slots(self) -> int:
        if not self._segments:
            return 0
        return (len(self._segments) - 1) * self._slots_per_segment + self._segments[-1].num_bytes // self.slot_bytes

    def _offset_bytes(self, slot: Slot) -> int:
        """Within the slot's segment."""
        return slot % self._slots_per_segment * self.slot_bytes

    # --- checks

    def _read(self, segment: Segment, slot: Slot, offset_bytes: int, out: npt.NDArray[np.uint8]) -> None:
        try:
            segment.read(offset_bytes, out)
        except StoreError:
            raise
        except OSError as error:
            raise _io_error(error, f"reading slot {slot}", segment.path) from error

    def _written(self, slot: Slot) -> tuple[Segment, array[int]]:
        self._check_open()
        self.check_slot(slot)
        checksums = self._checksums.get(slot)
        if checksums is None:
            raise StoreError(errno.ENODATA, f"nvme store: slot {slot} holds nothing readable", str(self.folder))
        return self._segments[slot // self._slots_per_segment], checksums

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("nvme store: closed")


def _io_error(error: OSError, doing: str, path: Path) -> StoreError:
    return StoreError(error.errno, f"nvme store: {doing}: {error.strerror}", str(path))


def _checksum(data: npt.NDArray[np.uint8]) -> int:
    return xxhash.xxh3_64_intdigest(data.data)


def _verify(data: npt.NDArray[np.uint8], expected: int, slot: Slot, layer: int, segment: Segment) -> None:
    actual = _checksum(data)
    if actual != expected:
        raise ChecksumError(
            f"nvme store: slot {slot}, layer {layer} of {segment.path}: read {actual:016x}, wrote {expected:016x}; "
            "the bytes were not served"
        )
