"""Memory for slabs and the ring: on pages, in huge pages where there are any, and no more of it than was asked for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from kvtier.stores.staging import HUGE_PAGE_BYTES, page_aligned

MIB = 1 << 20
PAGE = mmap.PAGESIZE


def resident_bytes(address: int, num_bytes: int) -> int:
    """Of the pages that hold these bytes, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    first, end = address // PAGE, -(-(address + num_bytes) // PAGE)
    found = np.zeros(end - first, np.uint8)
    result = libc.mincore(
        ctypes.c_void_p(first * PAGE), ctypes.c_size_t((end - first) * PAGE), ctypes.c_void_p(found.ctypes.data)
    )
    assert result == 0, os.strerror(ctypes.get_errno())
    return int((found & 1).sum()) * PAGE


class Mapped(mmap.mmap):
    """Notes what advice is given."""

    advised: ClassVar[list[tuple[int, int, int]]] = []
    error: ClassVar[OSError | None] = None

    def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
        address = np.frombuffer(self, np.uint8).__array_interface__["data"][0]
        Mapped.advised.append((option, address + start, length))
        if Mapped.error is not None:
            raise Mapped.error
        super().madvise(option, start, length)


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    monkeypatch.setattr(mmap, "mmap", Mapped)
    monkeypatch.setattr(Mapped, "error", None)
    Mapped.advised = []
    return Mapped.advised


SIZES = [1, PAGE, MIB, 2 * MIB - 1, 2 * MIB, 2 * MIB + 1, 5 * MIB + 3, 16 * MIB]


@pytest.mark.parametrize("num_bytes", SIZES)
def test_huge_pages_are_asked_for_within_the_memory_alone(num_bytes: int, advised: list[Any]) -> None:
    memory = page_aligned(num_bytes)
    start = memory.data_ptr()
    assert memory.shape == (num_bytes,) and memory.dtype == torch.uint8
    num_huge = num_bytes // HUGE_PAGE_BYTES
    assert start % (HUGE_PAGE_BYTES if num_huge else PAGE) == 0
    assert advised == ([(mmap.MADV_HUGEPAGE, start, num_huge * HUGE_PAGE_BYTES)] if num_huge else [])


@pytest.mark.parametrize("num_bytes", SIZES)
def test_nothing_is_resident_before_it_is_touched_and_no_more_than_its_pages_then(num_bytes: int) -> None:
    memory = page_aligned(num_bytes)
    start, pages = memory.data_ptr(), -(-num_bytes // PAGE) * PAGE
    assert resident_bytes(start, num_bytes) == 0
    memory[0] = memory[-1] = 7
    assert 0 < resident_bytes(start, num_bytes) <= min(pages, 2 * HUGE_PAGE_BYTES)
    memory.fill_(1)
    assert resident_bytes(start, num_bytes) == pages


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS])
def test_a_kernel_without_huge_pages_gives_small_ones(
    code: int, advised: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Mapped, "error", OSError(code, os.strerror(code)))
    memory = page_aligned(3 * MIB)
    assert len(advised) == 1 and memory.fill_(3).sum(dtype=torch.int64) == 9 * MIB


def test_too_much_is_a_memory_error() -> None:
    with pytest.raises(MemoryError, match="1152921504606846976 bytes"):
        page_aligned(1 << 60)
