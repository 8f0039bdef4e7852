"""Which file backs which slot, and what may be on disk: segments grow as they are needed, within the budget."""

from __future__ import annotations

import bisect
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

from kvtier.errors import ClosedError, IntegrityError, NoSpaceError
from kvtier.size import size_and_bytes
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.namespaces import Age
from kvtier.stores.nvme_layout import segment_budget_bytes, segment_bytes
from kvtier.stores.other_files import FoundFiles, OtherFiles
from kvtier.stores.segment import NO_SPACE_ERRNOS, Segment, io_error, no_space
from kvtier.stores.slot_format import Geometry
from kvtier.stores.space_limits import SpaceLimits
from kvtier.stores.superblock import superblock
from kvtier.types import Slot


class SegmentSpace:
    """Slots by segment: first those of the segments that were there, then those still to be made, in order.

    A segment is made when a slot of it is first written, while `reserve_free_frac` of the disk stays free; files of
    others are given up whole, oldest first, where that makes room for it. `du` never exceeds the budget.

    Attributes:
        segments: those that are made. It only grows, at its end, until close.
        others: files that take room and are not read, given up where that makes room.
        num_slots: slots of all segments, made or not. A plan that was made anew has fewer, or leaves some unused.
    """

    def __init__(
        self, folder: OwnedFolder, geometry: Geometry, limits: SpaceLimits, found: FoundFiles, *, sync: bool
    ) -> None:
        """`sync`: new files reach the medium before they are used."""
        self._folder, self._geometry, self._limits, self._sync = folder, geometry, limits, sync
        self.segments = [segment for segment, _ in found.segments]
        self.others = OtherFiles(folder, found.others)
        taken_bytes = sum(self._planned_bytes(num_slots, segment) for segment, num_slots in found.segments)
        self._planned = [num_slots for _, num_slots in found.segments] + limits.new_segments(geometry, taken_bytes)
        self._first_slots = [0, *itertools.accumulate(self._planned)]
        self.num_slots = self._first_slots.pop()
        self._is_short = False  # the last segment could not be made as long as planned
        self._lock = threading.Lock()
        self._closed = False
        self._peak_bytes = 0

    def _planned_bytes(self, num_slots: int, segment: Segment | None = None) -> int:
        planned_bytes = segment_budget_bytes(num_slots, self._geometry.slot_bytes)
        return planned_bytes if segment is None else max(planned_bytes, segment.allocated_bytes())

    # --- slots

    def locate(self, slot: Slot) -> tuple[Segment, int]:
        """The segment of a slot that has backing, and where in it the slot begins."""
        index, number = self._place(slot)
        return self.segments[index], PAGE_BYTES + number * self._geometry.slot_bytes

    def path_of(self, slot: Slot) -> Path:
        """For messages: the file of a slot, or the folder where it has none yet."""
        index, _ = self._place(slot)
        return self.segments[index].path if index < len(self.segments) else self._folder.path

    def locate_for_write(self, slot: Slot) -> tuple[Segment, int]:
        """As `locate`; makes the segments up to the slot's.

        Raises: NoSpaceError, StoreError, ClosedError.
        """
        if slot >= self._made_slots():
            with self._lock:
                # In order, so that "slots with backing" is a prefix; the pool hands out low slots first.
                while slot >= self._made_slots():
                    if self._closed:
                        raise ClosedError("nvme store: closed")
                    self._check_more()
                    self.segments.append(self._new_segment())
        return self.locate(slot)

    def reserve(self, slot: Slot, payload_bytes: int) -> tuple[Segment, int]:
        """As `locate_for_write`; so many bytes behind the slot's header, and the header, can then be written.

        Raises: NoSpaceError, StoreError, ClosedError.
        """
        return self.locate_for_write(slot)

    def erase(self, slot: Slot) -> None:
        """Leave nothing of what is in a slot, and on the medium where files reach it. Nothing without backing. OSError.

        The slot keeps its room; a sparse one has none until it is written again.
        """
        if slot < self._made_slots():
            segment, start = self.locate(slot)
            self._erase(slot, segment, start)
            if self._sync:
                segment.sync()

    def _erase(self, slot: Slot, segment: Segment, start: int) -> None:
        segment.erase(start, self._geometry.slot_bytes)

    def backed_slots(self) -> int:
        """How many slots, from 0, have backing."""
        return self._made_slots()

    def _place(self, slot: Slot) -> tuple[int, int]:
        """The segment's number, and the slot's in it."""
        index = bisect.bisect_right(self._first_slots, slot) - 1
        return index, slot - self._first_slots[index]

    def _made_slots(self) -> int:
        num_segments = len(self.segments)
        if num_segments == 0:
            return 0
        first = self._first_slots[num_segments - 1]
        if self._is_short:
            return first + (self.segments[-1].num_bytes - PAGE_BYTES) // self._geometry.slot_bytes
        return first + self._planned[num_segments - 1]

    def ranges(self) -> Iterator[tuple[int, int]]:
        """First slot and number of slots of each segment that is made."""
        return zip(self._first_slots, self._planned[: len(self.segments)], strict=False)

    def slots_for_others(self) -> Iterator[tuple[Age, range]]:
        """The slots that come to be only once a file of others is given up, with that file's age."""
        room_bytes = self._limits.budget_bytes - self._limits.kept_bytes - self.others.num_bytes
        going = iter(self.others)
        age: Age | None = None
        for index, num_slots in enumerate(self._planned):
            room_bytes -= self._planned_bytes(num_slots, self.segments[index] if index < len(self.segments) else None)
            while room_bytes < 0 and (other := next(going, None)) is not None:
                room_bytes += other.num_bytes
                age = other.age
            if age is not None and index >= len(self.segments):
                yield age, range(self._first_slots[index], self._first_slots[index] + num_slots)

    # --- making segments

    def reachable_slots(self) -> int:
        """How many slots, from 0, have backing, or come to have it by whole segments that the disk has room for now.

        Whole ones only: a disk that is all but full should not be cut into small files. Behind a segment that was made
        shorter than planned, and of which nobody uses the rest, further ones are planned anew.
        """
        if not self._lock.acquire(blocking=False):
            return self._made_slots()  # one is being made, on a disk that may be slow
        try:
            if self._closed:
                return 0
            room_bytes = self._room_bytes()
            if self._is_short:
                self._plan_behind_short(room_bytes)
            num_slots = self._made_slots()
            for planned in [] if self._is_short else self._planned[len(self.segments) :]:
                room_bytes -= segment_bytes(planned, self._geometry.slot_bytes)
                if room_bytes < 0:
                    break
                num_slots += planned
            return num_slots
        finally:
            self._lock.release()

    def _plan_behind_short(self, room_bytes: int) -> None:
        made = self._planned[: len(self.segments) - 1]
        made.append(self._made_slots() - self._first_slots[len(made)])
        taken_bytes = sum(self._planned_bytes(*each) for each in zip(made, self.segments, strict=True))
        more = self._limits.new_segments(self._geometry, taken_bytes)
        if more and room_bytes >= segment_bytes(more[0], self._geometry.slot_bytes):
            self._planned = made + more
            self._first_slots = [0, *itertools.accumulate(self._planned)][:-1]
            self._is_short = False  # the last of the three: others may be asking what has backing

    def _check_more(self) -> None:
        """A segment that had to be made shorter than planned is the last one, until there is room for a whole one."""
        if self._is_short or len(self.segments) == len(self._planned):
            available = self._made_slots()
            raise NoSpaceError(f"nvme store: {self._folder.path} had room for {available} slots and no more", available)

    def _new_segment(self) -> Segment:
        """As long as planned, or as long as the disk has room for."""
        available = self.backed_slots()
        planned = self._planned[len(self.segments)]
        name = self._new_name()
        path = self._folder.path / name
        self._give_up_others(self._planned_bytes(planned), self._first_bytes(planned))
        num_slots = self._num_slots_on_disk(planned)
        if num_slots < 1:
            raise NoSpaceError(
                f"nvme store: {path} would leave less than {self._limits.reserve_free_frac:.0%} of the disk free; "
                f"{available} slots have backing. Free some space or lower the nvme budget",
                available,
            )
        while True:
            try:
                segment = self._create(name, num_slots)
                break
            except OSError as error:
                if error.errno not in NO_SPACE_ERRNOS:
                    raise io_error(error, "making a segment", path) from error
                if num_slots == 1:
                    raise no_space(error, path, available) from error
                num_slots //= 2  # a quota or a file size limit: no call tells how much is left
        try:
            # Measured, since no formula knows every file system (huge pages of a tmpfs, extent sizes of xfs).
            used_bytes = self._bytes_with(segment, num_slots)
            if used_bytes > self._limits.budget_bytes:
                would = f"nvme store: {path} would bring the folder to {size_and_bytes(used_bytes)}"
                raise NoSpaceError(would, available)
        except BaseException:  # a Ctrl-C too: a file that is in no account would take room beyond the budget
            self._folder.unlink(name)
            raise
        self._is_short = num_slots < planned
        return segment

    def _create(self, name: str, num_slots: int) -> Segment:
        segment = self._create_file(name, segment_bytes(num_slots, self._geometry.slot_bytes))
        try:
            segment.write(0, superblock(self._geometry, num_slots))
            if self._sync:
                segment.sync()
                self._folder.sync()
        except BaseException:  # a Ctrl-C too: no half-made file stays
            self._folder.unlink(name)
            raise
        return segment

    def _create_file(self, name: str, num_bytes: int) -> Segment:
        return self._folder.create(name, num_bytes)

    def _first_bytes(self, num_slots: int) -> int:
        """What a file of so many slots takes from the disk when it is made."""
        return segment_bytes(num_slots, self._geometry.slot_bytes)

    def _num_slots_on_disk(self, planned: int) -> int:
        """How many of a new segment's slots the disk has room for."""
        return min(planned, (self._headroom_bytes() - PAGE_BYTES) // self._geometry.slot_bytes)

    def _bytes_with(self, segment: Segment, num_slots: int) -> int:
        """What the folder comes to take with a segment that was just made, and with all sessions that may come."""
        unused_bytes = max(0, self._limits.sessions_bytes - self._folder.sessions_bytes())
        return self.used_bytes() + unused_bytes + segment.allocated_bytes()

    def _new_name(self) -> str:
        taken = {segment.path.name for segment in self.segments} | {other.name for other in self.others}
        return next(name for name in (f"segment-{n:05d}.kvt" for n in itertools.count()) if name not in taken)

    def _give_up_others(self, more_bytes: int, disk_bytes: int) -> None:
        """Until the budget has room for `more_bytes` and the disk for `disk_bytes`, or none is left."""
        while self.others and (
            self._taken_bytes() + more_bytes > self._limits.budget_bytes or self._headroom_bytes() < disk_bytes
        ):
            self._peak_bytes = self.peak_bytes()
            self.others.give_up_first()

    def _taken_bytes(self) -> int:
        """What all files may come to take, as the budget counts them."""
        made = zip(self._planned, self.segments, strict=False)
        ours_bytes = sum(self._planned_bytes(num_slots, segment) for num_slots, segment in made)
        return self._limits.kept_bytes + ours_bytes + self.others.num_bytes

    def _headroom_bytes(self) -> int:
        return self._limits.free_bytes(self._folder.path)

    def _known_headroom_bytes(self) -> int:
        """As `_headroom_bytes`; none on a disk that cannot be asked."""
        try:
            return self._headroom_bytes()
        except OSError:
            return 0

    def _room_bytes(self) -> int:
        """What further segments may take of the disk: its headroom and what others have."""
        return self._known_headroom_bytes() + self.others.num_bytes

    # --- bytes

    def used_bytes(self) -> int:
        """Allocated bytes of the folder, its lock and all files, as `du` counts them; 0 after close. StoreError."""
        if self._closed:
            return 0
        try:
            files_bytes = sum(segment.allocated_bytes() for segment in list(self.segments))
            files_bytes += self._folder.overhead_bytes()
        except OSError as error:
            raise io_error(error, "counting what the files take", self._folder.path) from error
        return files_bytes + self.others.num_bytes

    def peak_bytes(self) -> int:
        """The most that `used_bytes` ever was: files shrink only where one of others is given up."""
        return max(self._peak_bytes, self.used_bytes())

    def ceiling_bytes(self) -> int:
        """What `used_bytes` can reach now: the budget, or less where the disk has no room for further segments."""
        others_bytes = self.others.num_bytes
        headroom_bytes = self._room_bytes()
        ceiling_bytes = self.used_bytes() - others_bytes
        if self._is_short:
            return ceiling_bytes + others_bytes
        for planned in self._planned[len(self.segments) :]:
            wanted_bytes = segment_bytes(planned, self._geometry.slot_bytes)
            num_slots = max(0, min(wanted_bytes, headroom_bytes) - PAGE_BYTES) // self._geometry.slot_bytes
            if num_slots < planned:
                fits_bytes = segment_bytes(num_slots, self._geometry.slot_bytes) if num_slots else 0
                return max(self.used_bytes(), min(ceiling_bytes + fits_bytes, self._limits.budget_bytes))
            headroom_bytes -= wanted_bytes
            ceiling_bytes += wanted_bytes
        return self._limits.budget_bytes

    def check_integrity(self) -> None:
        """Raise IntegrityError if the files are not what was planned, or take more than the budget."""
        used_bytes, budget_bytes = self.used_bytes(), self._limits.budget_bytes
        if used_bytes > budget_bytes:
            raise IntegrityError(f"nvme store: {self._folder.path} takes {used_bytes} of {budget_bytes} bytes")
        segments = list(self.segments)
        for index, segment in enumerate(segments):
            planned_bytes = segment_bytes(self._planned[index], self._geometry.slot_bytes)
            may_be_short = self._is_short and index == len(segments) - 1
            if segment.num_bytes != planned_bytes and not (may_be_short and segment.num_bytes < planned_bytes):
                raise IntegrityError(f"nvme store: {segment.path} was made with {segment.num_bytes} bytes")

    def close(self) -> None:
        """Let go of every segment. A write on its way may be making one: this waits for it."""
        with self._lock:
            self._closed = True
            self.segments = []
