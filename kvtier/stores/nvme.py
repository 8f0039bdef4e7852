"""The nvme tier: checked blocks in preallocated segment files of a folder that one process owns."""

from __future__ import annotations

import dataclasses
import errno
import functools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvtier.errors import ClosedError, StoreError
from kvtier.rate import Rate
from kvtier.stores.base import EndOfSlices, Store
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.folder import OwnedFolder
from kvtier.stores.io_choice import choose_io, make_io
from kvtier.stores.namespaces import Namespaces
from kvtier.stores.nvme_budget import check_budgets, sessions_kept_bytes
from kvtier.stores.nvme_layout import BOOKKEEPING_BYTES, RESERVE_FREE_FRAC, min_budget_bytes, sessions_room_bytes
from kvtier.stores.nvme_open import held_back, open_space
from kvtier.stores.segment import NO_SPACE_ERRNOS, Segment, io_error, no_space
from kvtier.stores.session_files import SessionFiles
from kvtier.stores.slot_format import Geometry, Payload
from kvtier.stores.slot_headers import SlotHeaders
from kvtier.stores.slot_index import FoundSlot, SlotIndex
from kvtier.stores.slot_payload import PayloadCodec
from kvtier.stores.slot_reader import SlotReader
from kvtier.stores.space_limits import SpaceLimits, expected_frac
from kvtier.stores.write_ledger import FolderLedger
from kvtier.types import BlockShape, Compression, IoMode, Slot, SlotLabel, Survives, Tier
from kvtier.wear import WriteMeter

__all__ = ["NvmeStore", "min_budget_bytes"]

_DAY_S = 86400.0
_FIND_THREADS = 8


