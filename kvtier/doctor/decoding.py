"""What a decode step costs beside products of matrices: attention over K and V, and the code around every layer.

A model's own size is in none of it. On CUDA devices: written for them; not yet run on a GPU.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.attention import Kernel, finish, pack, partial_attention
from kvtier.doctor.answer import NotMeasured, attempt
from kvtier.doctor.compute import DTYPES, median_s
from kvtier.doctor.host import usable_cores
from kvtier.doctor.watch import Watch
from kvtier.system import memory_available_bytes
from kvtier.workers import Workers

HEADS = (1, 4)
"""Query heads on one of K and V: with one, attention only reads; with more it computes too."""
_KV_HEADS, _BLOCK_TOKENS, _HEAD_DIM, _AT_ONCE = 4, 256, 64, 8
_BYTES = 64 << 20  # of K and V: beyond what is cached
_TINY_TOKENS, _MANY_CALLS, _FEW_CALLS = 16, 34, 2
_FEW_LAYERS, _MANY_LAYERS = 2, 10
_STEP_BLOCK_TOKENS, _TAIL_TOKENS = 64, 8
_STEPS_MIN, _STEPS_MAX, _STEPS_BEFORE = 5, 40, 3  # all of them in one tail
_LEAST_US = 0.1  # a difference of two times may come out as nothing, or less


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """One new token's attention, as kvtier computes it over blocks of 256 tokens: on the processor over a run of them
    as one piece, on a CUDA device block by block."""

    device: int | None
    """The CUDA device's index; None: the processor."""
    num_threads: int
    """torch's; 0 on a CUDA device."""
    dtype: str
    """Of K and V, without `torch.`."""
    heads: int
    """Of `HEADS`."""
    bytes_per_s: float | NotMeasured
    """Bytes of K and V as they are stored; each is read once."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Microseconds of code, whatever the size of weights and KV: from decode steps of models that have hardly any."""

    device: int | None
    num_threads: int
    step_us: float | NotMeasured
    """A step without its layers."""
    layer_us: float | NotMeasured
    """One layer more, with attention over a block and over the tail behind it: one call on the processor, where they
    lie joined, two on a CUDA device."""
    call_us: float | NotMeasured
    """One call of attention more, with its share of the merge."""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """All of it."""

    attention: tuple[AttentionRate, ...]
    costs: tuple[StepCost, ...]
    handover_us: float | NotMeasured
    """A call given to a waiting thread until its result is there, as every read of a slice is."""


