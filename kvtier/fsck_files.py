"""The files of an nvme folder, as `kvtier fsck` sees them: which can be read, and what of them is not in order."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator

from kvtier.errors import ConfigError
from kvtier.fsck_report import FsckReport, GeometryReport, Problem
from kvtier.fsck_scan import ScanSegment
from kvtier.fsck_sessions import SessionsCheck
from kvtier.fsck_words import counted
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder_entries import WRITES_NAME, EntryKind, namespace_of
from kvtier.stores.folder_view import Entry, FolderView
from kvtier.stores.slot_check import SegmentLook, look_at_segment, mend_segment
from kvtier.stores.slot_format import Geometry
from kvtier.stores.superblock import SegmentKind
from kvtier.stores.write_ledger import MAX_BYTES, parse_ledger

_LOOKS, _PAUSE_S = 5, 0.1  # at a segment that its owner may be making

Mend = Callable[[], None]
"""Writes; may raise OSError."""


class FilesCheck:
    """What one check sees of files. For one thread, but for `mended` and `opened`.

    Attributes:
        sessions: what it sees of those.
        segments: those that can be read.
        opened_s: when each namespace was last opened, by its file.
        changed: names of files that were written.
    """

    def __init__(self, view: FolderView, report: FsckReport, repair: bool) -> None:
        self._view, self._report, self._repair = view, report, repair
        self.sessions = SessionsCheck(view, report, self._to_remove)
        self.segments: list[ScanSegment] = []
        self.opened_s: dict[bytes, float] = {}
        self.changed: set[str] = set()
        self._to_mend: list[tuple[str, str, str, Mend]] = []

    def look(self) -> None:
        """Tell the segments that can be read, and what is not in order. Nothing changes yet."""
        self._report.used_bytes = self._view.own_bytes()
        try:
            entries = self._view.entries()
        except OSError as error:
            raise ConfigError(f"{self._view.path}: {error.strerror}") from error
        for entry in entries:
            self._report.used_bytes += entry.allocated_bytes
            if entry.kind is EntryKind.STRANGER:
                what = "is in the way: with it the tier refuses the folder. Move it elsewhere"
                self._report.add_problem(Problem(entry.name, what, False, reason=entry.reason))
            elif entry.kind is EntryKind.NAMESPACE:
                self.opened_s[namespace_of(entry.name)] = entry.changed_s
            elif entry.kind is EntryKind.SEGMENT:
                self._look_at_segment(entry)
            elif entry.kind is EntryKind.SESSION:
                self.sessions.look(entry.name)
            elif entry.name == WRITES_NAME:
                self._look_at_writes()
        if not self._view.is_private():
            self._report.notices.append("the folder's mode lets others in: the tier makes it 0700 when it opens it")

    def _look_at_writes(self) -> None:
        with contextlib.suppress(OSError), self.opened(WRITES_NAME) as fd:  # its owner replaces it, or removed it
            try:
                parse_ledger(os.pread(fd, MAX_BYTES + 1, 0), time.time())
            except ValueError as error:
                what = f"{WRITES_NAME}, the count of bytes written, {error}"
                self._report.notices.append(f"{what}: the tier takes tiers.nvme.max_writes as used up")

    def _look_at_segment(self, entry: Entry) -> None:
        if not entry.is_private:
            self._to_remove(entry.name, "its mode lets others at it, so the tier does not read it")
            return
        try:
            look = self._settled_look(entry.name)
        except FileNotFoundError:  # its owner gave it up
            return
        except OSError as error:  # not removed: of a disk that is away, nothing can be read
            problem = Problem(entry.name, "cannot be read; it stays as it is", False, reason=error.strerror or "")
            self._report.add_problem(problem)
            return
        if look.kind is SegmentKind.FUTURE:
            self._report.future_segments += 1
        elif look.geometry is None:
            self._to_remove(entry.name, SegmentKind.DAMAGED.value)
        elif look.num_whole_slots == 0:
            self._to_remove(entry.name, "too short for its first slot")
        else:
            self._take_in(entry, look, look.geometry)

    def _settled_look(self, name: str) -> SegmentLook:
        for tries in itertools.count(1):
            with self.opened(name) as fd:
                look = look_at_segment(fd)
            if look.kind is not SegmentKind.DAMAGED or self._report.owner is None or tries == _LOOKS:
                break
            time.sleep(_PAUSE_S)
        return look

    def _take_in(self, entry: Entry, look: SegmentLook, geometry: Geometry) -> None:
        self.segments.append(ScanSegment(entry.name, geometry, look.num_whole_slots))
        counts = self._report.geometries.setdefault(geometry, GeometryReport())
        counts.segments += 1
        counts.slots += look.num_whole_slots
        lost = look.num_slots - look.num_whole_slots
        if not lost and entry.size_bytes == PAGE_BYTES + look.num_slots * geometry.slot_bytes:
            return

        def mend() -> None:
            with self.opened(entry.name, writable=True) as fd:
                mend_segment(fd, geometry, look.num_whole_slots)
            self.changed.add(entry.name)

        missing = f"{counted(lost, 'slot')} {'is' if lost == 1 else 'are'} missing"
        what = f"was cut off: {missing}" if lost else "is longer than its slots"
        self._to_mend.append((entry.name, what, "repaired", mend))

    def _to_remove(self, name: str, what: str) -> None:
        self._to_mend.append((name, what, "removed", lambda: self._view.unlink(name)))

    def mend(self) -> None:
        """Report the files that are not in order; with `repair` see to them."""
        for name, what, done, mend in self._to_mend:
            is_mended, reason = self.mended(mend)
            self._report.add_problem(Problem(name, what, is_mended, reason=reason, mend=done))
        if self._repair and not self._view.is_private():
            attempt(self._view.make_private)

    def mended(self, mend: Mend) -> tuple[bool, str]:
        """Mend it, if that is wanted: whether it is in order now, and why not if it should be."""
        reason = attempt(mend) if self._repair else ""
        return self._repair and not reason, reason

    @contextlib.contextmanager
    def opened(self, name: str, *, writable: bool = False) -> Iterator[int]:
        """A file of the folder."""
        fd = self._view.open_file(name, writable=writable)
        try:
            yield fd
        finally:
            os.close(fd)

    def sync(self) -> None:
        """All repairs are on the medium. Raises OSError."""
        for name in sorted(self.changed):
            with self.opened(name, writable=True) as fd:
                os.fdatasync(fd)
        if self.changed or self._report.num_mended or self._report.dropped_namespace:
            self._view.sync()


def attempt(mend: Mend) -> str:
    """Why it failed; nothing if it did not."""
    try:
        mend()
    except OSError as error:
        return f"could not be repaired: {error.strerror}"
    return ""
