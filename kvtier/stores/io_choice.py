"""Which way of I/O an nvme store takes, by the config or by measuring, and why."""

from __future__ import annotations

import errno
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvtier.errors import ConfigError
from kvtier.size import size_and_bytes, size_words, speed_words
from kvtier.stores.buffered_io import BufferedIo
from kvtier.stores.direct_io import DirectIo
from kvtier.stores.file_io import PAGE_BYTES, Bytes, FileIo, OpenFile
from kvtier.stores.scratch import move_at, reopened, scratch_file, try_io
from kvtier.stores.staging import page_aligned
from kvtier.system import filesystem_kind, is_memory_backed
from kvtier.types import IoMode

# Below it the files fit in a few page caches, and neither a test nor a small temporary folder should wait for figures.
MEASURED_FROM_BYTES = 1 << 30
MEASURING_BYTES = 32 << 20  # what measuring writes at most
_MIN_SCRATCH_BYTES = 4 << 20
_MAX_READ_BYTES = 1 << 20
_WRITE_S, _ROUND_S, _NUM_ROUNDS, _NUM_THREADS = 0.25, 0.08, 3, 8  # at most 0.25 + 2 x 3 x 0.08 s in all
# A tie goes to direct: it spends no page cache and no copy.
_BUFFERED_MUST_BE = 1.1


@dataclass(frozen=True, slots=True)
class IoChoice:
    """`mmap` or `direct`, and why, in words for people."""

    mode: IoMode
    reason: str
    read_bytes_s: float | None = None
    """Of cold random reads, as measured; None: they were not."""


def make_io(mode: IoMode, host_budget_bytes: int) -> FileIo:
    """The way of this mode, which is not `auto`. Raises BudgetError: less host memory than its least."""
    return DirectIo(host_budget_bytes) if mode is IoMode.DIRECT else BufferedIo(host_budget_bytes)


def choose_io(
    wanted: IoMode,
    folder: Path,
    room_bytes: int,
    slice_bytes: int,
    may_write: Callable[[int], bool] = lambda num_bytes: True,
) -> IoChoice:
    """What the config says; for `auto`, the faster one at reading random slices of a scratch file in `folder`.

    Args:
        room_bytes: what may be taken on the disk now, by budget and free space.
        may_write: told how many bytes measuring writes, once it is wanted; False: do not.

    Raises:
        ConfigError: `direct` is wanted, and the file system refuses it.

    Cost: `auto` takes under a second (0.2 s on a fast disk) and 32 MiB of disk for that time, in a file without a name
    that no crash leaves behind; nothing below `MEASURED_FROM_BYTES`.
    """
    if wanted is IoMode.MMAP:
        return IoChoice(IoMode.MMAP, "tiers.nvme.io says so")
    kind = filesystem_kind(folder)
    if wanted is IoMode.AUTO and is_memory_backed(kind):
        return IoChoice(IoMode.MMAP, f"files on {kind} are memory already")
    if wanted is IoMode.AUTO and room_bytes < MEASURED_FROM_BYTES:
        least = size_words(MEASURED_FROM_BYTES)
        return IoChoice(IoMode.MMAP, f"not measured: there is room for {size_and_bytes(room_bytes)}, below {least}")
    if wanted is IoMode.AUTO and not may_write(MEASURING_BYTES):
        reason = f"not measured: that writes {size_words(MEASURING_BYTES)}, too much of tiers.nvme.max_writes"
        return IoChoice(IoMode.MMAP, reason)
    try:
        scratch = scratch_file(folder)
    except OSError as error:
        if wanted is IoMode.DIRECT:
            return IoChoice(IoMode.DIRECT, "tiers.nvme.io says so")
        return IoChoice(IoMode.MMAP, f"not measured: {kind} gives no unnamed file ({_name(error)})")
    direct = DirectIo(_NUM_THREADS * _MAX_READ_BYTES)
    try:
        try_io(direct, scratch)
    except OSError as error:
        if wanted is IoMode.DIRECT:
            raise ConfigError(
                f"tiers.nvme.io is direct, and the {kind} file system of {folder} refuses O_DIRECT ({_name(error)}): "
                "set it to auto or mmap, or give another folder"
            ) from error
        return IoChoice(IoMode.MMAP, f"{kind} refuses O_DIRECT ({_name(error)})")
    if wanted is IoMode.DIRECT:
        return IoChoice(IoMode.DIRECT, "tiers.nvme.io says so")
    return _measured(scratch, direct, folder, slice_bytes)


def _measured(scratch: OpenFile, direct: DirectIo, folder: Path, slice_bytes: int) -> IoChoice:
    size = min(max(slice_bytes, PAGE_BYTES), _MAX_READ_BYTES) // PAGE_BYTES * PAGE_BYTES
    buffers = [page_aligned(size).numpy() for _ in range(_NUM_THREADS)]
    buffered = BufferedIo(2 * MEASURING_BYTES)
    try:
        written = _write_scratch(scratch, direct)
        if written < max(_MIN_SCRATCH_BYTES, _NUM_THREADS * size):
            reason = f"not measured: the disk took only {size_words(written)} in {_WRITE_S:g} s"
            return IoChoice(IoMode.MMAP, reason)
        plain = reopened(scratch)
        buffered.prepare(plain.fd)
        rates: dict[IoMode, list[float]] = {IoMode.DIRECT: [], IoMode.MMAP: []}
        for _ in range(_NUM_ROUNDS):
            rates[IoMode.DIRECT].append(_read_rate(direct, scratch, written, buffers))
            rates[IoMode.MMAP].append(_read_rate(buffered, plain, written, buffers))
            os.posix_fadvise(plain.fd, 0, 0, os.POSIX_FADV_DONTNEED)  # clean, so it goes: cold again
    except OSError as error:
        return IoChoice(IoMode.MMAP, f"not measured: {_name(error)} on a scratch file in {folder}")
    finally:
        buffered.close()
    by_direct, by_mmap = (statistics.median(rates[mode]) for mode in (IoMode.DIRECT, IoMode.MMAP))
    mode = IoMode.MMAP if by_mmap > by_direct * _BUFFERED_MUST_BE else IoMode.DIRECT
    reason = (
        f"cold random reads of {size_words(size)}, {_NUM_THREADS} at a time: direct {speed_words(by_direct)}, mmap "
        f"{speed_words(by_mmap)} (medians of {_NUM_ROUNDS}, {size_words(written)})"
    )
    return IoChoice(mode, reason, by_mmap if mode is IoMode.MMAP else by_direct)


def _write_scratch(scratch: OpenFile, io: FileIo) -> int:
    """Bytes written until there are enough or time is up. Not compressible: some disks and file systems would."""
    piece = page_aligned(_MAX_READ_BYTES).numpy()
    piece.data[:] = random.randbytes(piece.nbytes)
    written, deadline_s = 0, time.monotonic() + _WRITE_S
    while written < MEASURING_BYTES and time.monotonic() < deadline_s:
        io.write(scratch, written, piece)
        written += piece.nbytes
    return written


def _read_rate(io: FileIo, file: OpenFile, file_bytes: int, buffers: list[Bytes]) -> float:
    """Bytes a second of random reads, each place once, on as many threads as buffers, for at most `_ROUND_S`."""
    num_places = file_bytes // buffers[0].nbytes
    moved = move_at(io, file, random.sample(range(num_places), num_places), buffers, _ROUND_S)
    return moved.num_bytes / moved.elapsed_s


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "an error")
