"""Exact speculation over tiers: prompt lookup on a copying task, with three quarters of the KV off the gpu tier.

The prompt is a text, its last 128 tokens again, and their beginning once more; the model goes on copying. (A passage
that was 2,000 tokens before is too far back for the demo's model: it copied a fifth of it.) By
`prompt_lookup_num_tokens` transformers drafts what followed the last tokens earlier in the prompt, and one forward
verifies the whole draft: KV that lies on slower tiers is streamed once for all of its tokens. Rows, each of `--new`
tokens by `generate`:

- `plain`: the model with `DynamicCache`, all in memory: what lookup gains without tiers;
- `gpu25_cpu75`, `gpu25_cpu25_nvme50`: kvtier with the prompt's blocks placed so; files are read past the page cache.

Greedy and lookup take turns on the same cache, cropped to the prompt after each. `ratio_to_greedy` is the median over
the rounds of greedy's time to lookup's. A row is invalid if lookup gives other tokens than greedy or than the plain
model, if the model does not copy, or if blocks moved. Run as `python -m kvtier.benchmarks.lookup`. Cost: about 5
minutes (one thread, SmolLM2); `--quick`, files only and 1,024 tokens, under one.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier import TieredKV
from kvtier.benchmarks.budgets import Layout, layout, tier_config
from kvtier.benchmarks.cold import is_cold
from kvtier.benchmarks.command import encode, fill, finish, parse
from kvtier.benchmarks.models import LoadedModel, load_model, twin
from kvtier.benchmarks.residence import residence, spread
from kvtier.benchmarks.rounds import alternate, ratios
from kvtier.hf import cache_keyword, describe
from kvtier.stores.slab import slot_bytes
from kvtier.system import io_counters
from kvtier.types import Tier

SPILLED = ("gpu25_cpu75", "gpu25_cpu25_nvme50")
CASES = ("plain", *SPILLED)
NUM_DRAFTED = 10
NUM_REPEATED = 32
"""Tokens of the passage that the prompt begins to copy."""
PASSAGE_TOKENS = 128
TARGET_RATIO = 1.8
MIN_COPIED_FRAC = 0.5
"""Of the tokens that a perfect copy would be: with fewer it is no copying task."""
_WIDEST = "gpu25_cpu25_nvme50"  # has every tier


@dataclass(frozen=True)
class Turn:
    """One call of `generate`."""

    seconds: float
    tokens: tuple[int, ...]
    """Those that were generated."""
    num_forwards: int
    """Fewer than tokens where drafts were right."""
    read_bytes: int


@dataclass
class Side:
    """A cache that holds the prompt but for its last token, and `generate` that goes on with it."""

    generate: Callable[..., Any]
    num_forwards: Callable[[], int]
    crop: Callable[[], None]
    """To what it held before the call."""
    file_bytes: int = 0
    """KV in files that one forward reads."""
    placed: Callable[[], Sequence[Tier | None]] = tuple
    shares: dict[str, float] | None = None

    def ask(self, prompt: torch.Tensor, num_new: int, num_drafted: int) -> Turn:
        """Greedy for `num_drafted` 0, else with prompt lookup."""
        how = {"prompt_lookup_num_tokens": num_drafted} if num_drafted else {}
        before, read_bytes, started_s = self.num_forwards(), io_counters().get("read_bytes", 0), time.perf_counter()
        out = self.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=num_new, do_sample=False, **how
        )
        took_s = time.perf_counter() - started_s
        read_bytes = io_counters().get("read_bytes", 0) - read_bytes
        turn = Turn(took_s, tuple(out[0, prompt.shape[1] :].tolist()), self.num_forwards() - before, read_bytes)
        self.crop()
        return turn


def copying_task(loaded: LoadedModel, num_tokens: int) -> torch.Tensor:
    """A text that ends with a passage twice, so many tokens, and the passage's beginning:
    `[1, num_tokens + NUM_REPEATED]`."""
    ids = encode(loaded, num_tokens - PASSAGE_TOKENS)
    passage = ids[:, -PASSAGE_TOKENS:]
    return torch.cat([ids, passage, passage[:, :NUM_REPEATED]], dim=1).to(loaded.model.device)


def plain_side(model: Any, prompt: torch.Tensor) -> Side:
    """`DynamicCache`. The model's forwards are counted: give a twin."""
    from transformers import DynamicCache

    count, forward, keyword = [0], model.forward, cache_keyword(model.forward)
    cache = DynamicCache(config=model.config)

    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        ids = kwargs["input_ids"]
        if ids.shape[1] >= prompt.shape[1]:  # assisted decoding passes all of the prompt, whatever the cache holds
            held = cache.get_seq_length()
            kwargs |= {name: kwargs[name][:, held:] for name in ("input_ids", "position_ids") if name in kwargs}
        return forward(*args, **kwargs)

    forward(prompt[:, :-1], use_cache=True, logits_to_keep=1, **{keyword: cache})
    model.forward = counted
    return Side(
        functools.partial(model.generate, **{keyword: cache}),
        lambda: count[0],
        lambda: cache.crop(prompt.shape[1] - 1 - cache.get_seq_length()),
    )


