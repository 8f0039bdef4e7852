"""Reading ahead across the step's boundary: only for the same plan again, and from no slot that was given up."""

from __future__ import annotations

import random
import time
from collections import Counter

import pytest
import torch

from kvtier.device import DONE, Event, HostDevice
from kvtier.errors import BlockLostError, ShortReadError
from kvtier.metrics import Metrics
from kvtier.plan import Source, StepPlan
from kvtier.policies.next_layers import NextLayers
from kvtier.policies.no_prefetch import NoPrefetch
from kvtier.ring import SliceRing
from kvtier.types import BlockId, BlockShape, PrefetchPolicy, Slot, Tier
from tests.rings import one_by_one, threads

SHAPE = BlockShape(num_layers=4, kv_heads=2, block_tokens=4, key_dim=3, value_dim=3, element_bytes=4)


class Slots:
    """What lies in each slot, read after a random delay into a buffer that is NaN before."""

    def __init__(self, seed: int = 0, max_delay_s: float = 0.001) -> None:
        self.random, self.max_delay_s = random.Random(seed), max_delay_s
        self.content: dict[Slot, float] = {}
        self.reads: list[tuple[int, Slot]] = []
        self.broken: set[tuple[int, Slot]] = set()
        self.reading: dict[Slot, int] = {}

    def __call__(self, tier: Tier, slot: Slot, layer: int, out: torch.Tensor, after: Event) -> Event:
        self.reading[slot] = self.reading.get(slot, 0) + 1
        try:
            out.view(torch.float32).fill_(float("nan"))
            time.sleep(self.random.random() * self.max_delay_s)
            self.reads.append((layer, slot))
            if (layer, slot) in self.broken:
                raise ShortReadError("short")
            out.view(torch.float32).fill_(self.content.get(slot, float(slot)) * 100 + layer)
            return DONE
        finally:
            self.reading[slot] -= 1


def ring_of(slots: Slots, num_slices: int = 16, prefetch: PrefetchPolicy | None = None) -> SliceRing:
    return SliceRing(
        SHAPE, num_slices, torch.float32, HostDevice(), begin_slices=one_by_one(slots),
        prefetch=NextLayers(depth=2) if prefetch is None else prefetch, metrics=Metrics(), threads=threads(3),
        io_timeout_s=5.0,
    )  # fmt: skip


def plan_of(num: int, first: int = 7) -> StepPlan:
    return StepPlan((), tuple(Source(BlockId(50 + i), i, Tier.NVME, Slot(first + 3 * i)) for i in range(num)))


def step(ring: SliceRing, plan: StepPlan, slots: Slots) -> None:
    """A whole step, each slice of it compared with what lies in its slot now."""
    ring.begin(plan)
    for layer in range(SHAPE.num_layers):
        seen: list[Source] = []
        for group in ring.groups(layer):
            for row, source in enumerate(group.sources):
                wanted = slots.content.get(source.slot, float(source.slot)) * 100 + layer
                assert bool((group.keys[row] == wanted).all()) and bool((group.values[row] == wanted).all())
            seen.extend(group.sources)
        assert tuple(seen) == plan.streamed
    ring.finish()


def settle(slots: Slots) -> None:
    """Until nothing is read any more."""
    before = -1
    while before != len(slots.reads) or any(slots.reading.values()):
        before = len(slots.reads)
        time.sleep(0.05)


@pytest.mark.parametrize("num_slices", [2, 3, 5, 16, 100])
@pytest.mark.parametrize("num_sources", [1, 2, 7])
def test_every_step_of_one_plan_gets_every_slice_right(num_slices: int, num_sources: int) -> None:
    slots = Slots(seed=num_slices)
    ring, plan = ring_of(slots, num_slices), plan_of(num_sources)
    for _ in range(5):
        step(ring, plan, slots)
    ring.drain()
    assert len(slots.reads) >= 5 * SHAPE.num_layers * num_sources
    ring.close()


def _both_steps(plan: StepPlan) -> list[tuple[int, Slot]]:
    return 2 * [(layer, source.slot) for layer in range(SHAPE.num_layers) for source in plan.streamed]


