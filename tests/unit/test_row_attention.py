"""Several rows' single tokens, piece after piece, against one softmax over all that each row sees."""

from __future__ import annotations

import random

import pytest
import torch

from kvtier.attention import Kernel, sink_attention
from kvtier.attention import Partial as Part
from kvtier.places import RowsPiece, runs_of_slots
from kvtier.row_attention import RowsAttention
from kvtier.types import Slot, Tier

KV_HEADS, GROUP, DIM, TOKENS = 2, 3, 16, 8


def whole(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """`[heads, 1, dim]` over `[kv_heads, length, dim]`."""
    keys, values = keys.repeat_interleave(GROUP, 0), values.repeat_interleave(GROUP, 0)
    scores = query @ keys.transpose(-1, -2) * kernel.scale
    if kernel.softcap is not None:
        scores = torch.tanh(scores / kernel.softcap) * kernel.softcap
    return torch.softmax(scores, -1) @ values


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_every_row_gets_the_softmax_over_all_that_it_sees(seed: int, softcap: float | None) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_rows, num_slots, kernel = rng.randint(2, 6), 12, Kernel(0.25, softcap)
    keys, values = (torch.randn(num_slots, KV_HEADS, TOKENS, DIM) for _ in range(2))
    query = torch.randn(num_rows, KV_HEADS * GROUP, 1, DIM)
    rows_of = {
        (Tier.GPU, Slot(slot)): tuple(sorted(rng.sample(range(num_rows), rng.randint(1, num_rows))))
        for slot in range(num_slots)
        if rng.random() < 0.8
    }
    rows_of[Tier.GPU, Slot(0)] = tuple(range(num_rows))
    attention = RowsAttention(query, KV_HEADS, kernel)
    seen: dict[tuple[Tier, Slot], tuple[int, ...]] = {}
    for (tier, first), rows in runs_of_slots(rows_of):
        attention.add(RowsPiece.of(keys[first : first + len(rows)], values[first : first + len(rows)], rows))
        seen |= {(tier, Slot(first + at)): each for at, each in enumerate(rows)}
    assert seen == rows_of
    result = attention.finish(torch.float32)
    assert result.shape == (num_rows, 1, KV_HEADS * GROUP, DIM)
    for row in range(num_rows):
        slots = [slot for (_, slot), rows in rows_of.items() if row in rows]
        expected = whole(query[row], *(torch.cat([each[slot] for slot in slots], 1) for each in (keys, values)), kernel)
        assert torch.allclose(result[row, 0], expected[:, 0], atol=1e-5)


def test_neighbours_that_equally_many_rows_see_are_one_call() -> None:
    rows_of = {(Tier.GPU, Slot(s)): rows for s, rows in {4: (0, 1), 5: (1, 2), 6: (0,), 7: (2,), 9: (1,)}.items()}
    rows_of[Tier.CPU, Slot(10)] = (0,)
    assert list(runs_of_slots(rows_of)) == [
        ((Tier.GPU, 4), [(0, 1), (1, 2)]), ((Tier.GPU, 6), [(0,), (2,)]), ((Tier.GPU, 9), [(1,)]),
        ((Tier.CPU, 10), [(0,)]),
    ]  # fmt: skip
    assert list(runs_of_slots({})) == []


def test_sinks_take_their_share_of_every_row() -> None:
    torch.manual_seed(0)
    sinks, query = torch.randn(KV_HEADS * GROUP), torch.randn(2, KV_HEADS * GROUP, 1, DIM)
    keys, values = torch.randn(2, KV_HEADS, TOKENS, DIM), torch.randn(2, KV_HEADS, TOKENS, DIM)
    attention = RowsAttention(query, KV_HEADS, Kernel(0.25))
    attention.add(RowsPiece.of(keys, values, [(0,), (1,)]))
    sink = sink_attention(sinks, KV_HEADS, 1, DIM)
    attention.add_part(Part(sink.output.expand(2, -1, -1, -1), sink.lse.expand(2, -1, -1)), torch.arange(2))
    result = attention.finish(torch.float32)
    for row in range(2):
        scores = query[row] @ keys[row].repeat_interleave(GROUP, 0).transpose(-1, -2) * 0.25
        weights = torch.softmax(torch.cat([scores, sinks.reshape(-1, 1, 1)], -1), -1)[..., :-1]
        assert torch.allclose(result[row, 0], (weights @ values[row].repeat_interleave(GROUP, 0))[:, 0], atol=1e-5)
