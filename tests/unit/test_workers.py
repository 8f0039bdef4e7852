"""Threads of our own, and the transfer engine that runs moves on them."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from kvtier.device import DONE, HostDevice
from kvtier.errors import ClosedError, NoSpaceError
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore
from kvtier.stores.null import NullStore
from kvtier.transfer import TransferEngine
from kvtier.types import BlockId, BlockShape, Move, MovePurpose, MoveStatus, Slot, SlotLabel, Tier
from kvtier.workers import Workers

SHAPE = BlockShape(num_layers=2, kv_heads=1, block_tokens=4, key_dim=4, value_dim=4, element_bytes=4)


def test_calls_run_in_order_on_no_more_threads_than_said() -> None:
    workers, gate, order = Workers(2, "test"), threading.Event(), list[int]()
    before = threading.active_count()
    blockers = [workers.submit(gate.wait, 10) for _ in range(2)]
    calls = [workers.submit(order.append, number) for number in range(20)]
    assert threading.active_count() == before + 2 and not order
    gate.set()
    for call in (*blockers, *calls):
        call.result(timeout=10)
    assert sorted(order) == list(range(20))
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("test-"))
    workers.close(wait=True)
    assert threading.active_count() == before
    workers.close(wait=True)


def test_an_idle_thread_is_used_before_a_new_one_is_started() -> None:
    workers = Workers(8, "test")
    before = threading.active_count()
    for _ in range(5):
        workers.submit(int).result(timeout=10)
        while not workers._idle._value:
            time.sleep(0.001)
    assert threading.active_count() == before + 1
    workers.close(wait=True)


def test_an_error_is_the_callers_and_is_freed_without_the_collector() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise ValueError("as asked")

    workers, held = Workers(1, "test"), Held()
    gone = weakref.ref(held)
    gc.disable()
    try:
        future = workers.submit(fail, held)
        with pytest.raises(ValueError, match="as asked"):
            future.result(timeout=10)
        workers.submit(int).result(timeout=10)
        del future, held
        assert gone() is None
    finally:
        gc.enable()
    workers.close(wait=True)


def test_close_cancels_what_has_not_begun_and_waits_only_if_asked_to() -> None:
    workers, gate = Workers(1, "test"), threading.Event()
    running = workers.submit(gate.wait, 10)
    while not running.running():
        time.sleep(0.001)
    queued = workers.submit(int)
    workers.close(wait=False)
    assert queued.cancelled() and not running.done()
    gate.set()
    workers.close(wait=True)
    assert running.result() is True


def refuse(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_threads_that_are_refused_are_asked_for_again_and_one_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by a hostile tester: the refused one counted as there, no call ever began, and `close` raised."""
    workers, gate = Workers(3, "test"), threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            workers.submit(int)
    blocker = workers.submit(gate.wait, 10)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        behind = workers.submit(int)
    gate.set()
    assert blocker.result(10) is True and behind.result(10) == 0
    workers.close(wait=True)


def test_a_move_without_a_thread_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported like any other: whoever waits for it would wait for ever."""
    stores: dict[Tier, Store] = {tier: CpuStore(SHAPE, 8, pin=False) for tier in (Tier.GPU, Tier.CPU)}
    engine = TransferEngine(stores, 2, HostDevice())
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        engine.start([_move(0, Tier.GPU, Tier.CPU)])
    (failed,) = engine.wait(10)
    assert failed.status is MoveStatus.FAILED and "can't start new thread" in failed.error
    engine.start([_move(1, Tier.GPU, Tier.CPU)])
    (done,) = engine.wait(10)
    assert done.status is MoveStatus.DONE and engine.in_flight() == 0
    assert engine.close(10)


class GatedStore(NullStore):
    """Writes wait at a gate."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(SHAPE, num_slots, Tier.NVME)
        self.gate, self.num_begun = threading.Event(), 0

    def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
        self.num_begun += 1
        self.gate.wait(10)
        super().write(slot, block, label)


def _move(move_id: int, source: Tier, dest: Tier) -> Move:
    return Move(move_id, BlockId(move_id), MovePurpose.DEMOTE, source, Slot(move_id), dest, Slot(move_id))


def test_moves_that_have_not_begun_can_be_taken_back_and_memory_goes_on() -> None:
    nvme = GatedStore(8)
    stores: dict[Tier, Store] = {
        Tier.GPU: CpuStore(SHAPE, 8, pin=False), Tier.CPU: CpuStore(SHAPE, 8, pin=False), Tier.NVME: nvme
    }  # fmt: skip
    engine = TransferEngine(stores, 2, HostDevice())
    engine.start([_move(number, Tier.GPU, Tier.NVME) for number in range(5)])
    while nvme.num_begun < 2:
        time.sleep(0.001)
    engine.start([_move(7, Tier.GPU, Tier.CPU)])
    (done,) = engine.wait(10)
    assert (done.move.move_id, done.status) == (7, MoveStatus.DONE)  # though all threads for nvme wait
    back = engine.withdraw([0, 1, 2, 3, 7])
    assert {result.move.move_id for result in back} == {2, 3}
    assert {result.status for result in back} == {MoveStatus.WITHDRAWN}
    assert engine.in_flight() == 3
    assert engine.withdraw([0, 1, 2, 3]) == []
    nvme.gate.set()
    ended = [result for _ in range(3) for result in engine.wait(10)]
    assert {result.move.move_id for result in ended} == {0, 1, 4} and engine.in_flight() == 0
    assert engine.close(10)
    with pytest.raises(ClosedError):
        engine.start([_move(6, Tier.GPU, Tier.CPU)])


def test_each_edge_is_metered_and_what_fails_brings_nothing() -> None:
    class Full(NullStore):
        def write(self, slot: Slot, block: torch.Tensor, label: SlotLabel | None = None) -> None:
            raise NoSpaceError("as asked", available_slots=0)

    gpu, cpu = CpuStore(SHAPE, 8, pin=False), CpuStore(SHAPE, 8, pin=False)
    engine = TransferEngine({Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: Full(SHAPE, 8, Tier.NVME)}, 2, HostDevice())
    engine.edges.steps.start()
    engine.start([_move(number, Tier.GPU, Tier.CPU) for number in range(3)])
    engine.start([_move(number, Tier.GPU, Tier.NVME) for number in range(3, 6)])
    ended = [result for _ in range(6) if engine.in_flight() for result in engine.wait(10)]
    assert {result.status for result in ended} == {MoveStatus.DONE, MoveStatus.NO_SPACE}
    out = torch.empty((1, SHAPE.slice_bytes), dtype=torch.uint8)
    engine.begin_slices(Tier.CPU, [Slot(0)], 1, out, DONE)()
    with pytest.raises(IndexError):
        engine.begin_slices(Tier.CPU, [Slot(0)], 2, out, DONE)()
    engine.edges.steps.stop()
    uses = engine.edges.uses()
    assert set(uses) == {"gpu_to_cpu", "cpu_to_gpu"}  # not gpu_to_nvme, which brought nothing
    assert uses["gpu_to_cpu"].num_bytes == pytest.approx(3 * SHAPE.block_bytes, abs=1)  # shares are rounded down
    assert uses["cpu_to_gpu"].num_bytes == pytest.approx(SHAPE.slice_bytes, abs=1)
    for use in uses.values():
        assert use.busy_s > 0 and use.peak_bytes_s is not None and use.peak_bytes_s >= use.num_bytes / use.busy_s
    assert engine.close(10)
