"""Milliseconds of a token against the length of its context, on a model of one layer: what grows is attention's share.

The KV is random (`synthetic`): contexts of 128K tokens need no prefill.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from kvtier import TieredKV
from kvtier.benchmarks.synthetic import fill, fill_plain

BLOCK_TOKENS = 256
CASES = ("dynamic", "all_gpu", "spilled")
"""`DynamicCache`; all KV on the gpu tier; most of it on the cpu tier (without CUDA both are host memory)."""
TOKENS = 8
"""Of each measurement."""


def one_layer(max_tokens: int) -> Any:
    """A Llama of one layer and random weights, for positions up to `max_tokens`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=max_tokens, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").to(torch.float32).eval()


def config_for(case: str, num_tokens: int, token_bytes: int, gpu_frac: float = 1.0) -> dict[str, Any]:
    """Room for the whole context on each tier; `gpu_frac` of the gpu tier's slots are used."""
    kv_bytes = (num_tokens + 4 * BLOCK_TOKENS) * token_bytes
    room = 4 << 20  # scratch and ring
    tiers: dict[str, Any] = {"gpu": {"budget": room + kv_bytes, "high": gpu_frac, "low": 0.9 * gpu_frac}}
    if case == "spilled":
        tiers["cpu"] = {"budget": kv_bytes + (1 << 20), "high": 1.0, "low": 0.99}
    return {"block_tokens": BLOCK_TOKENS, "prefill_chunk": BLOCK_TOKENS, "prefix_cache": False, "tiers": tiers}


def _gpu_frac(model: Any, num_tokens: int, token_bytes: int) -> float:
    """So that an eighth of the context's blocks stay on the gpu tier, and two at least."""
    with TieredKV(model, config_for("spilled", num_tokens, token_bytes)) as tiered:
        num_slots = tiered.stats()["tiers"]["gpu"]["num_slots"]
    return float(max(2, num_tokens // BLOCK_TOKENS // 8) / num_slots)


@contextmanager
def _counted(tiered: TieredKV) -> Iterator[Callable[[], float]]:
    """Seconds that the manager takes of steps: their begin, their plan, their commit."""
    manager, spent_s = tiered._runtime.manager, 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            nonlocal spent_s
            started_s = time.perf_counter()
            try:
                return call(*args)
            finally:
                spent_s += time.perf_counter() - started_s

        return run

    names = ("begin_step", "plan", "commit_step")
    for name in names:
        setattr(manager, name, timed(getattr(manager, name)))
    try:
        yield lambda: spent_s
    finally:
        for name in names:
            delattr(manager, name)


def measure(case: str, num_tokens: int, num_rounds: int) -> dict[str, Any]:
    """One case's row at one length: medians over the rounds of `TOKENS` tokens each."""
    model = one_layer(num_tokens + 1024 + num_rounds * TOKENS)
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(0, 512, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    row: dict[str, Any] = {"case": case, "context": num_tokens}
    with torch.no_grad():
        if case == "dynamic":
            plain = fill_plain(model, num_tokens, generator)
            return row | _rounds(lambda: model(ids[:, :1], cache=plain, use_cache=True), num_rounds)
        token_bytes = 2 * 2 * (128 // 4) * 4
        gpu_frac = _gpu_frac(model, num_tokens, token_bytes) if case == "spilled" else 1.0
        with TieredKV(model, config_for(case, num_tokens, token_bytes, gpu_frac)) as tiered:
            cache = tiered.new_cache()
            fill(tiered, cache, ids, generator)
            with _counted(tiered) as control_s:
                row |= _rounds(lambda: tiered(ids[:, :1], cache=cache), num_rounds)
                row["control_us_per_token"] = control_s() / ((num_rounds + 1) * TOKENS) * 1e6
            blocks = tiered._runtime.placement.residency.num_copies
            row["blocks"] = {tier.label: count for tier, count in blocks.items()}
    return row


def _rounds(step: Callable[[], object], num_rounds: int) -> dict[str, Any]:
    found: list[float] = []
    for _ in range(num_rounds + 1):
        started_s = time.perf_counter()
        for _ in range(TOKENS):
            step()
        found.append((time.perf_counter() - started_s) / TOKENS * 1e3)
    found = sorted(found[1:])  # the first one warms up
    return {"ms_per_token": statistics.median(found), "ms_spread": [found[0], found[-1]]}


def per_doubling(rows: Sequence[dict[str, Any]]) -> list[str]:
    """How much more each row takes than the one of the same case before it, and how much longer its context is."""
    before: dict[str, dict[str, Any]] = {}
    found = []
    for row in rows:
        last = before.get(row["case"])
        if last is None:
            found.append("")
        else:
            found.append(f"{row['ms_per_token'] / last['ms_per_token']:.2f} for {row['context'] // last['context']}x")
        before[row["case"]] = row
    return found
