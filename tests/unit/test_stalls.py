"""What is waited for is counted once, under its cause; and how long steps take without it."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from kvtier.device import DONE, Event, HostDevice
from kvtier.edge_meter import StepClock
from kvtier.errors import BlockLostError
from kvtier.metrics import Metrics, Stall
from kvtier.plan import Source, StepPlan
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.ring import SliceRing
from kvtier.step_timer import StepTimer
from kvtier.types import BlockId, BlockShape, Slot, Tier
from tests.rings import one_by_one, threads
from tests.small_tiers import House, build

SHAPE = BlockShape(num_layers=2, kv_heads=1, block_tokens=4, key_dim=4, value_dim=4, element_bytes=4)


# -- streams ----------------------------------------------------------------------------------------------------------


def stream(tiers: list[Tier], slow: Tier, delay_s: float = 0.02) -> Metrics:
    """A step's streaming without prefetch, so that everything is waited for; one tier takes its time."""

    def read(tier: Tier, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        time.sleep(delay_s if tier is slow else 0)
        return DONE

    metrics = Metrics()
    ring = SliceRing(
        SHAPE, 20, torch.float32, HostDevice(),
        begin_slices=one_by_one(read), prefetch=NoPrefetch(), metrics=metrics, threads=threads(2), io_timeout_s=5.0,
    )  # fmt: skip
    ring.begin(
        StepPlan((), tuple(Source(BlockId(number), number, tier, Slot(number)) for number, tier in enumerate(tiers)))
    )
    assert ring.group_slices == 4  # they come together
    for layer in range(SHAPE.num_layers):
        for _ in ring.groups(layer):
            pass
    ring.drain()
    ring.close()
    return metrics


def test_slices_of_a_slow_nvme_tier_are_stalls_of_it() -> None:
    metrics = stream([Tier.CPU, Tier.CPU, Tier.NVME, Tier.NVME], slow=Tier.NVME)
    assert metrics.stalls[Stall.STREAM_NVME] >= 0.02  # the reader slept so long at least once with nobody else to blame
    assert metrics.stalls[Stall.STREAM_NVME] > 4 * metrics.stalls[Stall.STREAM_CPU]
    assert {cause for cause, seconds in metrics.stalls.items() if seconds} <= {Stall.STREAM_CPU, Stall.STREAM_NVME}


def test_slices_of_a_slow_cpu_tier_are_stalls_of_it_whatever_came_before_them() -> None:
    metrics = stream([Tier.CPU, Tier.CPU, Tier.NVME, Tier.NVME], slow=Tier.CPU)
    assert metrics.stalls[Stall.STREAM_CPU] >= 0.02
    assert metrics.stalls[Stall.STREAM_CPU] > 4 * metrics.stalls[Stall.STREAM_NVME]
    assert metrics.stall_s == sum(metrics.stalls.values())


def test_what_does_not_come_in_time_is_waited_for_too() -> None:
    metrics = Metrics()
    is_over = threading.Event()
    ring = SliceRing(
        SHAPE, 20, torch.float32, HostDevice(),
        begin_slices=one_by_one(lambda tier, *_: (is_over.wait(10 if tier is Tier.NVME else 0) and DONE) or DONE),
        prefetch=NoPrefetch(),
        metrics=metrics, threads=threads(2), io_timeout_s=0.05,
    )  # fmt: skip
    tiers = [Tier.NVME, Tier.CPU, Tier.CPU, Tier.CPU]
    ring.begin(
        StepPlan((), tuple(Source(BlockId(number), number, tier, Slot(number)) for number, tier in enumerate(tiers)))
    )
    with pytest.raises(BlockLostError):
        next(ring.groups(0))
    is_over.set()
    ring.close()
    assert metrics.stalls[Stall.STREAM_NVME] == metrics.stall_s >= 0.05


# -- a step's start ---------------------------------------------------------------------------------------------------


def causes(house: House) -> set[Stall]:
    return {cause for cause, seconds in house.placement.metrics.stalls.items() if seconds}


def test_a_step_that_finds_the_gpu_tier_full_waits_for_room() -> None:
    house = build(gpu=2, cpu=8, nvme=0, max_delay=2)
    house.filled(8)
    assert not causes(house)
    house.append(house.manager.new_batch(), [1, 2, 3, 4])
    assert causes(house) == {Stall.ROOM}


def test_a_step_that_finds_every_tier_full_waits_for_room_below_too() -> None:
    house = build(gpu=2, cpu=2, nvme=8)
    house.filled(16)
    before = dict(house.placement.metrics.stalls)
    house.append(house.manager.new_batch(), list(range(8)))
    grew = {cause for cause, seconds in house.placement.metrics.stalls.items() if seconds > before[cause]}
    assert grew == {Stall.ROOM}


def test_a_step_waits_for_its_tail() -> None:
    house = build(gpu=4, cpu=8, nvme=0)
    batch = house.filled(6)
    twin = house.manager.fork(batch)
    house.append(twin, [90])  # the tail is copied
    assert causes(house) == {Stall.TAIL}


def test_a_step_waits_for_a_tail_that_went_down() -> None:
    house = build(gpu=2, cpu=8, nvme=0)
    batch = house.filled(6)
    house.append(house.manager.new_batch(), list(range(8)))
    assert house.tiers_of(batch) == ["cpu", "cpu"]
    before = dict(house.placement.metrics.stalls)
    house.append(batch, [6])
    grew = {cause for cause, seconds in house.placement.metrics.stalls.items() if seconds > before[cause]}
    assert grew == {Stall.ROOM, Stall.TAIL}


def test_who_waits_outside_of_a_step_waits_for_other_things() -> None:
    house = build(gpu=4, cpu=8, nvme=0)
    house.filled(8)
    house.manager.poll()
    house.drain()
    assert causes(house) == {Stall.OTHER}


# -- the time that is left --------------------------------------------------------------------------------------------


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_steps_compute_is_its_time_without_stalls() -> None:
    clock, metrics = Clock(), Metrics()
    timer = StepTimer(metrics, StepClock(clock))
    metrics.stalls[Stall.OTHER] = 50.0  # before it
    for columns in (1, 31, 32):
        with timer.step(columns):
            clock.now_s += 5.0
            metrics.stalls[Stall.ROOM] += 1.0
            metrics.stalls[Stall.STREAM_NVME] += 0.5
        clock.now_s += 100.0
        metrics.stalls[Stall.OTHER] += 7.0
    assert metrics.decode.as_dict() == {"steps": 2, "took_s": 10.0, "compute_s": 7.0}
    assert metrics.prefill.as_dict() == {"steps": 1, "took_s": 5.0, "compute_s": 3.5}
    assert timer.took_s() == 15.0


def test_a_step_that_fails_took_time_and_computed_nothing() -> None:
    clock, metrics = Clock(), Metrics()
    timer = StepTimer(metrics, StepClock(clock))
    with pytest.raises(KeyboardInterrupt), timer.step(1):
        clock.now_s += 2.0
        raise KeyboardInterrupt
    assert metrics.decode.as_dict() == {"steps": 0, "took_s": 0.0, "compute_s": 0.0}
    assert timer.took_s() == 2.0


def test_a_call_from_inside_a_step_does_not_end_it() -> None:
    clock, metrics = Clock(), Metrics()
    timer = StepTimer(metrics, StepClock(clock))
    with timer.step(1):
        clock.now_s += 1.0
        with pytest.raises(ValueError, match="refused"), timer.step(1, is_inner=True):
            raise ValueError("refused")
        clock.now_s += 1.0
        assert timer.took_s() == 2.0
    assert metrics.decode.as_dict() == {"steps": 1, "took_s": 2.0, "compute_s": 2.0}


class Mark:
    """A moment of a device that runs behind."""

    waited = 0

    def __init__(self, at_s: float, device: Clock) -> None:
        self.at_s, self._device = at_s, device

    def query(self) -> bool:
        return self._device.now_s >= self.at_s

    def synchronize(self) -> None:
        Mark.waited += 1
        self._device.now_s = max(self._device.now_s, self.at_s)

    def elapsed_time(self, end: Mark, /) -> float:
        assert self.query() and end.query()  # CUDA raises
        return (end.at_s - self.at_s) * 1e3


def test_a_device_that_only_queues_is_waited_for_by_nobody_but_who_asks() -> None:
    clock, device, metrics = Clock(), Clock(), Metrics()
    queue: list[Mark] = []

    def mark() -> Mark:
        queue.append(Mark(len(queue) * 3.0, device))  # a step every 6 s, of 3 s each
        return queue[-1]

    timer = StepTimer(metrics, StepClock(clock), mark=mark)
    Mark.waited = 0
    for _ in range(3):
        with timer.step(1):
            clock.now_s += 1.0
            metrics.stalls[Stall.STREAM_CPU] += 0.25
    assert Mark.waited == 0
    assert metrics.decode.as_dict() == {"steps": 3, "took_s": 3.0, "compute_s": 2.25}
    device.now_s = 4.0  # has come to the end of the first
    timer.settle()
    assert metrics.decode.as_dict() == {"steps": 3, "took_s": 5.0, "compute_s": 4.25}
    timer.settle(wait=True)
    assert Mark.waited == 2
    assert metrics.decode.as_dict() == {"steps": 3, "took_s": 9.0, "compute_s": 8.25}
    assert timer.took_s() == 9.0
