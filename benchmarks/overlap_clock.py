"""Clocks for simulations: the real one, and one that only waits move."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Protocol

SPIN_S = 100e-6
"""How long before its time a wait stops sleeping: longer than this kernel wakes late (about 60 us)."""


class Clock(Protocol):
    """Seconds, and a wait until then."""

    def now(self) -> float:
        """Seconds, of any origin."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return at `at_s`, or at once if that has passed."""
        ...

    def close(self) -> None:
        """Nobody waits any more."""
        ...


class RealClock:
    """Waits to within microseconds on an idle machine: sleeps, then gives up its turn again and again.

    `sleep(0)` lets go of the interpreter's lock, so that others who wait for their time get it.
    """

    def now(self) -> float:
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        left_s = at_s - time.monotonic()
        if left_s > SPIN_S:
            time.sleep(left_s - SPIN_S)
        while time.monotonic() < at_s:
            time.sleep(0)

    def close(self) -> None:
        """Nothing to do."""


class VirtualClock:
    """Time that passes only while nobody has anything to do: real work takes none, however busy the machine is.

    When every thread of the process sleeps and somebody waits for a time, it is the earliest of those. Whether they all
    sleep is what the kernel says of them (Linux only), several times in a row: who waits for the interpreter's lock
    sleeps too, but not for long while nobody has it.

    Cost: about a millisecond for each time that it moves on.
    """

    NUM_LOOKS = 3
    LOOK_EVERY_S = 100e-6

    def __init__(self) -> None:
        """Starts a thread, which `close` ends. Raises OSError where the kernel does not say how threads are."""
        self._tasks = Path(f"/proc/{os.getpid()}/task")
        os.listdir(self._tasks)
        self._now_s = 0.0
        self._waiting: list[tuple[float, threading.Event]] = []
        self._lock = threading.Lock()
        self._somebody_waits = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kvtier-virtual-clock", daemon=True)
        self._thread.start()

    def now(self) -> float:
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        reached = threading.Event()
        with self._lock:
            if at_s <= self._now_s or self._is_closed:
                return
            self._waiting.append((at_s, reached))
            self._somebody_waits.set()
        reached.wait()

    def close(self) -> None:
        """End the thread. Who waits returns at once, whatever the time."""
        with self._lock:
            self._is_closed = True
            for _, reached in self._waiting:
                reached.set()
            self._waiting.clear()
            self._somebody_waits.set()
        self._thread.join()

    def _run(self) -> None:
        own, num_quiet = threading.get_native_id(), 0
        while not self._is_closed:
            self._somebody_waits.wait()
            time.sleep(self.LOOK_EVERY_S)
            num_quiet = num_quiet + 1 if self._all_sleep(own) else 0
            if num_quiet >= self.NUM_LOOKS:
                num_quiet = 0
                self._move_on()

    def _all_sleep(self, own: int) -> bool:
        for name in os.listdir(self._tasks):
            if int(name) == own:
                continue
            try:
                stat = (self._tasks / name / "stat").read_text()
            except OSError:  # it has ended
                continue
            if stat[stat.rindex(")") + 2] != "S":
                return False
        return True

    def _move_on(self) -> None:
        with self._lock:
            if not self._waiting:
                self._somebody_waits.clear()
                return
            self._now_s = max(self._now_s, min(at_s for at_s, _ in self._waiting))
            for at_s, reached in self._waiting:
                if at_s <= self._now_s:
                    reached.set()
            self._waiting = [each for each in self._waiting if each[0] > self._now_s]
            if not self._waiting:
                self._somebody_waits.clear()
