"""What the device computes: a matrix times a vector, as decoding does, and times a matrix, as prefill does.

On CUDA devices: written for them; not yet run on a GPU.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.doctor.host import usable_cores
from kvtier.doctor.watch import Watch
from kvtier.system import memory_available_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_CPU_BYTES, _CUDA_BYTES = 64 << 20, 256 << 20  # of the matrix that a vector meets: beyond what is cached
_CPU_SIDE, _CUDA_SIDE = 512, 4096  # of the two matrices
_COLUMNS = 4096
NARROW_COLUMNS = 512
_CALLS_MIN = 3
_SLOW_S = 0.2  # a processor without instructions for the dtype: once is enough


@dataclass(frozen=True, slots=True)
class ComputeRate:
    """Two rates of one device in one dtype."""

    device: int | None
    """The CUDA device's index; None: the processor."""
    num_threads: int
    """torch's; 0 on a CUDA device."""
    dtype: str
    """Without `torch.`."""
    read_bytes_per_s: float | NotMeasured
    """Bytes of the matrix that is multiplied with a vector: each is read once. Its rows are of 4,096 elements."""
    flop_per_s: float | NotMeasured
    """Operations of a product of two square matrices, two for each product of numbers."""
    narrow_bytes_per_s: float | NotMeasured
    """As `read_bytes_per_s`, with rows of 512 elements, as small models have them: each row costs beside its bytes."""


def measure_compute(each_s: float, watch: Watch) -> tuple[ComputeRate, ...]:
    """The processor with one thread and with all, and every CUDA device; each rate for about `each_s`. Raises nothing.

    Memory: 64 MiB of the host, 256 MiB of a device. torch's number of threads is as before.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = usable_cores()
    counts = (1, cores) if cores > 1 else (1,)
    places = len(counts) + num_devices
    watch.phase("compute", 3 * len(DTYPES) * places * each_s, 3 * len(DTYPES) * places)
    return tuple(_rates(counts, num_devices, each_s, watch))


def _rates(counts: tuple[int, ...], num_devices: int, each_s: float, watch: Watch) -> Iterator[ComputeRate]:
    before = torch.get_num_threads()
    try:
        for num_threads in counts:
            torch.set_num_threads(num_threads)
            for dtype in DTYPES:
                yield _measure(torch.device("cpu"), num_threads, dtype, each_s, watch)
    finally:
        torch.set_num_threads(before)
    for index in range(num_devices):
        for dtype in DTYPES:
            yield _measure(torch.device("cuda", index), 0, dtype, each_s, watch)


def _measure(device: torch.device, num_threads: int, dtype: torch.dtype, each_s: float, watch: Watch) -> ComputeRate:
    on_cuda = device.type == "cuda"
    slow_s = math.inf if on_cuda else _SLOW_S  # a device's first call may take half a second

    def settle() -> None:
        if on_cuda:
            torch.cuda.synchronize(device)

    def vector(columns: int) -> float:
        wanted = _CUDA_BYTES if on_cuda else _CPU_BYTES
        if not on_cuda and memory_available_bytes() < 4 * wanted:
            raise MemoryError("too little memory is free for 64 MiB")
        matrix = torch.ones(wanted // dtype.itemsize // columns, columns, dtype=dtype, device=device)
        column = torch.ones(columns, 1, dtype=dtype, device=device)
        return matrix.nbytes / median_s(lambda: matrix @ column, settle, each_s, slow_s)

    def square() -> float:
        side = _CUDA_SIDE if on_cuda else _CPU_SIDE
        matrix = torch.ones(side, side, dtype=dtype, device=device)
        return 2 * side**3 / median_s(lambda: matrix @ matrix, settle, each_s, slow_s)

    found: list[float | NotMeasured] = []
    for call in (lambda: vector(_COLUMNS), square, lambda: vector(NARROW_COLUMNS)):
        found.append(attempt(call))
        watch.step()
    name = str(dtype).removeprefix("torch.")
    return ComputeRate(device.index if on_cuda else None, num_threads, name, *found)


def median_s(call: Callable[[], object], settle: Callable[[], None], most_s: float, slow_s: float) -> float:
    """Median seconds of a call, for about `most_s`.

    The first loads kernels and does not count, unless it took more than `slow_s`: then it is the only one.
    """
    times: list[float] = []
    until_s = time.perf_counter() + most_s
    while len(times) <= _CALLS_MIN or time.perf_counter() < until_s:
        started_s = time.perf_counter()
        call()
        settle()
        times.append(time.perf_counter() - started_s)
        if times[0] > slow_s:
            return times[0]
    return statistics.median(times[1:])
