"""What a call of `generate` takes: to its first token and in all, by the clock and by the processor."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.system import io_counters


@dataclass(frozen=True)
class Spent:
    """One call. CPU seconds are those of all threads of the process."""

    first_token_s: float
    first_token_cpu_s: float
    first_token_read_bytes: int
    """What the disk gave until then."""
    seconds: float
    cpu_seconds: float
    sequence: tuple[int, ...]
    """Prompt and answer."""


class _FirstToken:
    """A streamer: transformers gives it the prompt, then each token as soon as it is chosen."""

    def __init__(self) -> None:
        self.num_put = 0
        self.at_s = self.cpu_at_s = 0.0
        self.read_bytes = 0

    def put(self, value: torch.Tensor) -> None:
        self.num_put += 1
        if self.num_put == 2:
            self.at_s, self.cpu_at_s = time.perf_counter(), time.process_time()
            self.read_bytes = _read_bytes()

    def end(self) -> None:
        """Nothing is left to show."""


def spent(generate: Callable[..., Any], ids: torch.Tensor, num_new: int, **kwargs: Any) -> Spent:
    """Call `generate` greedily for `num_new` tokens behind one prompt, `[1, length]`; the clock runs from here on."""
    streamer, read_before = _FirstToken(), _read_bytes()
    started_s, cpu_started_s = time.perf_counter(), time.process_time()
    out = generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False, streamer=streamer, **kwargs
    )
    seconds, cpu_seconds = time.perf_counter() - started_s, time.process_time() - cpu_started_s
    return Spent(
        streamer.at_s - started_s,
        streamer.cpu_at_s - cpu_started_s,
        streamer.read_bytes - read_before,
        seconds,
        cpu_seconds,
        tuple(out[0].tolist()),
    )


def _read_bytes() -> int:
    return io_counters().get("read_bytes", 0)
