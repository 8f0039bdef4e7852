"""Decode speed against transformers' DynamicCache, in one process, alternating: ms per token and ratios.

Cases, each at several context lengths, with the same text in every cache:

- `dynamic`: the plain model, DynamicCache and sdpa;
- `all_gpu`: kvtier with everything on the gpu tier (on a machine without CUDA that is ordinary memory);
- `spilled`: kvtier with gpu 64 MiB, cpu 96 MiB, nvme 2 GiB: what does not fit is streamed at every token.

Each ratio is the median of `--pairs` alternating pairs of `--tokens` tokens. One torch thread unless `--threads` says
otherwise. Run as `python -m kvtier.benchmarks.decode`. Cost: one prefill per case and context (about 140 tokens/s),
then a few seconds a row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.documents import load_text
from kvtier.benchmarks.machine import machine
from kvtier.benchmarks.models import load_model

CONFIGS: dict[str, dict[str, Any]] = {
    "all_gpu": {"block_tokens": 256, "prefill_chunk": 512, "tiers": {"gpu": {"budget": "2GiB"}}},
    "spilled": {
        "block_tokens": 64,
        "prefill_chunk": 512,
        "tiers": {"gpu": {"budget": "64MiB"}, "cpu": {"budget": "96MiB"}, "nvme": {"budget": "2GiB"}},
    },
}


def _ms_per_token(step: Callable[[], object], num_tokens: int) -> float:
    started_s = time.perf_counter()
    for _ in range(num_tokens):
        step()
    return (time.perf_counter() - started_s) / num_tokens * 1e3


def measure(
    case: str, context: int, *, num_tokens: int, num_pairs: int, loaded: Any, ids: torch.Tensor
) -> dict[str, Any]:
    """One case against `dynamic` at one context length; both caches hold the same `context` tokens and grow alike.

    Returns a row: medians in ms per token, the median of the pairs' speed ratios (above 1 is faster than `dynamic`),
    their spread, and the largest difference of the last logits.
    """
    from transformers import DynamicCache

    from kvtier import TieredKV

    model, token = loaded.model, ids[:, :1]
    with TieredKV(model, CONFIGS[case]) as tiered, torch.no_grad():
        cache, plain = tiered.new_cache(), DynamicCache(config=model.config)
        tiered(ids[:, :context], cache=cache, logits_to_keep=1)
        chunk = tiered.config.prefill_chunk
        for start in range(0, context, chunk):
            model(ids[:, start : min(start + chunk, context)], cache=plain, use_cache=True, logits_to_keep=1)
        last: dict[str, torch.Tensor] = {}

        def ours() -> None:
            last["ours"] = tiered(token, cache=cache).logits

        def theirs() -> None:
            last["theirs"] = model(token, cache=plain, use_cache=True).logits

        ours(), theirs()
        pairs = [(_ms_per_token(ours, num_tokens), _ms_per_token(theirs, num_tokens)) for _ in range(num_pairs)]
        stats = tiered.stats()
    ratios = sorted(plain_ms / our_ms for our_ms, plain_ms in pairs)
    return {
        "case": case,
        "context": context,
        "ms_per_token": statistics.median(our_ms for our_ms, _ in pairs),
        "dynamic_ms_per_token": statistics.median(plain_ms for _, plain_ms in pairs),
        "ratio_to_dynamic": statistics.median(ratios),
        "ratio_spread": [ratios[0], ratios[-1]],
        "max_logit_diff": float((last["ours"] - last["theirs"]).abs().max()),
        "hit_frac": {name: tier["hit_frac"] for name, tier in stats["tiers"].items()},
    }


def main() -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", default="512,2048", help="comma list of context lengths in tokens")
    parser.add_argument("--cases", default="all_gpu,spilled", help=f"comma list of {', '.join(CONFIGS)}")
    parser.add_argument("--tokens", type=int, default=16, help="tokens per measurement")
    parser.add_argument("--pairs", type=int, default=9, help="alternating pairs per row, at least 5")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", default=None, help="a model's folder; SmolLM2-135M-Instruct by default")
    options = parser.parse_args()
    if options.pairs < 5:
        parser.error("--pairs: a median of fewer than 5 is noise")
    torch.set_num_threads(options.threads)
    console = Console(stderr=True)
    loaded = load_model(options.model, console)
    contexts = [int(context) for context in options.contexts.split(",")]
    ids = loaded.tokenizer(load_text(None)[: 8 * max(contexts)], return_tensors="pt").input_ids
    rows = []
    for context in contexts:
        if ids.shape[1] < context:
            parser.error(f"--contexts: the text has {ids.shape[1]} tokens, {context} are asked for")
        for case in options.cases.split(","):
            with console.status(f"{case} at {context} tokens"):
                rows.append(
                    measure(case, context, num_tokens=options.tokens, num_pairs=options.pairs, loaded=loaded, ids=ids)
                )
    table = Table(title=f"Decode, {loaded.name}, {options.threads} thread(s), against DynamicCache + sdpa")
    for column in ("case", "context", "ms/token", "dynamic ms/token", "speed ratio", "spread", "logit diff"):
        table.add_column(column, justify="right")
    for row in rows:
        low, high = row["ratio_spread"]
        table.add_row(
            row["case"],
            f"{row['context']:,}",
            f"{row['ms_per_token']:.1f}",
            f"{row['dynamic_ms_per_token']:.1f}",
            f"{row['ratio_to_dynamic']:.2f}",
            f"{low:.2f} … {high:.2f}",
            f"{row['max_logit_diff']:.1e}",
        )
    Console().print(table)
    print(json.dumps({"benchmark": "decode", "rows": rows, "machine": machine(), "threads": options.threads}))


if __name__ == "__main__":
    main()
