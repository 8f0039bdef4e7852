"""The cpu tier: one slab of host memory, page-locked where a CUDA device copies from it."""

from __future__ import annotations

import torch

from kvtier.errors import IntegrityError
from kvtier.log import logger
from kvtier.stores.slab import SlabStore
from kvtier.types import BlockShape, Tier


class CpuStore(SlabStore):
    """A slab in host memory, laid out as the gpu tier's, so that attention on the host may read slices in place.

    With `pin` the plain memory is registered as pinned host memory (`cudaHostRegister`): torch's `pin_memory()` rounds
    up to a power of two, which would break the budget. Registering makes every page resident at once.

    Attributes:
        pinned: whether the slab is pinned host memory; False after a failed registration.
    """

    def __init__(self, shape: BlockShape, num_slots: int, pin: bool) -> None:
        """Allocate the slab. A registration that fails is one warning, and the store goes on unpinned."""
        super().__init__(Tier.CPU, shape, num_slots, torch.device("cpu"))
        self.pinned = pin and _register(self.slab())

    def check_integrity(self) -> None:
        super().check_integrity()
        if self._slab is None and self.pinned:
            raise IntegrityError("cpu store: closed, but its memory is still registered with CUDA")

    def close(self) -> None:
        if self._slab is not None and self.pinned:
            _unregister(self._slab)
            self.pinned = False
        super().close()


def _register(slab: torch.Tensor) -> bool:
    """Page-lock the slab's memory; False, with one warning, if that cannot be had."""
    try:
        if not torch.cuda.is_available():
            raise RuntimeError("no CUDA device")
        torch.cuda.init()  # type: ignore[no-untyped-call]
        error = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))  # type: ignore[no-untyped-call]
        if error:
            raise RuntimeError(f"cudaHostRegister returned error {error}")
    except (RuntimeError, AssertionError) as reason:  # torch built without CUDA raises AssertionError
        logger.warning(
            "cpu tier: %d bytes could not be page-locked (%s); copies to the GPU will be slower. Raise `ulimit -l` or "
            "lower the cpu budget",
            slab.numel(),
            reason,
        )
        return False
    return True


def _unregister(slab: torch.Tensor) -> None:
    error = int(torch.cuda.cudart().cudaHostUnregister(slab.data_ptr()))  # type: ignore[no-untyped-call]
    if error:
        logger.warning("cpu tier: cudaHostUnregister returned error %d", error)
