"""Attention by the CPU over blocks of the cpu tier where they lie, beside a device that attends to the rest.

K and V stay; the queries go down, and outputs with their log-sum-exp come back: kilobytes, whatever the context.
Source: FlexGen (Sheng et al., ICML 2023, section 4.2, "compute delegation"); NEO (Jiang et al., MLSys 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from kvtier.attention import Kernel, Partial, merge, partial_attention
from kvtier.load_or_recompute import Meter
from kvtier.types import HostAttention
from kvtier.workers import Workers

Pieces = Sequence[tuple[torch.Tensor, torch.Tensor]]


class HostShare:
    """Which share of the cpu tier's blocks the CPU attends to."""

    FIRST_FRAC = 0.5
    """While only one of the two rates is known: both are measured by using both."""
    STEP_FRAC = 1 / 16
    """The share goes in steps of so much, and stays until it is off by three quarters of one: with every change a plan
    is made anew."""

    def __init__(
        self, mode: HostAttention, *, is_on_host: bool, link_per_s: Callable[[], float | None] = lambda: None
    ) -> None:
        """Args:
        is_on_host: the model itself runs on the CPU, and reads the cpu tier's memory as fast as its own.
        link_per_s: slices a second that cross the link, as measured; None: it was not.
        """
        self._mode, self._is_on_host, self._link_per_s = mode, is_on_host, link_per_s
        self.host = Meter()
        """Slices a second that the CPU attends to."""
        self._last = self.FIRST_FRAC

    @property
    def is_in_place(self) -> bool:
        """Whether the cpu tier is read where it lies, as fast as the gpu tier."""
        return self._is_on_host and self._mode is not HostAttention.NEVER

    def frac(self) -> float:
        """The share, from 0.0 to 1.0. Where both end at the same time: `host / (host + link)` of their rates."""
        if self._mode is HostAttention.NEVER:
            return 0.0
        if self._mode is HostAttention.ALWAYS or self._is_on_host:
            return 1.0
        host, link = self.host.per_s, self._link_per_s()
        if host is not None and link is not None:
            wanted = host / (host + link)
            if abs(wanted - self._last) >= 0.75 * self.STEP_FRAC:
                self._last = round(wanted / self.STEP_FRAC) * self.STEP_FRAC
        return self._last


class HostAttender:
    """Attends on a thread of its own, while the device computes."""

    def __init__(self, device: torch.device, share: HostShare) -> None:
        self._device, self._share = device, share
        self._workers = Workers(1, "kvtier-host-attention")

    def start(self, query: torch.Tensor, pieces: Pieces, kernel: Kernel) -> Future[Partial]:
        """Begin. `query` as `partial_attention` takes it, on the device: on CUDA this waits until it is computed.

        Args:
            pieces: K and V in host memory, at least one. They must stay until the future is done.
        """
        return self._workers.submit(self._attend, query.to("cpu"), pieces, kernel)

    def _attend(self, query: torch.Tensor, pieces: Pieces, kernel: Kernel) -> Partial:
        num_blocks = sum(keys.shape[0] for keys, _ in pieces)
        self._share.host.begin()
        done = 0
        try:
            with torch.no_grad():
                part: list[Partial] = []
                for keys, values in pieces:
                    part = [merge([*part, partial_attention(query, keys, values, kernel)])]
            done = num_blocks
            return part[0]
        finally:
            self._share.host.end(done)

    def finish(self, begun: Future[Partial]) -> Partial:
        """The result on the device. Raises what attention raised."""
        part = begun.result()
        return Partial(part.output.to(self._device), part.lse.to(self._device))

    def close(self) -> None:
        """End the thread, after what it has begun. Idempotent."""
        self._workers.close(wait=True)
