"""What kvtier's own code takes of a decode step, whatever the model's size: microseconds a token and a layer."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvtier import TieredKV
from kvtier.benchmarks.rounds import alternate
from kvtier.hf import cache_keyword

_HIDDEN, _CONTEXT, _BLOCK_TOKENS = 64, 80, 64
_STEPS, _BEFORE = 12, 3
_CACHED_BYTES = 64 << 20
"""More than the processor's caches hold, of which a large model's weights leave nothing to the code either."""


def measure_code(model: Any, num_rounds: int) -> dict[str, Any] | None:
    """What a step of one token takes more with everything on the gpu tier than the model does without any cache.

    Of a thin twin: as many layers, heads of the same length, hardly any weights, a block and a tail of K and V. What
    is left is code: Python, torch's calls, and attention over 80 tokens, which belongs to it as overhead of each call.
    Both start with processor's caches full of something else. None: the model cannot be made thin.

    Returns:
        `us_per_token`, `us_per_layer` (a layer's share of it), `us_spread` of the rounds, `num_layers`.
    """
    try:
        thin = _thin(model)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return None
    token, other = torch.zeros((1, 1), dtype=torch.long), torch.ones(_CACHED_BYTES, dtype=torch.uint8)
    config = {"block_tokens": _BLOCK_TOKENS, "prefix_cache": False, "tiers": {"gpu": {"budget": "64MiB"}}}
    plain = _thin(model)
    with TieredKV(thin, config) as tiered, torch.no_grad():
        cache = tiered.new_cache()
        given = {cache_keyword(thin.forward): cache}
        tiered(torch.zeros((1, _CONTEXT), dtype=torch.long), **given)

        def took(step: Callable[[], Any]) -> float:
            times = []
            for _ in range(_STEPS):
                other.add_(1)
                started_s = time.thread_time()
                step()
                times.append(time.thread_time() - started_s)
            return statistics.median(times[_BEFORE:]) * 1e6

        def tokens() -> float:
            found = took(lambda: tiered(token, **given))
            cache.crop(_CONTEXT - cache.get_seq_length())  # no block fills, in any round
            return found

        samples = alternate(
            {"kvtier": tokens, "plain": lambda: took(lambda: plain(token, use_cache=False))}, num_rounds
        )
    more = [ours - bare for ours, bare in zip(samples["kvtier"], samples["plain"], strict=True)]
    num_layers = thin.config.num_hidden_layers
    each = statistics.median(more)
    return {
        "us_per_token": each,
        "us_per_layer": each / num_layers,
        "us_spread": [min(more), max(more)],
        "num_layers": num_layers,
    }


def _thin(model: Any) -> Any:
    config = copy.deepcopy(model.config)
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    config.hidden_size = config.intermediate_size = _HIDDEN
    config.vocab_size, config.pad_token_id, config.bos_token_id, config.eos_token_id = 64, None, None, None
    return type(model)(config).to(dtype=torch.float32).eval()
