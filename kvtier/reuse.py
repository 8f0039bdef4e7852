"""What `generate` does not compute: the beginning of a prompt whose blocks are there already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.hf import TieredCache
from kvtier.prefix_cache import Match
from kvtier.sequences import Beginning

# Tensors that do not change the KV of the prompt.
PLAIN_TENSORS = frozenset(
    {"inputs", "input_ids", "attention_mask", "negative_prompt_ids", "negative_prompt_attention_mask"}
)
# What is asked for would be missing of tokens that are not computed.
_OF_ALL_TOKENS = ("output_hidden_states", "output_attentions", "output_router_logits")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of what `generate` was given: padding, then tokens."""

    padding: int
    token_ids: list[int]


def read_prompts(
    input_ids: torch.Tensor, mask: torch.Tensor | None, pad_token_id: int | None, takes_positions: bool
) -> list[Prompt] | None:
    """The rows of a call, or None where it cannot be told which tokens they are, and at which positions.

    Args:
        input_ids: `[prompts, length]`.
        mask: as `generate` takes it. Without one, transformers makes its own where padding may be among the ids.
        takes_positions: whether the model is told positions, which then count tokens; else they may count padding too.
    """
    rows = input_ids.tolist()
    if mask is None:
        if pad_token_id is not None and bool((input_ids == pad_token_id).any()):
            return None
        return [Prompt(0, row) for row in rows]
    if tuple(mask.shape) != tuple(input_ids.shape):
        return None
    prompts = []
    for row, seen in zip(rows, (mask != 0).tolist(), strict=True):
        num_tokens = sum(seen)
        padding = len(row) - num_tokens
        if not all(seen[padding:]) or (padding and not takes_positions):
            return None
        prompts.append(Prompt(padding, row[padding:]))
    return prompts


def is_plain_call(arguments: Mapping[str, Any], value: Any) -> bool:
    """Whether the KV of a call's prompt follows from its ids and mask, and nothing is wanted of all of its tokens.

    Args:
        value: what is in force of a generation setting, by name.
    """
    others = (name for name, each in arguments.items() if isinstance(each, torch.Tensor) and name not in PLAIN_TENSORS)
    return not any(True for _ in others) and not any(value(name) for name in _OF_ALL_TOKENS)


def reuse(cache: TieredCache, prompts: Sequence[Prompt], num_copies: int = 1) -> None:
    """Let an empty cache begin with the blocks that are found of its prompts, all but the last token at most.

    Each prompt becomes `num_copies` rows, which share them. Nothing is done if nothing is found, or if the cache holds
    anything.
    """
    state = cache.state
    runtime, batch = state.runtime, state.batch
    with runtime.turn:
        if batch.length or not prompts:
            return
        state.check_weights()
        origin = batch.origin
        if origin is None or not state.may_reuse():
            return
        state.take_rows(len(prompts) * num_copies)
        runtime.manager.poll()
        finder, each = runtime.prefix_cache, runtime.manager.block_tokens
        matches: list[Match] = []
        for number, prompt in enumerate(prompts):
            sequence = batch.tables[number * num_copies].sequence
            matches.append(finder.match(origin, prompt.token_ids, sequence))
        most = len(prompts[0].token_ids) + prompts[0].padding - 1
        begins = [
            Beginning(prompt.padding, prompt.token_ids[: len(match.blocks) * each], match.blocks)
            for prompt, match in zip(prompts, matches, strict=True)
            for _ in range(num_copies)
        ]
        length = min(most, *(begin.padding + len(begin.token_ids) for begin in begins))
        if any(begin.padding < length for begin in begins):
            runtime.manager.attach(batch, begins, length)
            for block in dict.fromkeys(block for table in batch.tables for block in table.blocks):
                runtime.manager.upkeep.keeper.want(block)  # what is used twice is worth a write
        for number, (prompt, match) in enumerate(zip(prompts, matches, strict=True)):
            finder.count(prompt.token_ids, match, batch.tables[number * num_copies])
