"""What a check of an nvme folder found: for programs one document, for people tables."""

from __future__ import annotations

import enum
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kvtier.fsck_session_report import SessionReport, session_table
from kvtier.fsck_words import ago, counted, iso
from kvtier.size import size_words, speed_words
from kvtier.stores.slot_check import SlotCheck, SlotState
from kvtier.stores.slot_format import Geometry

_MAX_PROBLEMS = 1000  # named; all are counted
_MAX_SHOWN = 20
_SHORT_DIGITS = 12


class Outcome(enum.StrEnum):
    """How a folder is when the check has ended."""

    CLEAN = "clean"
    REPAIRED = "repaired"
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it should be."""

    file: str
    what: str
    is_mended: bool
    slot: int | None = None
    """None: it is about the whole file."""
    namespace: bytes = b""
    slices: tuple[int, ...] = ()
    """Of a damaged slot, the first few."""
    reason: str = ""
    mend: str = ""
    """What a repair makes of it: `repaired` or `removed`; empty: nothing, it is not for us to touch."""

    def document(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "slot": self.slot,
            "what": self.what,
            "repaired": self.is_mended,
            "namespace": self.namespace.hex() or None,
            "slices": list(self.slices),
            "reason": self.reason,
        }

    def line(self) -> str:
        # Names of files that are not ours may hold anything, escape sequences too.
        where = ascii(self.file)[1:-1] + ("" if self.slot is None else f", slot {self.slot}")
        slices = f" (slice {', '.join(map(str, self.slices))})" if self.slices else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{where}: {self.what}{slices}{reason}" + (f"; {self.mend}" if self.is_mended else "")


@dataclass(slots=True)
class NamespaceReport:
    """What is there of one namespace. Seconds since the epoch; as the files say, so anything."""

    blocks: int = 0
    num_bad: int = 0
    num_bytes: int = 0
    """Of its slots, headers included."""
    opened_s: float | None = None
    """None: no file says when."""
    oldest_s: float | None = None
    newest_s: float | None = None

    def add(self, check: SlotCheck, slot_bytes: int) -> None:
        """Count a slot that is this namespace's."""
        self.blocks += check.state is SlotState.GOOD
        self.num_bad += check.state.is_bad
        self.num_bytes += slot_bytes
        at_s = check.written_ns / 1e9
        self.oldest_s = at_s if self.oldest_s is None else min(self.oldest_s, at_s)
        self.newest_s = at_s if self.newest_s is None else max(self.newest_s, at_s)


@dataclass(slots=True)
class GeometryReport:
    """What is there of one block size: models and `block_tokens` that differ, differ in it."""

    segments: int = 0
    slots: int = 0
    blocks: int = 0


