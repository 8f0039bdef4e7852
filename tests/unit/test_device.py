"""The fake device's own rules, staging buffers, and ring, engine and attention under hundreds of its schedules."""

from __future__ import annotations

import threading
from collections.abc import Collection

import pytest
import torch

from kvtier.attention import Kernel, finish, pack, partial_attention
from kvtier.device import DONE, HostDevice, StagingPool
from kvtier.errors import IntegrityError
from kvtier.metrics import Metrics
from kvtier.plan import Source
from kvtier.policies.next_layers import NextLayers
from kvtier.ring import SliceRing
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore, touch
from kvtier.stores.gpu import GpuStore
from kvtier.stores.staging import page_aligned
from kvtier.testing import FakeDevice, Wait
from kvtier.transfer import TransferEngine
from kvtier.types import BlockId, BlockShape, Move, MovePurpose, MoveResult, MoveStatus, Slot, Tier

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=4, key_dim=8, value_dim=8, element_bytes=4)
LAGS = (0.02, 5.0, 5.0)
"""Kernels far behind the host, copies at once."""


class FileLike(Store):
    """What is no slab: reads go through staging."""

    tier = Tier.NVME

    def __init__(self, shape: BlockShape, num_slots: int) -> None:
        self.shape, self.num_slots = shape, num_slots
        self.bytes = torch.zeros(num_slots, shape.block_bytes, dtype=torch.uint8)

    def write(self, slot: Slot, block: torch.Tensor, label: object = None) -> None:
        self.bytes[slot].copy_(block)

    def read(self, slot: Slot, out: torch.Tensor) -> None:
        out.copy_(self.bytes[slot])

    def read_slice(self, slot: Slot, layer: int, out: torch.Tensor) -> None:
        out.copy_(self.bytes[slot].view(self.shape.num_layers, -1)[layer])

    def used_bytes(self) -> int:
        return self.bytes.numel()

    def check_integrity(self) -> None:
        pass

    def close(self) -> None:
        pass


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
    assert made == [8, 8] and pool.num_bytes == 16
    assert len(pool.clear()) == 2 and pool.num_bytes == 0


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
@pytest.mark.parametrize("num_bytes", [1, 4096, 50_000])
def test_touching_leaves_zeros_on_every_page(num_bytes: int, num_threads: int) -> None:
    memory = page_aligned(num_bytes)
    touch(memory, num_threads)
    assert memory.numel() == num_bytes and not memory.any()


# -- ring, engine and attention ---------------------------------------------------------------------------------------


