"""What the prefix cache costs where it never helps: prompts of `--prompt` tokens, each of them asked once.

`tiered.generate` with `prefix_cache: true` and with `false` take turns on the same three prompts, and the plain model
on every fourth group. With it, every prompt's blocks stay and have to be given up again: tiers fill, blocks go down to
nvme, and are dropped there. Cases:

- `gpu`: the gpu tier alone, with room for about 6 prompts;
- `temporary`: gpu, cpu and nvme, for about 6, 2 and 4 prompts, in a temporary folder;
- `persistent`: the same with a `path`, where blocks are written with their names. Both hash the model for it.

Files are read and written past the page cache (`io: direct`, refused on file systems that have none: see `--folder`).

The cost is the median, over the pairs of such groups, of the time with it to the time without; `full` leaves out the
pairs before the last tier was full. CPU seconds are those of all threads until nothing moves any more, and other work
on the machine disturbs them less.

Run as `python -m kvtier.benchmarks.worst_case`. Cost: about 12 minutes and 300 MB of disk (one thread, SmolLM2);
`--quick`, prompts of 128 tokens in the case `temporary` alone, two.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.command import encode, fill, finish, parse
from kvtier.benchmarks.models import LoadedModel, load_model, twin
from kvtier.benchmarks.spent import Spent, spent
from kvtier.hf import describe

BLOCK_TOKENS = 64
NUM_ANSWERED = 8
GROUP = 3
"""Prompts in a row on one side, so that what a call leaves to the background meets the next call of the same side."""
PLAIN_EVERY = 4
CASES = ("gpu", "temporary", "persistent")
TARGET_COST_FRAC = 0.02


def config_for(case: str, prompt_bytes: int, folder: Path, **values: Any) -> dict[str, Any]:
    """Budgets in prompts; part of the gpu tier's is for scratch and ring. `folder`: of the case `persistent`."""
    tiers: dict[str, Any] = {"gpu": {"budget": 7 * prompt_bytes}}
    if case != "gpu":
        # What `auto` takes unmeasured for files of less than 1 GiB is the page cache, from which the kernel writes
        # later, on nobody's account; for the larger ones of real use it measures.
        nvme = {"budget": 4 * prompt_bytes + (128 << 10), "io": "direct"}
        tiers |= {"cpu": {"budget": 2 * prompt_bytes}, "nvme": nvme}
    if case == "persistent":
        tiers["nvme"]["path"] = str(folder)
    return {"block_tokens": BLOCK_TOKENS, "prefill_chunk": 512, "tiers": tiers, **values}


