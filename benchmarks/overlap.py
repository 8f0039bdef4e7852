"""Whether transfers hide behind compute: a step's time over `max(compute, transfer)`, on a simulated GPU and link.

Until kvtier has run on a GPU this is the evidence that offloading pays there. The model is a small random Llama of as
many layers as Llama-3.1-8B, its tokens are real and compared with the plain cache's; each of its layers and its head
take as long as Llama-3.1-8B's on an RTX 4090 or an H100, and the cpu tier lies behind a link whose bandwidth is in the
same proportion to that (`overlap_shapes.py` has the sum), all of it 24 times slower. Methods:

- `kvtier`: the real streaming path, with a cpu tier and `host_attention: never`;
- `layer_at_a_time`: what transformers' offloaded cache does, all K and V up and down at every token;
- `lru_promotion`: naive LRU promotion at first touch, with as much room on the device as kvtier.

`compute_ms` is kvtier's own step in the same run with everything resident; `transfer_ms` what the spilled bytes take on
the link alone; `bound_ms` the larger of the two, the same for all methods; `lost_ms` what a step takes beyond it.
A step is compute + stall + `overhead_ms`. The device stalls at the `step_boundary`, for the first layer's bytes; in
later layers for `bandwidth`, while the link is busy, which is no loss where the link binds, and for `latency`, while it
is not; and for `copy_down`, bytes that have to be gone. `link_idle_ms` says when the link up had nothing to do: before
the step's first transfer, between two, and behind the last. Where the link binds, what is lost is lost there.
`stats_stall_ms` is what kvtier itself calls stall.

What it does not show: what Python and wake-ups take is not 24 times slower, and much of it hides behind what is, so
that on hardware it weighs more; copies do not disturb each other or the kernels.

The methods take turns: one step that is not timed, which may find what was fetched in the pause, and `--steps` that
are. Run as `python -m kvtier.benchmarks.overlap`. Cost: about 5 minutes; `--quick`, each GPU behind its own link
alone, under one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.command import fill, finish
from kvtier.benchmarks.models import twin
from kvtier.benchmarks.overlap_link import Clock, Device, Link, RealClock, stalls
from kvtier.benchmarks.overlap_methods import LayerAtATime, LruPromotion, Method, Plain, Tiered, spilled
from kvtier.benchmarks.overlap_model import BLOCK_TOKENS, VOCABULARY, build, set_times
from kvtier.benchmarks.overlap_shapes import LATENCY_S, TIME_SCALE, Case, card, cases

TARGET_RATIO, AIM_RATIO = 1.12, 1.05
MAX_LOGIT_DIFF = 1e-4
METHODS = ("kvtier", "layer_at_a_time", "lru_promotion")
MAX_STEPS = BLOCK_TOKENS - 2  # then the tail is full, and blocks change place


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
    up_bytes: int
    down_bytes: int


def timed_step(method: Method, token: torch.Tensor, device: Device, logits: list[torch.Tensor]) -> StepTimes:
    """One token, with device and link on."""
    link, own_before_s, clock = method.link, method.stall_s(), device.clock
    carried = (0, 0) if link is None else (link.up.carried_bytes, link.down.carried_bytes)
    started_s = clock.now()
    logits.append(method.feed(token))
    ended_s = clock.now()
    idle, up, down = dict.fromkeys(("before", "between", "behind"), 0.0), 0, 0
    if link is not None:
        idle = idle_times(link.up.busy, started_s, ended_s)
        up, down = link.up.carried_bytes - carried[0], link.down.carried_bytes - carried[1]
    late_s, own_s = sum(part.late_s for part in device.parts), method.stall_s() - own_before_s
    return StepTimes(ended_s - started_s, stalls(device.parts, link), idle, late_s, own_s, up, down)


def idle_times(busy: Sequence[tuple[float, float]], started_s: float, ended_s: float) -> dict[str, float]:
    """What of a step the link had nothing to do: before its first transfer, between two, behind the last."""
    inside = [(max(a, started_s), min(b, ended_s)) for a, b in busy if b > started_s and a < ended_s]
    if not inside:
        return {"before": ended_s - started_s, "between": 0.0, "behind": 0.0}
    before, behind = inside[0][0] - started_s, ended_s - inside[-1][1]
    used = sum(b - a for a, b in inside)
    return {"before": before, "between": ended_s - started_s - used - before - behind, "behind": behind}


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

    @staticmethod
    def build(case: Case, num_layers: int, clock: Clock, time_scale: float) -> Bench:
        """Everything is prefilled, without waiting for device and link."""
        device = Device(clock)
        model = build(num_layers, device)
        set_times(model, case.layer_s * time_scale, case.head_s * time_scale)
        own = twin(model)
        num_held = case.num_blocks * BLOCK_TOKENS + 1
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
        for name, method in methods.items():
            if name != "kvtier":
                method.feed(ids[:, :num_held])
        return Bench(case, device, methods, ids[:, num_held:], num_layers * case.num_spilled * slice_bytes)

    def run(self, num_turns: int, num_steps: int) -> dict[str, list[StepTimes]]:
        """Turns of one step that is not timed and `num_steps` that are; every method in another place each time.

        `logits` then has those of every step.
        """
        times: dict[str, list[StepTimes]] = {name: [] for name in self.methods}
        self.logits: dict[str, list[torch.Tensor]] = {name: [] for name in self.methods}
        names = list(self.methods)
        for number in range(num_turns):
            at = number % len(names)
            for name in names[at:] + names[:at]:
                method, first = self.methods[name], number * (num_steps + 1)
                tokens = self.ids[:, first : first + num_steps + 1].split(1, dim=1)
                with self._on(method.link):
                    steps = [timed_step(method, token, self.device, self.logits[name]) for token in tokens]
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


def to_rows(bench: Bench, times: dict[str, list[StepTimes]]) -> list[dict[str, Any]]:
    """One row a method. Medians of steps; `_ms`."""
    case = bench.case
    compute, plain = (_median_ms(step.wall for step in times[name]) for name in ("resident", "plain"))
    link = bench.methods["kvtier"].link
    assert link is not None
    transfer = bench.spilled_bytes / link.up.bytes_per_s * 1e3
    bound = max(compute, transfer)
    rows = []
    for name in METHODS:
        steps = times[name]
        step = _median_ms(each.wall for each in steps)
        stall = _median_ms(sum(each.stalls.values()) for each in steps)
        diff = max(float((a - b).abs().max()) for a, b in zip(bench.logits[name], bench.logits["plain"], strict=True))
        ratios = sorted(each.wall * 1e3 / bound for each in steps)
        rows.append(
            {
                "device": case.gpu.name,
                "link_gb_s": case.link_bytes_s / 1e9,
                "load": case.load,
                "method": name,
                "context_tokens": case.context_tokens,
                "spilled_frac": case.num_spilled / case.num_blocks,
                "binding": case.binding,
                "step_ms": step,
                "bound_ms": bound,
                "lost_ms": step - bound,
                "ratio": step / bound,
                "ratio_spread": [ratios[0], ratios[-1]],
                "compute_ms": compute,
                "plain_ms": plain,
                "transfer_ms": transfer,
                "stall_ms": stall,
                "stall_frac": stall / step,
                "stall_by_cause": _medians_ms([each.stalls for each in steps]),
                "stats_stall_ms": _median_ms(each.own_stall for each in steps),
                "overhead_ms": step - stall - compute,
                "late_ms": _median_ms(each.late for each in steps),
                "link_idle_ms": _medians_ms([each.idle for each in steps]),
                "up_ratio": statistics.median(each.up_bytes for each in steps) / bench.spilled_bytes,
                "down_ratio": statistics.median(each.down_bytes for each in steps) / bench.spilled_bytes,
                "num_steps": len(steps),
                "max_logit_diff": diff,
                "is_exact": diff <= MAX_LOGIT_DIFF,
                "target_ratio": TARGET_RATIO if name == "kvtier" else None,
                **bench.methods[name].extras(),
            }
        )
    return rows


def _median_ms(seconds: Any) -> float:
    return statistics.median(seconds) * 1e3


def _medians_ms(each: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: _median_ms(one[name] for one in each) for name in each[0]}


def measure(
    case: Case, *, num_turns: int, num_steps: int, num_layers: int | None = None, clock: Clock | None = None,
    time_scale: float = TIME_SCALE,
) -> list[dict[str, Any]]:  # fmt: skip
    """One case's rows."""
    if num_turns * (num_steps + 1) > MAX_STEPS:
        raise ValueError(f"{num_turns} turns of {num_steps + 1} steps: {MAX_STEPS} in all, then the tail is full")
    num_layers = card().num_full if num_layers is None else num_layers
    with torch.no_grad():
        bench = Bench.build(case, num_layers, RealClock() if clock is None else clock, time_scale)
        try:
            return to_rows(bench, bench.run(num_turns, num_steps))
        finally:
            bench.close()


