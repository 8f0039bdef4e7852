"""A link and a device that are simulated by waiting: when bytes arrive, and when a layer is computed.

A transfer of n bytes has the link to itself for `n / bandwidth`, behind those asked for before it, and its bytes are
there `latency` later. The two directions know nothing of each other (PCIe is full duplex).

The device begins a layer as soon as it has ended the one before and the layer's bytes are there, and takes the time it
is told. The real work, a small model's, happens meanwhile: it counts only where it takes longer than that, as the
launches of a GPU's kernels do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.benchmarks.overlap_clock import Clock
from kvtier.stores.base import Store
from kvtier.types import Slot, SlotLabel


class Direction:
    """One direction of a link. Several threads may use it.

    Attributes:
        carried_bytes: so far. busy: when it was, as `(from, to)`, the oldest first.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Clock) -> None:
        self.bytes_per_s, self.latency_s, self.clock = bytes_per_s, latency_s, clock
        self.carried_bytes = 0
        self.busy: list[tuple[float, float]] = []
        self._free_at_s = float("-inf")
        self._lock = threading.Lock()

    def book(self, num_bytes: int, asked_s: float | None = None) -> float:
        """Take the link for a transfer, behind all booked before; when its bytes will have arrived.

        `asked_s`: when the device asked for it, where that is not now.
        """
        with self._lock:
            begins_s = max(self.clock.now() if asked_s is None else asked_s, self._free_at_s)
            self._free_at_s = begins_s + num_bytes / self.bytes_per_s
            self.carried_bytes += num_bytes
            self.busy.append((begins_s, self._free_at_s))
            return self._free_at_s + self.latency_s

    def busy_s(self, from_s: float, to_s: float) -> float:
        """How long of that time it was busy, or will be with what is booked."""
        with self._lock:
            return sum(max(0.0, min(b, to_s) - max(a, from_s)) for a, b in self.busy)


class Link:
    """Both directions. Where it is not on, bytes are there at once: for what is not measured.

    Attributes:
        due: by layer, when the last of its bytes will have arrived (`up`), or gone (`down`), of what was asked for.
    """

    def __init__(self, bytes_per_s: float, latency_s: float, clock: Clock) -> None:
        self.clock = clock
        self.up, self.down = (Direction(bytes_per_s, latency_s, clock) for _ in range(2))
        self.is_on = False
        self.due: dict[int, dict[str, float]] = {}
        self._lock = threading.Lock()

    def needs(self, layer: int, what: str, at_s: float) -> None:
        """The layer is not computed before `at_s`."""
        with self._lock:
            due = self.due.setdefault(layer, {})
            due[what] = max(at_s, due.get(what, at_s))

    def taken(self, layer: int) -> Mapping[str, float]:
        """What the layer needs, which is asked for once."""
        with self._lock:
            return self.due.pop(layer, {})

    def fetch(self, layer: int, num_bytes: int) -> None:
        """Bytes that the layer needs come up; returns when they are there."""
        if self.is_on:
            at_s = self.up.book(num_bytes)
            self.needs(layer, "up", at_s)
            self.clock.wait_until(at_s)


class LinkedStore(Store):
    """A store behind a link: what is read comes up, what is written goes down. Extras pass through."""

    def __init__(self, inner: Store, link: Link) -> None:
        self.inner, self.link = inner, link
        self.tier, self.shape, self.num_slots = inner.tier, inner.shape, inner.num_slots

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        if self.link.is_on:
            self.link.clock.wait_until(self.link.down.book(block.numel()))
        self.inner.write(slot, block, label)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        if self.link.is_on:
            self.link.clock.wait_until(self.link.up.book(out.numel()))
        self.inner.read(slot, out)

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.link.fetch(layer, out.numel())
        self.inner.read_slice(slot, layer, out)

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


@dataclass(frozen=True, slots=True)
class Part:
    """A layer, or what follows the last one, as the device has computed it."""

    free_s: float
    """When the device had ended what came before."""
    due: Mapping[str, float]
    begun_s: float
    ended_s: float
    late_s: float
    """What the real work took longer than the part."""


class Device:
    """The simulated GPU. Where it is not on, nothing takes longer than the real work.

    Attributes:
        link: what the bytes of the step that runs come through; None: they are here.
        parts: of the step that runs.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.is_on = False
        self.link: Link | None = None
        self.parts: list[Part] = []
        self.free_s = 0.0

    def __deepcopy__(self, memo: dict[int, Any]) -> Device:
        return self  # a model's twin runs on the same one

    def begin(self) -> None:
        """A step begins: what came before it has been waited for."""
        self.free_s = self.clock.now()
        self.parts.clear()

    def compute(self, number: int, work: Callable[[], torch.Tensor], seconds: float) -> torch.Tensor:
        """What `work` gives, when the device has computed part `number` of the step for `seconds`."""
        if not self.is_on:
            return work()
        result = work()
        due = {} if self.link is None else self.link.taken(number)
        begun_s = max([self.free_s, *due.values()])
        self.clock.wait_until(begun_s + seconds)
        ended_s = self.clock.now()
        self.parts.append(Part(self.free_s, due, begun_s, ended_s, ended_s - begun_s - seconds))
        self.free_s = ended_s
        return result


def stalls(parts: Iterable[Part], link: Link | None) -> dict[str, float]:
    """What the device waited for, in seconds.

    Returns:
        `step_boundary`: for the first layer's bytes; of later layers' `bandwidth`, while the link was busy, and
        `latency`, while it was not: they were asked for late, or on their way. `copy_down`: for bytes to have gone.
    """
    found = dict.fromkeys(("step_boundary", "bandwidth", "latency", "copy_down"), 0.0)
    for number, part in enumerate(parts):
        arrived_s = max(part.free_s, part.due.get("up", part.free_s))
        found["copy_down"] += part.begun_s - arrived_s
        if number == 0 or link is None:
            found["step_boundary"] += arrived_s - part.free_s
            continue
        busy_s = link.up.busy_s(part.free_s, arrived_s)
        found["bandwidth"] += busy_s
        found["latency"] += arrived_s - part.free_s - busy_s
    return found
