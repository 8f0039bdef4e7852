"""A store that fails on purpose, around one that does not."""

from __future__ import annotations

import enum
import errno
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from kvtier.errors import ChecksumError, NoSpaceError, ShortReadError, StoreError
from kvtier.stores.base import Store
from kvtier.types import Slot, SlotLabel


class Fault(enum.Enum):
    """What can go wrong in one call. The first three spoil reads, NO_SPACE and TORN_WRITE writes, the others both."""

    BIT_FLIP = "bit_flip"
    """One bit of the result is wrong, and the store's checksum sees it: ChecksumError."""
    SILENT_BIT_FLIP = "silent_bit_flip"
    """One bit of the result is wrong and nobody says so: for testing that a verifier notices wrong tokens."""
    SHORT_READ = "short_read"
    """Half of the result is there: ShortReadError."""
    EIO = "eio"
    """StoreError with errno EIO. After a write, the slot holds nothing readable."""
    DELAY = "delay"
    """The call takes `delay_s` longer and then succeeds."""
    NO_SPACE = "no_space"
    """NoSpaceError; slots below this one have backing. The slot holds nothing readable."""
    TORN_WRITE = "torn_write"
    """The write returns as if all were well. Until the slot is written again, reads find half of it: ChecksumError."""
    HANG = "hang"
    """The call waits until `release()` is called or `hang_s` has passed, and then succeeds."""


_OF_READS = (Fault.BIT_FLIP, Fault.SILENT_BIT_FLIP, Fault.SHORT_READ, Fault.EIO, Fault.DELAY, Fault.HANG)
_OF_WRITES = (Fault.EIO, Fault.NO_SPACE, Fault.TORN_WRITE, Fault.DELAY, Fault.HANG)


class FaultyStore(Store):
    """Passes every call to `inner` and spoils some: at given rates, or at given calls. Extras (`keys`, …) pass through.

    `inner` itself is never damaged: what it holds is whole, so that nothing wrong is left in files that persist.

    Attributes:
        num_calls: reads, slice reads and writes so far; the next call has this index.
        injected: faults injected so far, as `(call index, fault)`.
    """

    def __init__(
        self,
        inner: Store,
        seed: int,
        rates: Mapping[Fault, float] | None = None,
        at_calls: Mapping[int, Fault] | None = None,
        delay_s: float = 0.01,
        hang_s: float = 1.0,
    ) -> None:
        """`rates`: chance per call that a fault can spoil. `at_calls`: by call index from 0, reads and writes alike.

        With the same seed and rates the same sequence of reads and writes meets the same faults.
        """
        self.inner = inner
        self.tier = inner.tier
        self.shape = inner.shape
        self.num_slots = inner.num_slots
        self.rates = dict(rates or {})
        self.at_calls = dict(at_calls or {})
        self.delay_s, self.hang_s = delay_s, hang_s
        self.num_calls = 0
        self.injected: list[tuple[int, Fault]] = []
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._lost: set[int] = set()  # slots whose last write failed
        self._torn: set[int] = set()  # and those where half of it was silently left out
        self._released = threading.Event()

    def counts(self) -> dict[Fault, int]:
        """How often each fault was injected so far; those that never were are not in it."""
        with self._lock:
            return dict(Counter(fault for _, fault in self.injected))

    def release(self) -> None:
        """End every hang, and let no later call hang."""
        self._released.set()

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        faults = self._next_faults(_OF_WRITES)
        if Fault.EIO in faults:
            self._lost.add(slot)
            raise StoreError(errno.EIO, f"fake: writing slot {slot} failed")
        if Fault.NO_SPACE in faults:
            self._lost.add(slot)
            raise NoSpaceError(f"fake: no space for slot {slot}", available_slots=slot)
        self.inner.write(slot, block, label)
        self._lost.discard(slot)
        if Fault.TORN_WRITE in faults:
            self._torn.add(slot)
        else:
            self._torn.discard(slot)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        faults = self._next_faults(_OF_READS)
        self._check_readable(slot)
        flat = out if out.dim() == 1 else torch.empty(out.numel(), dtype=torch.uint8)
        try:
            self.inner.read(slot, flat)
            self._spoil(faults, slot, flat)
        finally:
            if flat is not out:
                out.copy_(flat.view(out.shape))

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        faults = self._next_faults(_OF_READS)
        self._check_readable(slot)
        self.inner.read_slice(slot, layer, out)
        self._spoil(faults, slot, out)

    def used_bytes(self) -> int:
        return self.inner.used_bytes()

    def check_integrity(self) -> None:
        self.inner.check_integrity()

    def close(self) -> None:
        self.inner.close()

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet: no endless recursion
            raise AttributeError(name)
        return getattr(self.inner, name)

    def _next_faults(self, possible: tuple[Fault, ...]) -> set[Fault]:
        with self._lock:
            index = self.num_calls
            self.num_calls += 1
            # One draw for each fault that has a rate: a new kind of fault changes nothing where it is not asked for.
            rates = ((fault, self.rates.get(fault, 0.0)) for fault in possible)
            faults = {fault for fault, rate in rates if rate and self._random.random() < rate}
            if self.at_calls.get(index) in possible:
                faults.add(self.at_calls[index])
            self.injected += [(index, fault) for fault in possible if fault in faults]
        if Fault.DELAY in faults:
            time.sleep(self.delay_s)
        if Fault.HANG in faults:
            self._released.wait(self.hang_s)
        return faults

    def _check_readable(self, slot: Slot) -> None:
        if slot in self._lost:
            raise StoreError(errno.EIO, f"fake: slot {slot} holds nothing readable since a write failed")

    def _spoil(self, faults: set[Fault], slot: Slot, out: torch.Tensor) -> None:
        if Fault.EIO in faults:
            out.fill_(0xEE)
            raise StoreError(errno.EIO, f"fake: reading slot {slot} failed")
        if Fault.SHORT_READ in faults:
            out[out.numel() // 2 :].fill_(0xEE)
            raise ShortReadError(f"fake: slot {slot} gave {out.numel() // 2} of {out.numel()} bytes")
        if slot in self._torn:
            out[out.numel() // 2 :].fill_(0xEE)
            raise ChecksumError(f"fake: only half of slot {slot} was written")
        if faults & {Fault.BIT_FLIP, Fault.SILENT_BIT_FLIP}:
            with self._lock:
                bit = self._random.randrange(out.numel() * 8)
            out[bit // 8] ^= 1 << bit % 8
        if Fault.BIT_FLIP in faults:
            raise ChecksumError(f"fake: slot {slot} has a flipped bit")
