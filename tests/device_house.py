"""Ring, engine, stores and attention on a device with queues, without a model: steps, and moves around them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from kvtier.attention import Kernel, finish, pack, partial_attention
from kvtier.device import Device
from kvtier.metrics import Metrics
from kvtier.plan import Source, StepPlan
from kvtier.policies.next_layers import NextLayers
from kvtier.ring import SliceRing
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore
from kvtier.stores.gpu import GpuStore
from kvtier.transfer import TransferEngine
from kvtier.types import BlockId, BlockShape, Move, MovePurpose, MoveResult, MoveStatus, Slot, Tier
from tests.rings import threads

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=4, key_dim=8, value_dim=8, element_bytes=4)
NUM_STEPS = 4


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


def attend_over_tiers(
    device: Device,
    seed: int,
    kernels: Callable[[], AbstractContextManager[None]],
    *,
    synchronize: Callable[[], None],
    lag: Callable[[], None] = lambda: None,
    checks_bytes: bool = True,
) -> float:
    """Four steps over eight streamed blocks; how far attention is from the definition.

    Before the first, four blocks go down from the gpu tier, straight behind the kernels that write them; the second and
    the third are read ahead for; before the fourth, blocks change their places.

    Args:
        kernels: within it this thread's operations are the device's.
        synchronize: waits for all of them.
        lag: called before kernels that write or read what copies read or write: may queue something that takes long.
        checks_bytes: whether every block must be whole at the end.
    """
    place, generator = device.torch_device, torch.Generator().manual_seed(seed)
    gpu = GpuStore(SHAPE, 4, torch.float32, place)
    cpu, files = CpuStore(SHAPE, 6, pin=place.type == "cuda"), FileLike(SHAPE, 4)
    gpu.slab().fill_(0xFF)
    engine = TransferEngine({Tier.GPU: gpu, Tier.CPU: cpu, Tier.NVME: files}, 2, device)
    ring = SliceRing(
        SHAPE, 5, torch.float32, device, begin_slices=engine.begin_slices, prefetch=NextLayers(depth=2),
        metrics=Metrics(), threads=threads(2), io_timeout_s=20.0,
    )  # fmt: skip
    ring._bytes.fill_(0xFF)
    # block, layer, K or V, head, token, dim
    content = torch.randn(8, SHAPE.num_layers, 2, 2, 4, 8, generator=generator)
    queries = torch.randn(NUM_STEPS, SHAPE.num_layers, 1, 4, 1, 8, generator=generator)
    there, asked = content.to(place), queries.to(place)
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
    with torch.no_grad(), kernels():
        lag()
        for number in range(4):
            for layer in range(SHAPE.num_layers):
                gpu.keys[layer][number].copy_(there[number, layer, 0])
                gpu.values[layer][number].copy_(there[number, layer, 1])
        settle(*(move(number, Tier.GPU, number, Tier.CPU, number) for number in range(4)))
        for step in range(NUM_STEPS):
            if step in (0, NUM_STEPS - 1):  # the steps between have the same plan, and are read ahead for
                streamed = [(n, *place) for n, place in enumerate(places) if place[0] is not Tier.GPU]
                plan = StepPlan((), tuple(Source(BlockId(n), n, tier, Slot(slot)) for n, tier, slot in streamed))
            ring.begin(plan)
            for layer in range(SHAPE.num_layers):
                query, parts = pack(asked[step, layer], 2), []
                for slot in (slot for tier, slot in places if tier is Tier.GPU):
                    view = slice(slot, slot + 1)
                    parts.append(partial_attention(query, gpu.keys[layer][view], gpu.values[layer][view], kernel))
                for group in ring.groups(layer):
                    lag()
                    parts.append(partial_attention(query, group.keys, group.values, kernel))
                outputs.append(finish(parts, 4, torch.float32))
            ring.finish()
            if step == NUM_STEPS - 2:
                for tier, slot in ((Tier.CPU, 0), (Tier.NVME, 0), (Tier.NVME, 1)):
                    ring.leave(tier, Slot(slot))
                # One from memory, one from a file, and then a file's block into the slot that was streamed from.
                settle(move(10, Tier.CPU, 0, Tier.GPU, 2), move(11, Tier.NVME, 0, Tier.GPU, 3))
                settle(move(12, Tier.NVME, 1, Tier.CPU, 0), move(13, Tier.GPU, 2, Tier.NVME, 0))
                places[0], places[4], places[5] = (Tier.NVME, 0), (Tier.GPU, 3), (Tier.CPU, 0)
    synchronize()
    ring.close()
    assert engine.close(20.0)
    for number, (tier, slot) in enumerate(places if checks_bytes else ()):
        stored = files.bytes[slot] if tier is Tier.NVME else (cpu if tier is Tier.CPU else gpu).block(Slot(slot))
        assert torch.equal(stored.cpu().view(torch.float32), content[number].reshape(-1)), (
            f"block {number} on {tier.label}"
        )
    cpu.close()
    off = []
    for (step, layer), found in zip(
        ((s, n) for s in range(NUM_STEPS) for n in range(SHAPE.num_layers)), outputs, strict=True
    ):
        keys, values = (content[:, layer, which].transpose(0, 1).reshape(1, 2, 32, 8) for which in (0, 1))
        wanted = torch.nn.functional.scaled_dot_product_attention(
            queries[step, layer], keys, values, scale=8**-0.5, enable_gqa=True
        )
        off.append((found.cpu() - wanted.transpose(1, 2)).abs().max())
    return float(torch.stack(off).max())
