"""What a soak's process is measured by, against where it stood before kvtier was there: memory, files, disk, CUDA."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import torch

from kvtier.benchmarks.checkpoint import Checkpoint
from kvtier.benchmarks.monitor import Sampler
from kvtier.benchmarks.report import budget_violations, memory_allowed_bytes
from kvtier.system import io_counters, num_threads, open_fds, process_memory_bytes


class Watch:
    """Made when the model is loaded and warm, before it is wrapped; `earlier` is what an interrupted run had found."""

    def __init__(self, gpu_tier_in_memory: bool, earlier: Checkpoint | None) -> None:
        self._earlier = earlier
        self._gpu_tier_in_memory = gpu_tier_in_memory
        self.baseline_bytes = process_memory_bytes()
        self.fds, self.threads = open_fds(), num_threads()
        self._io = io_counters()
        self._cuda_bytes = _cuda_peak_bytes(reset=True)
        self.sampler = Sampler(None)

    def begin(self, folder: str | None) -> None:
        """Sample from here on, this nvme folder too."""
        self.sampler = Sampler(Path(folder) if folder else None)
        self.sampler.start()

    def allowed_growth_bytes(self, stats: dict[str, Any]) -> int:
        """What memory may grow by."""
        allowed_bytes: int = memory_allowed_bytes(stats, self._gpu_tier_in_memory)
        return allowed_bytes

    def seen(self, stats: dict[str, Any]) -> dict[str, int]:
        """The sampler's peaks since the last call, and the memory that this process may have."""
        return {
            **self.sampler.take_recent(),
            "memory_allowed_bytes": self.baseline_bytes + self.allowed_growth_bytes(stats),
        }

    def violations(self, stats: dict[str, Any]) -> list[str]:
        """Every budget that was exceeded since the run began, as sentences."""
        cuda_growth = _cuda_peak_bytes() - self._cuda_bytes
        now = budget_violations(stats, self.sampler.peak, self.baseline_bytes, self._gpu_tier_in_memory, cuda_growth)
        earlier = self._earlier.budget_violations if self._earlier else ()
        return [*earlier, *(one for one in now if one not in earlier)]

    @property
    def peak(self) -> dict[str, int]:
        """The sampler's peaks since the run began."""
        earlier = self._earlier.peak if self._earlier else {}
        return {name: max(value, earlier.get(name, 0)) for name, value in self.sampler.peak.items()}

    @property
    def memory_growth_bytes(self) -> int:
        """The most memory above the baseline, of all processes that the run had."""
        earlier = self._earlier.memory_growth_bytes if self._earlier else 0
        growth: int = self.sampler.peak["memory_bytes"] - self.baseline_bytes
        return max(earlier, growth)

    @property
    def io(self) -> dict[str, int]:
        """`/proc/self/io` since the run began."""
        earlier = self._earlier.io if self._earlier else {}
        return {name: value - self._io.get(name, 0) + earlier.get(name, 0) for name, value in io_counters().items()}


def _cuda_peak_bytes(*, reset: bool = False) -> int:
    if not torch.cuda.is_available():
        return 0
    if reset:
        torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.max_memory_allocated())


def warm_up(model: Any, num_tokens: int) -> None:
    """One plain prefill and two tokens, so that threads, buffers and lazily imported code are in the baseline."""
    limit = getattr(model.config, "max_position_embeddings", None) or num_tokens + 2
    ids = torch.zeros(1, max(1, min(num_tokens, limit - 2)), dtype=torch.long, device=model.device)
    model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)
    gc.collect()