def prompts(loaded: LoadedModel, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Stretches of one text, one behind the other: no two begin alike for a block."""
    ids = encode(loaded, num_prompts * num_tokens)[0].tolist()
    found = [ids[first : first + num_tokens] for first in range(0, num_prompts * num_tokens, num_tokens)]
    if len({tuple(prompt[:BLOCK_TOKENS]) for prompt in found}) < num_prompts:
        raise RuntimeError("two prompts begin alike: nothing of this would be a worst case")
    return found


def ask_all(generate: Callable[..., Any], group: Sequence[Sequence[int]], tiered: TieredKV | None = None) -> Spent:
    """Prompts one behind the other, and then the wait until nothing of `tiered` moves any more.

    Seconds are those of the calls, which background moves of the calls before may slow down; CPU seconds have the
    moves of the last one too. `sequence` is all prompts and answers.
    """
    cpu_started_s = time.process_time()
    calls = [spent(generate, torch.tensor([list(prompt)]), NUM_ANSWERED) for prompt in group]
    if tiered is not None:
        runtime = tiered._runtime
        runtime.manager.poll()
        while runtime.placement.moves:
            time.sleep(0.01)  # `stats()` in a loop would cost more than the moves
            runtime.manager.poll()
    cpu_seconds = time.process_time() - cpu_started_s
    sequence = tuple(token for call in calls for token in call.sequence)
    return replace(calls[0], seconds=sum(call.seconds for call in calls), cpu_seconds=cpu_seconds, sequence=sequence)


def is_full(stats: dict[str, Any]) -> bool:
    """Whether the last tier has no room for one more prompt, as far as can be seen: 0.9 of its slots are used."""
    last = next(tier for tier in reversed(stats["tiers"].values()) if tier["num_slots"])
    return bool(last["used_slots"] >= 0.9 * last["num_slots"])


def measure(case: str, loaded: LoadedModel, asked: Sequence[Sequence[int]], folder: Path) -> dict[str, Any]:
    """One case's row."""
    model = loaded.model
    prompt_bytes = (len(asked[0]) + NUM_ANSWERED) * describe(model, BLOCK_TOKENS).shape.token_bytes
    calls: dict[str, list[Spent]] = {"with": [], "without": [], "plain": []}
    full_from: int | None = None
    with ExitStack() as stack:
        wrapped = {
            side: stack.enter_context(
                TieredKV(twin(model), config_for(case, prompt_bytes, folder / f"{case}-{side}", prefix_cache=on))
            )
            for side, on in (("with", True), ("without", False))
        }
        for first in range(0, len(asked) - GROUP + 1, GROUP):
            number, group = first // GROUP, asked[first : first + GROUP]
            if full_from is None and is_full(wrapped["with"].stats()):
                full_from = number
            for side in ("with", "without") if number % 2 else ("without", "with"):
                calls[side].append(ask_all(wrapped[side].generate, group, wrapped[side]))
            if number % PLAIN_EVERY == 0:
                calls["plain"].append(ask_all(model.generate, group))
        stats = {side: tiered.stats() for side, tiered in wrapped.items()}
    return to_row(case, calls, full_from, stats)


def to_row(
    case: str, calls: dict[str, list[Spent]], full_from: int | None, stats: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Medians of pairs. `full_from`: the first of them before which the last tier was full; None: it never was."""
    found = sum(stats["with"]["prefix_cache"]["reused_tokens"].values())
    pairs = list(zip(calls["with"], calls["without"], strict=True))
    same = [ours.sequence == other.sequence for ours, other in pairs]
    for number, call in enumerate(calls["plain"]):
        same[number * PLAIN_EVERY] &= call.sequence == calls["with"][number * PLAIN_EVERY].sequence
    row = {
        "case": case,
        "pairs": len(pairs),
        "full_pairs": 0 if full_from is None else len(pairs) - full_from,
        **{f"{side}_s": statistics.median(call.seconds for call in each) for side, each in calls.items()},
        **{f"{side}_cpu_s": statistics.median(call.cpu_seconds for call in each) for side, each in calls.items()},
        **_costs(pairs, ""),
        **_costs(list(zip(calls["with"][::PLAIN_EVERY], calls["plain"], strict=True)), "_to_plain"),
        "reused_tokens": found,
        "same_answers": sum(same),
        "bytes_moved": stats["with"]["bytes_moved"],
        "nvme_written_bytes": stats["with"]["tiers"]["nvme"]["written_bytes"],
        "is_valid": found == 0 and full_from is not None,
        "target_cost_frac": TARGET_COST_FRAC,
    }
    return row | ({} if full_from is None else _costs(pairs[full_from:], "_full"))


def _costs(pairs: Sequence[tuple[Spent, Spent]], name: str) -> dict[str, Any]:
    """What the first of each pair takes more than the second, as a part of that.

    The median over the pairs, which are measured one after the other, so that most noise of the machine hits both; its
    quartiles; and the same of the sums.
    """
    found: dict[str, Any] = {}
    for kind, attribute in (("cost", "seconds"), ("cpu_cost", "cpu_seconds")):
        times = [(getattr(ours, attribute), getattr(other, attribute)) for ours, other in pairs]
        fracs = sorted(ours / other - 1 for ours, other in times)
        found[f"{kind}{name}_frac"] = statistics.median(fracs)
        found[f"{kind}{name}_quartiles"] = [fracs[len(fracs) // 4], fracs[-1 - len(fracs) // 4]]
        found[f"{kind}{name}_of_sums_frac"] = sum(ours for ours, _ in times) / sum(other for _, other in times) - 1
    return found


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    rows = []
    for row in document["rows"]:
        notes = [] if row["is_valid"] else ["INVALID: " + ("found some" if row["reused_tokens"] else "never full")]
        notes += [f"{row['nvme_written_bytes'] / 1e6:.0f} MB to nvme"] if row["case"] != "gpu" else []
        rows.append((
            row["case"], f"{row['pairs']} ({row['full_pairs']})", f"{row['without_s']:.2f}", _cost(row, "cost"),
            _cost(row, "cpu_cost"), _cost(row, "cost_full"), _cost(row, "cpu_cost_full"), _cost(row, "cost_to_plain"),
            _cost(row, "cpu_cost_to_plain"), f"{row['same_answers']} of {row['pairs']}", "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "pairs (full)", "without, s", "cost", "cpu", "full: cost", "cpu", "to plain", "cpu",
               "same answers", "")  # fmt: skip
    title = f"{document['model']}: prompts of {document['prompt_tokens']} tokens that never repeat"
    return fill(Table(title=title), columns, rows)


def _cost(row: dict[str, Any], name: str) -> str:
    if f"{name}_frac" not in row:
        return ""
    low, high = row[f"{name}_quartiles"]
    return f"{row[f'{name}_frac']:+.1%} ({low:+.1%} … {high:+.1%})"


def main() -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt, at least 64")
    parser.add_argument("--pairs", type=int, default=10, help="groups of 3 prompts of each case, at least 8")
    parser.add_argument("--cases", default=",".join(CASES), help="comma list")
    parser.add_argument("--quick", action="store_true", help="8 pairs of 128 tokens a prompt, in the case temporary")
    options = parse(parser)
    if options.quick:
        options.prompt, options.pairs, options.cases = 128, 8, "temporary"
    cases = options.cases.split(",")
    if options.pairs < 8 or options.prompt < 64 or not set(cases) <= set(CASES):
        parser.error("--pairs must be at least 8, or the tiers are never full; --prompt at least 64; see --cases")
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    each = options.pairs * GROUP
    asked = prompts(loaded, each * len(cases), options.prompt)
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-worst-", dir=options.folder) as name:
        for number, case in enumerate(cases):
            with console.status(case):
                own = asked[number * each : (number + 1) * each]
                rows.append(measure(case, loaded, own, Path(name)))
    document = {"benchmark": "worst_case", "model": loaded.name, "prompt_tokens": options.prompt, "rows": rows}
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
