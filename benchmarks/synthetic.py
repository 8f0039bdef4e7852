"""Random KV in place of a prompt's, so that long contexts need no prefill: the same values in ours and in plain caches.

Two generators in the same state give a `TieredCache` and a `DynamicCache` equal K and V, whatever the tiers, blocks and
chunks. What is filled is nobody's KV: it gets no label, is shared with no one and is not kept for a later process, and
a block of it that is lost raises instead of being computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from kvtier import TieredKV
from kvtier.block_table import Made
from kvtier.errors import UnsupportedError
from kvtier.hf import TieredCache, describe
from kvtier.step import NewColumns, Run, Step
from kvtier.types import LayerGroup, Tier

PIECE_TOKENS = 256
"""Values are drawn for so many tokens at a time, whoever asks: the order of drawing is part of what is drawn."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `first …` of every row: `[rows, kv_heads, tokens, dim]` in each layer of the group."""

    first: int
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[2]


def fill(tiered: TieredKV, cache: TieredCache, token_ids: torch.Tensor, generator: torch.Generator) -> None:
    """Let an empty cache hold these tokens with random K and V, in steps of the manager without the model's forward.

    What lies where follows from the budgets, as after a prefill. Waits until no move is in flight.

    Args:
        token_ids: `[rows, tokens]`. Their number decides what is drawn, their values not.
        generator: on the host; as for `fill_plain`.

    Raises:
        UnsupportedError: the cache holds tokens, or the model has layers that are not tiered; nothing changed.
        CapacityError: the tiers have no room; the cache holds a beginning of the tokens.

    Cost: O(bytes of the KV), about 1 GB/s, and the moves that it takes.
    """
    runtime, state = tiered._runtime, cache.state
    num_rows, num_tokens = token_ids.shape
    _check(runtime.group)
    if state.batch.length:
        raise UnsupportedError(f"a cache that holds {state.batch.length} tokens cannot be filled: take a new one")
    manager, ids = runtime.manager, token_ids.tolist()
    with runtime.turn:
        runtime.check_open()
        state.take_rows(num_rows)
        state.check_weights()
        state.batch.origin = None  # with one it would be found by the names of tokens that it does not belong to
        for piece in _pieces(runtime.group, num_rows, num_tokens, generator):
            done = 0
            while done < piece.num_tokens:
                count = min(piece.num_tokens - done, runtime.executor.chunk(state.batch))
                first = piece.first + done
                new = [
                    NewColumns(count, (Run(0, count),), row[first : first + count], made=Made.OTHERWISE) for row in ids
                ]
                step = manager.begin_step(state.batch, new)
                try:
                    _write(tiered, step, piece, done)
                except BaseException:  # a Ctrl-C too: no step stays open
                    manager.abort_step(step)
                    raise
                manager.commit_step(step)
                done += count
        while runtime.placement.moves:
            runtime.placement.wait()


def _write(tiered: TieredKV, step: Step, piece: _Piece, done: int) -> None:
    """The step's tokens, which are those of the piece from number `done` on, into their gpu slots."""
    store = tiered._runtime.stores[Tier.GPU]
    for number, row in enumerate(step.rows):
        for write in row.writes:
            new = slice(done + write.offset, done + write.offset + write.num_tokens)
            old = slice(write.start, write.start + write.num_tokens)
            for position, (keys, values) in enumerate(zip(piece.keys, piece.values, strict=True)):
                store.keys[position][write.slot, :, old] = keys[number, :, new]
                store.values[position][write.slot, :, old] = values[number, :, new]


def fill_plain(model: Any, num_tokens: int, generator: torch.Generator, num_rows: int = 1) -> Any:
    """A `DynamicCache` of so many tokens in each row, with the K and V that `fill` draws. `model` is not wrapped.

    Raises UnsupportedError: the model has layers that are not full attention.
    """
    from transformers import DynamicCache

    group = describe(model, PIECE_TOKENS)
    _check(group)
    pieces = list(_pieces(group, num_rows, num_tokens, generator))
    cache = DynamicCache(config=model.config)
    for position, layer in enumerate(group.layers):
        keys = torch.cat([piece.keys[position] for piece in pieces], dim=2)
        values = torch.cat([piece.values[position] for piece in pieces], dim=2)
        cache.update(keys, values, layer)
    return cache


def _check(group: LayerGroup) -> None:
    if group.num_untiered:
        raise UnsupportedError(f"{group.num_untiered} layers are not tiered: nothing is known of what they hold")


def _pieces(group: LayerGroup, num_rows: int, num_tokens: int, generator: torch.Generator) -> Iterator[_Piece]:
    shape, dtype = group.shape, getattr(torch, group.dtype)
    for first in range(0, num_tokens, PIECE_TOKENS):
        count = min(PIECE_TOKENS, num_tokens - first)
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for _ in range(shape.num_layers):
            for into, dim in ((keys, shape.key_dim), (values, shape.value_dim)):
                numbers = torch.randn((num_rows, shape.kv_heads, count, dim), generator=generator)
                into.append(numbers.to(group.device, dtype))
        yield _Piece(first, keys, values)
