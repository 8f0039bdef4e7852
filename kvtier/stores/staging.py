"""Host memory that starts on a page boundary: what O_DIRECT reads into and writes from."""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import torch

from kvtier.errors import BudgetError
from kvtier.size import size_and_bytes
from kvtier.stores.file_io import Bytes

BUFFER_BYTES = 1 << 20  # a longer read goes through in pieces: from here on disks gain little by longer requests
HUGE_PAGE_BYTES = 2 << 20
_BUFFERS_MAX = 64  # 32 slices in flight and as many writers; memory is taken when a buffer is first used


class StagingPool:
    """At most `budget_bytes` of page-aligned buffers of `BUFFER_BYTES`, made when needed and kept for the next."""

    def __init__(self, budget_bytes: int) -> None:
        """Raises BudgetError: no room for one buffer."""
        self.num_buffers = min(budget_bytes // BUFFER_BYTES, _BUFFERS_MAX)
        if self.num_buffers < 1:
            raise BudgetError(
                f"tiers.nvme.page_cache is {size_and_bytes(budget_bytes)}, its minimum for direct I/O is "
                f"{size_and_bytes(BUFFER_BYTES)}: raise it"
            )
        self._room = threading.BoundedSemaphore(self.num_buffers)
        self._free: deque[Bytes] = deque()
        self._num_made = 0
        self._making = threading.Lock()

    @contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """A buffer of one's own, `[BUFFER_BYTES]` uint8, full of old bytes. Waits until one is free.

        Whoever holds one asks for no second, so that waiting always ends. Raises OSError: no memory.
        """
        with self._room:
            try:
                buffer = self._free.pop()
            except IndexError:  # every buffer made so far is in use, and there is room for another
                buffer = _pages(BUFFER_BYTES)
                with self._making:
                    self._num_made += 1
            try:
                yield buffer
            finally:
                self._free.append(buffer)

    def used_bytes(self) -> int:
        """Bytes of the buffers made so far."""
        return self._num_made * BUFFER_BYTES

    def num_free(self) -> int:
        """Buffers made and not in use now."""
        return len(self._free)


def page_aligned(num_bytes: int) -> torch.Tensor:
    """`[num_bytes]` uint8 of host memory on a page boundary, resident page by page as it is touched.

    torch's own allocations start 64 bytes into a page, so that O_DIRECT could not reach them without a copy. From
    `HUGE_PAGE_BYTES` on it begins on such a boundary, and its whole huge pages become resident at once, each when it is
    touched, where the kernel gives any: attention over a slab of them takes a tenth less, and a disk writes into them
    in long pieces (docs/adr/0036). Never more becomes resident than `num_bytes`, in whole pages.

    Raises:
        MemoryError: none to be had.
    """
    try:
        return torch.from_numpy(_pages(num_bytes))
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size_and_bytes(num_bytes)}: {error}") from error


def _pages(num_bytes: int) -> Bytes:
    num_huge_bytes = num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    room_bytes = num_bytes + (HUGE_PAGE_BYTES if num_huge_bytes else 0)
    # private: shared anonymous memory would be a tmpfs file, for which there are no huge pages
    memory = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    data = np.frombuffer(memory, dtype=np.uint8)
    if not num_huge_bytes:
        return data
    start = -int(data.__array_interface__["data"][0]) % HUGE_PAGE_BYTES
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that has none
            # Not what lies before and behind: a huge page there would take memory that is in no budget.
            memory.madvise(mmap.MADV_HUGEPAGE, start, num_huge_bytes)
    return data[start : start + num_bytes]