def tiered_sides(
    loaded: LoadedModel, prompt: torch.Tensor, num_new: int, folder: Path, stack: ExitStack
) -> dict[str, Callable[[], Side]]:
    """By placement: has the prompt's blocks lie so. One wrapper and one prefill for all of them."""
    widest = layout(_WIDEST, prompt.shape[1] - 1, num_new + NUM_DRAFTED)
    config = tier_config(loaded.model, widest, folder)
    shares = {case: layout(case, prompt.shape[1] - 1, num_new + NUM_DRAFTED) for case in SPILLED}
    most = max(each.num_blocks[Tier.CPU] for each in shares.values())
    block_bytes = describe(loaded.model, widest.block_tokens).shape.block_bytes
    config["tiers"]["cpu"]["budget"] = (most + 1) * slot_bytes(describe(loaded.model, widest.block_tokens).shape)
    tiered = stack.enter_context(TieredKV(twin(loaded.model), config))
    keyword = cache_keyword(loaded.model.forward)
    cache = tiered.new_cache()
    tiered(prompt[:, :-1], logits_to_keep=1, **{keyword: cache})

    def side(wanted: Layout) -> Side:
        spread(tiered, cache, wanted.num_blocks)
        return Side(
            functools.partial(tiered.generate, **{keyword: cache}),
            lambda: int(tiered.stats()["steps"]),
            lambda: cache.crop(prompt.shape[1] - 1 - cache.get_seq_length()),
            wanted.num_blocks.get(Tier.NVME, 0) * block_bytes,
            lambda: residence(cache)[: sum(wanted.num_blocks.values())],
            wanted.shares,
        )

    return {case: functools.partial(side, wanted) for case, wanted in shares.items()}


def measure(
    loaded: LoadedModel, cases: Sequence[str], context: int, *, num_new: int, num_rounds: int, folder: Path
) -> list[dict[str, Any]]:
    """The rows. `folder`: an empty one on a disk."""
    prompt = copying_task(loaded, context)
    with ExitStack() as stack, torch.no_grad():
        makers: dict[str, Callable[[], Side]] = {"plain": lambda: plain_side(twin(loaded.model), prompt)}
        if set(cases) & set(SPILLED):
            makers |= tiered_sides(loaded, prompt, num_new, folder, stack)
        expected = makers["plain"]().ask(prompt, num_new, 0).tokens
        rows = []
        for case in [case for case in CASES if case in cases]:
            side = makers[case]()
            placed = side.placed()
            turns = alternate(
                {
                    "greedy": lambda side=side: side.ask(prompt, num_new, 0),
                    "lookup": lambda side=side: side.ask(prompt, num_new, NUM_DRAFTED),
                },
                num_rounds,
            )
            copied = prompt[0, context - PASSAGE_TOKENS + NUM_REPEATED :][:num_new].tolist()
            rows.append(to_row(case, context, side, turns, expected, copied, side.placed() != placed))
    return rows


