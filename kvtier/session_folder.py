"""The sessions in an nvme folder, seen without a model: which there are, and where their blocks lie.

Reading takes no lock and writes nothing: the folder may be in use. Deleting owns the folder.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from kvtier.errors import ConfigError, FolderInUseError, StoreError
from kvtier.folder_session import FolderSession, Place
from kvtier.fsck_scan import Scan, ScanSegment
from kvtier.session_record import LaterVersionError, SessionRecord
from kvtier.stores.file_io import PAGE_BYTES, close_fd
from kvtier.stores.folder_entries import NEW_SUFFIX, EntryKind, session_name
from kvtier.stores.folder_view import FolderView, find_folder
from kvtier.stores.session_files import read_session
from kvtier.stores.slot_check import SlotCheck, SlotState, erase_slot, look_at_segment, slots_with_data
from kvtier.stores.slot_format import Geometry
from kvtier.terminal import printable

_MAX_BLOCKS = 1 << 20  # looked for, of all sessions together: crafted records must not cost more memory


class SessionFolder:
    """A folder with its sessions, as it was when it was opened. A context manager.

    Attributes:
        path: the folder of the store.
        sessions: those whose records are whole, last used first.
        num_unusable: records that are damaged, of a later version, or cannot be read.
    """

    def __init__(self, path: Path, *, owned: bool = False) -> None:
        """Read records, and the headers of slots.

        Args:
            path: what `tiers.nvme.path` says, or the folder `kv` in it.
            owned: no process may start to use it until `close`.

        Raises:
            ConfigError: there is no such folder, or it is another user's.
            FolderInUseError: `owned`, and a living process has it.

        Cost: one read of each header, by 8 threads.
        """
        place = find_folder(path)
        try:
            self.view = FolderView(place, owned=owned)
        except FolderInUseError:
            raise FolderInUseError(
                f"{place} is in use by a process that is alive: end it first, or use its tiered.session(name); "
                "`kvtier sessions list`, show and export work meanwhile"
            ) from None
        try:
            self.path = self.view.path
            self.sessions: list[FolderSession] = []
            self.num_unusable = 0
            self.segments: list[ScanSegment] = []
            self._look()
            self._locate()
        except BaseException:  # a Ctrl-C too: no lock is left
            self.close()
            raise

    @property
    def owner(self) -> str | None:
        """The process that uses the folder now."""
        return self.view.owner()

    def _look(self) -> None:
        try:
            entries = self.view.entries()
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error
        num_blocks = 0
        for entry in entries:
            if entry.kind is EntryKind.SESSION and not entry.name.endswith(NEW_SUFFIX):
                record = self._record(entry.name)
                if record is not None:
                    num_blocks += -(-len(record.token_ids) // record.block_tokens)
                    if num_blocks > _MAX_BLOCKS:
                        raise ConfigError(f"{self.path}: its sessions are of more than {_MAX_BLOCKS} blocks together")
                    self.sessions.append(FolderSession(record, record.labels()))
            elif entry.kind is EntryKind.SEGMENT and entry.is_private:
                with contextlib.suppress(OSError), self._opened(entry.name) as fd:
                    look = look_at_segment(fd)
                    if look.geometry is not None and look.num_whole_slots:
                        self.segments.append(ScanSegment(entry.name, look.geometry, look.num_whole_slots))
        self.sessions.sort(key=lambda each: -each.record.used_s)

    def _record(self, name: str) -> SessionRecord | None:
        try:
            with self._opened(name) as fd:
                return read_session(fd, name)
        except FileNotFoundError:  # its owner deleted it
            return None
        except (OSError, ValueError, LaterVersionError):
            self.num_unusable += 1
            return None

    def _locate(self) -> None:
        """Where the blocks of all sessions lie."""
        wanted = {label.namespace + label.identity for each in self.sessions for label in each.labels}
        found: dict[bytes, list[tuple[int, Place]]] = {}
        lock = threading.Lock()

        def visit(segment: ScanSegment, slot: int, check: SlotCheck) -> None:
            key = check.namespace + check.identity
            if check.state is SlotState.GOOD and key in wanted:
                with lock:
                    found.setdefault(key, []).append((check.written_ns, Place(segment, slot)))

        if wanted:
            Scan(self.view, self.segments, False, visit, lambda done, of: None).run()
        for each in self.sessions:
            for label in each.labels:
                copies = sorted(found.get(label.namespace + label.identity, ()), key=lambda copy: -copy[0])
                each.places.append(tuple(place for _, place in copies))

    @contextlib.contextmanager
    def _opened(self, name: str, *, writable: bool = False) -> Iterator[int]:
        fd = self.view.open_file(name, writable=writable)
        try:
            yield fd
        finally:
            close_fd(fd)

    def allocated_bytes(self) -> int:
        """What the folder and all in it takes, as `du` counts it. Raises ConfigError: it cannot be read."""
        try:
            return self.view.own_bytes() + sum(entry.allocated_bytes for entry in self.view.entries())
        except OSError as error:
            raise ConfigError(f"{self.path}: {error.strerror}") from error

    def has_ledger(self) -> bool:
        """Whether the folder counts what is written to it, for `tiers.nvme.max_writes`."""
        return any(entry.kind is EntryKind.WRITES for entry in self.view.entries())

    def codecs(self, geometry: Geometry) -> set[int]:
        """Those of the blocks in slots of a geometry. One read of each header, in one thread. Raises OSError."""
        codecs: set[int] = set()
        for each in self.segments:
            if each.geometry != geometry:
                continue
            with self._opened(each.name) as fd:
                for slot in slots_with_data(fd, geometry, each.num_slots):
                    raw = os.pread(fd, geometry.header_bytes, PAGE_BYTES + slot * geometry.slot_bytes)
                    if len(raw) == geometry.header_bytes:
                        fields = geometry.parse(np.frombuffer(raw, np.uint8)[None]).good_fields()
                        codecs.update(int(codec) for codec in fields["codec"])
        return codecs

    def find(self, name: str, key: str = "") -> FolderSession:
        """The session of that name; `key`: the hexadecimal beginning of its key, where several have it.

        Raises ConfigError: there is none, or several.
        """
        named = [each for each in self.sessions if each.record.name == name]
        found = [each for each in named if each.record.key().hex().startswith(key.lower())]
        if len(found) == 1:
            return found[0]
        shown = printable(name)
        if not named:
            raise ConfigError(f"session {shown}: there is none in {self.path}; `kvtier sessions list` names them")
        keys = ", ".join(each.record.key().hex()[:12] for each in (found or named)[:5])
        if not found:
            raise ConfigError(f"--key {printable(key)}: no session {shown} has such a key; there are {keys}")
        raise ConfigError(f"session {shown}: {len(found)} have that name, of different salts: add --key with {keys}")

    def delete(self, session: FolderSession) -> int:
        """Erase the blocks that no other session has, last first, then the record; how many blocks that were.

        The folder must be `owned`.

        Raises StoreError: some of it is still there; deleting again tries again.
        """
        others = {
            label.namespace + label.identity for each in self.sessions if each is not session for label in each.labels
        }
        num_erased = 0
        try:
            for label, places in reversed(list(zip(session.labels, session.places, strict=True))):
                if label.namespace + label.identity in others:
                    continue
                for place in places:
                    with self._opened(place.segment.name, writable=True) as fd:
                        erase_slot(fd, place.segment.geometry, place.slot)
                num_erased += bool(places)
            self.view.unlink(session_name(session.record.key()))
            self.view.sync()
        except OSError as error:
            message = f"deleting session {printable(session.record.name)}: {error.strerror}; some of it is still there"
            raise StoreError(error.errno, message, str(self.path)) from error
        self.sessions.remove(session)
        return num_erased

    def close(self) -> None:
        """Let go of the folder. Idempotent."""
        self.view.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
