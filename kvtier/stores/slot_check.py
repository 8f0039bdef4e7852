"""Is a slot on disk what its header says? Every slice is read and compared; nothing is believed before it was."""

from __future__ import annotations

import enum
import errno
import fcntl
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.segment import punch_hole, zero_pages
from kvtier.stores.slot_format import Bytes, Geometry, Verdict, whole_pages
from kvtier.stores.superblock import SegmentKind, read_superblock, superblock

_CHUNK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 1 << 20  # the largest block_tokens and 40,000 layers; a crafted one must not cost more memory
_MAX_TRIES = 8
_PAUSE_S = 0.01  # between two looks at a slot; a header is written in far less
_MAX_BAD_SLICES = 16  # named of one slot


class SlotState(enum.Enum):
    """What a slot is."""

    GOOD = "good"
    """Header and every slice verify."""
    FREE = "free"
    TORN = "torn"
    """Its header has begun and does not verify: a write that was cut short, or damage. It cannot say whose it is."""
    DAMAGED = "damaged"
    """Its header verifies, and slices do not, or cannot be read."""
    UNREADABLE = "unreadable"
    """Its header cannot be read."""
    FUTURE = "future"
    """Of a format version that this code does not know."""
    CHANGING = "changing"
    """Its owner wrote it at every look."""

    @property
    def is_bad(self) -> bool:
        """Whether the tier could have been asked for it in vain: a repair makes it free."""
        return self in (SlotState.TORN, SlotState.DAMAGED, SlotState.UNREADABLE)


@dataclass(frozen=True, slots=True)
class SlotCheck:
    """One slot as it was found."""

    state: SlotState
    namespace: bytes = b""
    """Of GOOD and DAMAGED ones: 32 bytes, as `identity`."""
    written_ns: int = 0
    """Of GOOD and DAMAGED ones, nanoseconds since 1970; as the header says, so anything."""
    bad_slices: tuple[int, ...] = ()
    """Of DAMAGED ones, the first few."""
    num_bad_slices: int = 0
    reason: str = ""
    """The system's word, where something could not be read."""
    identity: bytes = b""


@dataclass(frozen=True, slots=True)
class SegmentLook:
    """What the first page of a segment says of the file."""

    kind: SegmentKind
    geometry: Geometry | None
    num_slots: int
    """By its superblock."""
    num_whole_slots: int
    """Those of them that the file is long enough for."""


def look_at_segment(fd: int) -> SegmentLook:
    """Judge a segment file by its first page. Raises OSError."""
    page = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), np.uint8)
    kind, geometry, num_slots = read_superblock(page)
    if geometry is None or geometry.header_bytes > _MAX_HEADER_BYTES:
        return SegmentLook(SegmentKind.DAMAGED if geometry else kind, None, 0, 0)
    there = max(0, os.fstat(fd).st_size - PAGE_BYTES) // geometry.slot_bytes
    return SegmentLook(kind, geometry, num_slots, min(num_slots, there))


