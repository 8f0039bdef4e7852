"""The ring against a reader that delays, reorders and fails, with buffers that are NaN until their slice arrives."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
import torch

from kvtier.errors import BlockLostError, IntegrityError, ShortReadError, TransferTimeoutError
from kvtier.metrics import Metrics
from kvtier.plan import Source
from kvtier.policies.next_layers import NextLayers
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.ring import SliceRing
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier

SHAPE = BlockShape(num_layers=5, kv_heads=2, block_tokens=4, key_dim=3, value_dim=3, element_bytes=4)


class FakeReader:
    """Writes `slot * 100 + layer` into a slice after a random delay; the buffer is NaN before."""

    def __init__(self, seed: int, max_delay_s: float = 0.002) -> None:
        self.random, self.max_delay_s = random.Random(seed), max_delay_s
        self.fails_at: tuple[int, int] | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.reads: list[tuple[int, int]] = []
        self.running = 0

    def __call__(self, tier: Tier, slot: Slot, layer: int, out: torch.Tensor) -> None:
        self.running += 1
        try:
            out.view(torch.float32).fill_(float("nan"))
            time.sleep(self.random.random() * self.max_delay_s)
            self.hangs.wait(5)
            self.reads.append((layer, slot))
            if self.fails_at == (layer, slot):
                raise ShortReadError("short")
            out.view(torch.float32).fill_(slot * 100 + layer)
        finally:
            self.running -= 1


def _ring(reader: FakeReader, num_slices: int, prefetch: PrefetchPolicy, timeout_s: float = 5.0) -> SliceRing:
    return SliceRing(
        SHAPE, num_slices, torch.float32, torch.device("cpu"), read_slice=reader, prefetch=prefetch,
        metrics=Metrics(), num_threads=3, io_timeout_s=timeout_s,
    )  # fmt: skip


def _sources(num: int) -> list[Source]:
    return [Source(BlockId(50 + i), i, Tier.NVME, Slot(7 + 3 * i)) for i in range(num)]


@pytest.mark.parametrize("prefetch", [NoPrefetch(), NextLayers(depth=1), NextLayers(depth=9)])
@pytest.mark.parametrize("num_slices", [2, 3, 5, 16, 100])
@pytest.mark.parametrize("num_sources", [1, 2, 7, 20])
def test_every_slice_arrives_whole_in_plan_order(
    prefetch: PrefetchPolicy, num_slices: int, num_sources: int
) -> None:  # fmt: skip
    reader = FakeReader(seed=num_slices * 31 + num_sources)
    ring = _ring(reader, num_slices, prefetch)
    sources = _sources(num_sources)
    for _ in range(3):  # three steps on one ring: the second use is where it would break
        ring.begin(sources)
        for layer in range(SHAPE.num_layers):
            seen: list[Source] = []
            for group in ring.groups(layer):
                for row, source in enumerate(group.sources):
                    wanted = float(source.slot * 100 + layer)
                    for part in (group.keys[row], group.values[row]):
                        assert part.shape == (2, 4, 3) and bool((part == wanted).all())
                seen.extend(group.sources)
                time.sleep(0.0005)
                # Not overwritten while in use, however far the reads behind it have come.
                assert bool((group.keys == group.keys[:, :1, :1, :1]).all())
            assert seen == sources
        ring.drain()
    ring.close()


def test_without_prefetch_no_later_layer_is_read_early() -> None:
    reader = FakeReader(seed=1, max_delay_s=0)
    ring = _ring(reader, 8, NoPrefetch())
    ring.begin(_sources(3))
    for _ in ring.groups(0):
        pass
    time.sleep(0.02)
    assert {layer for layer, _ in reader.reads} == {0}
    ring.close()


def test_with_depth_two_the_next_two_layers_are_read_while_one_is_used() -> None:
    reader = FakeReader(seed=1, max_delay_s=0)
    ring = _ring(reader, 64, NextLayers(depth=2))
    ring.begin(_sources(2))
    time.sleep(0.05)
    assert {layer for layer, _ in reader.reads} == {0, 1, 2}
    ring.close()


def test_a_slice_that_cannot_be_read_is_a_lost_block_and_the_ring_goes_on() -> None:
    reader = FakeReader(seed=2)
    ring = _ring(reader, 4, NextLayers(depth=2))
    sources = _sources(6)
    reader.fails_at = (1, sources[3].slot)
    ring.begin(sources)
    for _ in ring.groups(0):
        pass
    with pytest.raises(BlockLostError, match=r"block 3 \(layer 1\) cannot be read from nvme"):
        for _ in ring.groups(1):
            pass
    reader.fails_at = None
    ring.begin(sources)
    assert reader.running == 0 or ring._reads  # nothing of the failed step is still being read into a buffer
    for layer in range(SHAPE.num_layers):
        for group in ring.groups(layer):
            assert not group.keys.isnan().any()
    ring.close()


def test_layers_out_of_order_are_an_error_not_another_layers_bytes() -> None:
    ring = _ring(FakeReader(seed=3), 4, NextLayers(depth=2))
    ring.begin(_sources(2))
    with pytest.raises(IntegrityError, match="out of order"):
        next(ring.groups(1))
    ring.drain()
    ring.close()


def test_a_read_that_hangs_is_an_error_and_is_waited_for_before_its_buffer_is_used_again() -> None:
    reader = FakeReader(seed=4, max_delay_s=0)
    ring = _ring(reader, 4, NextLayers(depth=1), timeout_s=0.05)
    reader.hangs.clear()
    ring.begin(_sources(2))
    with pytest.raises(TransferTimeoutError):
        next(ring.groups(0))
    with pytest.raises(TransferTimeoutError):
        ring.begin(_sources(2))
    reader.hangs.set()
    time.sleep(0.05)
    ring.begin(_sources(2))
    for group in ring.groups(0):
        assert not group.keys.isnan().any()
    ring.drain()
    ring.close()


@pytest.mark.parametrize("num_sources", [8, 20, 40])  # part of a cell, one cell, two cells a layer
def test_thirty_two_slices_are_read_at_a_time(num_sources: int) -> None:
    together, begun = threading.Barrier(32), itertools.count()

    def meeting(tier: Tier, slot: Slot, layer: int, out: torch.Tensor) -> None:
        if next(begun) < 32:
            together.wait(timeout=20)  # passes only once 32 reads are under way
        out.view(torch.float32).fill_(slot)

    ring = SliceRing(
        SHAPE, 80, torch.float32, torch.device("cpu"), read_slice=meeting, prefetch=NextLayers(depth=4),
        metrics=Metrics(), num_threads=32, io_timeout_s=60.0,
    )  # fmt: skip
    ring.begin(_sources(num_sources))
    for layer in range(SHAPE.num_layers):
        for group in ring.groups(layer):
            for row, source in enumerate(group.sources):
                assert bool((group.keys[row] == float(source.slot)).all())
    ring.close()


def test_fewer_than_two_slices_are_refused() -> None:
    with pytest.raises(IntegrityError):
        _ring(FakeReader(seed=5), 1, NoPrefetch())