class NvmeStore(Store):
    """Slots of a header and a block, each in whole pages, in files `segment-00000.kvt` … of `folder`.

    The format is docs/nvme-format.md. Space is taken from the disk segment by segment, when a slot of the next one is
    first written, and only while `reserve_free_frac` of the disk stays free. `du` of the folder never exceeds
    `budget_bytes`.

    Every slice has an xxh3 checksum, made from the bytes handed to `write`, kept in memory, and compared at every read
    with the bytes that the caller will use. Those of blocks that an earlier process wrote come from their headers, when
    the folder is opened. Only blocks written with a label have a header, and only in a `persistent` folder.

    Cost: a write is one hash pass (7 GB/s), one `pwrite` of the block and up to two of a page; a read one copy out of
    the page cache, or by O_DIRECT none where the buffer lies on pages, and one hash pass. Joined blocks go both ways
    by groups of slices, about a mebibyte each, with a copy more (15 GB/s). All of it releases the GIL.
    Opening reads the header of each slot. Memory: 8 bytes a slice, about 400 bytes a labelled slot, a group for each
    thread that moves joined blocks, and at most `page_cache_bytes` for the files.

    Attributes:
        io: what was chosen of `mmap` and `direct`, and why.
        writes: how much was written, and whether a move may write more.
        sessions: records of conversations in the folder. One that is not `persistent` has no room for any: `load` finds
            none, `save` raises StoreError.
    """

    def __init__(
        self,
        shape: BlockShape,
        budget_bytes: int,
        folder: Path,
        persistent: bool,
        segment_bytes_max: int = 1 << 30,
        reserve_free_frac: float = RESERVE_FREE_FRAC,
        survives: Survives = Survives.KILL,
        namespace_ttl_s: float = 14 * _DAY_S,
        io: IoMode = IoMode.AUTO,
        page_cache_bytes: int = 256 << 20,
        compression: Compression = Compression.NONE,
        max_writes: Rate | None = None,
    ) -> None:
        """Own the folder and find what is in it; allocate nothing yet.

        Args:
            budget_bytes: ceiling for the folder's allocated bytes, file system overhead included. Files beyond it are
                removed, those of the namespaces opened longest ago first.
            folder: made if absent (0700). Without `persistent` it is removed at close.
            persistent: the files stay after close, and labelled blocks can be found by the next process.
            segment_bytes_max: how much is taken from the disk at a time, at most; one slot if that is larger.
            reserve_free_frac: fraction of the disk that always stays free.
            survives: whether writes are flushed to the medium, which costs what the disk needs for it.
            namespace_ttl_s: blocks of namespaces that were not opened for so long are overwritten first.
            io: how files are read and written. `auto` measures for less than a second where the budget is worth it.
            page_cache_bytes: the most host memory for the files: page cache, or staging where I/O is direct.
            compression: of what is written; whatever is found can be read.
            max_writes: for `writes`, which says when it is reached; in a persistent folder over all processes. The
                store itself refuses nothing. `auto` measures, which writes, only where that is little of it.

        Raises:
            BudgetError: no room for one slot, less page cache than the least, or `max_writes` of less than a slot.
            ConfigError: also for a shape or a file system that cannot be compressed.
            FolderInUseError, ConfigError: the folder cannot be had; nothing in it was touched.
            StoreError: the folder can be had, but the disk fails.
        """
        self.tier = Tier.NVME
        self.shape = shape
        self._geometry = Geometry.of(shape)
        self.slot_bytes = self._geometry.slot_bytes
        self._codec = PayloadCodec(shape, compression)
        self._reader = SlotReader(shape, self._codec)
        self.compression = compression
        limits = SpaceLimits(budget_bytes, segment_bytes_max, reserve_free_frac, expected_frac(shape, compression))
        check_budgets(shape, budget_bytes, max_writes)
        self.budget_bytes = budget_bytes
        self.persistent = persistent
        syncs = persistent and survives is Survives.POWER_LOSS
        self._folder = OwnedFolder(folder, keep_files=persistent)
        self.folder = self._folder.path
        self._index = SlotIndex()
        self._closed = False
        try:
            if limits.is_sparse:
                self._folder.check_holes()
            self.writes = self._meter(max_writes, self.slot_bytes + BOOKKEEPING_BYTES)
            self._folder.count = self.writes.wrote
            room_bytes = min(budget_bytes, limits.free_bytes(self.folder))
            self.io = choose_io(io, self.folder, room_bytes, shape.slice_bytes, may_write=self.writes.spend)
            self._folder.io = self._io = make_io(self.io.mode, page_cache_bytes)
            self.sessions = self._open_sessions(syncs)
            kept_bytes = sessions_kept_bytes(shape, budget_bytes, self.sessions, self.folder)
            limits = dataclasses.replace(limits, sessions_bytes=kept_bytes)
            self._namespaces = Namespaces(self._folder, namespace_ttl_s)
            self._space = open_space(self._folder, self._geometry, limits, self._namespaces, self._index, sync=syncs)
        except BaseException as error:  # a Ctrl-C too: the lock is given back
            self._folder.close(keep_files=persistent)
            if isinstance(error, OSError) and not isinstance(error, StoreError):
                raise io_error(error, "opening", self.folder) from error
            raise
        self._headers = SlotHeaders(self._geometry, self._index, self._namespaces, syncs)
        self.num_slots = self._space.num_slots

    def _meter(self, max_writes: Rate | None, move_bytes: int) -> WriteMeter:
        if max_writes is not None and self.persistent:
            return WriteMeter(max_writes, move_bytes, FolderLedger(self._folder))
        self._folder.forget_writes()  # nobody goes on with the count, and it would be short
        return WriteMeter(max_writes, move_bytes)

    def _open_sessions(self, syncs: bool) -> SessionFiles:
        room_bytes = sessions_room_bytes(self.budget_bytes, self.shape) if self.persistent else 0
        return SessionFiles(self._folder, room_bytes, sync=syncs, may_write=self.writes.allows)

    # --- the store's interface

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        """As the interface says; with a label, in a persistent folder, a later process can find the block.

        A label whose content is too long for a header (positions that jump at each token) is left out: the block is
        then found by nobody. Raises ValueError for one of other lengths than 32 bytes; nothing was changed.
        """
        self._check_open()
        self.check_slot(slot)
        self.check_block(block)
        if label is not None and not self._geometry.fits(label):
            label = None
        num_bytes, parts, payload = self._codec.encode(block.numpy())
        self._index.begin(slot)  # before the first byte changes: from here to the end nothing is readable
        try:
            if self._index.is_on_disk(slot):  # before its pages change too
                self._headers.take_back(slot, *self._space.locate(slot))
            segment, start = self._space.reserve(slot, num_bytes)
            at = start + self._geometry.header_bytes
            for part in parts:
                segment.write(at, part)
                at += part.nbytes
            if label is not None and self.persistent:
                self._headers.write(slot, label, payload, segment, start)
        except StoreError:
            raise
        except OSError as error:
            path = self._space.path_of(slot)
            if error.errno in NO_SPACE_ERRNOS:  # copy-on-write file systems allocate again
                raise no_space(error, path, self._space.backed_slots()) from error
            raise io_error(error, f"writing slot {slot}", path) from error
        self._index.readable(slot, payload)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        self.check_block(out)
        self._reader.read(slot, *self._written(slot), out.numpy())

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.check_layer(layer)
        self.check_buffer(out, self.shape.slice_bytes)
        self._reader.read_slice(slot, *self._written(slot), layer, out.numpy())

    def read_slices(self, slots: Sequence[Slot], layer: int, out: torch.Tensor) -> list[StoreError | None]:
        return self.begin_slices(slots, layer, out)()

    def begin_slices(self, slots: Sequence[Slot], layer: int, out: torch.Tensor) -> EndOfSlices:
        """As the interface says; past the page cache by two system calls for all where the kernel takes that."""
        self.check_layer(layer)
        self.check_buffer(out, len(slots) * self.shape.slice_bytes)
        try:
            places = [(slot, *self._written(slot)) for slot in slots]
        except StoreError:  # of one of them: by the interface each is told what is its own
            return functools.partial(super().read_slices, slots, layer, out)
        return self._reader.begin_slices(places, self._io, layer, out.numpy())

    @property
    def reads_together(self) -> bool:
        """Whether slices as they are written are read together for less than one by one, and several such reads at a
        time by a thread. Encoded ones are not: decoding takes a thread each."""
        return (
            self._io.reads_together and self.compression is Compression.NONE and not self.shape.slice_bytes % PAGE_BYTES
        )

    def used_bytes(self) -> int:
        """Allocated bytes of the folder and all that is in it, as `du` counts them; 0 after close."""
        return self._space.used_bytes()

    def check_integrity(self) -> None:
        if self._closed:
            return
        self._space.check_integrity()
        self._index.check_integrity(self._space.backed_slots(), self.shape.num_layers)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.sessions.close()
        self._space.close()
        self.writes.close()
        self._index = SlotIndex()
        self._io.close()
        self._folder.close(keep_files=self.persistent)

    # --- what outlives the process

    def find(self, label: SlotLabel) -> Slot | None:
        """The slot that holds this block whole, written by this process or an earlier one.

        Namespace, identity and content are equal byte by byte, and the header on disk verifies. A header that does not,
        or cannot be read, is a miss. The slot's bytes are checked when they are read.

        Cost: a look-up; for a hit, one read of the header. Raises: ClosedError.
        """
        self._check_open()
        if not self.persistent:
            return None
        self._namespaces.touch(label.namespace)
        hit = self._index.find(label.namespace + label.identity)
        if hit is None:
            return None
        slot, generation = Slot(hit[0]), hit[1]
        held = self._headers.read(generation, *self._space.locate(slot))
        if held != label or self._index.find(label.namespace + label.identity) != hit:
            return None
        return slot

    def find_all(self, labels: Sequence[SlotLabel]) -> list[Slot | None]:
        """As `find` for each, headers read by several threads: of a session's blocks, say.

        Cost: 0.4 ms a hit on a cold disk where `find` takes 1 to 1.4 ms each. Raises: ClosedError.
        """
        self._check_open()
        if not self.persistent or not labels:
            return [None] * len(labels)
        for namespace in {label.namespace for label in labels}:
            self._namespaces.touch(namespace)  # here: its bookkeeping is one thread's
        with ThreadPoolExecutor(min(_FIND_THREADS, len(labels)), thread_name_prefix="kvtier-find") as pool:
            return list(pool.map(self.find, labels))

    def copies(self, labels: Iterable[SlotLabel]) -> list[Slot]:
        """All slots in which a later process could find one of these blocks: what to erase, to be rid of them.

        More than `find` gives: a block that was written again has older copies, one of which is found once the newest
        is gone. Some of the slots may hold what is in use. O(slots). Raises: ClosedError.
        """
        self._check_open()
        return [Slot(slot) for slot in self._index.copies({label.namespace + label.identity for label in labels})]

    def found(self) -> Mapping[int, FoundSlot]:
        """What the open found and nobody has overwritten or forgotten since, by slot; O(slots). Raises ClosedError."""
        self._check_open()
        return self._index.found()

    def label(self, slot: Slot) -> SlotLabel | None:
        """The label in a slot's header, if the slot can be found and the header verifies. One read of the header."""
        self._check_open()
        self.check_slot(slot)
        generation = self._index.generation(slot)
        return None if generation is None else self._headers.read(generation, *self._space.locate(slot))

    def put_label(self, slot: Slot, label: SlotLabel) -> None:
        """Write a slot's header behind its bytes, which lie there whole and without one: it can be found from now on.

        Cost: a write of the header, and two waits for the medium with `survives: power_loss`. If the slot is written
        meanwhile (this call hung), its new bytes are not found by the old label: not here, and elsewhere their
        checksums are not those of the header.

        Raises:
            StoreError: the slot holds nothing readable, or the header could not be written: it is not found.
        """
        segment, start, payload = self._written(slot)
        if not self.persistent:
            return
        try:
            self._headers.write(slot, label, payload, segment, start - self._geometry.header_bytes, is_there=True)
        except StoreError:
            raise
        except OSError as error:
            raise io_error(error, f"labelling slot {slot}", self._space.path_of(slot)) from error

    def forget(self, slot: Slot) -> None:
        """No process finds the slot again; its bytes stay readable in this one.

        Raises: StoreError, if the header on disk could not be taken back: a later process may still find the slot.
        """
        self._check_open()
        self.check_slot(slot)
        self._index.forget(slot)
        if not self._index.is_on_disk(slot):
            return
        segment, start = self._space.locate(slot)
        try:
            self._headers.take_back(slot, segment, start, at_once=True)
        except OSError as error:
            raise io_error(error, f"forgetting slot {slot}", segment.path) from error

    def erase(self, slot: Slot) -> None:
        """As `forget`, and none of the slot's bytes is left in the file: nothing is readable, in any process.

        The slot can be written again. Files get no larger; with compression they get smaller. What lies on the medium
        under a file that no longer shows it is the file system's and the disk's matter. A kill in the middle leaves a
        slot that nobody finds.

        Cost: one call where the file system can (ext4, xfs, btrfs), else a write of a slot.

        Raises: StoreError: some of the bytes may still be there; it cannot be read here, and unless the header could
            not be taken back no later process finds it.
        """
        self._check_open()
        self.check_slot(slot)
        self._index.begin(slot)
        try:
            if self._index.is_on_disk(slot):
                self._headers.take_back(slot, *self._space.locate(slot), at_once=True)
            self._space.erase(slot)
        except StoreError:
            raise
        except OSError as error:
            raise io_error(error, f"erasing slot {slot}", self._space.path_of(slot)) from error

    def held_back(self) -> list[Slot]:
        """The slots to hand out last, in this order: what they hold, or would cost, may still be of use.

        Found blocks by namespace, those opened longest ago first; among them the slots that come to be only when a file
        of another model or block size is given up. What is older than the time to live is not held back. O(slots).
        """
        self._check_open()
        return [Slot(slot) for slot in held_back(self._space, self._namespaces, self._index)]

    @property
    def num_found(self) -> int:
        """Blocks of an earlier process that can be found."""
        return self._index.num_found

    def num_in(self, namespace: bytes) -> int:
        """How many slots of a namespace have a label."""
        return self._index.num_in(namespace)

    def slots_of(self, namespace: bytes) -> list[Slot]:
        """Those slots, the oldest first. O(labelled slots)."""
        return [Slot(slot) for slot in self._index.slots_of(namespace)]

    @property
    def num_quarantined(self) -> int:
        """Slots that the open did not trust: torn, damaged, of a later version, or an older copy of another."""
        return self._index.num_quarantined

    # --- more than the interface

    def ceiling_bytes(self) -> int:
        """What `used_bytes` can reach now: the budget, or less where the disk has no room for further segments.

        Raises: ClosedError.
        """
        self._check_open()
        return self._space.ceiling_bytes()

    def reachable_slots(self) -> int:
        """How many slots, from 0, have backing, or come to have it by whole segments that the disk has room for now.

        Makes none. To be asked once a full disk was told of; what it says may be gone when it is used. One statvfs.
        """
        return self._space.reachable_slots()

    def peak_bytes(self) -> int:
        """The most that `used_bytes` ever was."""
        return self._space.peak_bytes()

    def host_bytes(self) -> int:
        """Host memory held for the files now: at most `page_cache_bytes` of page cache, or staging; and
        `joined_room_bytes` for each thread that has moved joined blocks."""
        return self._io.host_bytes() + self._codec.rooms_bytes()

    def prefetch(self, slot: Slot, layer: int) -> None:
        """Ask for one slice to be in the page cache soon, if there is one; returns at once. Errors as `read_slice`."""
        self.check_layer(layer)
        segment, start, payload = self._written(slot)
        offset_bytes, num_bytes = payload.place(layer, self.shape.slice_bytes)
        segment.will_need(start + offset_bytes, num_bytes)

    @property
    def stored_frac(self) -> float:
        """Bytes stored per byte of KV, of all that this process wrote; 1.0 before it wrote anything."""
        return self._codec.stored_frac

    def _written(self, slot: Slot) -> tuple[Segment, int, Payload]:
        """The slot's segment, where its slices begin, and what they are."""
        self._check_open()
        self.check_slot(slot)
        payload = self._index.payload(slot)
        if payload is None:
            raise StoreError(errno.ENODATA, f"nvme store: slot {slot} holds nothing readable", str(self.folder))
        segment, start = self._space.locate(slot)
        return segment, start + self._geometry.header_bytes, payload

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("nvme store: closed")