def slots_with_data(fd: int, geometry: Geometry, num_slots: int) -> Iterator[int]:
    """The slots whose header may have been written; all others are free. O(extents of the file) and those slots.

    What was preallocated and never written is known to the file system: it is not read. A file of absurd length is
    cheap for the same reason.
    """
    end = PAGE_BYTES + num_slots * geometry.slot_bytes
    at, next_slot = PAGE_BYTES, 0
    while next_slot < num_slots:
        try:
            data = os.lseek(fd, at, os.SEEK_DATA)
            hole = os.lseek(fd, data, os.SEEK_HOLE)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but holes from here on
                return
            data, hole = at, end  # a file system that does not know
        first = max(next_slot, (data - PAGE_BYTES) // geometry.slot_bytes)
        if first < num_slots and data >= PAGE_BYTES + first * geometry.slot_bytes + geometry.header_bytes:
            first += 1  # the extent begins in the slot's slices
        stop = min(num_slots, -(-(hole - PAGE_BYTES) // geometry.slot_bytes))
        yield from range(first, stop)
        next_slot, at = max(next_slot, first, stop), max(hole, PAGE_BYTES + max(first, stop) * geometry.slot_bytes)


class SlotReader:
    """Reads slots of any segment, one at a time, in one thread. Memory: 5 MiB, whatever the sizes on disk."""

    def __init__(self) -> None:
        # A mapping of its own is page-aligned, as reads past the page cache need it.
        memory: Bytes = np.frombuffer(mmap.mmap(-1, _MAX_HEADER_BYTES + _CHUNK_BYTES), np.uint8)
        self._header, self._chunk = memory[:_MAX_HEADER_BYTES], memory[_MAX_HEADER_BYTES:]
        self.read_bytes = 0

    def check(self, fd: int, geometry: Geometry, slot: int, *, slices: bool = True) -> SlotCheck:
        """Judge a slot; without `slices`, by its header alone.

        A bad one is looked at again, since the folder may have a living owner: that takes the header back before the
        slices change, so only with the same header before and after is it bad. Raises nothing.

        Cost: one read of the header; for a block one of each 4 MiB and a hash pass.
        """
        before = b""
        for tries in range(_MAX_TRIES):
            found, header = self._look(fd, geometry, slot, slices)
            if not found.state.is_bad or (tries and header == before):
                return found
            before = header
            time.sleep(_PAUSE_S)
        return SlotCheck(SlotState.CHANGING)

    def _look(self, fd: int, geometry: Geometry, slot: int, slices: bool) -> tuple[SlotCheck, bytes]:
        start = PAGE_BYTES + slot * geometry.slot_bytes
        header = self._header[: geometry.header_bytes]
        try:
            self._read(fd, start, header)
        except OSError as error:
            return SlotCheck(SlotState.UNREADABLE, reason=_reason(error)), b""
        parsed = geometry.parse(header[None])
        fields, state = parsed.fields[0], _STATES[Verdict(int(parsed.verdicts[0]))]
        seen = xxhash.xxh3_128_digest(header.data)
        if state is not SlotState.GOOD:
            return SlotCheck(state), seen
        namespace, written_ns = fields["namespace"].tobytes(), int(fields["written_ns"])
        bad, num_bad, reason = (
            self._bad_slices(fd, start + geometry.header_bytes, parsed.checksums[0].tolist(), parsed.sizes[0].tolist())
            if slices
            else ([], 0, "")
        )
        state = SlotState.DAMAGED if num_bad else SlotState.GOOD
        identity = fields["identity"].tobytes()
        return SlotCheck(state, namespace, written_ns, tuple(bad), num_bad, reason, identity), seen

    def _bad_slices(self, fd: int, start: int, expected: list[int], sizes: list[int]) -> tuple[list[int], int, str]:
        """The slices that differ or cannot be read: the first of them, how many, and the system's word.

        `expected`, `sizes`: of each slice, as it is stored.
        """
        bad: list[int] = []
        num_bad, reason = 0, ""
        hasher, readable, layer, left = xxhash.xxh3_64(), True, 0, sizes[0]
        block_bytes = whole_pages(sum(sizes))
        for offset in range(0, block_bytes, len(self._chunk)):
            chunk = self._chunk[: min(len(self._chunk), block_bytes - offset)]
            try:
                self._read(fd, start + offset, chunk)
                chunk_readable = True
            except OSError as error:  # of a bad sector the other chunks may still be read
                reason, chunk_readable = _reason(error), False
            at = 0
            while at < len(chunk) and layer < len(sizes):  # behind the last slice: padding
                take = min(left, len(chunk) - at)
                hasher.update(chunk[at : at + take].data)
                readable &= chunk_readable
                at, left = at + take, left - take
                if left == 0:
                    if not readable or hasher.intdigest() != expected[layer]:
                        num_bad += 1
                        bad += [layer] if len(bad) < _MAX_BAD_SLICES else []
                    layer, readable = layer + 1, True
                    left = sizes[layer] if layer < len(sizes) else 0
                    hasher.reset()
        return bad, num_bad, reason

    def _read(self, fd: int, offset_bytes: int, out: Bytes) -> None:
        """Fill `out`. Raises OSError, also where the file ends."""
        view = out.data
        while view:
            try:
                got = os.preadv(fd, [view], offset_bytes)
            except OSError as error:
                flags = fcntl.fcntl(fd, fcntl.F_GETFL)
                if error.errno != errno.EINVAL or not flags & os.O_DIRECT:
                    raise
                fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # a disk of larger blocks: by the page cache then
                continue
            if got == 0:
                raise OSError(errno.ENODATA, "the file ends here")
            self.read_bytes += got
            view, offset_bytes = view[got:], offset_bytes + got


_STATES = {
    Verdict.EMPTY: SlotState.FREE,
    Verdict.GOOD: SlotState.GOOD,
    Verdict.BAD: SlotState.TORN,
    Verdict.FUTURE: SlotState.FUTURE,
}


def invalidate_slot(fd: int, geometry: Geometry, slot: int) -> None:
    """Make a slot free: its header's first page becomes zero. The block's bytes stay until it is written again.

    For the folder's owner alone. Raises OSError.
    """
    page, offset_bytes = memoryview(bytes(PAGE_BYTES)), PAGE_BYTES + slot * geometry.slot_bytes
    while page:
        written = os.pwrite(fd, page, offset_bytes)
        page, offset_bytes = page[written:], offset_bytes + written


def erase_slot(fd: int, geometry: Geometry, slot: int) -> None:
    """Make a slot free, and leave none of its bytes in the file: first what it is found by, then the rest.

    A slot of a file that is all allocated stays so; of one with holes it becomes one. On the medium when it returns, as
    far as files reach it. For the folder's owner alone. Raises OSError; some bytes may still be there then.
    """
    invalidate_slot(fd, geometry, slot)
    os.fdatasync(fd)  # no header for bytes that are gone, whatever happens
    offset_bytes, status = PAGE_BYTES + slot * geometry.slot_bytes, os.fstat(fd)
    erase = zero_pages if status.st_blocks * 512 >= status.st_size else punch_hole
    try:
        erase(fd, offset_bytes, geometry.slot_bytes)
    except OSError:  # not known there
        end, zeros = offset_bytes + geometry.slot_bytes, memoryview(bytes(_CHUNK_BYTES))
        while offset_bytes < end:
            offset_bytes += os.pwrite(fd, zeros[: end - offset_bytes], offset_bytes)
    os.fdatasync(fd)


def mend_segment(fd: int, geometry: Geometry, num_whole_slots: int) -> None:
    """Let the superblock say how many slots there are, and the file end behind them. For the folder's owner alone.

    Raises OSError.
    """
    os.ftruncate(fd, PAGE_BYTES + num_whole_slots * geometry.slot_bytes)
    os.pwrite(fd, superblock(geometry, num_whole_slots).data, 0)


def _reason(error: OSError) -> str:
    return error.strerror or os.strerror(error.errno or 0)
