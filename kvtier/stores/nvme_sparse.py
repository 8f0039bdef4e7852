"""Slots that take only the pages that their content needs, in files that are holes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtier.errors import ClosedError, IntegrityError, NoSpaceError
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.nvme_layout import segment_budget_bytes, sparse_overhead_bytes
from kvtier.stores.nvme_space import SegmentSpace
from kvtier.stores.other_files import FoundFiles
from kvtier.stores.segment import NO_SPACE_ERRNOS, Segment, io_error, no_space
from kvtier.stores.slot_format import Geometry, Headers, Verdict, whole_pages
from kvtier.stores.space_limits import SpaceLimits
from kvtier.types import Slot

_SLACK = 32  # one page in so many may stay with a slot that got smaller: a hole costs more time than it is worth

Pages = npt.NDArray[np.uint32]


class _SlotPages:
    """How many pages each slot of a segment has, counted from the slot's beginning. For SparseSpace, under its lock."""

    def __init__(self, pages: Pages) -> None:
        self.of = pages
        self.num = int(pages.sum())
        self.overhead_bytes = sparse_overhead_bytes(len(pages))
        self.excess_bytes = 0  # what the file system was seen to take beyond all that

    def set(self, slot: int, num_pages: int) -> None:
        self.num += num_pages - int(self.of[slot])
        self.of[slot] = num_pages

    @property
    def budget_bytes(self) -> int:
        """What the segment may take on disk now."""
        return self.num * PAGE_BYTES + self.overhead_bytes + self.excess_bytes

    def measured(self, allocated_bytes: int) -> None:
        self.excess_bytes = max(0, allocated_bytes - self.num * PAGE_BYTES - self.overhead_bytes)


