"""The ways that `overlap.py` compares: kvtier, and what else offloads K and V, each behind a simulated link.

The others are honest: they book the link at the very time at which the device would ask, so that neither Python nor
hand-overs between threads cost them anything; and what attention reads is what they have copied.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import wait
from typing import Any

import torch
from transformers import DynamicCache

from kvtier import TieredKV
from kvtier.benchmarks.overlap_link import Device, Link, LinkedStore
from kvtier.benchmarks.overlap_model import BLOCK_TOKENS
from kvtier.config import KVTierConfig
from kvtier.hf import cache_keyword, describe
from kvtier.lower_tiers import gpu_budget
from kvtier.types import Tier

NUM_WARM = 3
"""Steps of one token each after which kvtier reads ahead, for it has seen that it does the same again and again."""


class Method(ABC):
    """One way to hold the K and V of one sequence. Fed with the same tokens as all others.

    Attributes:
        link: what it reads and writes through; None: all is on the device.
    """

    link: Link | None = None

    @abstractmethod
    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        """The next tokens, `[1, n]`; the logits behind the last of them, `[vocabulary]`."""

    @abstractmethod
    def arrive(self) -> None:
        """Return when nothing that was asked for is on its way."""

    def stall_s(self) -> float:
        """Seconds that steps have waited so far, by its own account."""
        return 0.0

    def extras(self) -> dict[str, Any]:
        """What else a row should say."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""


class Plain(Method):
    """A transformers cache, without or with an offload of its own."""

    def __init__(self, model: Any, cache: Any = None, link: Link | None = None) -> None:
        """`cache`: None for transformers' DynamicCache."""
        self._model, self.link = model, link
        self._cache = DynamicCache(config=model.config) if cache is None else cache
        self._keyword = cache_keyword(model.forward)

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        out = self._model(ids, **{self._keyword: self._cache}, use_cache=True, logits_to_keep=1)
        return out.logits[0, -1]

    def arrive(self) -> None:
        """Its link is booked when it is asked."""

    def close(self) -> None:
        """The cache goes with this object."""


