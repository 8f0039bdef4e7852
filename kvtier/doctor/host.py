"""What the processor does to bytes: copies, checksums, compression."""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import xxhash
import zstandard

from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.doctor.watch import Watch
from kvtier.stores.staging import page_aligned
from kvtier.system import memory_available_bytes

_MIB = 1 << 20
_COPY_BYTES, _COPY_BYTES_A_CORE = 64 * _MIB, 8 * _MIB  # beyond what processors cache
SLICE_BYTES = 384 << 10
_ZSTD_LEVEL = 1
_CALLS_MIN = 3


@dataclass(frozen=True, slots=True)
class HostSpeed:
    """Bytes a second, each on one core but `copy_all`."""

    cores: int
    copy_one: float | NotMeasured
    copy_all: float | NotMeasured
    checksum: float | NotMeasured
    compress: float | NotMeasured
    decompress: float | NotMeasured
    compressed_frac: float | NotMeasured
    """What zstd leaves of normally distributed bf16 numbers, whose bytes are like KV's."""


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_host(most_s: float, watch: Watch) -> HostSpeed:
    """Measure each for a fifth of `most_s`. Raises nothing. Memory: 128 MiB, or 16 a core if that is more."""
    watch.phase("processor", most_s, 5)
    each_s, cores = most_s / 5, usable_cores()

    def measured(call: Callable[[], float]) -> float | NotMeasured:
        found = attempt(call)
        watch.step()
        return found

    copy_one = measured(lambda: _copy_rate(1, each_s))
    copy_all = measured(lambda: _copy_rate(cores, each_s))
    data, cold = _like_kv(), page_aligned(_COPY_BYTES // 2).numpy()
    cold[:] = 1
    slices = itertools.cycle(
        cold.data[at : at + SLICE_BYTES] for at in range(0, cold.nbytes - SLICE_BYTES, SLICE_BYTES)
    )
    packed = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)
    checksum = measured(lambda: _rate(lambda: xxhash.xxh3_64_intdigest(next(slices)), SLICE_BYTES, each_s))
    compressor, decompressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL), zstandard.ZstdDecompressor()
    compress = measured(lambda: _rate(lambda: compressor.compress(data), len(data), each_s))
    decompress = measured(lambda: _rate(lambda: decompressor.decompress(packed), len(data), each_s))
    return HostSpeed(cores, copy_one, copy_all, checksum, compress, decompress, len(packed) / len(data))


def _like_kv() -> bytes:
    numbers = np.random.default_rng(0).standard_normal(SLICE_BYTES // 2, dtype=np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()  # bf16 is the upper half of fp32


def _copy_rate(num_threads: int, most_s: float) -> float:
    """Bytes copied a second; each is read once and written once."""
    wanted = max(_COPY_BYTES, num_threads * _COPY_BYTES_A_CORE)
    num_bytes = min(wanted, memory_available_bytes() // 8) // num_threads * num_threads
    source, target = page_aligned(num_bytes).numpy(), page_aligned(num_bytes).numpy()
    source[:] = 1
    target[:] = 0  # both are there before the first copy
    part = num_bytes // num_threads
    pairs = [(target[i * part : (i + 1) * part], source[i * part : (i + 1) * part]) for i in range(num_threads)]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="kvtier-measure") as pool:

        def copy() -> object:
            return list(pool.map(lambda pair: np.copyto(*pair), pairs))

        return _rate(copy, num_bytes, most_s)


def _rate(call: Callable[[], object], num_bytes: int, most_s: float) -> float:
    """Bytes a second, from the median time of a call, for about `most_s`."""
    times: list[float] = []
    until_s = time.perf_counter() + most_s
    while len(times) < _CALLS_MIN or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(times)