def measure_decoding(each_s: float, watch: Watch) -> DecodeSpeed:
    """The processor with one thread and with all, and every CUDA device; each figure for about `each_s`.

    Raises nothing. Memory: 64 MiB of the host or of a device, and 32 for a small cache. torch's number of threads is
    as before. Cost: importing transformers comes on top; without it there are no `costs`.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = usable_cores()
    host = torch.device("cpu")
    places = [(host, count) for count in ((1, cores) if cores > 1 else (1,))]
    places += [(torch.device("cuda", index), 0) for index in range(num_devices)]
    num_rates = len(DTYPES) * len(HEADS) * len(places)
    watch.phase("decoding", (num_rates + 3 * len(places)) * each_s + 3.0, num_rates + len(places) + 1)
    attention: list[AttentionRate] = []
    costs: list[StepCost] = []
    before = torch.get_num_threads()
    try:
        for device, num_threads in places:
            torch.set_num_threads(num_threads or before)
            attention += _attention(device, num_threads, each_s, watch)
            costs.append(_costs(device, num_threads, each_s))
            watch.step()
    finally:
        torch.set_num_threads(before)
    handover = attempt(lambda: _handover_us(each_s))
    watch.step()
    return DecodeSpeed(tuple(attention), tuple(costs), handover)


def _attention(device: torch.device, num_threads: int, each_s: float, watch: Watch) -> Iterator[AttentionRate]:
    for dtype, heads in itertools.product(DTYPES, HEADS):
        rate = attempt(lambda dtype=dtype, heads=heads: _attention_rate(device, dtype, heads, each_s))  # type: ignore[misc]
        watch.step()
        yield AttentionRate(device.index, num_threads, str(dtype).removeprefix("torch."), heads, rate)


def _attention_rate(device: torch.device, dtype: torch.dtype, heads: int, each_s: float) -> float:
    if device.type == "cpu" and memory_available_bytes() < 4 * _BYTES:
        raise MemoryError("too little memory is free for 64 MiB")
    block_bytes = 2 * _KV_HEADS * _BLOCK_TOKENS * _HEAD_DIM * dtype.itemsize
    joined = device.type == "cpu"
    rows, tokens = (1, _AT_ONCE * _BLOCK_TOKENS) if joined else (_AT_ONCE, _BLOCK_TOKENS)
    blocks = torch.ones(
        _BYTES // (_AT_ONCE * block_bytes), 2, rows, _KV_HEADS, tokens, _HEAD_DIM, dtype=dtype, device=device
    )
    query = torch.ones(1, _KV_HEADS, heads, _HEAD_DIM, dtype=dtype, device=device)
    kernel = _kernel(device, dtype)
    pieces = itertools.cycle((keys, values) for keys, values in blocks)
    seconds = median_s(lambda: partial_attention(query, *next(pieces), kernel), _settle(device), each_s, each_s + 1.0)
    return _AT_ONCE * block_bytes / seconds


def _kernel(device: torch.device, dtype: torch.dtype) -> Kernel:
    """As `LayerGroup.is_wide` has it."""
    return Kernel(_HEAD_DIM**-0.5, wide=dtype.itemsize == 2 and device.type == "cpu")


def _settle(device: torch.device) -> Callable[[], None]:
    return (lambda: torch.cuda.synchronize(device)) if device.type == "cuda" else lambda: None


def _costs(device: torch.device, num_threads: int, each_s: float) -> StepCost:
    steps = attempt(lambda: _steps_us(device, each_s))
    step, layer = (steps, steps) if isinstance(steps, NotMeasured) else steps
    return StepCost(device.index, num_threads, step, layer, attempt(lambda: _call_us(device, each_s)))


def _call_us(device: torch.device, each_s: float) -> float:
    """Of so few tokens that they take no time."""
    dtype, heads = torch.float32, _KV_HEADS * max(HEADS)
    tokens = torch.ones(1, _KV_HEADS, _TINY_TOKENS, _HEAD_DIM, dtype=dtype, device=device)
    query = pack(torch.ones(1, heads, 1, _HEAD_DIM, dtype=dtype, device=device), _KV_HEADS)
    kernel, settle = _kernel(device, dtype), _settle(device)

    def attend(num_calls: int) -> torch.Tensor:
        return finish([partial_attention(query, tokens, tokens, kernel) for _ in range(num_calls)], heads, dtype)

    many, few = (
        median_s(lambda num=num: attend(num), settle, each_s / 2, each_s + 1.0)  # type: ignore[misc]
        for num in (_MANY_CALLS, _FEW_CALLS)
    )
    return max(_LEAST_US, (many - few) / (_MANY_CALLS - _FEW_CALLS) * 1e6)


def _steps_us(device: torch.device, each_s: float) -> tuple[float, float] | NotMeasured:
    """A step without layers, and a layer: the line through two models of different depth, which take turns."""
    try:
        from kvtier import TieredKV
        from kvtier.hf.tiny import tiny_llama
    except ImportError as error:
        return NotMeasured(f"transformers cannot be imported: {' '.join(str(error).split())[:120]}")
    config = {
        "block_tokens": _STEP_BLOCK_TOKENS,
        "prefix_cache": False,
        "tiers": {"gpu": {"budget": 32 << 20}},
    }
    times: dict[int, list[float]] = {_FEW_LAYERS: [], _MANY_LAYERS: []}
    settle = _settle(device)
    with ExitStack() as stack, torch.no_grad():
        steps: dict[int, Callable[[], object]] = {}
        for num_layers in times:
            tiered: Any = stack.enter_context(TieredKV(tiny_llama(device, torch.float32, num_layers), config))
            cache = tiered.new_cache()
            prompt = torch.zeros((1, _STEP_BLOCK_TOKENS + _TAIL_TOKENS), dtype=torch.long, device=device)
            tiered(prompt, past_key_values=cache)
            steps[num_layers] = functools.partial(tiered, prompt[:, :1], past_key_values=cache)
        until_s = time.perf_counter() + each_s * len(times)
        for number in range(_STEPS_MAX):
            if number >= _STEPS_MIN and time.perf_counter() > until_s:
                break
            for num_layers, step in steps.items():
                settle()
                started_s = time.perf_counter()
                step()
                settle()
                times[num_layers].append(time.perf_counter() - started_s)
    few, many = (statistics.median(times[num_layers][_STEPS_BEFORE:]) * 1e6 for num_layers in times)
    layer = max(_LEAST_US, (many - few) / (_MANY_LAYERS - _FEW_LAYERS))
    return max(_LEAST_US, few - _FEW_LAYERS * layer), layer


def _handover_us(each_s: float) -> float:
    workers = Workers(1, "kvtier-measure")
    try:
        return median_s(lambda: workers.submit(int).result(), lambda: None, each_s, each_s + 1.0) * 1e6
    finally:
        workers.close(wait=True)
