"""`kvtier fsck`: is every slice in an nvme folder what its header says, whose is it, and what else lies there?

A check writes nothing, and takes no lock for longer than a look at it. Repairs and drops hold the lock from beginning
to end, so they never touch a folder in use.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.fsck_report import FsckReport, GeometryReport, NamespaceReport, Outcome, Problem
from kvtier.fsck_scan import Progress, Scan, ScanSegment, Visit
from kvtier.fsck_sessions import SessionsCheck
from kvtier.fsck_words import counted
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder_entries import WRITES_NAME, EntryKind, namespace_name, namespace_of
from kvtier.stores.folder_view import Entry, FolderView, find_folder
from kvtier.stores.slot_check import (
    SegmentLook,
    SlotCheck,
    SlotState,
    invalidate_slot,
    look_at_segment,
    mend_segment,
)
from kvtier.stores.slot_format import Geometry
from kvtier.stores.superblock import SegmentKind
from kvtier.stores.write_ledger import MAX_BYTES, parse_ledger

_LOOKS, _PAUSE_S = 5, 0.1  # at a segment that its owner may be making

Mend = Callable[[], None]
"""Writes; may raise OSError."""


def check_folder(
    path: Path, *, repair: bool = False, drop: str | None = None, progress: Progress = lambda done, of: None
) -> FsckReport:
    """Read and verify all of a folder that an nvme store left, or uses.

    Args:
        path: what `tiers.nvme.path` says, or the folder `kv` in it.
        repair: make bad slots free, and remove files of ours that the tier cannot use.
        drop: the hexadecimal beginning of one namespace: its slots become free, and are not checked.

    Raises:
        ConfigError: no such folder, another user's, not kvtier's; no namespace, or several, begin with `drop`.
        FolderInUseError: `repair` or `drop`, and a living process uses it. After either error no slot or segment has
            changed.

    Whatever the files hold, it raises nothing else. After a KeyboardInterrupt a repair has happened in part; the next
    one does the rest.

    Cost: one read of everything that was written, past the page cache where the file system can, by 8 threads; `drop`
    reads the headers twice more. Memory: 5 MiB a thread, about 500 bytes a namespace, 200 a block of sessions.
    """
    started_s = time.monotonic()
    with FolderView(find_folder(path), owned=repair or drop is not None) as view:
        check = _Check(view, repair, progress)
        check.look_at_files()
        if drop is not None:
            check.drop(drop)
        check.mend_files()
        check.verify()
        check.finish()
        check.report.elapsed_s = time.monotonic() - started_s
        return check.report


class _Check:
    """One run over one folder. Threads share the report under the lock, which is never held during I/O."""

    def __init__(self, view: FolderView, repair: bool, progress: Progress) -> None:
        self._view, self._repair, self._progress = view, repair, progress
        self.report = FsckReport(view.path, view.owner(), repair)
        self._sessions = SessionsCheck(view, self.report, self._to_remove)
        self._segments: list[ScanSegment] = []
        self._opened_s: dict[bytes, float] = {}
        self._to_mend: list[tuple[str, str, str, Mend]] = []
        self._to_sync: set[str] = set()
        self._lock = threading.Lock()

    # --- files

    def look_at_files(self) -> None:
        """Tell the segments that can be read, and what is not in order. Nothing changes yet."""
        self.report.used_bytes = self._view.own_bytes()
        try:
            entries = self._view.entries()
        except OSError as error:
            raise ConfigError(f"{self._view.path}: {error.strerror}") from error
        for entry in entries:
            self.report.used_bytes += entry.allocated_bytes
            if entry.kind is EntryKind.STRANGER:
                what = "is in the way: with it the tier refuses the folder. Move it elsewhere"
                self.report.add_problem(Problem(entry.name, what, False, reason=entry.reason))
            elif entry.kind is EntryKind.NAMESPACE:
                self._opened_s[namespace_of(entry.name)] = entry.changed_s
            elif entry.kind is EntryKind.SEGMENT:
                self._look_at_segment(entry)
            elif entry.kind is EntryKind.SESSION:
                self._sessions.look(entry.name)
            elif entry.name == WRITES_NAME:
                self._look_at_writes()
        if not self._view.is_private():
            self.report.notices.append("the folder's mode lets others in: the tier makes it 0700 when it opens it")

    def _look_at_writes(self) -> None:
        with contextlib.suppress(OSError), self._opened(WRITES_NAME) as fd:  # its owner replaces it, or removed it
            try:
                parse_ledger(os.pread(fd, MAX_BYTES + 1, 0), time.time())
            except ValueError as error:
                what = f"{WRITES_NAME}, the count of bytes written, {error}"
                self.report.notices.append(f"{what}: the tier takes tiers.nvme.max_writes as used up")

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
            self.report.add_problem(problem)
            return
        if look.kind is SegmentKind.FUTURE:
            self.report.future_segments += 1
        elif look.geometry is None:
            self._to_remove(entry.name, SegmentKind.DAMAGED.value)
        elif look.num_whole_slots == 0:
            self._to_remove(entry.name, "too short for its first slot")
        else:
            self._take_in(entry, look, look.geometry)

    def _settled_look(self, name: str) -> SegmentLook:
        for tries in itertools.count(1):
            with self._opened(name) as fd:
                look = look_at_segment(fd)
            if look.kind is not SegmentKind.DAMAGED or self.report.owner is None or tries == _LOOKS:
                break
            time.sleep(_PAUSE_S)
        return look

    def _take_in(self, entry: Entry, look: SegmentLook, geometry: Geometry) -> None:
        self._segments.append(ScanSegment(entry.name, geometry, look.num_whole_slots))
        counts = self.report.geometries.setdefault(geometry, GeometryReport())
        counts.segments += 1
        counts.slots += look.num_whole_slots
        lost = look.num_slots - look.num_whole_slots
        if not lost and entry.size_bytes == PAGE_BYTES + look.num_slots * geometry.slot_bytes:
            return

        def mend() -> None:
            with self._opened(entry.name, writable=True) as fd:
                mend_segment(fd, geometry, look.num_whole_slots)
            self._to_sync.add(entry.name)

        missing = f"{counted(lost, 'slot')} {'is' if lost == 1 else 'are'} missing"
        what = f"was cut off: {missing}" if lost else "is longer than its slots"
        self._to_mend.append((entry.name, what, "repaired", mend))

    def _to_remove(self, name: str, what: str) -> None:
        self._to_mend.append((name, what, "removed", lambda: self._view.unlink(name)))

    def mend_files(self) -> None:
        """Report the files that are not in order; with `repair` see to them."""
        for name, what, done, mend in self._to_mend:
            is_mended, reason = self._mended(mend)
            self.report.add_problem(Problem(name, what, is_mended, reason=reason, mend=done))
        if self._repair and not self._view.is_private():
            _try(self._view.make_private)

    def _mended(self, mend: Mend) -> tuple[bool, str]:
        """Whether it is in order now, and why not if it should be."""
        reason = _try(mend) if self._repair else ""
        return self._repair and not reason, reason

    def _free(self, segment: ScanSegment, slot: int) -> None:
        with self._opened(segment.name, writable=True) as fd:
            invalidate_slot(fd, segment.geometry, slot)
        with self._lock:
            self._to_sync.add(segment.name)

    @contextlib.contextmanager
    def _opened(self, name: str, *, writable: bool = False) -> Iterator[int]:
        fd = self._view.open_file(name, writable=writable)
        try:
            yield fd
        finally:
            os.close(fd)

    # --- slots

    def drop(self, prefix: str) -> None:
        """Make every slot of one namespace free, and remove its file.

        Raises ConfigError unless exactly one namespace begins with the prefix; nothing has changed then.
        """
        namespace = self.report.dropped_namespace = self._namespace(prefix)

        def free(segment: ScanSegment, slot: int, check: SlotCheck) -> None:
            if check.namespace == namespace:
                reason = _try(lambda: self._free(segment, slot))
                with self._lock:
                    self.report.num_dropped += not reason
                    if reason:
                        what = "could not be dropped"
                        self.report.add_problem(Problem(segment.name, what, False, slot, namespace, reason=reason))

        self._scan(free, slices=False)
        if self._opened_s.pop(namespace, None) is not None:
            name = namespace_name(namespace)
            if reason := _try(lambda: self._view.unlink(name)):
                self.report.add_problem(Problem(name, "could not be dropped", False, None, namespace, reason=reason))

    def _namespace(self, prefix: str) -> bytes:
        names = {namespace.hex() for namespace in self._opened_s}

        def collect(segment: ScanSegment, slot: int, check: SlotCheck) -> None:
            if check.namespace:
                with self._lock:
                    names.add(check.namespace.hex())

        self._scan(collect, slices=False)
        matching = sorted(name for name in names if prefix and name.startswith(prefix.lower()))
        if not matching:
            raise ConfigError(
                f"--drop {prefix!a}: no namespace of {self._view.path} begins so; --json lists them whole"
            )
        if len(matching) > 1:
            more = ", …" if len(matching) > 5 else ""
            raise ConfigError(f"--drop {prefix!a}: several namespaces begin so: {', '.join(matching[:5])}{more}")
        return bytes.fromhex(matching[0])

    def verify(self) -> None:
        """Read every slice of every slot."""
        self._scan(self._judge, slices=True)

    def _judge(self, segment: ScanSegment, slot: int, check: SlotCheck) -> None:
        is_mended, reason = self._mended(lambda: self._free(segment, slot)) if check.state.is_bad else (False, "")
        with self._lock:
            self.report.add_slot(segment.geometry, check)
            self._sessions.saw(check)
            if check.state.is_bad:
                what, why = check.state.value, "; ".join(filter(None, (check.reason, reason)))
                if check.num_bad_slices:
                    what += f", {check.num_bad_slices} of {segment.geometry.num_slices} slices"
                self.report.add_problem(
                    Problem(segment.name, what, is_mended, slot, check.namespace, check.bad_slices, why, "repaired")
                )

    def _scan(self, visit: Visit, *, slices: bool) -> None:
        scan = Scan(self._view, self._segments, slices, visit, self._progress)
        scan.run()
        self.report.read_bytes += scan.read_bytes
        if slices:
            self.report.slots[SlotState.FREE] += scan.num_unwritten

    # --- the end

    def finish(self) -> None:
        """What could be told only now; then all repairs are on the medium."""
        report = self.report
        report.problems.sort(key=lambda problem: (problem.file, -1 if problem.slot is None else problem.slot))
        for namespace, opened_s in self._opened_s.items():
            report.namespaces.setdefault(namespace, NamespaceReport()).opened_s = opened_s
        report.owner = report.owner or self._view.owner()
        if report.owner is not None:
            report.notices.append(f"in use by process {report.owner}: what it writes meanwhile may be missing here")
        if report.future_segments or report.slots[SlotState.FUTURE]:
            report.notices.append("segments or slots of a later format version were left: only that can check them")
        self._sessions.finish()
        self._sweep_namespaces()
        if reason := _try(self._sync):
            report.add_problem(Problem("", "the repairs may not be on the disk", False, reason=reason))

    def _sweep_namespaces(self) -> None:
        """Files of namespaces without a block: harmless, and the tier removes them when it opens the folder."""
        report = self.report
        empty = [namespace for namespace in self._opened_s if not report.namespaces[namespace].blocks]
        may_be_used = report.outcome is Outcome.DAMAGED or report.future_segments or report.slots[SlotState.FUTURE]
        if self._repair and not may_be_used:
            removed = [each for each in empty if not _try(lambda each=each: self._view.unlink(namespace_name(each)))]  # type: ignore[misc]
            for namespace in removed:
                del report.namespaces[namespace]
            report.num_swept = len(removed)
        elif empty:
            have = "has" if len(empty) == 1 else "have"
            report.notices.append(f"{counted(len(empty), 'namespace')} {have} no block that verifies")

    def _sync(self) -> None:
        for name in sorted(self._to_sync):
            with self._opened(name, writable=True) as fd:
                os.fdatasync(fd)
        if self._to_sync or self.report.num_mended or self.report.dropped_namespace:
            self._view.sync()


def _try(mend: Mend) -> str:
    """Why it failed; nothing if it did not."""
    try:
        mend()
    except OSError as error:
        return f"could not be repaired: {error.strerror}"
    return ""
