"""Whether what lies in files is loaded or computed again: measured rates, and the cut between the two.

Pure: who measures tells it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

MIN_GAIN_FRAC = 0.1
"""A cut must save so much of the time, or all is loaded: rates are not that exact."""


class Meter:
    """How much a second, over the time that anything was under way. Thread-safe.

    Old figures count for less: half after each `HALF_S` seconds under way.
    """

    HALF_S = 10.0

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._num_open = 0
        self._since_s = 0.0
        self._amount = self._busy_s = 0.0

    def begin(self) -> None:
        """Something begins."""
        with self._lock:
            if not self._num_open:
                self._since_s = self._clock_s()
            self._num_open += 1

    def end(self, amount: float) -> None:
        """It has ended, and was so much; 0 if it failed, which counts as time lost."""
        with self._lock:
            now_s = self._clock_s()
            self._num_open -= 1
            self._add(amount, now_s - self._since_s)
            self._since_s = now_s

    def add(self, amount: float, seconds: float) -> None:
        """So much was done in that time, by one at a time."""
        with self._lock:
            self._add(amount, seconds)

    def _add(self, amount: float, seconds: float) -> None:
        kept = 0.5 ** (seconds / self.HALF_S)
        self._amount = self._amount * kept + amount
        self._busy_s = self._busy_s * kept + seconds

    @property
    def per_s(self) -> float | None:
        """The rate; None: nothing was measured yet."""
        with self._lock:
            return self._amount / self._busy_s if self._amount and self._busy_s else None


def best_cut(in_files: Sequence[bool], compute_s: float, load_s: float) -> int:
    """The number of the first block, of a prefix found whole, that is loaded; those before it are computed.

    Blocks before the first that lies in files are there already, and neither loaded nor computed. Both go on at once:
    the front is computed while the back is loaded. The number of all blocks means that nothing is loaded.

    Args:
        in_files: by block, whether it lies in files alone.
        compute_s: a block's computing.
        load_s: a block's loading.

    Source: the two-pointer overlap of Cake (Jin et al., "Compute or load KV cache? Why not both?", 2024).
    """
    first = next((index for index, each in enumerate(in_files) if each), len(in_files))
    num_left = sum(in_files)
    best, best_s = first, num_left * load_s
    worth_s = best_s * (1 - MIN_GAIN_FRAC)
    for cut in range(first + 1, len(in_files) + 1):
        num_left -= in_files[cut - 1]
        took_s = max((cut - first) * compute_s, num_left * load_s)
        if took_s < min(best_s, worth_s):
            best, best_s = cut, took_s
    return best
