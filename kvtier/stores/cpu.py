"""The cpu tier: one slab of host memory, page-locked where a CUDA device copies from it."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from kvtier.errors import IntegrityError
from kvtier.log import logger
from kvtier.size import size_and_bytes
from kvtier.stores.slab import SlabStore
from kvtier.types import BlockShape, Tier

_TOUCH_THREADS = 8  # more only wait for each other: the kernel clears pages at the speed of memory


class CpuStore(SlabStore):
    """A slab in host memory, laid out as the gpu tier's, so that attention on the host may read slices in place.

    With `pin` the plain memory is registered as pinned host memory (`cudaHostRegister`): torch's `pin_memory()` rounds
    up to a power of two, which would break the budget. Registering makes every page resident, one after the other and
    on one thread, so they are touched by several first.

    Attributes:
        pinned: whether the slab is pinned host memory; False after a failed registration.
    """

    def __init__(self, shape: BlockShape, num_slots: int, pin: bool, joined: bool = False) -> None:
        """Allocate the slab. A registration that fails is one warning, and the store goes on unpinned."""
        super().__init__(Tier.CPU, shape, num_slots, torch.device("cpu"), joined)
        self.pinned = False
        if pin:
            touch(self.slab(), min(_TOUCH_THREADS, os.cpu_count() or 1))
            self.pinned = page_lock(self.slab(), "cpu tier")

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._slab is None and self.pinned:
            raise IntegrityError("cpu store: closed, but its memory is still registered with CUDA")

    def close(self) -> None:
        if self._slab is not None and self.pinned:
            page_unlock(self._slab, "cpu tier")
            self.pinned = False
        super().close()


def touch(memory: torch.Tensor, num_threads: int) -> None:
    """Have the kernel back every page of memory that was never written, with zeros as it would at the first access.

    Args:
        memory: `[num_bytes]` uint8 on a page boundary, fresh.

    Cost: the clearing of its pages, shared by the threads: torch writes without the interpreter's lock.
    """
    share = -(-memory.numel() // num_threads)
    share = -(-share // mmap.PAGESIZE) * mmap.PAGESIZE
    with ThreadPoolExecutor(num_threads, "kvtier-touch") as threads:
        parts = [memory[at : at + share : mmap.PAGESIZE] for at in range(0, memory.numel(), share)]
        list(threads.map(torch.Tensor.zero_, parts))


def page_lock(memory: torch.Tensor, whose: str) -> bool:
    """Make host memory pinned host memory; False, with one warning, if that cannot be had."""
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        error = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))  # type: ignore[no-untyped-call]
        if error:
            raise RuntimeError(f"cudaHostRegister returned error {error}")
    except (RuntimeError, AssertionError) as reason:  # torch built without CUDA raises AssertionError
        logger.warning(
            "%s: %s could not be page-locked (%s); copies to the GPU will be slower. Raise `ulimit -l` or "
            "lower the cpu budget",
            whose,
            size_and_bytes(memory.numel()),
            reason,
        )
        return False
    return True


def page_unlock(memory: torch.Tensor, whose: str) -> None:
    """Undo `page_lock`, before the memory goes."""
    error = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))  # type: ignore[no-untyped-call]
    if error:
        logger.warning("%s: cudaHostUnregister returned error %d", whose, error)
