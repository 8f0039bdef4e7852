"""How long steps take, without what they wait for: a stopwatch around each. Pure: the device's clock is handed in."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from kvtier.edge_meter import StepClock
from kvtier.metrics import Metrics, StepTimes


class DeviceMark(Protocol):
    """A moment in the device's queue; `torch.cuda.Event` with timing."""

    def query(self) -> bool:
        """Whether the device has come to it."""

    def synchronize(self) -> None:
        """Wait until it has."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds from this one to `end`; the device must have come to both."""


@dataclass(frozen=True, slots=True)
class _Queued:
    """A step whose forward has returned, and whose kernels may still run."""

    times: StepTimes
    start: DeviceMark
    end: DeviceMark
    took_s: float


class StepTimer:
    """Adds each step to `Metrics.decode` or `.prefill`, and runs the clock of steps. One thread at a time.

    On a device that only queues kernels a step ends when the device has come to its end, which is known later: by the
    next step, or when somebody asks. Steps queued one on the other, with nobody reading what they compute, would count
    twice what they overlap.
    """

    def __init__(
        self,
        metrics: Metrics,
        clock: StepClock,
        *,
        prefill_columns: int = 32,
        mark: Callable[[], DeviceMark] | None = None,
    ) -> None:
        """Args:
        prefill_columns: a step of so many new columns a row is prefill; those of fewer (speculation too) are decode.
        mark: puts one into the device's queue; None: what is called has been done when it returns.
        """
        self._metrics, self._clock, self._mark = metrics, clock, mark
        self.prefill_columns = prefill_columns
        self._queued: deque[_Queued] = deque()
        self._late_s = 0.0
        """What devices took when the forward had returned."""

    def step(self, num_columns: int, *, is_inner: bool = False) -> _Timed | nullcontext[None]:
        """A context around a step of so many new columns a row, from before it reserves to after it has committed.

        `is_inner`: it is called from inside of another, which is going to be refused, and counts for nothing.
        """
        if is_inner:
            return nullcontext()
        times = self._metrics.prefill if num_columns >= self.prefill_columns else self._metrics.decode
        return _Timed(self, times)

    def took_s(self) -> float:
        """Time that steps ran, aborted ones and the one that runs too."""
        return self._clock.seconds() + self._late_s

    def settle(self, *, wait: bool = False) -> None:
        """Count what devices have done by now. `wait`: all that is queued."""
        while self._queued:
            step = self._queued[0]
            if wait:
                step.end.synchronize()
            elif not step.end.query():
                return
            self._queued.popleft()
            late_s = max(0.0, step.start.elapsed_time(step.end) / 1e3 - step.took_s)
            step.times.took_s += late_s
            step.times.compute_s += late_s
            self._late_s += late_s


class _Timed:
    """One step. A class of its own: as a generator it would keep an error's frames, and what they hold, alive."""

    __slots__ = ("_began", "_stalled_s", "_timer", "_times")

    def __init__(self, timer: StepTimer, times: StepTimes) -> None:
        self._timer, self._times = timer, times
        self._began: DeviceMark | None = None
        self._stalled_s = 0.0

    def __enter__(self) -> None:
        timer = self._timer
        timer.settle()
        self._began = None if timer._mark is None else timer._mark()
        self._stalled_s = timer._metrics.stall_s
        timer._clock.start()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        timer, times = self._timer, self._times
        took_s = timer._clock.stop()
        if kind is not None:
            return
        stalled_s = timer._metrics.stall_s - self._stalled_s
        times.num_steps += 1
        times.took_s += took_s
        times.compute_s += max(0.0, took_s - stalled_s)
        if timer._mark is not None and self._began is not None:
            timer._queued.append(_Queued(times, self._began, timer._mark(), took_s))
