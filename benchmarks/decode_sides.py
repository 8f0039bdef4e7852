"""What `benchmarks/decode.py` compares: caches of one row with the same synthetic KV, and how each takes a token.

`SIDES` makes them by case.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from kvtier import TieredKV
from kvtier.benchmarks.budgets import Layout, layout, tier_config
from kvtier.benchmarks.cold import drop_cache
from kvtier.benchmarks.models import twin
from kvtier.benchmarks.naive_lru import NaiveLru
from kvtier.benchmarks.residence import residence, spread
from kvtier.benchmarks.synthetic import fill, fill_plain
from kvtier.errors import UnsupportedError
from kvtier.hf import cache_keyword, describe
from kvtier.system import io_counters
from kvtier.types import Tier

MEMORY_FRAC = 0.5
"""What naive LRU promotion has of memory: as much as the gpu and cpu tiers that it is compared with."""
NUM_READERS = 8
BLOCK_CONTEXT = 2048
"""Up to which naive LRU promotion of whole blocks is measured."""


@dataclass(frozen=True)
class Given:
    """What all sides of one comparison are made of: the KV of `context` tokens, and room for `num_more`."""

    model: Any
    context: int
    num_more: int
    seed: int
    folder: Path

    def generator(self) -> torch.Generator:
        """In the state from which every side's KV is drawn."""
        return torch.Generator().manual_seed(self.seed)

    def plain(self) -> Any:
        """A `DynamicCache` of it."""
        return fill_plain(self.model, self.context, self.generator())


@dataclass(frozen=True)
class Sample:
    """Some tokens on one side. Reads and stall are per token."""

    ms: float
    cpu_ms: float
    """Of all threads of the process."""
    read_bytes: float
    stall_ms: float
    logits: torch.Tensor
    """Behind the last token."""


@dataclass
class Side:
    """One case: how a token is appended, and what is known of it beside its time."""

    step: Callable[[torch.Tensor], torch.Tensor]
    close: Callable[[], None] = lambda: None
    stall_s: Callable[[], float] = lambda: 0.0
    files: Path | None = None
    file_bytes: int = 0
    """KV that an ideal schedule reads from files at every token: what has no room in memory."""
    placed: Callable[[], Sequence[Tier | None]] = tuple
    """Where each full block lies now."""
    layout: Layout | None = None
    notes: dict[str, Any] = field(default_factory=dict)

    def measure(self, tokens: torch.Tensor) -> Sample:
        """Append `tokens`, `[1, n]`, one by one: a first one outside of the time, for caches are others' before it."""
        if self.files is not None:
            drop_cache(self.files)
        logits = self.step(tokens[:, :1])
        num = tokens.shape[1] - 1
        stalled_s, read_bytes = self.stall_s(), io_counters().get("read_bytes", 0)
        cpu_started_s, started_s = time.process_time(), time.perf_counter()
        for number in range(1, num + 1):
            logits = self.step(tokens[:, number : number + 1])
        took_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
        return Sample(
            took_s / num * 1e3,
            cpu_s / num * 1e3,
            (io_counters().get("read_bytes", 0) - read_bytes) / num,
            (self.stall_s() - stalled_s) / num * 1e3,
            logits[0, -1].float().cpu(),
        )


