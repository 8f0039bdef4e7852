"""The sessions in an nvme folder: one small file each, put in place whole, within their part of the budget."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
from collections.abc import Callable

from kvtier.errors import ClosedError, StoreError
from kvtier.log import logger
from kvtier.session_record import LaterVersionError, SessionRecord, decode, encode
from kvtier.size import size_and_bytes
from kvtier.stores.file_io import close_fd
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.folder_entries import NEW_SUFFIX, session_name
from kvtier.stores.nvme_layout import SESSION_ENTRY_BYTES
from kvtier.stores.segment import io_error
from kvtier.stores.slot_format import whole_pages

MAX_FILE_BYTES = 64 << 20  # 16 million tokens; a crafted file must not cost more memory


class SessionFiles:
    """Records of conversations in an owned folder, a file for each, named by its key.

    A name is in no path: a record says it. Of two threads that save, one waits for the other.

    Attributes:
        room_bytes: the most that the files may take, as `used_bytes` counts them; 0 for a folder that does not outlive
            the process.
        num_damaged: files that the last `load` left out, as they are damaged, cannot be read, or are open to others.
        num_future: those that it left out because they are of a later version.
    """

    def __init__(
        self,
        folder: OwnedFolder,
        room_bytes: int,
        *,
        sync: bool = False,
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        """Remove what an earlier process did not finish.

        Args:
            room_bytes: 0: nothing can be saved.
            sync: each save waits for the medium, twice: 0.6 ms here instead of 0.2, 4 ms and more on a busy disk.
            may_write: whether the limit to what is written has room.
        """
        self._folder, self._sync, self._may_write = folder, sync, may_write
        self.room_bytes = room_bytes
        self.num_damaged = self.num_future = 0
        self._lock = threading.Lock()
        self._closed = False
        for name in folder.session_files():
            if name.endswith(NEW_SUFFIX):
                with contextlib.suppress(OSError):  # then it is counted, and gone when that session is saved
                    folder.unlink(name)

    def used_bytes(self) -> int:
        """What the files take of `room_bytes`, each with what it makes the folder grow by."""
        return self._folder.sessions_bytes() + SESSION_ENTRY_BYTES * len(self._folder.session_files())

    def load(self) -> list[SessionRecord]:
        """All records that are whole, by file name. Reads every file.

        The others are left out, counted and stay where they are, with one warning. Raises: ClosedError.
        """
        with self._lock:
            self._check_open()
            records = []
            self.num_damaged = self.num_future = 0
            for name in self._folder.session_files():
                if name.endswith(NEW_SUFFIX):
                    continue
                try:
                    fd = self._folder.open_file(name)
                    try:
                        records.append(read_session(fd, name))
                    finally:
                        close_fd(fd)
                except LaterVersionError:
                    self.num_future += 1
                except (OSError, ValueError):
                    self.num_damaged += 1
        if self.num_damaged or self.num_future:
            logger.warning(
                "nvme folder %s: %d session files cannot be used (%d damaged, %d of a later version) and were left "
                "out: `kvtier fsck` names them",
                self._folder.path, self.num_damaged + self.num_future, self.num_damaged, self.num_future,
            )  # fmt: skip
        return records

    def save(self, record: SessionRecord) -> None:
        """Put the record in the place of an older one of its key, or of a damaged file of that name.

        Cost: 0.2 ms for 8,000 tokens, and what waiting for the medium takes. Counts in `tiers.nvme.max_writes`.

        Raises:
            StoreError: no room, or the file system's reason. The older record stands (where it was the last wait for
                the medium that failed, either does, and the new one from now on in this process).
            ClosedError.
        """
        data = encode(record)
        name = session_name(record.key())
        with self._lock:
            self._check_open()
            self._check_room(name, len(data))
            self._folder.count(whole_pages(len(data)))
            try:
                self._folder.replace_file(name, data, sync=self._sync)
            except OSError as error:
                raise io_error(error, "saving a session", self._folder.path / name) from error

    def delete(self, key: bytes) -> None:
        """Remove a session's file, if there is one; its space is free then.

        Raises StoreError: it may still be there. ClosedError. ValueError: `key` is not 32 bytes.
        """
        if len(key) != 32:
            raise ValueError(f"a session's key has 32 bytes, not {len(key)}")
        name = session_name(key)
        with self._lock:
            self._check_open()
            try:
                with contextlib.suppress(FileNotFoundError):
                    self._folder.unlink(name)
                    if self._sync:
                        self._folder.sync()
            except OSError as error:
                raise io_error(error, "deleting a session", self._folder.path / name) from error

    def close(self) -> None:
        """Save and delete nothing any more. Waits for a save that is on its way. Idempotent."""
        with self._lock:
            self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("nvme store: closed, and its sessions with it")

    def _check_room(self, name: str, num_bytes: int) -> None:
        # The older record is there until the new one is whole: both count.
        wanted_bytes = self.used_bytes() + whole_pages(num_bytes) + SESSION_ENTRY_BYTES
        if not self.room_bytes:
            why = "there is no room for any: set tiers.nvme.path, and raise tiers.nvme.budget if it is small"
        elif num_bytes > MAX_FILE_BYTES:
            why = f"it takes {size_and_bytes(num_bytes)}, and at most {size_and_bytes(MAX_FILE_BYTES)} are kept of one"
        elif wanted_bytes > self.room_bytes:
            why = (
                f"with it they would take {size_and_bytes(wanted_bytes)} in the folder, and "
                f"{size_and_bytes(self.room_bytes)} of tiers.nvme.budget are for them: delete sessions, or "
                "raise tiers.nvme.budget"
            )
        elif not self._may_write():
            why = "tiers.nvme.max_writes is used up: wait until older writes are out of its time, or raise it"
        else:
            return
        raise StoreError(errno.EDQUOT, f"nvme store: a session is not saved: {why}", str(self._folder.path / name))


def read_session(fd: int, name: str) -> SessionRecord:
    """The record in a file of that name, opened for reading.

    Raises:
        OSError: it cannot be read, or is no plain file.
        ValueError: it is damaged, open to others, or another session's; LaterVersionError.
    """
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a plain file")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ValueError("has a mode that lets others at it, so it is not read")
    if status.st_size > MAX_FILE_BYTES:
        raise ValueError(f"is of {size_and_bytes(status.st_size)}, more than any session")
    with open(fd, "rb", closefd=False) as file:
        record = decode(file.read(MAX_FILE_BYTES + 1))
    if session_name(record.key()) != name:
        raise ValueError("is of another session than its name says")
    return record
