"""What an open finds in a folder: which segment files are of our sizes, and what the header of each slot says."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvtier.stores.file_io import PAGE_BYTES, close_fd
from kvtier.stores.folder import OwnedFolder, SegmentFile
from kvtier.stores.slot_format import HEADER, Geometry, Headers
from kvtier.stores.superblock import SegmentKind, read_superblock

_NUM_THREADS = 8  # headers lie a slot apart: a cold disk is asked for many at a time
_CHUNK_BYTES = 1 << 20  # of headers, read and judged together: what a core's cache holds


@dataclass(slots=True, eq=False)
class FoundSegment:
    """A segment file as an open found it."""

    file: SegmentFile
    kind: SegmentKind
    geometry: Geometry | None
    """Of a segment whose superblock is in order; another than ours is another model's or block size's."""
    num_slots: int = 0
    """Whole slots that the file has and that its superblock knows of."""
    headers: Headers | None = None
    """Of a segment of our geometry."""
    namespaces: set[bytes] = field(default_factory=set)
    """Named by headers: those that verify, or of another geometry's as they stand."""


def examine_segments(folder: OwnedFolder, geometry: Geometry, max_bytes: int) -> list[FoundSegment]:
    """Look at every segment file of the folder, reading headers only; nothing is changed, nothing is fatal.

    Args:
        max_bytes: no file is longer; one that is (it may be all holes) was not written by us.

    Cost: one read of the header region a slot, by 8 threads; about 10 us a slot when the page cache has it.
    """
    files = folder.segment_files()
    with ThreadPoolExecutor(min(_NUM_THREADS, max(1, len(files))), thread_name_prefix="kvtier-open") as pool:
        found = list(pool.map(_look, itertools.repeat(folder), files, itertools.repeat(max_bytes)))
    ours = [each for each in found if each.geometry == geometry]
    others = [each for each in found if each.geometry not in (None, geometry)]
    with ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="kvtier-open") as pool:
        rows = max(1, _CHUNK_BYTES // geometry.header_bytes)
        chunks = [(each, start) for each in ours for start in range(0, each.num_slots, rows)]
        parts = pool.map(lambda chunk: _headers(folder, chunk[0], chunk[1], rows), chunks)
        by_segment: dict[str, list[Headers]] = {}
        for (each, _), part in zip(chunks, parts, strict=True):
            by_segment.setdefault(each.file.name, []).append(part)
        for each, namespaces in zip(others, pool.map(_namespaces, itertools.repeat(folder), others), strict=True):
            each.namespaces = namespaces
    for each in ours:
        each.headers = Headers.joined(by_segment.get(each.file.name, []), geometry)
        each.namespaces = _distinct(each.headers.good_fields()["namespace"])
    return found


def _look(folder: OwnedFolder, file: SegmentFile, max_bytes: int) -> FoundSegment:
    damaged = FoundSegment(file, SegmentKind.DAMAGED, None)
    if not file.is_private or file.size_bytes > max_bytes:  # of a mode in which others may have written it
        return damaged
    try:
        fd = folder.open_file(file.name)
        try:
            page = np.frombuffer(os.pread(fd, PAGE_BYTES, 0), np.uint8)
        finally:
            close_fd(fd)
    except OSError:
        return damaged
    kind, geometry, num_slots = read_superblock(page)
    if geometry is None:
        return FoundSegment(file, kind, None)
    there = max(0, file.size_bytes - PAGE_BYTES) // geometry.slot_bytes  # of a truncated file: those that are whole
    return FoundSegment(file, kind, geometry, min(num_slots, there))


def _read_rows(fd: int, geometry: Geometry, slots: Iterable[int], out: npt.NDArray[np.uint8]) -> None:
    """The beginning of each slot into a row of `out`; what cannot be read becomes 0xFF, which is no header."""
    num_bytes, view = out.shape[1], out.reshape(-1).data
    for row, slot in enumerate(slots):
        place = view[row * num_bytes : (row + 1) * num_bytes]
        try:
            if os.preadv(fd, (place,), PAGE_BYTES + slot * geometry.slot_bytes) == num_bytes:
                continue
        except OSError:
            pass  # a bad sector: this slot is quarantined, the others are not
        out[row] = 0xFF


def _headers(folder: OwnedFolder, segment: FoundSegment, start: int, num_rows: int) -> Headers:
    geometry = segment.geometry
    assert geometry is not None
    slots = range(start, min(segment.num_slots, start + num_rows))
    raw = np.empty((len(slots), geometry.header_bytes), np.uint8)
    try:
        fd = folder.open_file(segment.file.name)
    except OSError:
        raw[:] = 0xFF
        return geometry.parse(raw)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # reading ahead would read the payloads
        _read_rows(fd, geometry, slots, raw)
    finally:
        close_fd(fd)
    return geometry.parse(raw)


def _namespaces(folder: OwnedFolder, segment: FoundSegment) -> set[bytes]:
    """By whom a segment of another geometry is used. Not verified: it decides only which file goes first."""
    geometry = segment.geometry
    assert geometry is not None
    seen: set[bytes] = set()
    try:
        fd = folder.open_file(segment.file.name)
    except OSError:
        return seen
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        raw = np.empty((1024, HEADER.itemsize), np.uint8)
        for start in range(0, segment.num_slots, len(raw)):
            slots = range(start, min(segment.num_slots, start + len(raw)))
            _read_rows(fd, geometry, slots, raw)
            fields = raw[: len(slots)].view(HEADER)[:, 0]
            seen |= _distinct(fields["namespace"][geometry.is_magic(fields)])
    finally:
        close_fd(fd)
    return seen


def _distinct(namespaces: npt.NDArray[np.uint8]) -> set[bytes]:
    return {row.tobytes() for row in np.unique(namespaces, axis=0)} if len(namespaces) else set()
