"""What goes between host memory and each CUDA device. Written for CUDA; not yet run on a GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.doctor.watch import Watch
from kvtier.stores.cpu import CpuStore
from kvtier.stores.staging import page_aligned
from kvtier.system import memory_available_bytes
from kvtier.types import BlockShape

_BLOCK = BlockShape(num_layers=1, kv_heads=64, block_tokens=1024, key_dim=256, value_dim=256, element_bytes=2)  # 64 MiB
PIECE_BYTES = (1 << 20, _BLOCK.block_bytes)
_CALLS_MIN = 3
ESTIMATE_S = 3.0


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Bytes a second of copies of `piece_bytes` each, one after the other on one CUDA stream."""

    is_pinned: bool
    to_device: bool
    piece_bytes: int
    bytes_per_s: float | NotMeasured


@dataclass(frozen=True, slots=True)
class Gpu:
    """One CUDA device."""

    index: int
    name: str
    free_bytes: int
    total_bytes: int
    copies: tuple[CopyRate, ...]


def measure_gpus(each_s: float, watch: Watch) -> tuple[Gpu, ...] | NotMeasured:
    """Every CUDA device, each rate for about `each_s`. Raises nothing. Memory: 128 MiB of the host, 64 of a device."""
    if not torch.cuda.is_available():
        return NotMeasured(
            "no CUDA device" if torch.version.cuda else "no CUDA device (this torch is built without CUDA)"
        )
    num_devices = torch.cuda.device_count()
    watch.phase("GPU", num_devices * (8 * each_s + ESTIMATE_S), 8 * num_devices)
    found = attempt(lambda: tuple(_measure(index, each_s, watch) for index in range(num_devices)))
    return found


def _measure(index: int, each_s: float, watch: Watch) -> Gpu:
    device = torch.device("cuda", index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    rates: list[CopyRate] = []
    for is_pinned in (True, False):
        found = attempt(lambda is_pinned=is_pinned: _rates(device, is_pinned, each_s, watch))  # type: ignore[misc]
        if isinstance(found, NotMeasured):
            found = [CopyRate(is_pinned, to, size, found) for to in (True, False) for size in PIECE_BYTES]
        rates += found
    return Gpu(index, torch.cuda.get_device_name(device), int(free_bytes), int(total_bytes), tuple(rates))


def _rates(device: torch.device, is_pinned: bool, each_s: float, watch: Watch) -> list[CopyRate]:
    if memory_available_bytes() < 4 * _BLOCK.block_bytes:
        raise MemoryError("too little host memory is free for 64 MiB")
    # Registered as the cpu tier registers its own, so that what fails there fails here.
    store = CpuStore(_BLOCK, 1, pin=True) if is_pinned else None
    try:
        if store is not None and not store.pinned:
            raise MemoryError("64 MiB of host memory could not be page-locked")
        host = store.slab() if store is not None else page_aligned(_BLOCK.block_bytes)
        host.fill_(1)
        there = torch.empty(_BLOCK.block_bytes, dtype=torch.uint8, device=device)
        return copy_rates(host, there, is_pinned, each_s, lambda: torch.cuda.synchronize(device), watch)
    finally:
        if store is not None:
            store.close()


def copy_rates(
    host: torch.Tensor,
    there: torch.Tensor,
    is_pinned: bool,
    each_s: float,
    synchronize: Callable[[], None],
    watch: Watch,
) -> list[CopyRate]:
    """Both directions by each piece size, between two tensors `[num_bytes]` uint8."""
    rates: list[CopyRate] = []
    for to_device in (True, False):
        target, source = (there, host) if to_device else (host, there)
        for piece_bytes in PIECE_BYTES:
            starts = range(0, target.numel(), piece_bytes)
            pieces = [(target[at : at + piece_bytes], source[at : at + piece_bytes]) for at in starts]
            times: list[float] = []
            until_s = time.perf_counter() + each_s
            while len(times) < _CALLS_MIN or time.perf_counter() < until_s:
                synchronize()
                started_s = time.perf_counter()
                for to, of in pieces:
                    to.copy_(of, non_blocking=True)
                synchronize()
                times.append(time.perf_counter() - started_s)
            rate = target.numel() / statistics.median(times)
            rates.append(CopyRate(is_pinned, to_device, piece_bytes, rate))
            watch.step()
    return rates
