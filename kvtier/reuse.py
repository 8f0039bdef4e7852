"""What `generate` does not compute: the beginning of a prompt whose blocks are there already."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvtier.block_table import BlockTable
from kvtier.hf import PLAIN_ARGUMENTS, TieredCache
from kvtier.load_or_recompute import best_cut
from kvtier.origin import Origin
from kvtier.prefix import Miss
from kvtier.prefix_cache import Match
from kvtier.sequences import Beginning
from kvtier.types import Tier

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
    if tuple(mask.shape) != tuple(input_ids.shape) or not bool(((mask == 0) | (mask == 1)).all()):
        return None  # transformers sums a mask up to positions: 2 would leave gaps between them
    prompts = []
    for row, seen in zip(rows, (mask != 0).tolist(), strict=True):
        num_tokens = sum(seen)
        padding = len(row) - num_tokens
        if not all(seen[padding:]) or (padding and not takes_positions):
            return None
        prompts.append(Prompt(padding, row[padding:]))
    return prompts


def is_plain_call(arguments: Mapping[str, Any], known: Container[str], value: Callable[[str], Any]) -> bool:
    """Whether the KV of a call's prompt follows from its ids and mask, and nothing is wanted of all of its tokens.

    Args:
        known: arguments that say how to generate; every other one but ids and mask goes to the model.
        value: what is in force of a generation setting, by name.
    """
    for name, each in arguments.items():
        if name in PLAIN_TENSORS or each is None:
            continue
        if isinstance(each, torch.Tensor) or (name not in known and name not in PLAIN_ARGUMENTS):
            return False
    return not any(value(name) for name in _OF_ALL_TOKENS)


class Reuse:
    """Lets one empty cache begin with the blocks that are found of its prompts, all but the last token at most.

    Where measured loading from files is slower than measured computing, the cache begins with less; of a single prompt
    it may compute the front while the back is loaded.
    """

    def __init__(self, cache: TieredCache, compute: Callable[[list[int]], object]) -> None:
        """`compute` appends tokens to the cache, which has one row, by the model's own forward."""
        self._state, self._compute = cache.state, compute
        self._runtime, self._batch = cache.state.runtime, cache.state.batch

    def begin(self, prompts: Sequence[Prompt], num_copies: int = 1) -> None:
        """Each prompt becomes `num_copies` rows, which share what is found of it. Nothing is done if the cache holds
        anything.

        Raises what `compute` does; the cache then holds a beginning of the prompt.
        """
        runtime, batch = self._runtime, self._batch
        with runtime.turn:
            if batch.length or not prompts:
                return
            self._state.check_weights(closely=False)
            origin = batch.origin
            if origin is None or not self._state.may_reuse():
                return
            self._state.take_rows(len(prompts) * num_copies)
            runtime.manager.poll()
            tables = batch.tables[::num_copies]
            matches = self._match(prompts, tables, origin)
            if any(match.blocks for match in matches):
                self._state.check_weights()  # the close look, which the first forward takes where nothing is attached
                if batch.origin is None:
                    return
                if batch.origin is not origin:
                    matches = self._match(prompts, tables, batch.origin)
            is_one = batch.num_rows == 1 and not prompts[0].padding
            cuts = [self._cut(match) for match in matches]
            if is_one and cuts[0].computes:
                match, cut = matches[0], cuts[0]
            else:
                found = [cut.shortened(match) for match, cut in zip(matches, cuts, strict=True)]
                self._attach(prompts, found, num_copies)
                for prompt, match, table in zip(prompts, found, tables, strict=True):
                    runtime.prefix_cache.count(prompt.token_ids, match, table)
                return
        self._begin_both(prompts[0].token_ids, match, cut)

    def _match(self, prompts: Sequence[Prompt], tables: Sequence[BlockTable], origin: Origin) -> list[Match]:
        pairs = zip(prompts, tables, strict=True)
        return [self._runtime.prefix_cache.match(origin, each.token_ids, table.sequence) for each, table in pairs]

    def _cut(self, match: Match) -> _Cut:
        """What of the blocks found is to be loaded, computed, or left."""
        residency = self._runtime.placement.residency
        in_files = [residency[block].fastest is Tier.NVME for block in match.blocks]
        first = next((index for index, each in enumerate(in_files) if each), len(in_files))
        load_s, compute_s = self._runtime.load_s(), self._runtime.compute_s()
        if first == len(in_files) or load_s is None or compute_s is None:
            return _Cut(first, first, len(in_files))
        return _Cut(first, best_cut(in_files, compute_s, load_s), len(in_files))

    def _attach(self, prompts: Sequence[Prompt], matches: Sequence[Match], num_copies: int) -> None:
        manager = self._runtime.manager
        begins = [
            Beginning(prompt.padding, prompt.token_ids[: len(match.blocks) * manager.block_tokens], match.blocks)
            for prompt, match in zip(prompts, matches, strict=True)
            for _ in range(num_copies)
        ]
        most = len(prompts[0].token_ids) + prompts[0].padding - 1
        length = min(most, *(begin.padding + len(begin.token_ids) for begin in begins))
        if any(begin.padding < length for begin in begins):
            manager.attach(self._batch, begins, length)
            self._want()

    def _want(self) -> None:
        for block in dict.fromkeys(block for table in self._batch.tables for block in table.blocks):
            self._runtime.manager.upkeep.keeper.want(block)  # what is used twice is worth a write

    def _begin_both(self, token_ids: list[int], match: Match, cut: _Cut) -> None:
        """Compute the blocks before the cut while those behind it are brought up, then go on with those."""
        runtime, batch, each = self._runtime, self._batch, self._runtime.manager.block_tokens
        manager = runtime.manager
        back = match.blocks[cut.cut :]
        with runtime.turn:
            origin = batch.origin
            waiting = manager.new_batch()
            manager.attach(waiting, [Beginning(0, token_ids[: len(match.blocks) * each], match.blocks)],
                           len(match.blocks) * each)  # fmt: skip
            manager.enter(waiting)  # they come up while there is room, and nobody gives them up
            self._attach([Prompt(0, token_ids)], [Match(match.blocks[: cut.first], match.miss)], 1)
        try:
            self._compute(token_ids[cut.first * each : cut.cut * each])
            with runtime.turn:
                # Another thread may have changed the model before the front was computed: then that is the new one's.
                if batch.length == cut.cut * each and batch.origin is origin and self._state.has_current_weights():
                    last = len(match.blocks) * each
                    manager.extend(batch, token_ids[cut.cut * each : last], back)
                    manager.truncate(batch, min(last, len(token_ids) - 1))
                    runtime.prefix_cache.count(token_ids, match, batch.tables[0], cut.first, cut.cut)
                    self._want()
        finally:
            with runtime.turn:
                manager.leave(waiting)
                manager.drop(waiting)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Of blocks found: the first that lies in files, the first that is loaded, and how many there are."""

    first: int
    cut: int
    num_blocks: int

    @property
    def computes(self) -> bool:
        """Whether some are computed and others loaded."""
        return self.first < self.cut < self.num_blocks

    def shortened(self, match: Match) -> Match:
        """What is used of them where all that is loaded is loaded before anything is computed."""
        if self.first < self.cut == self.num_blocks:
            return Match(match.blocks[: self.first], Miss.SLOWER)
        return match
