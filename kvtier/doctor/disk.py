"""What the disk of a folder does: requests at random places of a scratch file, by the nvme store's own ways of I/O."""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvtier.doctor.answer import NotMeasured, attempt, in_words
from kvtier.doctor.disk_rates import DEPTHS, MODES, REQUEST_BYTES, Access, DiskRate, DiskSpeed
from kvtier.doctor.watch import Watch
from kvtier.stores.buffered_io import BufferedIo
from kvtier.stores.direct_io import DirectIo
from kvtier.stores.file_io import PAGE_BYTES, Bytes, FileIo, OpenFile
from kvtier.stores.nvme_layout import RESERVE_FREE_FRAC
from kvtier.stores.scratch import move_at, reopened, scratch_file, try_io
from kvtier.stores.staging import page_aligned
from kvtier.system import (
    can_preallocate,
    disk_room_bytes,
    filesystem_kind,
    io_counters,
    is_memory_backed,
    memory_available_bytes,
)
from kvtier.types import IoMode

_MIB = 1 << 20
_LEAST_SCRATCH_BYTES = 4 * _MIB
_NUM_ROUNDS = 3
_MEMORY_SHARE = 8  # of what is available, where files are memory


@dataclass(frozen=True, slots=True)
class DiskPlan:
    """Limits of one measurement. None is ever exceeded, but by the requests that are under way when time is up."""

    scratch_bytes: int
    """Disk space taken, at most."""
    cell_write_bytes: int
    """Bytes written for one rate of writes, at most."""
    read_s: float
    """For one rate, in each of the rounds."""
    write_s: float
    fill_s: float
    most_s: float
    """For all of it."""
    estimate_s: float

    @property
    def most_written_bytes(self) -> int:
        """Bytes written in all, at most."""
        return self.scratch_bytes + len(MODES) * len(REQUEST_BYTES) * len(DEPTHS) * self.cell_write_bytes


FULL = DiskPlan(256 * _MIB, 64 * _MIB, read_s=0.17, write_s=0.5, fill_s=5.0, most_s=36.0, estimate_s=17.0)
QUICK = DiskPlan(64 * _MIB, 32 * _MIB, read_s=0.03, write_s=0.1, fill_s=1.0, most_s=5.0, estimate_s=4.0)


def measure_disk(folder: Path, plan: DiskPlan, watch: Watch) -> DiskSpeed:
    """Measure the disk of `folder`, which must exist. The scratch file has no name, and its space is free at the end.

    5 % of the disk always stay free, as for the nvme tier. Raises nothing: what goes wrong is in the rows.

    Cost: at most `plan`.
    """
    watch.phase("disk", plan.estimate_s, 1 + (_NUM_ROUNDS + 1) * len(_cells(Access.READ)))
    room = attempt(lambda: _room_bytes(folder, plan))
    if isinstance(room, NotMeasured):
        return _nothing(room)
    if room < _LEAST_SCRATCH_BYTES:
        return _nothing(NotMeasured(f"only {room // _MIB} MiB may be taken there: 5 % of the disk always stays free"))
    try:
        with _scratch(folder) as file:
            return _Bench(file, folder, plan, watch).run(room)
    except (OSError, MemoryError, RuntimeError) as error:
        return _nothing(NotMeasured(f"a scratch file in {folder}: {in_words(error)}"))