def _plain_step(model: Any, cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    keyword = cache_keyword(model.forward)

    def step(token: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = model(token, use_cache=True, **{keyword: cache}).logits
        return logits

    return step


def dynamic(given: Given) -> Side:
    """transformers' default."""
    return Side(_plain_step(given.model, given.plain()))


def static(given: Given) -> Side:
    """transformers' cache of a fixed length, with room for the tokens that are measured and no more."""
    from transformers import StaticCache

    cache = StaticCache(config=given.model.config, max_cache_len=given.context + given.num_more)
    _take_over(cache, given.plain())
    return Side(_plain_step(given.model, cache))


def hf_offloaded(given: Given) -> Side:
    """transformers' offloaded cache: all KV in host memory, both ways over the bus at every token. Needs a device."""
    from transformers import DynamicCache

    cache = DynamicCache(config=given.model.config, offloading=True)
    _take_over(cache, given.plain())
    return Side(_plain_step(given.model, cache))


def _take_over(cache: Any, plain: Any) -> None:
    for index, layer in enumerate(plain.layers):
        cache.update(layer.keys, layer.values, index)


def tiered(given: Given, name: str, placement: str, **values: Any) -> Side:
    """kvtier with its full blocks placed. `values` are further keys of its config."""
    wanted, folder = layout(placement, given.context, given.num_more), given.folder / name
    model = twin(given.model)
    wrapper = TieredKV(model, tier_config(model, wanted, folder, **values))
    try:
        cache = wrapper.new_cache()
        fill(wrapper, cache, torch.zeros((1, given.context), dtype=torch.long), given.generator())
        spread(wrapper, cache, wanted.num_blocks)
    except BaseException:  # a Ctrl-C too: no folder stays locked
        wrapper.close()
        raise
    shape = describe(given.model, wanted.block_tokens).shape
    return Side(
        lambda token: wrapper(token, **{cache_keyword(given.model.forward): cache}).logits,
        close=wrapper.close,
        stall_s=lambda: float(wrapper.stats()["stall_s"]),
        files=folder if Tier.NVME in wanted.num_blocks else None,
        file_bytes=wanted.num_blocks.get(Tier.NVME, 0) * shape.block_bytes,
        placed=lambda: residence(cache)[: sum(wanted.num_blocks.values())],
        layout=wanted,
        notes={"io": wrapper.stats()["tiers"]["nvme"].get("io")} if Tier.NVME in wanted.num_blocks else {},
    )


def naive_lru(given: Given, num_readers: int = 1, unit: Literal["slice", "block"] = "slice") -> Side:
    """LRU promotion over files, with memory for half; `num_readers` slices at a time.

    Raises UnsupportedError: whole blocks of more than `BLOCK_CONTEXT` tokens, which takes seconds a token.
    """
    if unit == "block" and given.context > BLOCK_CONTEXT:
        raise UnsupportedError(f"promotes whole blocks once a layer: seconds a token, measured to {BLOCK_CONTEXT:,}")
    wanted = layout("gpu25_cpu25_nvme50", given.context, given.num_more)
    folder = given.folder / f"naive_{unit}_{num_readers}"
    naive = NaiveLru(
        twin(given.model),
        given.plain(),
        folder,
        block_tokens=wanted.block_tokens,
        memory_frac=MEMORY_FRAC,
        num_more=given.num_more,
        unit=unit,
        num_readers=num_readers,
    )
    file_bytes = wanted.num_blocks[Tier.NVME] * describe(given.model, wanted.block_tokens).shape.block_bytes
    return Side(naive.step, naive.close, files=folder, file_bytes=file_bytes)


SIDES: dict[str, Callable[[Given], Side]] = {
    "dynamic": dynamic,
    "static": static,
    "all_gpu": functools.partial(tiered, name="all_gpu", placement="all_gpu"),
    "gpu25_cpu75": functools.partial(tiered, name="gpu25_cpu75", placement="gpu25_cpu75"),
    "gpu25_cpu25_nvme50": functools.partial(tiered, name="nvme50", placement="gpu25_cpu25_nvme50"),
    "no_prefetch": functools.partial(
        tiered, name="no_prefetch", placement="gpu25_cpu25_nvme50", prefetch={"policy": "no_prefetch"}
    ),
    "naive_lru": naive_lru,
    "naive_lru_block": functools.partial(naive_lru, unit="block"),
    "naive_lru_parallel": functools.partial(naive_lru, num_readers=NUM_READERS),
    "hf_offloaded": hf_offloaded,
}


def make(case: str, given: Given) -> Side | str:
    """The case's side, or why there is none on this machine."""
    if case == "hf_offloaded" and not torch.cuda.is_available():
        return _refusal(given)
    try:
        return SIDES[case](given)
    except UnsupportedError as error:
        return str(error)


def _refusal(given: Given) -> str:
    """What transformers itself says where there is no device to offload from."""
    try:
        side = hf_offloaded(given)
        side.step(torch.zeros((1, 1), dtype=torch.long))
    except (RuntimeError, AssertionError, AttributeError) as error:
        return f"transformers refuses without CUDA: {' '.join(str(error).split())[:120]}"
    return "transformers offloads nothing without CUDA"
