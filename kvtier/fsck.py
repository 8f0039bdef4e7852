"""`kvtier fsck`: is every slice in an nvme folder what its header says, whose is it, and what else lies there?

A check writes nothing, and takes no lock for longer than a look at it. Repairs and drops hold the lock from beginning
to end, so they never touch a folder in use.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.fsck_files import FilesCheck, attempt
from kvtier.fsck_report import FsckReport, NamespaceReport, Outcome, Problem
from kvtier.fsck_scan import Progress, Scan, ScanSegment, Visit
from kvtier.fsck_words import counted
from kvtier.stores.folder_entries import namespace_name
from kvtier.stores.folder_view import FolderView, find_folder
from kvtier.stores.slot_check import SlotCheck, SlotState, invalidate_slot


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
        check.files.look()
        if drop is not None:
            check.drop(drop)
        check.files.mend()
        check.verify()
        check.finish()
        check.report.elapsed_s = time.monotonic() - started_s
        return check.report


class _Check:
    """One run over one folder. Threads share the report under the lock, which is never held during I/O."""

    def __init__(self, view: FolderView, repair: bool, progress: Progress) -> None:
        self._view, self._repair, self._progress = view, repair, progress
        self.report = FsckReport(view.path, view.owner(), repair)
        self.files = FilesCheck(view, self.report, repair)
        self._lock = threading.Lock()

    # --- slots

    def _free(self, segment: ScanSegment, slot: int) -> None:
        with self.files.opened(segment.name, writable=True) as fd:
            invalidate_slot(fd, segment.geometry, slot)
        with self._lock:
            self.files.changed.add(segment.name)

    def drop(self, prefix: str) -> None:
        """Make every slot of one namespace free, and remove its file.

        Raises ConfigError unless exactly one namespace begins with the prefix; nothing has changed then.
        """
        namespace = self.report.dropped_namespace = self._namespace(prefix)

        def free(segment: ScanSegment, slot: int, check: SlotCheck) -> None:
            if check.namespace == namespace:
                reason = attempt(lambda: self._free(segment, slot))
                with self._lock:
                    self.report.num_dropped += not reason
                    if reason:
                        what = "could not be dropped"
                        self.report.add_problem(Problem(segment.name, what, False, slot, namespace, reason=reason))

        self._scan(free, slices=False)
        if self.files.opened_s.pop(namespace, None) is not None:
            name = namespace_name(namespace)
            if reason := attempt(lambda: self._view.unlink(name)):
                self.report.add_problem(Problem(name, "could not be dropped", False, None, namespace, reason=reason))

    def _namespace(self, prefix: str) -> bytes:
        names = {namespace.hex() for namespace in self.files.opened_s}

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
        is_mended, reason = self.files.mended(lambda: self._free(segment, slot)) if check.state.is_bad else (False, "")
        with self._lock:
            self.report.add_slot(segment.geometry, check)
            self.files.sessions.saw(check)
            if check.state.is_bad:
                what, why = check.state.value, "; ".join(filter(None, (check.reason, reason)))
                if check.num_bad_slices:
                    what += f", {check.num_bad_slices} of {segment.geometry.num_slices} slices"
                self.report.add_problem(
                    Problem(segment.name, what, is_mended, slot, check.namespace, check.bad_slices, why, "repaired")
                )

    def _scan(self, visit: Visit, *, slices: bool) -> None:
        scan = Scan(self._view, self.files.segments, slices, visit, self._progress)
        scan.run()
        self.report.read_bytes += scan.read_bytes
        if slices:
            self.report.slots[SlotState.FREE] += scan.num_unwritten

    # --- the end

    def finish(self) -> None:
        """What could be told only now; then all repairs are on the medium."""
        report = self.report
        report.problems.sort(key=lambda problem: (problem.file, -1 if problem.slot is None else problem.slot))
        for namespace, opened_s in self.files.opened_s.items():
            report.namespaces.setdefault(namespace, NamespaceReport()).opened_s = opened_s
        report.owner = report.owner or self._view.owner()
        if report.owner is not None:
            report.notices.append(f"in use by process {report.owner}: what it writes meanwhile may be missing here")
        if report.future_segments or report.slots[SlotState.FUTURE]:
            report.notices.append("segments or slots of a later format version were left: only that can check them")
        self.files.sessions.finish()
        self._sweep_namespaces()
        if reason := attempt(self.files.sync):
            report.add_problem(Problem("", "the repairs may not be on the disk", False, reason=reason))

    def _sweep_namespaces(self) -> None:
        """Files of namespaces without a block: harmless, and the tier removes them when it opens the folder."""
        report = self.report
        empty = [namespace for namespace in self.files.opened_s if not report.namespaces[namespace].blocks]
        may_be_used = report.outcome is Outcome.DAMAGED or report.future_segments or report.slots[SlotState.FUTURE]
        if self._repair and not may_be_used:
            removed = [each for each in empty if not attempt(partial(self._view.unlink, namespace_name(each)))]
            for namespace in removed:
                del report.namespaces[namespace]
            report.num_swept = len(removed)
        elif empty:
            have = "has" if len(empty) == 1 else "have"
            report.notices.append(f"{counted(len(empty), 'namespace')} {have} no block that verifies")
