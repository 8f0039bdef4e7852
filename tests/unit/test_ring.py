"""The ring against a reader that delays, reorders and fails, with buffers that are NaN until their slice arrives."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvtier.breaker import Breaker
from kvtier.device import DONE, Event, HostDevice
from kvtier.errors import BlockLostError, CapacityError, IntegrityError, ShortReadError, TransferTimeoutError
from kvtier.metrics import Metrics
from kvtier.plan import Source, StepPlan
from kvtier.policies.next_layers import NextLayers
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.ring import SliceRing
from kvtier.slice_reads import ReadThreads
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier
from tests.rings import one_by_one, threads

SHAPE = BlockShape(num_layers=5, kv_heads=2, block_tokens=4, key_dim=3, value_dim=3, element_bytes=4)

THREE, TOGETHER = threads(3), ReadThreads(3, 3, lambda: True)
BOTH_WAYS = pytest.mark.parametrize("reads", [THREE, TOGETHER], ids=["each by a thread", "together by one"])


class FakeReader:
    """Writes `slot * 100 + layer` into a slice after a random delay; the buffer is NaN before."""

    def __init__(self, seed: int, max_delay_s: float = 0.002) -> None:
        self.random, self.max_delay_s = random.Random(seed), max_delay_s
        self.fails_at: tuple[int, int] | None = None
        self.hangs = threading.Event()
        self.hangs.set()
        self.memory_is_well = threading.Event()
        self.memory_is_well.set()
        self.reads: list[tuple[int, int]] = []
        self.running = 0

    @contextmanager
    def memory_hangs(self) -> Iterator[None]:
        self.memory_is_well.clear()
        yield
        self.memory_is_well.set()

    def __call__(self, tier: Tier, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        self.running += 1
        try:
            out.view(torch.float32).fill_(float("nan"))
            time.sleep(self.random.random() * self.max_delay_s)
            (self.hangs if tier is Tier.NVME else self.memory_is_well).wait(5)
            self.reads.append((layer, slot))
            if self.fails_at == (layer, slot):
                raise ShortReadError("short")
            out.view(torch.float32).fill_(slot * 100 + layer)
            return DONE
        finally:
            self.running -= 1


def _ring(
    reader: FakeReader,
    num_slices: int,
    prefetch: PrefetchPolicy,
    timeout_s: float = 5.0,
    breaker: Breaker | None = None,
    reads: ReadThreads = THREE,
) -> SliceRing:
    return SliceRing(
        SHAPE, num_slices, torch.float32, HostDevice(), begin_slices=one_by_one(reader), prefetch=prefetch,
        metrics=Metrics(), threads=reads, io_timeout_s=timeout_s, breaker=breaker,
    )  # fmt: skip


def _sources(num: int) -> list[Source]:
    return [Source(BlockId(50 + i), i, Tier.NVME, Slot(7 + 3 * i)) for i in range(num)]


def _plan(sources: list[Source]) -> StepPlan:
    return StepPlan((), tuple(sources))


@BOTH_WAYS
@pytest.mark.parametrize("prefetch", [NoPrefetch(), NextLayers(depth=1), NextLayers(depth=9)])
@pytest.mark.parametrize("num_slices", [2, 3, 5, 16, 100])
@pytest.mark.parametrize("num_sources", [1, 2, 7, 20])
def test_every_slice_arrives_whole_in_plan_order(
    prefetch: PrefetchPolicy, num_slices: int, num_sources: int, reads: ReadThreads
) -> None:
    reader = FakeReader(seed=num_slices * 31 + num_sources)
    ring = _ring(reader, num_slices, prefetch, reads=reads)
    sources = _sources(num_sources)
    for _ in range(3):  # three steps on one ring: the second use is where it would break
        ring.begin(_plan(sources))
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
    ring.begin(_plan(_sources(3)))
    for _ in ring.groups(0):
        pass
    time.sleep(0.02)
    assert {layer for layer, _ in reader.reads} == {0}
    ring.close()


@BOTH_WAYS
def test_with_depth_two_the_next_two_layers_are_read_while_one_is_used(reads: ReadThreads) -> None:
    reader = FakeReader(seed=1, max_delay_s=0)
    ring = _ring(reader, 64, NextLayers(depth=2), reads=reads)
    ring.begin(_plan(_sources(2)))
    time.sleep(0.05)
    assert {layer for layer, _ in reader.reads} == {0, 1, 2}
    ring.close()


@BOTH_WAYS
def test_a_slice_that_cannot_be_read_is_a_lost_block_and_the_ring_goes_on(reads: ReadThreads) -> None:
    reader = FakeReader(seed=2)
    ring = _ring(reader, 4, NextLayers(depth=2), reads=reads)
    sources = _sources(6)
    reader.fails_at = (1, sources[3].slot)
    ring.begin(_plan(sources))
    for _ in ring.groups(0):
        pass
    with pytest.raises(BlockLostError, match=r"block 3 \(layer 1\) cannot be read from nvme"):
        for _ in ring.groups(1):
            pass
    reader.fails_at = None
    ring.begin(_plan(sources))
    assert reader.running == 0 or ring._reads_of  # nothing of the failed step is still being read into a buffer
    for layer in range(SHAPE.num_layers):
        for group in ring.groups(layer):
            assert not group.keys.isnan().any()
    ring.close()


def test_layers_out_of_order_are_an_error_not_another_layers_bytes() -> None:
    ring = _ring(FakeReader(seed=3), 4, NextLayers(depth=2))
    ring.begin(_plan(_sources(2)))
    with pytest.raises(IntegrityError, match="out of order"):
        next(ring.groups(1))
    ring.drain()
    ring.close()


def _in_memory(num: int) -> list[Source]:
    return [Source(BlockId(150 + i), i, Tier.CPU, Slot(1 + 3 * i)) for i in range(num)]


def _stream(ring: SliceRing, sources: list[Source]) -> None:
    """A whole step, each slice of it compared."""
    ring.begin(_plan(sources))
    for layer in range(SHAPE.num_layers):
        seen: list[Source] = []
        for group in ring.groups(layer):
            for row, source in enumerate(group.sources):
                for part in (group.keys[row], group.values[row]):
                    assert bool((part == float(source.slot * 100 + layer)).all())
            seen.extend(group.sources)
        assert seen == sources
    ring.drain()


def _wait_until_over(ring: SliceRing) -> None:
    while ring.num_overdue:
        time.sleep(0.001)


@BOTH_WAYS
@pytest.mark.parametrize("num_slices", [3, 4, 9, 40])
@pytest.mark.parametrize("depth", [0, 1, 4])
def test_reads_that_hang_are_losses_and_slices_of_the_cpu_tier_still_stream(
    num_slices: int, depth: int, reads: ReadThreads
) -> None:
    reader, breaker = FakeReader(seed=4, max_delay_s=0), Breaker("nvme")
    ring = _ring(reader, num_slices, NextLayers(depth=depth), timeout_s=0.3, breaker=breaker, reads=reads)
    on_disk, in_memory = _sources(6), _in_memory(5)
    mixed = [source for pair in zip(on_disk, in_memory, strict=False) for source in pair]
    reader.hangs.clear()
    ring.begin(_plan(mixed))
    with pytest.raises(BlockLostError, match=r"cannot be read from nvme: .*longer than io_timeout_s \(0.3 s\)") as lost:
        for _ in ring.groups(0):
            pass
    assert set(lost.value.blocks) <= {source.block for source in on_disk}
    ring.drain()  # without a wait: what hangs was waited for
    assert ring.num_overdue > 0 and breaker.is_hanging
    for _ in range(2):
        _stream(ring, in_memory)
    reader.hangs.set()
    _wait_until_over(ring)
    breaker.look()
    assert not breaker.is_hanging
    _stream(ring, mixed)
    assert ring.close()


@BOTH_WAYS
def test_a_read_that_hangs_has_its_buffer_until_it_ends(reads: ReadThreads) -> None:
    """Its late bytes must come into none that another step reads."""
    reader = FakeReader(seed=6, max_delay_s=0)
    ring = _ring(reader, 9, NextLayers(depth=1), timeout_s=0.3, reads=reads)
    reader.hangs.clear()
    ring.begin(_plan(_sources(2)))  # one cell of four
    with pytest.raises(BlockLostError):
        next(ring.groups(0))
    late = {
        read.cell.first + read.piece.first + n for read in ring._reads._running for n in range(len(read.piece.sources))
    }
    assert late
    before = ring._bytes[list(late)].clone()
    for _ in range(3):
        _stream(ring, _in_memory(7))
    assert torch.equal(ring._bytes[list(late)], before)
    reader.hangs.set()
    _wait_until_over(ring)
    assert ring.close()


@BOTH_WAYS
def test_late_reads_end_with_what_they_were_for_and_queued_ones_never_begin(reads: ReadThreads) -> None:
    reader = FakeReader(seed=8, max_delay_s=0)
    ring = _ring(reader, 37, NextLayers(depth=1), timeout_s=0.3, reads=reads)
    reader.hangs.clear()
    sources = _sources(9)
    ring.begin(
        _plan(sources)
    )  # two layers of one cell each: six reads of three slices on three threads, or two of nine
    with pytest.raises(BlockLostError):
        next(ring.groups(0))
    ring.drain()
    num_begun, num_each = ring.num_overdue, 9 if reads is TOGETHER else 3
    assert num_begun in ((1, 2) if reads is TOGETHER else (3,))  # the second one may come when the first one hangs
    reader.hangs.set()
    _wait_until_over(ring)
    _stream(ring, sources)  # behind whatever was queued
    assert len(reader.reads) == num_begun * num_each + 9 * SHAPE.num_layers
    assert ring.close()


@BOTH_WAYS
def test_all_blocks_of_a_tier_that_hangs_are_unreadable_for_one_deadline(reads: ReadThreads) -> None:
    reader = FakeReader(seed=7, max_delay_s=0)
    ring = _ring(reader, 9, NextLayers(depth=1), timeout_s=0.3, reads=reads)
    deadlines, pass_deadline = [], ring._reads.pass_deadline
    ring._reads.pass_deadline = lambda late: deadlines.append(late) or pass_deadline(late)  # type: ignore[func-returns-value,method-assign]
    reader.hangs.clear()
    assert set(ring.unreadable(_plan(_sources(6) + _in_memory(2)))) == {source.block for source in _sources(6)}
    assert len(deadlines) == 1  # not one for each group or layer
    reader.hangs.set()
    _wait_until_over(ring)
    assert ring.unreadable(_plan(_sources(6) + _in_memory(2))) == []
    assert ring.close()


def test_a_ring_without_a_buffer_left_says_so() -> None:
    reader = FakeReader(seed=4, max_delay_s=0)
    ring = _ring(reader, 2, NextLayers(depth=1), timeout_s=0.3)
    reader.hangs.clear()
    ring.begin(_plan(_sources(2)))
    with pytest.raises(BlockLostError):
        next(ring.groups(0))
    with pytest.raises(TransferTimeoutError, match="no buffer is left to stream through"):
        ring.begin(_plan(_in_memory(2)))
    assert not ring.close()
    reader.hangs.set()
    _wait_until_over(ring)
    assert ring.close()


def test_a_cpu_tier_that_hangs_is_an_error() -> None:
    reader, breaker = FakeReader(seed=4, max_delay_s=0), Breaker("nvme")
    ring = _ring(reader, 4, NextLayers(depth=1), timeout_s=0.3, breaker=breaker)
    with reader.memory_hangs():
        ring.begin(_plan(_in_memory(2)))
        with pytest.raises(TransferTimeoutError):
            next(ring.groups(0))
        with pytest.raises(TransferTimeoutError):
            ring.begin(_plan(_in_memory(2)))
        assert not breaker.is_hanging
    _stream(ring, _in_memory(2))
    assert ring.close()


@pytest.mark.parametrize("num_hangs", [1, 3])
def test_behind_reads_that_hang_those_of_other_blocks_are_read_together_by_another_thread(num_hangs: int) -> None:
    """One thread for all must not be one that all others wait behind for ever."""
    released, hung = threading.Event(), set[Slot]()

    def reader(tier: Tier, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        if slot in hung:
            released.wait(20)
        out.view(torch.float32).fill_(slot * 100 + layer)
        return DONE

    ring = SliceRing(
        SHAPE, 40, torch.float32, HostDevice(), begin_slices=one_by_one(reader), prefetch=NoPrefetch(),
        metrics=Metrics(), threads=TOGETHER, io_timeout_s=0.3,
    )  # fmt: skip
    sources = _sources(2 * num_hangs + 3)
    for number in range(num_hangs):
        hung.add(sources[number].slot)
        ring.begin(_plan(sources[number : number + 2]))
        with pytest.raises(BlockLostError):
            next(ring.groups(0))
        ring.drain()
        assert ring.num_overdue == number + 1
        _stream(ring, sources[-3:])
    assert not ring.close()
    released.set()
    _wait_until_over(ring)
    assert ring.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvtier-stream")]


@pytest.mark.parametrize("num_sources", [8, 20, 40])  # part of a cell, one cell, two cells a layer
def test_thirty_two_slices_are_read_at_a_time(num_sources: int) -> None:
    together, begun = threading.Barrier(32), itertools.count()

    def meeting(tier: Tier, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        if next(begun) < 32:
            together.wait(timeout=20)  # passes only once 32 reads are under way
        out.view(torch.float32).fill_(slot)
        return DONE

    ring = SliceRing(
        SHAPE, 80, torch.float32, HostDevice(), begin_slices=one_by_one(meeting), prefetch=NextLayers(depth=4),
        metrics=Metrics(), threads=threads(32), io_timeout_s=60.0,
    )  # fmt: skip
    ring.begin(_plan(_sources(num_sources)))
    for layer in range(SHAPE.num_layers):
        for group in ring.groups(layer):
            for row, source in enumerate(group.sources):
                assert bool((group.keys[row] == float(source.slot)).all())
    ring.close()


@BOTH_WAYS
def test_a_thread_that_is_not_to_be_had_is_a_capacity_error_and_the_next_step_goes(
    reads: ReadThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ring, sources = _ring(FakeReader(seed=9), 9, NextLayers(depth=1), reads=reads), _sources(3) + _in_memory(2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        for _ in range(2):
            with pytest.raises(CapacityError, match=r"can't start new thread.*raise the limit on threads"):
                ring.begin(_plan(sources))
            ring.drain()
    for _ in range(2):
        _stream(ring, sources)
    assert ring.close()


def test_fewer_than_two_slices_are_refused() -> None:
    with pytest.raises(IntegrityError):
        _ring(FakeReader(seed=5), 1, NoPrefetch())