class Tiered(Method):
    """kvtier: everything on the gpu tier, or with so many gpu slots and a cpu tier behind a link."""

    def __init__(self, model: Any, num_blocks: int, num_slots: int | None = None, link: Link | None = None) -> None:
        """Args:
        num_blocks: that the sequence will have.
        num_slots: of the gpu tier; None: enough for all.
        """
        self.link = link
        slots = num_blocks + 8 if num_slots is None else num_slots
        self._tiered = TieredKV(model, config_for(model, slots, 0 if link is None else 2 * num_blocks))
        self._runtime = self._tiered._runtime
        if link is not None:
            self._runtime.interpose(Tier.CPU, lambda store: LinkedStore(store, link))
        self._cache = self._tiered.new_cache()
        self._before: Mapping[str, float] = {}
        self.num_layers = self._runtime.group.shape.num_layers

    def feed(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._tiered(ids, cache=self._cache, logits_to_keep=1).logits
        return logits[0, -1]

    def settle(self) -> None:
        """Return when nothing moves any more."""
        for _ in range(3):  # what has come makes room for more
            self._runtime.manager.poll()
            while self._runtime.placement.moves:
                time.sleep(0.001)
                self._runtime.manager.poll()

    def arrive(self) -> None:
        ring = self._runtime.executor.ring
        if ring is not None:
            wait([future for reads in ring._reads_of.values() for future in reads])

    def num_streamed(self) -> int:
        """Slices that attention has read from the cpu tier so far."""
        return int(self._cache.stats()["slices_read"]["cpu"])

    @property
    def num_slots(self) -> int:
        """Blocks that the gpu tier has room for."""
        return self._runtime.gpu_budget.num_slots

    def stall_s(self) -> float:
        return self._runtime.metrics.stall_s

    def extras(self) -> dict[str, Any]:
        stats = self._tiered.stats()
        ring = self._runtime.executor.ring
        found = {"moves_in_flight": stats["moves_in_flight"]}
        if ring is not None:
            found |= {"ring_slices": self._runtime.gpu_budget.ring_slices, "group_slices": ring.group_slices}
        causes = self._causes()
        return found | {"stats_stalls_s": {name: causes[name] - self._before.get(name, 0.0) for name in causes}}

    def mark(self) -> None:
        """What it waits for counts from here on."""
        self._before = self._causes()

    def _causes(self) -> Mapping[str, float]:
        """Seconds waited so far by cause, as far as `stats()` knows causes."""
        stats = self._tiered.stats()
        causes: Mapping[str, float] = stats.get("bound", {}).get("stalls", {"all": stats["stall_s"]})
        return causes

    def close(self) -> None:
        self._tiered.close()


def config_for(model: Any, num_slots: int, cpu_blocks: int) -> dict[str, Any]:
    """A config whose gpu budget has room for exactly so many blocks, and its cpu tier for `cpu_blocks`.

    Raises ValueError: no budget has.
    """
    group = describe(model, BLOCK_TOKENS)

    def config(budget_bytes: int) -> dict[str, Any]:
        # To the last slot: what is measured is streaming, and nothing may move meanwhile.
        tiers: dict[str, Any] = {"gpu": {"budget": budget_bytes, "high": 1.0, "low": 0.999}}
        if cpu_blocks:
            tiers["cpu"] = {"budget": cpu_blocks * group.shape.block_bytes}
        found = {"block_tokens": BLOCK_TOKENS, "prefill_chunk": BLOCK_TOKENS, "prefix_cache": False, "tiers": tiers}
        if "host_attention" in KVTierConfig.model_fields:
            found["host_attention"] = "never"
        return found

    def slots(budget_bytes: int) -> int:
        return gpu_budget(KVTierConfig(**config(budget_bytes)), group).num_slots

    low, high = (num_slots + 1) * group.shape.block_bytes, 4 * (num_slots + 8) * group.shape.block_bytes
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if slots(middle) >= num_slots else (middle + 1, high)
    if slots(low) != num_slots:
        raise ValueError(f"no gpu budget has room for exactly {num_slots} blocks")
    return config(low)


def spilled(model: Any, num_blocks: int, num_spilled: int, ids: torch.Tensor, link: Link) -> Tiered:
    """kvtier with `ids` fed, of whose full blocks exactly `num_spilled` are streamed in each step, and nothing moves.

    Args:
        ids: `[1, n]`, of `num_blocks` full blocks and more than `NUM_WARM` tokens.

    Raises RuntimeError: no number of gpu slots does that.
    """
    resident = num_blocks - num_spilled
    for num_slots in range(resident + 1, resident + 6):
        found = Tiered(model, num_blocks, num_slots, link)
        found.feed(ids[:, :-NUM_WARM])
        found.settle()
        for token in ids[:, -NUM_WARM:].split(1, dim=1):
            before = found.num_streamed()
            found.feed(token)
        if found.num_streamed() - before == num_spilled * found.num_layers:
            found.mark()
            return found
        found.close()
    raise RuntimeError(f"kvtier streams {num_spilled} of {num_blocks} blocks at no number of gpu slots")


class LayerAtATime(DynamicCache):
    """transformers' `DynamicCache(offloading=True)`: a layer's whole K and V come up before it, and go down after it.

    In its order (transformers 5.24, `Cache.update`): a layer waits for its own K and V, asks for the next layer's (the
    last one for layer 0's), appends, and copies its own down. That copy is on the compute's own CUDA stream, so that
    attention waits for it; it and the next layer's way up go on at the same time.
    """

    def __init__(self, config: Any, link: Link, device: Device) -> None:
        super().__init__(config=config)
        self.link, self.device = link, device
        self._arrives_s: dict[int, float] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own. Where the link is not on, all is on the device."""
        link, free_s = self.link, self.device.free_s
        if not link.is_on:
            self._arrives_s.clear()
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self._ask_for(layer_idx, free_s)
        arrives_s = self._arrives_s.pop(layer_idx)
        link.needs(layer_idx, "up", arrives_s)
        link.clock.wait_until(arrives_s)
        held = self.layers[layer_idx]
        held.keys, held.values = held.keys.clone(), held.values.clone()
        asked_s = max(free_s, arrives_s)
        self._ask_for((layer_idx + 1) % len(self.layers), asked_s)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        gone_s = link.down.book(keys.nbytes + values.nbytes, asked_s)
        link.needs(layer_idx, "down", gone_s)
        link.clock.wait_until(gone_s)
        held.keys, held.values = keys.clone(), values.clone()
        return keys, values

    def _ask_for(self, layer: int, asked_s: float) -> None:
        if layer not in self._arrives_s:
            held = self.layers[layer]
            self._arrives_s[layer] = self.link.up.book(held.keys.nbytes + held.values.nbytes, asked_s)


class LruPromotion(DynamicCache):
    """Blocks come to the device when they are first touched, in the place of those touched longest ago.

    By slice, so that no layer brings up what only others need, and all misses of a layer are asked for at once. Full
    blocks never change, so nothing goes down; the tail stays on the device. Each step goes through all slices in the
    same order: what is needed next is always what was given up last.
    """

    def __init__(self, config: Any, link: Link, device: Device, num_slots: int) -> None:
        """`num_slots`: blocks, all layers of them, that the device has room for."""
        super().__init__(config=config)
        self.link, self.device, self.num_slots = link, device, num_slots
        self.num_hits = self.num_misses = 0
        self._here: OrderedDict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = OrderedDict()

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' own, but that K and V come from what is on the device."""
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not self.link.is_on:
            return keys, values
        num_full = (keys.shape[-2] - 1) // BLOCK_TOKENS
        held = [self._touch((layer_idx, block), keys, values) for block in range(num_full)]
        self.link.clock.wait_until(self.link.due.get(layer_idx, {}).get("up", 0.0))
        tail = slice(num_full * BLOCK_TOKENS, None)
        return (
            torch.cat([*(block_keys for block_keys, _ in held), keys[:, :, tail]], dim=-2),
            torch.cat([*(block_values for _, block_values in held), values[:, :, tail]], dim=-2),
        )

    def _touch(
        self, which: tuple[int, int], keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A slice, on the device now or when the link has brought it."""
        if which in self._here:
            self.num_hits += 1
            self._here.move_to_end(which)
            return self._here[which]
        self.num_misses += 1
        layer, block = which
        at = slice(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
        block_keys, block_values = keys[:, :, at].clone(), values[:, :, at].clone()
        arrives_s = self.link.up.book(block_keys.nbytes + block_values.nbytes, self.device.free_s)
        self.link.needs(layer, "up", arrives_s)
        if len(self._here) >= self.num_slots * len(self.layers):
            self._here.popitem(last=False)
        self._here[which] = block_keys, block_values
        return block_keys, block_values
