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

A machine that is busy with other things makes the resident step longer than `simulated_ms`, what its parts were told to
take, and with it the bound: beyond 5 % a row is not `is_quiet`, and marked NOISY; a larger `--scale` helps.

With `--virtual` time passes only while everybody waits: the real work takes none, and a busy machine changes nothing.
That is what the order and the size of transfers alone give.

The methods take turns: one step that is not timed, which may find what was fetched in the pause, and `--steps` that
are. Run as `python -m kvtier.benchmarks.overlap`. Cost: about 5 minutes; `--quick`, each GPU behind its own link
alone, under one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.command import fill, finish
from kvtier.benchmarks.overlap_clock import Clock, RealClock, VirtualClock
from kvtier.benchmarks.overlap_run import MAX_STEPS, METHODS, Bench, StepTimes
from kvtier.benchmarks.overlap_shapes import TIME_SCALE, Case, card, cases

TARGET_RATIO, AIM_RATIO = 1.12, 1.05
MAX_LOGIT_DIFF = 1e-4
MAX_NOISE_FRAC = 0.05


def to_rows(bench: Bench, times: dict[str, list[StepTimes]]) -> list[dict[str, Any]]:
    """One row a method. Medians of steps; `_ms`."""
    case = bench.case
    compute, plain = (_median_ms(step.wall for step in times[name]) for name in ("resident", "plain"))
    link = bench.methods["kvtier"].link
    assert link is not None
    transfer = bench.spilled_bytes / link.up.bytes_per_s * 1e3
    bound, simulated = max(compute, transfer), bench.simulated_s * 1e3
    rows = []
    for name in (name for name in METHODS if name in times):
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
                "simulated_ms": simulated,
                "plain_ms": plain,
                "transfer_ms": transfer,
                "stall_ms": stall,
                "stall_frac": stall / step,
                "stall_by_cause": _medians_ms([each.stalls for each in steps]),
                "stats_stall_ms": _median_ms(each.own_stall for each in steps),
                "overhead_ms": step - stall - compute,
                "late_ms": _median_ms(each.late for each in steps),
                "link_idle_ms": _medians_ms([each.idle for each in steps]),
                "up_ratio": statistics.median(up for up, _ in bench.moved[name]) / bench.spilled_bytes,
                "down_ratio": statistics.median(down for _, down in bench.moved[name]) / bench.spilled_bytes,
                "num_steps": len(steps),
                "max_logit_diff": diff,
                "is_exact": diff <= MAX_LOGIT_DIFF,
                "is_quiet": compute <= (1 + MAX_NOISE_FRAC) * simulated,
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
    case: Case, *, num_turns: int, num_steps: int, clock: Clock, num_layers: int | None = None,
    time_scale: float = TIME_SCALE, methods: Sequence[str] = METHODS,
) -> list[dict[str, Any]]:  # fmt: skip
    """One case's rows."""
    if num_turns * (num_steps + 1) > MAX_STEPS:
        raise ValueError(f"{num_turns} turns of {num_steps + 1} steps: {MAX_STEPS} in all, then the tail is full")
    num_layers = card().num_full if num_layers is None else num_layers
    with torch.no_grad():
        bench = Bench.build(case, num_layers, clock, time_scale, methods)
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
        notes = ([] if row["is_exact"] else ["NOT EXACT"]) + ([] if row["is_quiet"] else ["NOISY"])
        missed = " <" if row["ratio"] > (row["target_ratio"] or row["ratio"]) else ""
        rows.append((
            f"{row['device']}, {row['link_gb_s']:.0f} GB/s", f"{row['load']}, {row['binding']}", row["method"],
            f"{row['step_ms']:.1f}", f"{row['bound_ms']:.1f}", f"{row['ratio']:.3f}{missed}", f"{low:.2f} … {high:.2f}",
            f"{row['compute_ms']:.1f}", f"{row['transfer_ms']:.1f}", f"{row['stall_ms']:.1f}", causes,
            f"{row['overhead_ms']:.1f}", "+".join(f"{idle:.0f}" for idle in row["link_idle_ms"].values()),
            f"{row['up_ratio']:.2f} / {row['down_ratio']:.2f}", "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "load, bound", "method", "step", "bound", "ratio", "spread", "compute", "transfer", "stall",
               "by cause", "overhead", "link idle", "up / down", "")  # fmt: skip
    return fill(Table(title="Overlap on a simulated GPU and link; ms, marked < beyond the target"), columns, rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table, then one JSON document as the last line. 1 if logits were not the plain cache's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="of each method in each case")
    parser.add_argument("--steps", type=int, default=3, help="that are timed in a turn; in all at least 5")
    parser.add_argument("--methods", default=",".join(METHODS), help="comma list; kvtier is always among them")
    parser.add_argument("--scale", type=float, default=TIME_SCALE, help="how many times slower all is than hardware")
    parser.add_argument("--virtual", action="store_true", help="count waits alone: what the real work takes is nothing")
    parser.add_argument("--quick", action="store_true", help="each GPU behind its own link, balanced")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--json", action="store_true", help="only the JSON document on standard output")
    options = parser.parse_args(arguments)
    if options.turns * options.steps < 5 or options.turns * (options.steps + 1) > MAX_STEPS:
        parser.error(f"--turns x --steps: at least 5, and x (--steps + 1) at most {MAX_STEPS}")
    methods = {"kvtier", *options.methods.split(",")}
    if unknown := methods - {*METHODS}:
        parser.error(f"--methods: {', '.join(unknown)} is none of {', '.join(METHODS)}")
    torch.set_num_threads(options.threads)
    load_before, console, rows = os.getloadavg()[0], Console(stderr=True), list[dict[str, Any]]()
    clock: Clock = VirtualClock() if options.virtual else RealClock()
    for case in cases(("balanced",), own_links=True) if options.quick else chosen():
        with console.status(f"{case.gpu.name}, {case.link_bytes_s / 1e9:.0f} GB/s, {case.load}"):
            rows += measure(
                case, num_turns=options.turns, num_steps=options.steps, clock=clock, time_scale=options.scale,
                methods=[*methods],
            )  # fmt: skip
    clock.close()
    document = {"benchmark": "overlap", "rows": rows, "time_scale": options.scale, "aim_ratio": AIM_RATIO}
    document["clock"] = "virtual" if options.virtual else "real"
    finish(document, [table(document)], options, load_before)
    return 0 if all(row["is_exact"] for row in rows) else 1


def chosen() -> list[Case]:
    """Every GPU behind every link, and what is spilled deeply behind its own."""
    return cases(("balanced",)) + cases(("deep",), own_links=True)


if __name__ == "__main__":
    sys.exit(main())
