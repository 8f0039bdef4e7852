"""Taking an exported session into an nvme folder, without its model: blocks under their labels, then the record."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.archive_header import ArchiveHeader
from kvtier.codecs.zstd import NUMBERS as ZSTD_NUMBERS
from kvtier.errors import ArchiveError, CapacityError, ConfigError, SessionExistsError
from kvtier.folder_session import shape_of
from kvtier.rate import Rate
from kvtier.session_archive import ArchiveReader
from kvtier.session_folder import SessionFolder
from kvtier.session_record import SessionRecord
from kvtier.size import size_and_bytes
from kvtier.stores.folder_entries import EntryKind
from kvtier.stores.folder_view import find_folder
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.nvme_layout import (
    FOLDER_BYTES,
    SESSION_ENTRY_BYTES,
    min_budget_bytes,
    segment_budget_bytes,
    sessions_room_bytes,
    sparse_overhead_bytes,
)
from kvtier.stores.slot_format import Geometry, whole_pages
from kvtier.terminal import printable
from kvtier.types import BlockShape, Compression, IoMode, Slot, SlotLabel

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import did."""

    name: str
    num_tokens: int
    num_written: int
    num_shared: int
    """Blocks that were there already."""
    budget_bytes: int


def import_session(
    path: Path,
    file: Path,
    *,
    name: str | None = None,
    budget_bytes: int | None = None,
    max_writes: Rate | None = None,
) -> Imported:
    """Take an exported session into a folder that nobody uses.

    It takes slots that hold nothing, then those of blocks that no session has, those of models used longest ago first;
    never a session's.

    Args:
        name: another one than the exported session's.
        budget_bytes: what `tiers.nvme.budget` says. None: what the folder's files take now; it does not grow then.
        max_writes: what `tiers.nvme.max_writes` says, needed where the folder counts what is written.

    Raises:
        ArchiveError: the file is no exported session, or its blocks are of another size or dtype than the folder's.
        SessionExistsError: there is one of that name and salt.
        CapacityError: no room within the budget, or within `max_writes`.
        ConfigError, FolderInUseError, StoreError.
        After each of them there is no such session; blocks that were written by then stay as those of no session.
    """
    with ArchiveReader(file) as reader:
        header = reader.header
        with _opened(path, header) as folder:
            plan = _Plan(folder, header, file, name, budget_bytes, max_writes)
        # The store takes the lock itself; between the two another process may have taken it: it then says so.
        store = plan.open()
        try:
            num_written = plan.write(store, reader.blocks())
            store.sessions.save(plan.record)
        finally:
            store.close()
    num_shared = header.num_blocks - num_written
    return Imported(plan.record.name, len(header.token_ids), num_written, num_shared, plan.budget_bytes)


def _opened(path: Path, header: ArchiveHeader) -> SessionFolder:
    try:
        find_folder(path)
    except ConfigError as error:
        raise ConfigError(f"{error}. {_use_it_once(header)}") from None
    return SessionFolder(path, owned=True)


def _use_it_once(header: ArchiveHeader) -> str:
    """The mend for a folder that has no block of the archive's size: nothing else tells how they lie there."""
    return (
        f"Mend: have a session there once, with the archive's model and block_tokens: {header.block_tokens} "
        "(tiered.session(name).generate(...)), or import with tiered.import_session, which knows the model"
    )