class SparseSpace(SegmentSpace):
    """Slots by segment, as in the base class; their pages are allocated before each write, and given back behind it.

    The file system is the allocator: slots have fixed places, and what lies in them is as long as it is. There are more
    slots than the budget has room for if none of them gets smaller. The budget is enforced at each write, in bytes:
    pages are counted before they are allocated and until they are given back, so `du` is never more than the count.
    """

    def __init__(
        self,
        folder: OwnedFolder,
        geometry: Geometry,
        limits: SpaceLimits,
        found: FoundFiles,
        pages: Sequence[Pages],
        *,
        sync: bool,
    ) -> None:
        """`pages`: of each slot of each segment that was found, as `give_back_holes` returns them."""
        super().__init__(folder, geometry, limits, found, sync=sync)
        self._pages = [_SlotPages(each) for each in pages]
        self._ceiling = self.num_slots  # from here on slots were refused, and there has been no room since
        self._num_changing = 0

    def reserve(self, slot: Slot, payload_bytes: int) -> tuple[Segment, int]:
        """As the base class. A slot that cannot grow holds nothing afterwards, and its pages serve the others."""
        self._check_ceiling(slot)
        segment, start = self.locate_for_write(slot)
        index, local = self._place(slot)
        pages = self._pages[index]
        wanted = (self._geometry.header_bytes + whole_pages(payload_bytes)) // PAGE_BYTES
        with self._lock:
            if self._closed:
                raise ClosedError("nvme store: closed")
            self._check_ceiling(slot)
            held = int(pages.of[local])
            self._num_changing += 1
            has_room = wanted <= held or self._has_room((wanted - held) * PAGE_BYTES)
            if has_room and wanted > held:
                pages.set(local, wanted)
        try:
            if not has_room:
                self._shrink(segment, start, pages, local, 0)
                raise self._refusal(slot, f"{wanted - held} pages more do not fit the budget or the disk")
            if wanted > held:
                self._grow(segment, start, pages, slot, local, held)
            elif held - wanted > wanted // _SLACK:
                self._shrink(segment, start, pages, local, wanted)
        except OSError as error:
            if isinstance(error, NoSpaceError):
                raise
            raise io_error(error, f"making room for slot {slot}", segment.path) from error
        finally:
            with self._lock:
                self._num_changing -= 1
        return segment, start

    def _grow(self, segment: Segment, start: int, pages: _SlotPages, slot: Slot, local: int, held: int) -> None:
        """Allocate what was counted. Raises NoSpaceError, OSError; the slot then has no pages, if they could go."""
        end = start + int(pages.of[local]) * PAGE_BYTES
        try:
            segment.allocate(start + held * PAGE_BYTES, end - start - held * PAGE_BYTES)
        except OSError as error:
            self._shrink(segment, start, pages, local, 0)  # some of it may have been allocated
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            raise self._refusal(slot, str(no_space(error, segment.path, self.backed_slots()))) from error
        # Measured, since no formula knows every file system (huge pages of a tmpfs, extent sizes of xfs).
        allocated_bytes = segment.allocated_bytes()
        with self._lock:
            pages.measured(allocated_bytes)
            fits = self._taken_bytes() <= self._limits.budget_bytes
        if not fits:
            self._shrink(segment, start, pages, local, 0)
            raise self._refusal(slot, "the file system takes more than it was asked for")

    def _shrink(self, segment: Segment, start: int, pages: _SlotPages, local: int, wanted: int) -> None:
        """Give back what is beyond `wanted` pages. Raises OSError; they are then still counted."""
        held = int(pages.of[local])
        if held == wanted:
            return
        with self._lock:
            self._peak_bytes = self.peak_bytes()
        segment.punch(start + wanted * PAGE_BYTES, (held - wanted) * PAGE_BYTES)
        allocated_bytes = segment.allocated_bytes()
        with self._lock:
            pages.set(local, wanted)
            pages.measured(allocated_bytes)

    def _erase(self, slot: Slot, segment: Segment, start: int) -> None:
        index, local = self._place(slot)
        with self._lock:
            self._num_changing += 1
        try:
            self._shrink(segment, start, self._pages[index], local, 0)
        finally:
            with self._lock:
                self._num_changing -= 1

    def _has_room(self, more_bytes: int) -> bool:
        self._give_up_others(more_bytes, more_bytes)
        fits_budget = self._taken_bytes() + more_bytes <= self._limits.budget_bytes
        return fits_budget and self._headroom_bytes() >= more_bytes

    def _refusal(self, slot: Slot, why: str) -> NoSpaceError:
        """For a slot without pages. Slots beyond all that have some will get none either."""
        available = self.backed_slots()
        with self._lock:
            self._ceiling = min(self._ceiling, available)
        message = f"nvme store: {self._folder.path} has no room for slot {slot}: {why}; {available} slots have backing"
        return NoSpaceError(message, available, retires_slot=slot < available)

    def _check_ceiling(self, slot: Slot) -> None:
        if slot >= self._ceiling:
            message = f"nvme store: {self._folder.path} had room for {self._ceiling} slots and no more"
            raise NoSpaceError(message, self._ceiling)

    # --- what the base class asks

    def backed_slots(self) -> int:
        """The last slot that has pages, and all before it."""
        for first, pages in zip(reversed(self._first_slots[: len(self._pages)]), reversed(self._pages), strict=True):
            if pages.num:
                return first + int(np.flatnonzero(pages.of)[-1]) + 1
        return 0

    def reachable_slots(self) -> int:
        """The slots that can be tried while there is room for one more, of the expected size; 0 while there is not."""
        if not self._lock.acquire(blocking=False):
            return 0  # a segment is being made, on a disk that may be slow
        try:
            if self._closed:
                return 0
            more_bytes = self._limits.expected_slot_bytes(self._geometry)
            fits_budget = self._taken_bytes() + more_bytes <= self._limits.budget_bytes
            if not fits_budget or self._known_headroom_bytes() < more_bytes:
                return 0
            self._ceiling = self.num_slots
            return self._made_slots() if self._is_short else self.num_slots
        finally:
            self._lock.release()

    def _new_segment(self) -> Segment:
        segment = super()._new_segment()
        num_slots = (segment.num_bytes - PAGE_BYTES) // self._geometry.slot_bytes
        self._pages.append(_SlotPages(np.zeros(num_slots, np.uint32)))
        return segment

    def _create_file(self, name: str, num_bytes: int) -> Segment:
        return self._folder.create(name, num_bytes, sparse=True)

    def _planned_bytes(self, num_slots: int, segment: Segment | None = None) -> int:
        return segment_budget_bytes(num_slots, self._limits.expected_slot_bytes(self._geometry))

    def _first_bytes(self, num_slots: int) -> int:
        return sparse_overhead_bytes(num_slots)

    def _num_slots_on_disk(self, planned: int) -> int:
        return planned if self._headroom_bytes() >= sparse_overhead_bytes(planned) else 0

    def _bytes_with(self, segment: Segment, num_slots: int) -> int:
        return self._taken_bytes() + max(sparse_overhead_bytes(num_slots), segment.allocated_bytes())

    def _taken_bytes(self) -> int:
        ours_bytes = sum(pages.budget_bytes for pages in self._pages)
        return self._limits.kept_bytes + ours_bytes + self.others.num_bytes

    def ceiling_bytes(self) -> int:
        """What `used_bytes` can reach now: the budget, or less where the disk has no room."""
        return min(self._limits.budget_bytes, self.used_bytes() + self._known_headroom_bytes())

    def check_integrity(self) -> None:
        """Raise IntegrityError if files are not what was planned or counted, or take more than the budget."""
        super().check_integrity()
        with self._lock:
            for segment, pages in zip(self.segments, self._pages, strict=True):
                counted_bytes, allocated_bytes = pages.num * PAGE_BYTES, segment.allocated_bytes()
                is_whole = segment.size_bytes() == segment.num_bytes and not self._num_changing
                if pages.num != pages.of.sum() or (is_whole and allocated_bytes < counted_bytes):
                    raise IntegrityError(f"nvme store: {segment.path}: {counted_bytes} bytes counted as allocated")
                if allocated_bytes > pages.budget_bytes:
                    raise IntegrityError(
                        f"nvme store: {segment.path} takes {allocated_bytes} bytes, {pages.budget_bytes} are counted"
                    )
            if self._taken_bytes() > self._limits.budget_bytes:
                raise IntegrityError(f"nvme store: {self._taken_bytes()} bytes are counted, more than the budget")