def _room_bytes(folder: Path, plan: DiskPlan) -> int:
    room = min(plan.scratch_bytes, disk_room_bytes(folder, RESERVE_FREE_FRAC))
    if is_memory_backed(filesystem_kind(folder)):
        room = min(room, memory_available_bytes() // _MEMORY_SHARE)
    return room // _MIB * _MIB


_Cell = tuple[Access, int, int, IoMode]


def _cells(access: Access) -> list[_Cell]:
    """The modes take turns, so that what else the machine does hits both."""
    return list(itertools.product([access], REQUEST_BYTES, DEPTHS, MODES))


def _nothing(why: NotMeasured) -> DiskSpeed:
    rates = [DiskRate(mode, access, size, depth, why, why) for of in Access for access, size, depth, mode in _cells(of)]
    return DiskSpeed(tuple(rates), why, why, 0, 0)


@contextmanager
def _scratch(folder: Path) -> Iterator[OpenFile]:
    try:
        file = scratch_file(folder)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
            raise
        # No unnamed files here (NFS, old overlays): one that loses its name at once.
        fd, name = tempfile.mkstemp(prefix=".kvtier-doctor-", dir=folder)
        file = OpenFile(fd, Path(name))
        os.unlink(name)
    try:
        yield file
    finally:
        with suppress(OSError):
            os.ftruncate(file.fd, 0)  # the space is free now, whoever still holds the descriptor


@dataclass(frozen=True, slots=True)
class _Round:
    rate: float
    disk_frac: float | NotMeasured
    core_rate: float | None = None
    """None: nothing was told, or too little to measure."""


class _Bench:
    """One scratch file, its two ways of I/O, and what may still be written."""

    def __init__(self, file: OpenFile, folder: Path, plan: DiskPlan, watch: Watch) -> None:
        self.file, self.folder, self.plan, self.watch = file, folder, plan, watch
        self.deadline_s = time.monotonic() + plan.most_s
        self.written_bytes = self.filled_bytes = 0
        self.fill_rate = 0.0
        self.ways: dict[IoMode, tuple[FileIo, OpenFile]] = {}
        self.refused: dict[IoMode, NotMeasured] = {}
        self.memory: Bytes = page_aligned(max(DEPTHS) * max(REQUEST_BYTES)).numpy()
        piece = random.randbytes(_MIB)  # not compressible: some disks and file systems would
        for at in range(0, self.memory.nbytes, _MIB):
            self.memory.data[at : at + _MIB] = piece

    def run(self, room_bytes: int) -> DiskSpeed:
        file = self.file
        preallocates = attempt(lambda: can_preallocate(file.fd))
        if preallocates is True:  # elsewhere it would be written, not reserved
            os.posix_fallocate(file.fd, 0, room_bytes)
        plain = reopened(file)
        direct = DirectIo(max(DEPTHS) * max(REQUEST_BYTES))
        buffered = BufferedIo(2 * self.plan.scratch_bytes)
        try:
            buffered.prepare(plain.fd)
            self.ways[IoMode.MMAP] = (buffered, plain)
            try:
                self.written_bytes += PAGE_BYTES
                try_io(direct, file)
                self.ways[IoMode.DIRECT] = (direct, file)
            except OSError as error:
                kind = filesystem_kind(self.folder)
                self.refused[IoMode.DIRECT] = NotMeasured(f"{kind} refuses O_DIRECT: {in_words(error)}")
            self._fill(*self.ways.get(IoMode.DIRECT, self.ways[IoMode.MMAP]), room_bytes)
            self.watch.step()
            # In rounds over all of them: a disk that another process slows down for a while is slow for all alike.
            reads = self._rounds(_cells(Access.READ), _NUM_ROUNDS)
            writes = self._rounds(_cells(Access.WRITE), 1)
        finally:
            buffered.close()
        takes_direct: Literal[True] | NotMeasured = True
        if IoMode.DIRECT in self.refused:
            takes_direct = self.refused[IoMode.DIRECT]
        return DiskSpeed((*reads, *writes), takes_direct, preallocates, self.filled_bytes, self.written_bytes)

    def _fill(self, io: FileIo, file: OpenFile, room_bytes: int) -> None:
        """Write until there is enough or time is up, each piece onto the disk."""
        started_s, done = time.monotonic(), 0
        while done < room_bytes and time.monotonic() < started_s + self.plan.fill_s:
            piece = self.memory[: min(4 * _MIB, room_bytes - done)]
            self.written_bytes += piece.nbytes  # before: whatever happens, they count
            io.write(file, done, piece)
            os.fdatasync(file.fd)
            done += piece.nbytes
        self.filled_bytes, self.fill_rate = done, done / (time.monotonic() - started_s)

    def _rounds(self, cells: list[_Cell], num_rounds: int) -> list[DiskRate]:
        rounds: dict[_Cell, list[_Round]] = {cell: [] for cell in cells}
        failed: dict[_Cell, NotMeasured] = {}
        for _ in range(num_rounds):
            for cell in cells:
                call: Callable[[], _Round | NotMeasured] = functools.partial(self._round, *cell)
                found = failed[cell] if cell in failed else attempt(call)
                if isinstance(found, NotMeasured):
                    failed[cell] = found
                else:
                    rounds[cell].append(found)
                self.watch.step()
        return [_rate(cell, rounds[cell], failed.get(cell)) for cell in cells]

    def _round(self, access: Access, size: int, depth: int, mode: IoMode) -> _Round | NotMeasured:
        num_places = self.filled_bytes // size
        if mode in self.refused:
            return self.refused[mode]
        if num_places < depth:
            return NotMeasured(
                f"the scratch file of {self.filled_bytes // _MIB} MiB is too small for so many at a time"
            )
        if time.monotonic() > self.deadline_s:
            return NotMeasured(f"time was up after {self.plan.most_s:g} s: the disk is slow, or busy")
        buffers = [self.memory[i * size : (i + 1) * size] for i in range(depth)]
        self._drop_cache()
        measure = self._read if access is Access.READ else self._write
        return measure(*self.ways[mode], buffers, num_places)

    def _read(self, io: FileIo, file: OpenFile, buffers: list[Bytes], num_places: int) -> _Round:
        places = random.sample(range(num_places), num_places)
        before, worked_s = io_counters(), time.process_time()
        moved = move_at(io, file, places, buffers, self.plan.read_s)
        worked_s = time.process_time() - worked_s  # of all threads: nothing else runs in this process
        core_rate = moved.num_bytes / worked_s if worked_s > 0 else None
        return _Round(moved.num_bytes / moved.elapsed_s, _disk_frac("read_bytes", before, moved.num_bytes), core_rate)

    def _write(self, io: FileIo, file: OpenFile, buffers: list[Bytes], num_places: int) -> _Round | NotMeasured:
        """Over what was written before: the first write into preallocated space is another, slower thing."""
        plan, size = self.plan, buffers[0].nbytes
        # Through the page cache all of it has to be waited for afterwards: no more than the disk takes meanwhile.
        most_bytes = max(min(plan.cell_write_bytes, int(self.fill_rate * plan.write_s)), len(buffers) * size)
        num = min(num_places, most_bytes // size, (plan.most_written_bytes - self.written_bytes) // size)
        if num < len(buffers):
            return NotMeasured(f"the {plan.most_written_bytes // _MIB} MiB that may be written are")
        before = io_counters()
        self.written_bytes += num * size  # before, as above
        started_s = time.monotonic()
        moved = move_at(io, file, random.sample(range(num_places), num), buffers, plan.write_s, is_write=True)
        os.fdatasync(file.fd)
        elapsed_s = time.monotonic() - started_s
        self.written_bytes -= num * size - moved.num_bytes
        return _Round(moved.num_bytes / elapsed_s, _disk_frac("write_bytes", before, moved.num_bytes))

    def _drop_cache(self) -> None:
        """Dirty pages cannot be dropped, so they are written first."""
        os.fdatasync(self.file.fd)
        os.posix_fadvise(self.file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _rate(cell: _Cell, rounds: list[_Round], failed: NotMeasured | None) -> DiskRate:
    """The median of the rounds that there are; one that failed counts only where there is no other."""
    access, size, depth, mode = cell
    if not rounds:
        why = failed or NotMeasured("not tried")
        return DiskRate(mode, access, size, depth, why, why)
    fracs = [found.disk_frac for found in rounds if not isinstance(found.disk_frac, NotMeasured)]
    frac = statistics.median(fracs) if fracs else rounds[0].disk_frac
    rate = DiskRate(mode, access, size, depth, statistics.median(found.rate for found in rounds), frac)
    core_rates = [found.core_rate for found in rounds if found.core_rate is not None]
    return dataclasses.replace(rate, core_bytes_per_s=statistics.median(core_rates)) if core_rates else rate


def _disk_frac(key: str, before: dict[str, int], num_bytes: int) -> float | NotMeasured:
    after = io_counters()
    if key not in before or key not in after:
        return NotMeasured("the kernel keeps no account (/proc/self/io)")
    return (after[key] - before[key]) / num_bytes
