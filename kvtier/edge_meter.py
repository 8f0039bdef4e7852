"""What goes along each edge between tiers, how much of it while steps run, and the best rate seen. Pure Python."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvtier.bound import EdgeUse
from kvtier.types import Tier

ClockS = Callable[[], float]


class StepClock:
    """Seconds that steps ran, up to any moment. One thread starts and stops it, any thread reads it."""

    def __init__(self, clock_s: ClockS = time.monotonic) -> None:
        self.clock_s = clock_s
        self.state: tuple[float, float | None] = 0.0, None  # replaced as a whole: readers need no lock
        """Seconds of steps that have ended, and when the one that runs began."""

    @property
    def is_running(self) -> bool:
        """Whether a step runs."""
        return self.state[1] is not None

    def start(self) -> None:
        """A step begins. One that never ended (a Ctrl-C in the worst moment) counts for nothing."""
        self.state = self.state[0], self.clock_s()

    def stop(self) -> float:
        """It has ended; returns its seconds."""
        total_s, since_s = self.state
        took_s = 0.0 if since_s is None else self.clock_s() - since_s
        self.state = total_s + took_s, None
        return took_s

    def seconds(self) -> float:
        """Up to this moment."""
        total_s, since_s = self.state
        return total_s if since_s is None else total_s + self.clock_s() - since_s


Moment = tuple[float, float]
"""A time, and what the clock of steps said then."""


class EdgeMeter:
    """One edge. Bytes count when they have arrived; those of a transfer that fails do not, its time does.

    A transfer that was under way while a step ran and while none did counts for steps by that share of its time.

    The peak is the best window: `WINDOW_S` in which the edge was busy, or more until `WINDOW_FLIGHTS` times as many
    transfers have arrived as ever were under way at once in it: what had begun before it is then a small part. Until
    there has been one it is the average so far, and never less than an average.
    """

    WINDOW_S = 0.1
    WINDOW_FLIGHTS = 8

    def __init__(self, steps: StepClock) -> None:
        self._steps, self._lock = steps, threading.Lock()
        self._num_open = 0
        self._since: Moment = 0.0, 0.0
        """Up to when the busy time is counted, while anything is under way."""
        self._busy_s = self._step_busy_s = self._step_bytes = 0.0
        self._bytes = 0
        self._best_bytes_s = 0.0
        self._window_bytes = self._window_arrived = self._window_most_open = 0
        self._window_s = 0.0

    def begin(self) -> Moment:
        """A transfer begins; what `end` wants to know. O(1)."""
        with self._lock:
            now = self._now()
            if not self._num_open:
                self._since = now
            self._num_open += 1
            self._window_most_open = max(self._window_most_open, self._num_open)
            return now

    def end(self, began: Moment, num_bytes: int) -> None:
        """It has ended, and brought so many bytes; 0 if it failed. O(1)."""
        with self._lock:
            now = self._now()
            self._advance(now)
            self._num_open -= 1
            self._bytes += num_bytes
            self._window_bytes += num_bytes
            self._window_arrived += num_bytes > 0
            took_s, in_steps_s = now[0] - began[0], now[1] - began[1]
            if took_s > 0:
                self._step_bytes += num_bytes * min(1.0, max(0.0, in_steps_s / took_s))
            if self._window_s >= self.WINDOW_S and (
                self._window_arrived >= self.WINDOW_FLIGHTS * self._window_most_open
            ):
                self._best_bytes_s = max(self._best_bytes_s, self._window_bytes / self._window_s)
                self._window_s, self._window_bytes, self._window_arrived = 0.0, 0, 0
                self._window_most_open = self._num_open

    def transfer(self, num_bytes: int) -> _Transfer:
        """`begin` and `end` around what brings so many bytes."""
        return _Transfer(self, num_bytes)

    def use(self) -> EdgeUse | None:
        """What went along while steps ran, and the peak at any time; None: nothing ever arrived."""
        with self._lock:
            if self._num_open:
                self._advance(self._now())
            if not self._bytes or self._busy_s <= 0:
                return None
            peak_bytes_s = max(self._best_bytes_s, self._bytes / self._busy_s)
            return EdgeUse(int(self._step_bytes), self._step_busy_s, peak_bytes_s)

    def _advance(self, now: Moment) -> None:
        """Count the time in which something was under way, up to now."""
        busy_s = now[0] - self._since[0]
        self._busy_s += busy_s
        self._window_s += busy_s
        self._step_busy_s += max(0.0, now[1] - self._since[1])  # less where a step never ended
        self._since = now

    def _now(self) -> Moment:
        now_s = self._steps.clock_s()
        total_s, since_s = self._steps.state
        # The step may have begun since the time was read.
        return now_s, total_s if since_s is None or since_s > now_s else total_s + now_s - since_s


class _Transfer:
    """Not a generator: this is done for each slice that is streamed."""

    __slots__ = ("_began", "_meter", "_num_bytes")

    def __init__(self, meter: EdgeMeter, num_bytes: int) -> None:
        self._meter, self._num_bytes = meter, num_bytes

    def __enter__(self) -> None:
        self._began = self._meter.begin()

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        self._meter.end(self._began, self._num_bytes if kind is None else 0)


class EdgeMeters:
    """A meter for each edge, and the clock of steps that they share."""

    def __init__(self, clock_s: ClockS = time.monotonic) -> None:
        self.steps = StepClock(clock_s)
        self._meters = {(source, dest): EdgeMeter(self.steps) for source in Tier for dest in Tier}

    def __getitem__(self, edge: tuple[Tier, Tier]) -> EdgeMeter:
        return self._meters[edge]

    def uses(self) -> dict[str, EdgeUse]:
        """By name (`nvme_to_gpu`), the edges between two tiers that anything ever went along."""
        found = {edge: meter.use() for edge, meter in self._meters.items() if edge[0] is not edge[1]}
        return {f"{source.label}_to_{dest.label}": use for (source, dest), use in found.items() if use is not None}