class _Plan:
    """What is to be written where, and with which limits. Making one changes nothing."""

    def __init__(
        self,
        folder: SessionFolder,
        header: ArchiveHeader,
        file: Path,
        name: str | None,
        budget_bytes: int | None,
        max_writes: Rate | None,
    ) -> None:
        now_s = time.time()
        try:
            self.record = SessionRecord(
                name or header.name, header.salt, header.namespace, header.block_tokens, header.token_ids,
                min(header.created_s, now_s), now_s, header.ttl_s, False,
                next((each.record.kv for each in folder.sessions if each.record.namespace == header.namespace), None),
            )  # fmt: skip
        except ValueError as error:
            raise ArchiveError(f"{file}: {error}") from None
        self._folder = folder.path
        self._check_new([each.record for each in folder.sessions])
        self._file, self._header = file, header
        geometry = self._geometry(folder, header)
        self._compression, element_bytes = _compression(folder, geometry)
        self._check_dtype(element_bytes)
        self._shape = self._block_shape(geometry, element_bytes)
        self._max_writes = max_writes
        if max_writes is None and folder.has_ledger():
            raise ConfigError(
                f"{folder.path} counts what is written to it: give --max-writes as the config's tiers.nvme.max_writes"
            )
        self.budget_bytes = self._budget(folder) if budget_bytes is None else budget_bytes
        if not self._holds(self.budget_bytes, folder):
            raise ConfigError(
                f"--budget {size_and_bytes(self.budget_bytes)}: {folder.path} takes "
                f"{size_and_bytes(folder.allocated_bytes())} and what its files may grow by, and what is beyond the "
                "budget would be removed: give what tiers.nvme.budget says"
            )

    def _check_new(self, records: list[SessionRecord]) -> None:
        if any(each.key() == self.record.key() for each in records):
            raise SessionExistsError(
                f"session {printable(self.record.name)}: {self._folder} has one of that name and salt: delete it "
                "first, or import with --name"
            )

    def _geometry(self, folder: SessionFolder, header: ArchiveHeader) -> Geometry:
        fitting = {each.geometry for each in folder.segments if each.geometry.payload_bytes == header.block_bytes}
        known = {
            place.segment.geometry
            for each in folder.sessions
            if each.record.namespace == header.namespace
            for places in each.places
            for place in places
        }
        if known and not known & fitting:
            raise ArchiveError(
                f"{self._file}: its blocks are of {header.block_bytes} bytes, those of the same model in {folder.path} "
                f"of {min(each.payload_bytes for each in known)}"
            )
        fitting = known & fitting or {each for each in fitting if _fits(each, header.block_tokens)}
        if not fitting:
            sizes = " or ".join(sorted({f"{each.geometry.payload_bytes}" for each in folder.segments}))
            those = f"those in {folder.path} are of {sizes} bytes" if sizes else f"{folder.path} has none yet"
            raise ArchiveError(
                f"{self._file}: its blocks are of {header.block_tokens} tokens and {header.block_bytes} bytes, and "
                f"{those}. {_use_it_once(header)}"
            )
        if len(fitting) > 1:
            raise ArchiveError(
                f"{self._file}: blocks of two models in {folder.path} are of its size; it cannot be told"
            )
        return fitting.pop()

    def _check_dtype(self, element_bytes: int) -> None:
        dtype = self._header.dtype.removeprefix("torch.")
        known_bytes = _ELEMENT_BYTES.get(dtype)
        is_other = known_bytes is not None and element_bytes not in (1, known_bytes)
        if is_other or (known_bytes and self._header.block_bytes % (known_bytes * self._header.block_tokens)):
            raise ArchiveError(f"{self._file}: its KV is of {dtype}, and blocks in {self._folder} are of another dtype")

    def _block_shape(self, geometry: Geometry, element_bytes: int) -> BlockShape:
        try:
            return shape_of(geometry, self._header.block_tokens, element_bytes)
        except ConfigError as error:
            raise ArchiveError(f"{self._file}: {error}") from None

    def _budget(self, folder: SessionFolder) -> int:
        """What has room for all that is there and the new record, and for no further segment."""
        if self._compression is not Compression.NONE:
            raise ConfigError(
                f"{folder.path} is compressed, so what it takes says nothing of its room: give --budget as the "
                "config's tiers.nvme.budget"
            )
        record_bytes = 2 * (whole_pages(4 * len(self._header.token_ids) + 4096) + SESSION_ENTRY_BYTES)
        budget_bytes = folder.allocated_bytes() + FOLDER_BYTES + record_bytes
        while not self._holds(budget_bytes - record_bytes, folder):
            budget_bytes += budget_bytes // 256 + 4096
        return budget_bytes

    def _holds(self, budget_bytes: int, folder: SessionFolder) -> bool:
        """Whether the store would remove no file with that budget."""
        if budget_bytes < min_budget_bytes(self._shape):
            return False
        wanted_bytes = FOLDER_BYTES + sessions_room_bytes(budget_bytes, self._shape)
        slots = {each.name: each for each in folder.segments}
        for entry in folder.view.entries():
            if entry.kind is EntryKind.SEGMENT:
                each = slots.get(entry.name)
                if each is None or each.geometry != Geometry.of(self._shape):
                    wanted_bytes += entry.allocated_bytes
                elif self._compression is Compression.NONE:
                    planned_bytes = segment_budget_bytes(each.num_slots, each.geometry.slot_bytes)
                    wanted_bytes += max(planned_bytes, entry.allocated_bytes)
                else:
                    wanted_bytes += entry.allocated_bytes + sparse_overhead_bytes(each.num_slots)
        return wanted_bytes <= budget_bytes

    def open(self) -> NvmeStore:
        """The folder's store. Raises what it does."""
        return NvmeStore(
            self._shape,
            self.budget_bytes,
            self._folder,
            True,
            io=IoMode.MMAP,  # measuring is for those who go on
            compression=self._compression,
            max_writes=self._max_writes,
        )

    def write(self, store: NvmeStore, blocks: Iterator[memoryview]) -> int:
        """Write those that are not there; how many. Raises CapacityError, ArchiveError, StoreError."""
        records = store.sessions.load()
        self._check_new(records)
        labels = self.record.labels()
        there = store.find_all(labels)
        slots = self._slots(store, [*labels, *(label for each in records for label in each.labels())])
        num_missing = sum(slot is None for slot in there)
        if num_missing > len(slots):
            raise CapacityError(
                f"{num_missing} blocks of session {printable(self.record.name)} are to be written to {self._folder}, "
                f"and {len(slots)} find room within {size_and_bytes(self.budget_bytes)}: give --budget as the "
                "config's tiers.nvme.budget, or delete sessions"
            )
        for label, slot, data in zip(labels, there, blocks, strict=True):
            if slot is None:
                if not store.writes.allows():
                    raise CapacityError(f"--max-writes {self._max_writes} is used up: import later")
                block = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                store.write(slots.pop(0), block, label)
        return num_missing

    @staticmethod
    def _slots(store: NvmeStore, kept: list[SlotLabel]) -> list[Slot]:
        """Those that may be written, in this order: empty ones, then blocks of no session."""
        keys = {(label.namespace, label.identity) for label in kept}
        found, held_back = store.found(), store.held_back()
        late = dict.fromkeys([*held_back])
        of_sessions = {slot for slot, each in found.items() if (each.namespace, each.identity) in keys}
        slots = [Slot(slot) for slot in range(store.num_slots) if slot not in late]
        return [slot for slot in [*slots, *late] if slot not in of_sessions]


def _fits(geometry: Geometry, block_tokens: int) -> bool:
    try:
        shape_of(geometry, block_tokens)
    except ConfigError:
        return False
    return True


def _compression(folder: SessionFolder, geometry: Geometry) -> tuple[Compression, int]:
    """How the folder's blocks of a geometry are stored, and the size of their elements; 1 where nothing tells."""
    codecs = folder.codecs(geometry)
    element_bytes = next((size for size, number in ZSTD_NUMBERS.items() if number in codecs), None)
    return (Compression.NONE, 1) if element_bytes is None else (Compression.ZSTD, element_bytes)
