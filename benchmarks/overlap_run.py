"""The methods of `overlap.py` in turns, on one simulated device: what each of their steps took, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from kvtier.benchmarks.models import twin
from kvtier.benchmarks.overlap_clock import Clock
from kvtier.benchmarks.overlap_link import Device, Link, stalls
from kvtier.benchmarks.overlap_methods import NUM_WARM, LayerAtATime, LruPromotion, Method, Plain, Tiered, spilled
from kvtier.benchmarks.overlap_model import BLOCK_TOKENS, VOCABULARY, build, set_times
from kvtier.benchmarks.overlap_shapes import LATENCY_S, Case

METHODS = ("kvtier", "layer_at_a_time", "lru_promotion")
MAX_STEPS = BLOCK_TOKENS - NUM_WARM - 2  # then the tail is full, and blocks change place


@dataclass(frozen=True)
class StepTimes:
    """One step, in seconds."""

    wall: float
    stalls: dict[str, float]
    idle: dict[str, float]
    """Of the link up."""
    late: float
    """What the real work took longer than the simulated."""
    own_stall: float


def timed_step(method: Method, token: torch.Tensor, device: Device, logits: list[torch.Tensor]) -> StepTimes:
    """One token, with device and link on."""
    link, own_before_s, clock = method.link, method.stall_s(), device.clock
    started_s = clock.now()
    logits.append(method.feed(token))
    ended_s = clock.now()
    idle = dict.fromkeys(("before", "between", "behind"), 0.0)
    if link is not None:
        idle = idle_times(link.up.busy, started_s, ended_s)
    late_s, own_s = sum(part.late_s for part in device.parts), method.stall_s() - own_before_s
    return StepTimes(ended_s - started_s, stalls(device.parts, link), idle, late_s, own_s)


def idle_times(busy: Sequence[tuple[float, float]], started_s: float, ended_s: float) -> dict[str, float]:
    """What of a step the link had nothing to do: before its first transfer, between two, behind the last."""
    inside = [(max(a, started_s), min(b, ended_s)) for a, b in busy if b > started_s and a < ended_s]
    if not inside:
        return {"before": ended_s - started_s, "between": 0.0, "behind": 0.0}
    before, behind = inside[0][0] - started_s, ended_s - inside[-1][1]
    used = sum(b - a for a, b in inside)
    return {"before": before, "between": ended_s - started_s - used - before - behind, "behind": behind}


def _carried(link: Link | None) -> tuple[int, int]:
    """Bytes up and down, so far."""
    return (0, 0) if link is None else (link.up.carried_bytes, link.down.carried_bytes)


@dataclass
class Bench:
    """All methods of one case, each with the same tokens fed, ready to go on."""

    case: Case
    device: Device
    methods: dict[str, Method]
    ids: torch.Tensor
    """What is fed from here on."""
    spilled_bytes: int
    """What a step has to bring up."""

    simulated_s: float
    """What the parts of a step are told to take."""
    logits: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """By method, of every step so far."""
    moved: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """By method, of each turn: bytes that a step has moved up and down, on average. What is read ahead is on its way
    when a step ends, and may be asked for before that or after: of a single step nobody can say."""

    @staticmethod
    def build(case: Case, num_layers: int, clock: Clock, time_scale: float, chosen: Sequence[str] = METHODS) -> Bench:
        """Everything is prefilled, without waiting for device and link. `kvtier` must be among those chosen."""
        device = Device(clock)
        model = build(num_layers, device)
        set_times(model, case.layer_s * time_scale, case.head_s * time_scale)
        own = twin(model)
        num_held = case.num_blocks * BLOCK_TOKENS + 1 + NUM_WARM
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(VOCABULARY, (1, num_held + MAX_STEPS), generator=generator)
        slice_bytes = BLOCK_TOKENS * 2 * model.config.head_dim * 4
        speed = slice_bytes / (case.slice_bytes / case.link_bytes_s * time_scale)
        links = {name: Link(speed, LATENCY_S * time_scale, clock) for name in METHODS}
        tiered = spilled(own, case.num_blocks, case.num_spilled, ids[:, :num_held], links["kvtier"])
        others = twin(model)
        both_ways = LayerAtATime(others.config, links["layer_at_a_time"], device)
        promoting = LruPromotion(others.config, links["lru_promotion"], device, tiered.num_slots)
        methods: dict[str, Method] = {
            "resident": Tiered(model, case.num_blocks + 1),
            "plain": Plain(others),
            "kvtier": tiered,
            "layer_at_a_time": Plain(others, both_ways, both_ways.link),
            "lru_promotion": Plain(others, promoting, promoting.link),
        }
        methods = {name: method for name, method in methods.items() if name not in METHODS or name in chosen}
        for name, method in methods.items():
            if name != "kvtier":  # which has been
                for tokens in ids[:, :num_held].split([num_held - NUM_WARM, *[1] * NUM_WARM], dim=1):
                    method.feed(tokens)
        spilled_bytes = num_layers * case.num_spilled * slice_bytes
        simulated_s = (num_layers * case.layer_s + case.head_s) * time_scale
        return Bench(case, device, methods, ids[:, num_held:], spilled_bytes, simulated_s)

    def run(self, num_turns: int, num_steps: int) -> dict[str, list[StepTimes]]:
        """Turns of one step that is not timed and `num_steps` that are; every method in another place each time."""
        times: dict[str, list[StepTimes]] = {name: [] for name in self.methods}
        self.logits = {name: list[torch.Tensor]() for name in self.methods}
        self.moved = {name: list[tuple[float, float]]() for name in self.methods}
        names = list(self.methods)
        for number in range(num_turns):
            at = number % len(names)
            for name in names[at:] + names[:at]:
                method, first = self.methods[name], number * (num_steps + 1)
                tokens = self.ids[:, first : first + num_steps + 1].split(1, dim=1)
                method.arrive()
                before = _carried(method.link)
                with self._on(method.link):
                    steps = [timed_step(method, token, self.device, self.logits[name]) for token in tokens]
                    method.arrive()
                up, down = (after - each for after, each in zip(_carried(method.link), before, strict=True))
                self.moved[name].append((up / len(steps), down / len(steps)))
                times[name] += steps[1:]
        return times

    @contextmanager
    def _on(self, link: Link | None) -> Iterator[None]:
        self.device.link, self.device.is_on = link, True
        if link is not None:
            link.is_on = True
            link.due.clear()
            link.up.busy.clear()
        yield
        self.device.link, self.device.is_on = None, False
        if link is not None:
            link.is_on = False

    def close(self) -> None:
        """Let go of everything."""
        for method in self.methods.values():
            method.close()