def test_a_plan_that_came_twice_is_read_for_before_it_comes_again() -> None:
    slots = Slots()
    ring, plan = ring_of(slots), plan_of(2)
    step(ring, plan, slots)
    settle(slots)
    assert len(slots.reads) == SHAPE.num_layers * 2  # nobody knows yet that it comes again
    step(ring, plan, slots)
    settle(slots)
    # By what was read and not by when: under load a thread's read ahead may begin before another's of this step.
    ahead = list((Counter(slots.reads) - Counter(_both_steps(plan))).elements())
    assert {layer for layer, _ in ahead} == {0, 1}  # as far as the policy looks behind the last layer
    step(ring, plan, slots)
    settle(slots)
    assert len(slots.reads) == 3 * SHAPE.num_layers * 2 + len(ahead)  # nothing was read twice
    ring.close()


def test_without_prefetch_nothing_is_read_ahead() -> None:
    slots = Slots()
    ring, plan = ring_of(slots, prefetch=NoPrefetch()), plan_of(2)
    for _ in range(3):
        step(ring, plan, slots)
    settle(slots)
    assert len(slots.reads) == 3 * SHAPE.num_layers * 2
    ring.close()


def test_sequences_that_take_turns_are_not_read_ahead_for() -> None:
    slots = Slots()
    ring, plans = ring_of(slots), (plan_of(2), plan_of(3, first=40))
    for number in range(6):
        step(ring, plans[number % 2], slots)
    settle(slots)
    assert len(slots.reads) == 3 * SHAPE.num_layers * (2 + 3)
    ring.close()


def test_another_plan_gets_nothing_of_what_was_read_for_the_one_before() -> None:
    slots = Slots()
    ring, plan = ring_of(slots), plan_of(2)
    for _ in range(3):
        step(ring, plan, slots)
    for other in (plan_of(3, first=40), plan_of(2), plan):
        step(ring, other, slots)
    ring.close()


def test_a_slot_that_is_given_up_is_not_read_any_more_and_its_old_bytes_are_not_served() -> None:
    slots = Slots(max_delay_s=0.01)
    ring, plan = ring_of(slots), plan_of(2)
    for _ in range(3):
        step(ring, plan, slots)
    slot = plan.streamed[1].slot
    ring.leave(Tier.NVME, slot)
    assert not any(slots.reading.values())
    slots.content[slot] = 777.0  # another block's bytes
    step(ring, plan_of(2), slots)
    step(ring, plan, slots)
    ring.close()


def test_giving_up_a_slot_that_nobody_reads_costs_nothing_that_was_read_ahead() -> None:
    slots = Slots()
    ring, plan = ring_of(slots), plan_of(2)
    for _ in range(3):
        step(ring, plan, slots)
    settle(slots)
    before = len(slots.reads)
    ring.leave(Tier.NVME, Slot(99))
    ring.leave(Tier.CPU, plan.streamed[0].slot)
    step(ring, plan, slots)
    settle(slots)
    assert len(slots.reads) == before + SHAPE.num_layers * 2
    ring.close()


def test_a_read_ahead_that_fails_is_a_loss_of_the_step_that_needs_it() -> None:
    slots = Slots()
    ring, plan = ring_of(slots), plan_of(2)
    step(ring, plan, slots)
    ring.begin(plan)
    slots.broken.add((0, plan.streamed[1].slot))
    for layer in range(SHAPE.num_layers):
        if layer == 0:
            slots.broken.clear()
        for _ in ring.groups(layer):
            pass
        if layer == 1:
            slots.broken.add((0, plan.streamed[1].slot))  # of the next step: this one has read it
    ring.finish()  # this step had all of its slices
    settle(slots)
    with pytest.raises(BlockLostError) as told:
        step(ring, plan, slots)
    assert told.value.blocks == (plan.streamed[1].block,)
    ring.drain()
    slots.broken.clear()
    step(ring, plan, slots)
    ring.close()


def test_an_aborted_step_leaves_nothing_behind() -> None:
    slots = Slots()
    ring, plan = ring_of(slots), plan_of(3)
    for _ in range(2):
        step(ring, plan, slots)
    ring.begin(plan)
    for _ in ring.groups(0):
        pass
    ring.drain()
    assert not any(slots.reading.values())
    for _ in range(3):
        step(ring, plan, slots)
    ring.close()
