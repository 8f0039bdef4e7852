"""The sessions in an nvme folder, as `kvtier fsck` sees them: which are whole, and how much of each is there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from kvtier.fsck_report import FsckReport, Problem
from kvtier.fsck_session_report import SessionReport
from kvtier.fsck_words import counted
from kvtier.session_record import LaterVersionError, SessionRecord
from kvtier.stores.folder_entries import NEW_SUFFIX
from kvtier.stores.folder_view import FolderView
from kvtier.stores.session_files import read_session
from kvtier.stores.slot_check import SlotCheck, SlotState

_MAX_BLOCKS = 1 << 18  # looked for, of all sessions together: crafted records must not cost more memory


@dataclass(slots=True)
class SessionsCheck:
    """What one check sees of sessions. For one thread at a time.

    Memory: about 200 bytes a block, of at most 262,144.
    """

    view: FolderView
    report: FsckReport
    to_remove: Callable[[str, str], None]
    """Called with the name of a file that nobody can use, and why."""
    _wanted: dict[bytes, list[SessionReport]] = field(default_factory=dict)
    """By namespace and identity of a block: the sessions that it is of. Found, it is off."""
    _unfinished: list[str] = field(default_factory=list)
    _num_blocks: int = 0

    def look(self, name: str) -> None:
        """Read a session's file. Nothing changes."""
        if name.endswith(NEW_SUFFIX):
            self._unfinished.append(name)
            return
        try:
            fd = self.view.open_file(name)
            try:
                record = read_session(fd, name)
            finally:
                os.close(fd)
        except FileNotFoundError:  # its owner deleted it
            return
        except LaterVersionError:
            self.report.future_sessions += 1
        except ValueError as error:
            self.to_remove(name, str(error))
        except OSError as error:  # not removed: of a disk that is away, nothing can be read
            reason = error.strerror or ""
            self.report.add_problem(Problem(name, "cannot be read; it stays as it is", False, reason=reason))
        else:
            self._take_in(record)

    def _take_in(self, record: SessionRecord) -> None:
        num_blocks = -(-len(record.token_ids) // record.block_tokens)
        told = SessionReport(
            record.name, record.key(), record.namespace, len(record.token_ids), record.block_tokens, num_blocks,
            record.created_s, record.used_s, record.ttl_s, record.is_pinned,
        )  # fmt: skip
        self.report.sessions.append(told)
        self._num_blocks += num_blocks
        if self._num_blocks > _MAX_BLOCKS:
            return
        told.num_found = 0
        for label in record.labels():
            self._wanted.setdefault(label.namespace + label.identity, []).append(told)

    def saw(self, check: SlotCheck) -> None:
        """A slot was read. Of copies of a block one counts."""
        if check.state is SlotState.GOOD:
            for told in self._wanted.pop(check.namespace + check.identity, ()):
                told.num_found = (told.num_found or 0) + 1

    def finish(self) -> None:
        """With repairs, remove what was not finished."""
        report = self.report
        if report.future_sessions:
            report.notices.append("sessions of a later format version were left: only that can read them")
        if report.repairs:
            for name in self._unfinished:
                with contextlib.suppress(OSError):  # the tier removes it too
                    self.view.unlink(name)
        elif self._unfinished and report.owner is None:
            what = counted(len(self._unfinished), "session")
            report.notices.append(f"{what} was being saved when the process died: the older one, if any, stands")
