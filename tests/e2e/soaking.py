"""A soak small enough for a test: a tiny model, tiny budgets, no console."""

from __future__ import annotations

from typing import Any

import torch
from rich.console import Console

from kvtier.benchmarks.models import LoadedModel
from kvtier.benchmarks.soak import SoakOptions, run_soak

# 2 layers x 2 heads x (16 + 16) x 4 bytes = 512 bytes of KV a token: 3 sessions of 500 tokens are 750 KiB.
CONFIG = {
    "block_tokens": 16,
    "prefill_chunk": 64,
    "tiers": {"gpu": {"budget": "512KiB"}, "cpu": {"budget": "128KiB"}, "nvme": {"budget": "16MiB"}},
}


class Letters:
    """One token a byte, no chat template."""

    chat_template = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode("utf-8", errors="replace"))}

    def decode(self, ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def tiny_loaded() -> LoadedModel:
    """A random Llama whose logits are far from ties."""
    import transformers  # here: the pure tests run without it

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
        initializer_range=0.3,  # larger than the default: random logits that are far from ties
    )
    return LoadedModel(transformers.LlamaForCausalLM(config).eval(), Letters(), "tiny-llama")


def options(**changes: Any) -> SoakOptions:
    return SoakOptions(**{"config": CONFIG, "sessions": 3, "contexts": (500, 400), "max_new_tokens": 6, **changes})


def soak_quietly(loaded: LoadedModel, *, file: Any = None, saved: Any = None, **changes: Any) -> Any:
    return run_soak(options(**changes), Console(quiet=True), loaded, file=file, saved=saved)