@dataclass(slots=True)
class FsckReport:
    """All of it."""

    path: Path
    owner: str | None
    """What the lock says of the process that used the folder; None: nobody did."""
    repairs: bool = False
    """Whether it was asked to."""
    slots: Counter[SlotState] = field(default_factory=Counter)
    namespaces: dict[bytes, NamespaceReport] = field(default_factory=dict)
    geometries: dict[Geometry, GeometryReport] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    num_problems: int = 0
    num_mended: int = 0
    num_mendable: int = 0
    """What was not repaired because nobody asked for it."""
    notices: list[str] = field(default_factory=list)
    used_bytes: int = 0
    """As `du` counts the folder, before any repair."""
    read_bytes: int = 0
    elapsed_s: float = 0.0
    future_segments: int = 0
    sessions: list[SessionReport] = field(default_factory=list)
    future_sessions: int = 0
    dropped_namespace: bytes = b""
    num_dropped: int = 0
    num_swept: int = 0
    """Files of namespaces without a block, which were removed."""

    def add_slot(self, geometry: Geometry, check: SlotCheck) -> None:
        """Count a slot that was looked at."""
        self.slots[check.state] += 1
        self.geometries[geometry].blocks += check.state is SlotState.GOOD
        if check.namespace:
            self.namespaces.setdefault(check.namespace, NamespaceReport()).add(check, geometry.slot_bytes)

    def add_problem(self, problem: Problem) -> None:
        """Count it, and name it if there are not too many."""
        self.num_problems += 1
        self.num_mended += problem.is_mended
        self.num_mendable += bool(problem.mend) and not self.repairs
        if len(self.problems) < _MAX_PROBLEMS:
            self.problems.append(problem)

    @property
    def outcome(self) -> Outcome:
        if self.num_problems > self.num_mended:
            return Outcome.DAMAGED
        return Outcome.REPAIRED if self.num_mended else Outcome.CLEAN

    # --- for programs

    def document(self) -> dict[str, Any]:
        """All of it as JSON takes it; docs/fsck.md has the fields."""
        now_s = time.time()
        return {
            "path": str(self.path),
            "status": self.outcome.value,
            "in_use_by": self.owner,
            "slots": {state.value: self.slots[state] for state in SlotState},
            "used_bytes": self.used_bytes,
            "namespaces": [
                {
                    "namespace": namespace.hex(),
                    "blocks": each.blocks,
                    "bad_slots": each.num_bad,
                    "bytes": each.num_bytes,
                    "last_opened": iso(each.opened_s),
                    "oldest_written": iso(each.oldest_s),
                    "newest_written": iso(each.newest_s),
                }
                for namespace, each in sorted(self.namespaces.items())
            ],
            "geometries": [
                {
                    "num_slices": geometry.num_slices,
                    "slice_bytes": geometry.slice_bytes,
                    "slot_bytes": geometry.slot_bytes,
                    "segments": each.segments,
                    "slots": each.slots,
                    "blocks": each.blocks,
                }
                for geometry, each in self.geometries.items()
            ],
            "sessions": [each.document(now_s) for each in self.sessions],
            "future_sessions": self.future_sessions,
            "future_segments": self.future_segments,
            "problems": [problem.document() for problem in self.problems],
            "num_problems": self.num_problems,
            "num_repaired": self.num_mended,
            "dropped": (
                {"namespace": self.dropped_namespace.hex(), "slots": self.num_dropped}
                if self.dropped_namespace
                else None
            ),
            "namespace_files_removed": self.num_swept,
            "notices": self.notices,
            "read_bytes": self.read_bytes,
            "elapsed_s": round(self.elapsed_s, 3),
        }

    # --- for people

    def page(self) -> list[RenderableType]:
        """Tables and lines for `print_page`."""
        parts: list[RenderableType] = [Text(f"{ascii(str(self.path))[1:-1]}: {size_words(self.used_bytes)} on disk")]
        if self.namespaces:
            parts.append(self._namespace_table())
        if self.geometries:
            parts.append(self._geometry_table())
        if self.sessions:
            parts += [session_table(self.sessions, _MAX_SHOWN), Text(f"sessions: {len(self.sessions)}")]
        counts = ", ".join(f"{self.slots[state]} {state.value}" for state in SlotState if self.slots[state])
        parts.append(Text(f"slots: {counts or 'none'}"))
        if self.dropped_namespace:
            parts.append(Text(f"dropped: {counted(self.num_dropped, 'slot')} of {self.dropped_namespace.hex()}"))
        if self.num_swept:
            parts.append(Text(f"removed: {counted(self.num_swept, 'file')} of namespaces without a block"))
        parts += [Text(problem.line()) for problem in self.problems[:_MAX_SHOWN]]
        if self.num_problems > _MAX_SHOWN:
            parts.append(Text(f"and {self.num_problems - _MAX_SHOWN} more (--json names {_MAX_PROBLEMS})"))
        parts += [Text(f"note: {notice}") for notice in self.notices]
        parts.append(Text(self._verdict()))
        return parts

    def _namespace_table(self) -> Table:
        table = _table("namespace", "blocks", "bad", "bytes", "last opened", "oldest", "newest")
        now_s = time.time()
        for namespace, each in sorted(self.namespaces.items()):
            times = (ago(at_s, now_s) for at_s in (each.opened_s, each.oldest_s, each.newest_s))
            short = namespace.hex()[:_SHORT_DIGITS]
            table.add_row(short, str(each.blocks), str(each.num_bad), size_words(each.num_bytes), *times)
        return table

    def _geometry_table(self) -> Table:
        table = _table("layers", "slice", "slot", "segments", "slots", "blocks")
        for geometry, each in self.geometries.items():
            sizes = (size_words(geometry.slice_bytes), size_words(geometry.slot_bytes))
            table.add_row(str(geometry.num_slices), *sizes, str(each.segments), str(each.slots), str(each.blocks))
        return table

    def _verdict(self) -> str:
        left = self.num_problems - self.num_mended
        detail = {
            Outcome.CLEAN: "every slice that a header vouches for was read and verified",
            Outcome.REPAIRED: f"all of {self.num_mended} found",
            Outcome.DAMAGED: f"problems: {left}, repaired: {self.num_mended}",
        }[self.outcome]
        if self.num_mendable:
            detail += f"; --repair mends {'all' if self.num_mendable == left else self.num_mendable} of them"
        speed = speed_words(self.read_bytes / max(self.elapsed_s, 1e-3))
        return f"{self.outcome.value}: {detail}; {size_words(self.read_bytes)} in {self.elapsed_s:.1f} s ({speed})"


def _table(*heads: str) -> Table:
    table = Table(*heads, box=box.SIMPLE, pad_edge=False)
    for column in table.columns:
        column.no_wrap = True  # digits that --drop takes must be there in whole
    return table
