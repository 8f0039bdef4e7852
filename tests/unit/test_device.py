"""The fake device's own rules, staging buffers, and ring, engine and attention under hundreds of its schedules."""

from __future__ import annotations

import mmap
import threading

import pytest
import torch

from kvtier.device import DONE, HostDevice, StagingPool
from kvtier.errors import IntegrityError
from kvtier.stores.cpu import touch
from kvtier.stores.staging import page_aligned
from kvtier.testing import FakeDevice, Wait
from tests.device_house import attend_over_tiers

LAGS = (0.02, 5.0, 5.0)
"""Kernels far behind the host, copies at once."""


# -- the fake's own rules ---------------------------------------------------------------------------------------------


def test_a_kernels_result_is_nan_until_its_turn() -> None:
    device, a = FakeDevice(0, hurries=(0.0, 1.0, 1.0)), torch.ones(3)
    with device.kernels():
        b = (a + 1) * 2
        c = b.view(3, 1)
        c += 1
    assert b.isnan().all()
    device.synchronize()
    assert b.tolist() == [5.0] * 3


def test_what_the_host_asks_for_is_waited_for() -> None:
    device = FakeDevice(0, hurries=(0.0, 1.0, 1.0))
    with device.kernels():
        a = torch.ones(3) * 2
        assert float(a.sum()) == 6.0 and bool((a == 2).all()) and int(a.argmax()) == 0
        numbers = torch.arange(4) + 1
        assert numbers.tolist() == [1, 2, 3, 4]


def test_a_copy_spoils_its_destination_when_it_begins_and_takes_what_is_there_then() -> None:
    device, source, dest = FakeDevice(0, hurries=(1.0, 0.0, 0.0)), torch.ones(3), torch.zeros(3)
    event = device.copy_up([(dest, source)], DONE)
    assert dest.tolist() == [0.0] * 3 and not event.is_done()
    device._run_one(1)
    assert dest.isnan().all()
    source += 1
    event.synchronize()
    assert dest.tolist() == [1.0] * 3
    assert device.violations == ["a source changed while it was copied"]
    event = device.copy_down([(dest, source)], DONE)
    device._run_one(2)
    dest += 1
    dest[:] = 7.0
    event.synchronize()
    assert device.violations[1:] == ["a destination was written while a copy was on its way there"]


def test_copies_keep_their_order_within_a_queue_and_wait_for_events_of_others() -> None:
    for seed in range(50):
        device, a, b, c = FakeDevice(seed), torch.zeros(2), torch.zeros(2), torch.zeros(2)
        with device.kernels():
            a += 3
            made = device.record()
            device.copy_down([(b, a)], made)
            arrived = device.copy_down([(c, b)], DONE)
            device.compute_waits_for(arrived)
            a *= c
        device.synchronize()
        assert a.tolist() == [9.0] * 2 and not device.violations


def test_queues_that_wait_for_each_other_are_an_error_not_a_hang() -> None:
    device, a = FakeDevice(0), torch.zeros(2)
    other = FakeDevice(1, hurries=(0.0, 0.0, 0.0))
    with pytest.raises(IntegrityError, match="wait for each other"):
        device.copy_up([(a, torch.ones(2))], other.record()).synchronize()


# -- staging ----------------------------------------------------------------------------------------------------------


def test_a_staging_buffer_is_nobody_elses_before_its_copy_is_over() -> None:
    device, made = FakeDevice(0, hurries=(0.0, 0.0, 0.0)), []
    pool = StagingPool(lambda num_bytes: made.append(num_bytes) or torch.zeros(num_bytes, dtype=torch.uint8))
    there = torch.zeros(8, dtype=torch.uint8)
    with pool.buffer(8) as buffer:
        buffer.host.fill_(5)
        buffer.until = device.copy_up([(there, buffer.host)], DONE)
    assert not there.any()
    with pool.buffer(8) as buffer:  # its copy ends first
        buffer.host.fill_(6)
        with pool.buffer(8) as second:
            second.host.fill_(7)
    assert there.tolist() == [5] * 8 and not device.violations
    page = mmap.PAGESIZE  # locked memory shares its pages with nobody's
    assert made == [page, page] and pool.num_bytes == 2 * page
    assert len(pool.clear()) == 2 and pool.num_bytes == 0


def test_staging_never_grows_beyond_what_was_planned() -> None:
    pool = HostDevice().staging()
    pool.budget_bytes = 2 * mmap.PAGESIZE
    with pool.buffer(8), pool.buffer(9):
        with pytest.raises(IntegrityError, match="staging"), pool.buffer(8):
            pass
        assert pool.num_bytes == pool.budget_bytes
    with pool.buffer(8), pool.buffer(9):
        pass


def test_a_staging_buffer_that_could_not_be_allocated_is_not_counted() -> None:
    def refuse(num_bytes: int) -> torch.Tensor:
        raise MemoryError(num_bytes)

    pool = StagingPool(refuse)
    with pytest.raises(MemoryError), pool.buffer(8):
        pass
    assert pool.num_bytes == 0


def test_a_caller_that_hangs_with_a_buffer_keeps_nobody_waiting() -> None:
    pool, gate, inside = HostDevice().staging(), threading.Event(), threading.Event()

    def hang() -> None:
        with pool.buffer(8):
            inside.set()
            gate.wait(10)

    thread = threading.Thread(target=hang)
    thread.start()
    assert inside.wait(10)
    with pool.buffer(8) as buffer:
        assert buffer.host.numel() == 8
    gate.set()
    thread.join()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_bytes", [1, 4096, 50_000, (5 << 20) + 3])
def test_touching_leaves_zeros_on_every_page(num_bytes: int, num_threads: int) -> None:
    memory = page_aligned(num_bytes)
    touch(memory, num_threads)
    assert memory.numel() == num_bytes and not memory.any()


# -- ring, engine and attention ---------------------------------------------------------------------------------------


def _attend(device: FakeDevice) -> float:
    off = attend_over_tiers(
        device, 7, device.kernels, synchronize=device.synchronize, checks_bytes=not device.leaves_out
    )
    assert device.leaves_out or not device.violations, device.violations
    return off


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_ring_engine_and_attention_agree_with_one_call_under_every_schedule(first: int) -> None:
    for seed in range(first, first + 50):
        assert _attend(FakeDevice(seed)) <= 1e-5, f"seed {seed}"


@pytest.mark.parametrize("wait", Wait)
def test_each_wait_is_needed(wait: Wait) -> None:
    hurries = (5.0, 0.02, 0.02) if wait is Wait.COMPUTE_FOR_ARRIVAL else LAGS
    for seed in range(5):
        off = _attend(FakeDevice(seed, [wait], hurries))
        assert not off <= 1e-3, f"seed {seed}: without the wait of {wait.value} nothing is wrong"  # NaN is wrong


def test_a_host_without_queues_allocates_no_event() -> None:
    device, there = HostDevice(), torch.zeros(4)
    assert device.record() is DONE and DONE.is_done() and not device.is_async
    assert device.copy_up([(there, torch.ones(4))], DONE) is DONE and there.all()
    assert device.copy_down([(there, torch.zeros(4))], DONE) is DONE and not there.any()
    device.compute_waits_for(DONE)
    device.close()