def table(document: dict[str, Any]) -> Table:
    """The rows for people; all times in milliseconds."""
    rows = []
    for row in document["rows"]:
        low, high = row["ratio_spread"]
        causes = "+".join(f"{value:.0f}" for value in row["stall_by_cause"].values())
        missed = " <" if row["ratio"] > (row["target_ratio"] or row["ratio"]) else ""
        rows.append((
            f"{row['device']}, {row['link_gb_s']:.0f} GB/s", f"{row['load']}, {row['binding']}", row["method"],
            f"{row['step_ms']:.1f}", f"{row['bound_ms']:.1f}", f"{row['ratio']:.3f}{missed}", f"{low:.2f} … {high:.2f}",
            f"{row['compute_ms']:.1f}", f"{row['transfer_ms']:.1f}", f"{row['stall_ms']:.1f}", causes,
            f"{row['overhead_ms']:.1f}", "+".join(f"{idle:.0f}" for idle in row["link_idle_ms"].values()),
            f"{row['up_ratio']:.2f} / {row['down_ratio']:.2f}", "yes" if row["is_exact"] else "NO",
        ))  # fmt: skip
    columns = ("case", "load, bound", "method", "step", "bound", "ratio", "spread", "compute", "transfer", "stall",
               "by cause", "overhead", "link idle", "up / down", "exact")  # fmt: skip
    return fill(Table(title="Overlap on a simulated GPU and link; ms, marked < beyond the target"), columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, then one JSON document as the last line. 1 if logits were not the plain cache's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="of each method in each case")
    parser.add_argument("--steps", type=int, default=2, help="that are timed in a turn; in all at least 5")
    parser.add_argument("--quick", action="store_true", help="each GPU behind its own link, balanced")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--json", action="store_true", help="only the JSON document on standard output")
    options = parser.parse_args(arguments)
    if options.turns * options.steps < 5 or options.turns * (options.steps + 1) > MAX_STEPS:
        parser.error(f"--turns x --steps: at least 5, and x (--steps + 1) at most {MAX_STEPS}")
    torch.set_num_threads(options.threads)
    load_before, console, rows = os.getloadavg()[0], Console(stderr=True), list[dict[str, Any]]()
    for case in cases(("balanced",), own_links=True) if options.quick else chosen():
        with console.status(f"{case.gpu.name}, {case.link_bytes_s / 1e9:.0f} GB/s, {case.load}"):
            rows += measure(case, num_turns=options.turns, num_steps=options.steps)
    document = {"benchmark": "overlap", "rows": rows, "time_scale": TIME_SCALE, "aim_ratio": AIM_RATIO}
    finish(document, [table(document)], options, load_before)
    return 0 if all(row["is_exact"] for row in rows) else 1


def chosen() -> list[Case]:
    """Every GPU behind every link, and what is spilled deeply behind its own."""
    return cases(("balanced",)) + cases(("deep",), own_links=True)


if __name__ == "__main__":
    sys.exit(main())