def to_row(
    case: str,
    context: int,
    side: Side,
    turns: dict[str, list[Turn]],
    expected: Sequence[int],
    copied: Sequence[int],
    has_moved: bool,
) -> dict[str, Any]:
    """One case's row. `expected`: the plain model's greedy tokens; `copied`: what a perfect copy would be."""
    times = {way: [turn.seconds / len(turn.tokens) * 1e3 for turn in each] for way, each in turns.items()}
    ratio, spread_of_ratio = ratios(times["lookup"], times["greedy"])
    first = {way: each[0] for way, each in turns.items()}
    same = all(turn.tokens == tuple(expected) for each in turns.values() for turn in each)
    num_tokens, num_forwards = len(first["lookup"].tokens), first["lookup"].num_forwards
    copied_frac = sum(a == b for a, b in zip(expected, copied, strict=False)) / len(expected)
    reasons = [] if same else ["other tokens"]
    reasons += ["blocks moved while it was measured"] if has_moved else []
    reasons += ["the model does not copy"] if copied_frac < MIN_COPIED_FRAC else []
    read_bytes = {way: statistics.median(turn.read_bytes for turn in each) for way, each in turns.items()}
    if side.file_bytes and not is_cold(round(read_bytes["greedy"]), first["greedy"].num_forwards * side.file_bytes):
        reasons.append("warm")
    return {
        "case": case,
        "context": context,
        "new_tokens": num_tokens,
        "ms_per_token": statistics.median(times["lookup"]),
        "greedy_ms_per_token": statistics.median(times["greedy"]),
        "ratio_to_greedy": ratio,
        "spread": spread_of_ratio,
        "tokens_per_forward": num_tokens / num_forwards,
        "accepted_frac": max(0, num_tokens - num_forwards) / (num_forwards * NUM_DRAFTED),
        "copied_frac": copied_frac,
        "read_bytes_per_token": read_bytes["lookup"] / num_tokens,
        "greedy_read_bytes_per_token": read_bytes["greedy"] / num_tokens,
        "same_tokens": same,
        "target_ratio": TARGET_RATIO if case in SPILLED else None,
        "is_valid": not reasons,
        "invalid": reasons,
        **({"placement": side.shares} if side.shares else {}),
    }


def table(document: dict[str, Any]) -> Table:
    """The rows for people."""
    rows = []
    for row in document["rows"]:
        low, high = row["spread"]
        missed = row["ratio_to_greedy"] < (row["target_ratio"] or 0)
        rows.append((
            row["case"], f"{row['greedy_ms_per_token']:.1f}", f"{row['ms_per_token']:.1f}",
            f"{row['ratio_to_greedy']:.2f}" + (" <" if missed else ""), f"{low:.2f} … {high:.2f}",
            f"{row['tokens_per_forward']:.1f}", f"{row['accepted_frac']:.0%}", f"{row['copied_frac']:.0%}",
            f"{row['greedy_read_bytes_per_token'] / 1e6:.1f}", f"{row['read_bytes_per_token'] / 1e6:.1f}",
            "; ".join(["same tokens" if row["same_tokens"] else "OTHER TOKENS", *row["invalid"]]),
        ))  # fmt: skip
    columns = ("case", "greedy, ms/token", "lookup, ms/token", "speed to greedy", "spread", "tokens/forward", 
               "accepted", "copied", "greedy MB read/token", "lookup MB", "")  # fmt: skip
    title = f"Prompt lookup, {document['model']}, {document['context']:,} tokens copied; marked <: below {TARGET_RATIO}"
    return fill(Table(title=title), columns, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=2048, help="tokens of the text, at least 256")
    parser.add_argument("--new", type=int, default=64, help="tokens to generate, 8 to 96")
    parser.add_argument("--cases", default=",".join(CASES), help="comma list")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--quick", action="store_true", help="files only, 1,024 tokens, 24 new ones")
    options = parse(parser, arguments)
    if options.quick:
        options.context, options.new, options.cases = 1024, 24, _WIDEST
    cases = options.cases.split(",")
    is_long = 8 <= options.new <= PASSAGE_TOKENS - NUM_REPEATED and options.context >= 2 * PASSAGE_TOKENS
    if options.rounds < 5 or not is_long or not set(cases) <= set(CASES):
        parser.error("--rounds must be at least 5, --new 8 to 96, --context at least 256; see --cases")
    load_before, console = os.getloadavg()[0], Console(stderr=True)
    loaded = load_model(options.model, console)
    with tempfile.TemporaryDirectory(prefix="kvtier-lookup-", dir=options.folder) as name, console.status("lookup"):
        rows = measure(
            loaded, cases, options.context, num_new=options.new, num_rounds=options.rounds, folder=Path(name)
        )
    document = {
        "benchmark": "lookup",
        "quick": options.quick,
        "model": loaded.name,
        "context": options.context,
        "rounds": options.rounds,
        "drafted": NUM_DRAFTED,
        "rows": rows,
    }
    finish(document, [table(document)], options, load_before)


if __name__ == "__main__":
    main()