def sparse_pages(headers: Headers, geometry: Geometry) -> Pages:
    """The pages that the slots of an earlier process need: those whose header verifies, and no others."""
    pages = np.zeros(len(headers.verdicts), np.uint32)
    good = headers.where(Verdict.GOOD)
    payload_pages = -(-headers.fields["payload_bytes"][good].astype(np.int64) // PAGE_BYTES)
    pages[good] = geometry.header_bytes // PAGE_BYTES + payload_pages
    return pages


def give_back_holes(segment: Segment, geometry: Geometry, pages: Pages) -> None:
    """Make the file of an earlier process take these pages of its slots and no others. Raises OSError.

    Cost: two calls a slot that has pages, 5 us each where there is nothing to do.
    """
    end = PAGE_BYTES
    ranges = []
    for slot in np.flatnonzero(pages).tolist():
        start = PAGE_BYTES + slot * geometry.slot_bytes
        if start > end:
            segment.punch(end, start - end)
        end = start + int(pages[slot]) * PAGE_BYTES
        ranges.append((start, end - start))
    if end < segment.num_bytes:
        segment.punch(end, segment.num_bytes - end)
    if segment.allocated_bytes() < int(pages.sum() + 1) * PAGE_BYTES:  # copied by a tool that makes holes of zeros
        for start, num_bytes in ranges:
            segment.allocate(start, num_bytes)
