"""A CUDA device's queues: compute is whatever CUDA stream is current, copies have two of their own.

Written for CUDA and not yet run on a GPU: its order is tested with the fake device (ADR 0028).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from kvtier.device import DONE, Copy, Device, Event, HostDevice, StagingPool
from kvtier.stores.cpu import page_lock, page_unlock
from kvtier.stores.staging import page_aligned


class _CudaEvent:
    """One recording of a CUDA event, which goes back to the pool with this object.

    A CUDA stream that was told to wait has noted this recording, so the event may be recorded anew meanwhile.
    """

    __slots__ = ("_pool", "raw")

    def __init__(self, pool: deque[torch.cuda.Event], stream: torch.cuda.Stream) -> None:
        self._pool = pool
        try:
            self.raw = pool.pop()
        except IndexError:
            # blocking: a thread that waits sleeps, where it would otherwise spin on a core that reads need
            self.raw = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        self.raw.record(stream)

    def is_done(self) -> bool:
        return bool(self.raw.query())  # type: ignore[no-untyped-call]  # no types

    def synchronize(self) -> None:
        self.raw.synchronize()

    def __del__(self) -> None:
        self._pool.append(self.raw)  # takes no lock: a finalizer may run anywhere


class CudaDevice(Device):
    """Two long-lived CUDA streams for copies, one up, one down, and events that are used again."""

    is_async = True

    def __init__(self, device: torch.device) -> None:
        self.torch_device = device
        self._up = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no types
        self._down = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no types
        self._events: deque[torch.cuda.Event] = deque()
        self._locked: list[torch.Tensor] = []
        self._staging = StagingPool(self._allocate)

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        memory = page_aligned(num_bytes)
        memory.zero_()  # so that its pages are there to be locked
        if page_lock(memory, "staging"):
            self._locked.append(memory)
        return memory

    def record(self) -> Event:
        return _CudaEvent(self._events, torch.cuda.current_stream(self.torch_device))

    def compute_waits_for(self, event: Event) -> None:
        _wait(torch.cuda.current_stream(self.torch_device), event)

    def copy_up(self, copies: Sequence[Copy], after: Event) -> Event:
        return self._copy(self._up, copies, after)

    def copy_down(self, copies: Sequence[Copy], after: Event) -> Event:
        return self._copy(self._down, copies, after)

    def _copy(self, stream: torch.cuda.Stream, copies: Sequence[Copy], after: Event) -> Event:
        # Threads share the stream, and theirs may come between these lines: whoever waits then waits for more.
        with torch.cuda.stream(stream):
            _wait(stream, after)
            for dest, source in copies:
                dest.copy_(source, non_blocking=True)
            return _CudaEvent(self._events, stream)

    def staging(self) -> StagingPool:
        return self._staging

    def close(self) -> None:
        self._up.synchronize()
        self._down.synchronize()
        self._staging.clear()
        while self._locked:
            page_unlock(self._locked.pop(), "staging")


def _wait(stream: torch.cuda.Stream, event: Event) -> None:
    if isinstance(event, _CudaEvent):
        stream.wait_event(event.raw)
    elif event is not DONE:
        raise TypeError(f"{event!r} is no event of a CUDA device")


def open_device(device: torch.device) -> Device:
    """The queues of the device that a model lies on."""
    return CudaDevice(device) if device.type == "cuda" else HostDevice()


def timing_mark(device: torch.device) -> Callable[[], torch.cuda.Event] | None:
    """What notes a moment of the current CUDA stream, to tell times between two; None where nothing is queued."""
    if device.type != "cuda":
        return None

    def mark() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record(torch.cuda.current_stream(device))
        return event

    return mark
