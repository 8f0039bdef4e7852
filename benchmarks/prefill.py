"""Time to the first token of a new prompt, and the memory it takes, against the plain model.

Cases, at each context length, over the same real text:

- `plain_chunked`: the plain model with `DynamicCache` and sdpa, in chunks of `--chunk` tokens, as kvtier's;
- `plain_one_call`: the same in one forward;
- `all_gpu`, `gpu25_cpu75`, `gpu25_cpu25_nvme50`: kvtier with budgets for these shares of the prompt's blocks, but
  on the gpu tier at least what one step takes. What lies where at the end follows from the budgets: `placement` says
  how it came out. Files are in a temporary folder in `~/.cache/kvtier/runs`.

Cases take turns in `--rounds` rounds; `ratio_to_chunked` and `ratio_to_one_call` are medians over the rounds of plain's
time to the case's: above 1 is faster. Each starts with an empty cache; making it is part of the time.

`peak_bytes` is the most resident memory beyond what the model took before, in a process of its own for each case: KV,
activations, and whatever the allocator holds. Run as `python -m kvtier.benchmarks.prefill`. Cost: about half an hour
(one thread, SmolLM2); `--quick`, 384 tokens in fewer cases, under a minute.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.budgets import SHARES, layout, tier_config
from kvtier.benchmarks.command import encode, fill, finish, in_a_new_process, parse
from kvtier.benchmarks.models import LoadedModel, load_model, twin
from kvtier.benchmarks.prefill_child import prefill_plain, prefill_tiered
from kvtier.benchmarks.residence import residence
from kvtier.benchmarks.rounds import alternate, ratio_columns
from kvtier.hf import TieredCache
from kvtier.types import Tier

PLAIN = ("plain_chunked", "plain_one_call")
CASES = (*PLAIN, *SHARES)
QUICK_CASES = ("plain_chunked", "all_gpu", "gpu25_cpu25_nvme50")
MAX_LOGIT_DIFF = 1e-3

Child = Callable[[dict[str, Any], Path], dict[str, Any]]
_CHILD: Child = functools.partial(in_a_new_process, "prefill_child")


@dataclass
class _Side:
    """One case: a prefill, and where its blocks were left."""

    run: Callable[[], tuple[torch.Tensor, TieredCache | None]]
    task: dict[str, Any]
    """What a process of its own is told."""
    logits: list[torch.Tensor] = field(default_factory=list)
    placed: dict[str, int] = field(default_factory=dict)

    def seconds(self) -> float:
        """Of one prefill."""
        started_s = time.perf_counter()
        logits, cache = self.run()
        int(logits.argmax())  # the first token, on the host
        took_s = time.perf_counter() - started_s
        self.logits.append(logits.float().cpu())
        if cache is not None:
            tiers = residence(cache)
            self.placed = {tier.label: tiers.count(tier) for tier in Tier}
            cache.reset()
        return took_s


def _side(case: str, model: Any, ids: torch.Tensor, chunk: int, stack: ExitStack) -> _Side:
    task: dict[str, Any] = {"ids": ids[0].tolist(), "config": None, "chunk": None}
    if case in PLAIN:
        size = chunk if case == "plain_chunked" else None
        return _Side(lambda: (prefill_plain(model, ids, size), None), {**task, "chunk": size})
    config = tier_config(model, layout(case, ids.shape[1], 1, prefill_chunk=chunk), None, holds=False)
    tiered = stack.enter_context(TieredKV(twin(model), config))
    return _Side(lambda: prefill_tiered(tiered, ids), {**task, "config": config})


def measure(
    loaded: LoadedModel,
    cases: Sequence[str],
    context: int,
    *,
    chunk: int,
    num_rounds: int,
    folder: Path,
    child: dict[str, Any],
    start: Child = _CHILD,
) -> list[dict[str, Any]]:
    """The rows of one context length. `child`: what a process of its own is told beside its case."""
    ids = encode(loaded, context).to(loaded.model.device)
    cases = [case for case in CASES if case in (*cases, "plain_chunked")]
    with ExitStack() as stack, torch.no_grad():
        sides = {case: _side(case, loaded.model, ids, chunk, stack) for case in cases}
        times = alternate({case: side.seconds for case, side in sides.items()}, num_rounds)
    memory = {case: start({**side.task, **child}, folder) for case, side in sides.items()}
    plain = sides["plain_chunked"].logits[0]
    return [to_row(case, context, sides[case], times, memory[case], plain) for case in cases]


def to_row(
    case: str,
    context: int,
    side: _Side,
    times: dict[str, list[float]],
    memory: dict[str, Any],
    plain: torch.Tensor,
) -> dict[str, Any]:
    """One case's row. `plain`: the logits behind the prompt in the same chunks."""
    own = sorted(times[case])
    difference = max(float((logits - plain).abs().max()) for logits in side.logits)
    row: dict[str, Any] = {
        "case": case,
        "context": context,
        "seconds": statistics.median(own),
        "spread": [own[0], own[-1]],
        "tokens_per_s": context / statistics.median(own),
        **ratio_columns("chunked", times[case], times["plain_chunked"]),
        "peak_bytes": memory["peak_bytes"] - memory["before_bytes"],
        "model_bytes": memory["before_bytes"],
        "max_logit_diff": difference,
        "is_valid": difference <= MAX_LOGIT_DIFF,
    }
    if "plain_one_call" in times:
        row |= ratio_columns("one_call", times[case], times["plain_one_call"])
    total = sum(side.placed.values())
    return row | ({"placement": {tier: count / total for tier, count in side.placed.items()}} if total else {})


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    rows = []
    for row in document["rows"]:
        low, high = row["ratio_to_chunked_spread"]
        notes = [] if row["is_valid"] else [f"INVALID: logits are {row['max_logit_diff']:.1e} from plain's"]
        notes += [f"{share:.0%} {tier}" for tier, share in row.get("placement", {}).items() if share]
        rows.append((
            row["case"], f"{row['context']:,}", f"{row['seconds']:.2f}", f"{row['tokens_per_s']:.0f}",
            f"{row['ratio_to_chunked']:.2f}", f"{low:.2f} … {high:.2f}",
            f"{row['ratio_to_one_call']:.2f}" if "ratio_to_one_call" in row else "",
            f"{row['peak_bytes'] / 2**20:.0f}", f"{row['max_logit_diff']:.0e}", "; ".join(notes),
        ))  # fmt: skip
    columns = ("case", "context", "s", "tokens/s", "speed to chunked", "spread", "to one call", "peak MiB", 
               "logit diff", "placement")  # fmt: skip
    title = f"Prefill, {document['model']}, chunks of {document['chunk']}, {document['rounds']} rounds"
    return fill(Table(title=title), columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="2048,8192", help="comma list of tokens, at least 128")
    parser.add_argument("--cases", default=",".join(CASES), help="comma list; plain_chunked comes with any")
    parser.add_argument("--chunk", type=int, default=512, help="tokens of a forward")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--quick", action="store_true", help="384 tokens, chunks of 96, fewer cases")
    options = parse(parser, arguments)
    if options.quick:
        options.contexts, options.chunk, options.cases = "384", 96, ",".join(QUICK_CASES)
    contexts, cases = [int(context) for context in options.contexts.split(",")], options.cases.split(",")
    if options.rounds < 5 or options.chunk < 1 or min(contexts) < 128 or not set(cases) <= set(CASES):
        parser.error("--rounds must be at least 5, --chunk at least 1, --contexts at least 128; see --cases")
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvtier-prefill-", dir=options.folder) as name:
        for context in contexts:
            with console.status(f"{context} tokens"):
                rows += measure(
                    loaded, cases, context, chunk=options.chunk, num_rounds=options.rounds,
                    folder=Path(name), child={"model": options.model, "threads": options.threads},
                )  # fmt: skip
    document = {
        "benchmark": "prefill",
        "quick": options.quick,
        "model": loaded.name,
        "chunk": options.chunk,
        "rounds": options.rounds,
        "rows": rows,
    }
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