def _house(seed: int, leaves_out: Collection[Wait] = (), hurries: Collection[float] | None = None) -> float:
    """Two steps over eight streamed blocks, with moves between them; how far attention is from the definition.

    Before the first, four blocks go down from the gpu tier, straight behind the kernels that write them; between the
    steps, two come up into slots that kernels of the first step still read.
    """
    device, generator = FakeDevice(seed, leaves_out, hurries), torch.Generator().manual_seed(seed)
    gpu = GpuStore(SHAPE, 4, torch.float32, torch.device("cpu"))
    cpu, files = CpuStore(SHAPE, 6, pin=False), FileLike(SHAPE, 4)
    gpu.slab().fill_(0xFF)
    engine = TransferEngine({Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: files}, 2, device)
    ring = SliceRing(
        SHAPE, 5, torch.float32, device, read_slice=engine.read_slice, prefetch=NextLayers(depth=2), metrics=Metrics(),
        num_threads=2, io_timeout_s=20.0,
    )  # fmt: skip
    ring._bytes.fill_(0xFF)
    content = torch.randn(
        8, SHAPE.num_layers, 2, 2, 4, 8, generator=generator
    )  # block, layer, K or V, head, token, dim
    queries = torch.randn(2, SHAPE.num_layers, 1, 4, 1, 8, generator=generator)
    for number in range(4):
        files.write(Slot(number), content[4 + number].reshape(-1).view(torch.uint8))
    kernel, outputs = Kernel(8**-0.5), []

    def settle(*moves: Move) -> None:
        engine.start(moves)
        done: list[MoveResult] = []
        while len(done) < len(moves):
            done += engine.wait(20.0)
        assert [result.status for result in done] == [MoveStatus.DONE] * len(moves), done

    def move(number: int, source: Tier, source_slot: int, dest: Tier, dest_slot: int) -> Move:
        purpose = MovePurpose.DEMOTE if source < dest else MovePurpose.PROMOTE
        return Move(number, BlockId(number), purpose, source, Slot(source_slot), dest, Slot(dest_slot))

    places = [*((Tier.CPU, number) for number in range(4)), *((Tier.NVME, number) for number in range(4))]
    with torch.no_grad(), device.kernels():
        for number in range(4):
            for layer in range(SHAPE.num_layers):
                gpu.keys[layer][number].copy_(content[number, layer, 0])
                gpu.values[layer][number].copy_(content[number, layer, 1])
        settle(*(move(number, Tier.GPU, number, Tier.CPU, number) for number in range(4)))
        for step in range(2):
            ring.begin(
                [
                    Source(BlockId(n), n, tier, Slot(slot))
                    for n, (tier, slot) in enumerate(places)
                    if tier is not Tier.GPU
                ]
            )
            for layer in range(SHAPE.num_layers):
                query = pack(queries[step, layer], 2)
                parts = [
                    partial_attention(
                        query, gpu.keys[layer][slot : slot + 1], gpu.values[layer][slot : slot + 1], kernel
                    )
                    for tier, slot in places
                    if tier is Tier.GPU
                ]
                parts += [partial_attention(query, group.keys, group.values, kernel) for group in ring.groups(layer)]
                outputs.append(finish(parts, 4, torch.float32))
            ring.drain()
            if step == 0:  # one from memory, one from a file, and a file's block into the slot that was streamed from
                settle(move(10, Tier.CPU, 0, Tier.GPU, 2), move(11, Tier.NVME, 0, Tier.GPU, 3))
                settle(move(12, Tier.NVME, 1, Tier.CPU, 0), move(13, Tier.GPU, 2, Tier.NVME, 0))
                places[0], places[4], places[5] = (Tier.NVME, 0), (Tier.GPU, 3), (Tier.CPU, 0)
    device.synchronize()
    ring.close()
    assert engine.close(20.0)
    for number, (tier, slot) in enumerate(places if not leaves_out else ()):
        stored = files.bytes[slot] if tier is Tier.NVME else (cpu if tier is Tier.CPU else gpu).block(Slot(slot))
        assert torch.equal(stored.view(torch.float32), content[number].reshape(-1)), f"block {number} on {tier.label}"
    assert leaves_out or not device.violations, device.violations
    off = []
    for (step, layer), found in zip(((s, n) for s in range(2) for n in range(SHAPE.num_layers)), outputs, strict=True):
        keys, values = (content[:, layer, which].transpose(0, 1).reshape(1, 2, 32, 8) for which in (0, 1))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            queries[step, layer], keys, values, scale=8**-0.5, enable_gqa=True
        )
        off.append((found - wanted.transpose(1, 2)).abs().max())
    return float(torch.stack(off).max())


@pytest.mark.parametrize("first", range(0, 300, 50))
def test_ring_engine_and_attention_agree_with_one_call_under_every_schedule(first: int) -> None:
    for seed in range(first, first + 50):
        assert _house(seed) <= 1e-5, f"seed {seed}"


@pytest.mark.parametrize("wait", Wait)
def test_each_wait_is_needed(wait: Wait) -> None:
    hurries = (5.0, 0.02, 0.02) if wait is Wait.COMPUTE_FOR_ARRIVAL else LAGS
    for seed in range(5):
        off = _house(seed, [wait], hurries)
        assert not off <= 1e-3, f"seed {seed}: without the wait of {wait.value} nothing is wrong"  # NaN is wrong


def test_a_host_without_queues_allocates_no_event() -> None:
    device, there = HostDevice(), torch.zeros(4)
    assert device.record() is DONE and DONE.is_done() and not device.is_async
    assert device.copy_up([(there, torch.ones(4))], DONE) is DONE and there.all()
    assert device.copy_down([(there, torch.zeros(4))], DONE) is DONE and not there.any()
    device.compute_waits_for(DONE)
    device.close()
