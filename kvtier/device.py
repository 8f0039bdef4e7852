"""The order of what a device does: kernels, copies up, copies down, and the events between them.

A device with queues of its own (CUDA, or the fake one of `kvtier.testing`) does nothing when it is told to, only later,
and each of its three queues at its own pace:

- compute: the kernels that the model's thread queues;
- up: copies from host memory, or within the device;
- down: copies to host memory.

Within a queue things happen in the order in which they were queued; between queues only where one waits for an event
of another. The waits that kvtier needs, and who asks for them:

- a load waits for the last reader of its place, a store for the producer of what it copies: `after` of a copy;
- compute waits for what has been loaded: `compute_waits_for`;
- the host waits before it reads or writes memory itself: `Event.synchronize`.
"""

from __future__ import annotations

import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from kvtier.errors import IntegrityError
from kvtier.size import whole_pages

Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination and source: contiguous, of the same number of bytes."""


class Event(Protocol):
    """A place in one of a device's queues."""

    def is_done(self) -> bool:
        """Whether all that was queued before it is done. Without waiting."""

    def synchronize(self) -> None:
        """Wait, on the host, until it is."""


class _Done:
    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


DONE: Event = _Done()
"""The event behind nothing: what has no queue to wait for."""


@dataclass(slots=True)
class Staging:
    """Host memory of one caller's own, for bytes between a device and what is neither it nor the cpu tier's slab."""

    host: torch.Tensor
    """`[num_bytes]` uint8, page-locked where the device wants that; full of old bytes."""
    until: Event = DONE
    """Behind the copy that reads or writes it: it is nobody else's before."""


class StagingPool:
    """Staging buffers, made when needed and kept for the next. Never more of a size than callers at the same time.

    Attributes:
        budget_bytes: the most that all buffers take: as many as callers can be there at once (`budget.staging_bytes`).
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor]) -> None:
        self._allocate = allocate
        self.budget_bytes = sys.maxsize
        self._idle: dict[int, deque[Staging]] = {}
        self._made: list[torch.Tensor] = []
        self._num_bytes = 0
        self._making = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Host memory taken so far, in whole pages."""
        return self._num_bytes

    @contextmanager
    def buffer(self, num_bytes: int) -> Iterator[Staging]:
        """A buffer; whoever queues a copy of it sets `until`. Waits for another's copy, never for another caller.

        A caller may hang on a disk: those that wait for it would hang too. Copies end.

        Raises:
            IntegrityError: there are more callers than `budget_bytes` was reckoned for. MemoryError: none to be had.
        """
        idle = self._idle.setdefault(num_bytes, deque())
        try:
            staging = idle.popleft()
        except IndexError:  # as many are in use as have ever been at once
            staging = Staging(self._make(num_bytes))
        staging.until.synchronize()
        staging.until = DONE
        try:
            yield staging
        finally:
            idle.append(staging)

    def _make(self, num_bytes: int) -> torch.Tensor:
        taken_bytes = whole_pages(num_bytes)
        with self._making:
            if self._num_bytes + taken_bytes > self.budget_bytes:
                raise IntegrityError(f"staging of {self._num_bytes + taken_bytes} bytes, planned {self.budget_bytes}")
            self._num_bytes += taken_bytes
        try:
            memory = self._allocate(taken_bytes)
        except BaseException:  # a Ctrl-C too: what was not taken is not counted
            with self._making:
                self._num_bytes -= taken_bytes
            raise
        self._made.append(memory)
        return memory[:num_bytes]

    def clear(self) -> list[torch.Tensor]:
        """Let go of all buffers, which nobody may use any more. Returns them."""
        made, self._made = self._made, []
        self._num_bytes = 0
        self._idle.clear()
        return made


class Device(ABC):
    """One device's queues. Any thread may call; the calling thread's current CUDA stream is the compute queue."""

    torch_device: torch.device
    is_async: bool
    """Whether kernels and copies are only queued. Where not, gpu slots are host memory that needs no copy commands."""

    @abstractmethod
    def record(self) -> Event:
        """An event behind all kernels that this thread has queued."""

    @abstractmethod
    def compute_waits_for(self, event: Event) -> None:
        """Kernels that this thread queues from here on begin after the event. The host does not wait."""

    @abstractmethod
    def copy_up(self, copies: Sequence[Copy], after: Event) -> Event:
        """Queue copies into the device's memory behind `after`; the event behind them. Returns at once.

        Until then a destination holds garbage and a source must stay as it is. Sources that are not page-locked are
        slower, and the call may take as long as the copy.
        """

    @abstractmethod
    def copy_down(self, copies: Sequence[Copy], after: Event) -> Event:
        """As `copy_up`, from the device's memory to the host's."""

    @abstractmethod
    def staging(self) -> StagingPool:
        """Host memory for copies of what lies in neither slab."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what is queued and give staging memory back. Idempotent."""


class HostDevice(Device):
    """No device: the gpu tier is ordinary memory, and all is done when a call returns. Allocates nothing."""

    is_async = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._staging = StagingPool(lambda num_bytes: torch.empty(num_bytes, dtype=torch.uint8))

    def record(self) -> Event:
        return DONE

    def compute_waits_for(self, event: Event) -> None:
        pass

    def copy_up(self, copies: Sequence[Copy], after: Event) -> Event:
        for dest, source in copies:
            dest.copy_(source)
        return DONE

    def copy_down(self, copies: Sequence[Copy], after: Event) -> Event:
        return self.copy_up(copies, after)

    def staging(self) -> StagingPool:
        return self._staging

    def close(self) -> None:
        self._staging.clear()
