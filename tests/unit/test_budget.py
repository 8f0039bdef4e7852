"""The sum of the gpu budget's parts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.budget import MIN_SLOTS, split_gpu_budget
from kvtier.errors import BudgetError
from kvtier.types import AttentionMode, BlockShape

SMOLLM2 = BlockShape(num_layers=30, kv_heads=3, block_tokens=64, key_dim=64, value_dim=64, element_bytes=4)


@settings(max_examples=300, deadline=None)
@given(
    budget_bytes=st.integers(0, 1 << 36),
    layers=st.integers(1, 80),
    kv_heads=st.integers(1, 16),
    groups=st.integers(1, 8),
    block_tokens=st.sampled_from([16, 64, 256]),
    dim=st.sampled_from([16, 64, 128]),
    chunk=st.integers(1, 4096),
    mode=st.sampled_from(AttentionMode),
    streams=st.booleans(),
    wide=st.booleans(),
    writes_scores=st.booleans(),
    untiered=st.sampled_from([0.0, 0.25, 0.6]),
)
def test_the_parts_never_exceed_the_budget(
    budget_bytes: int, layers: int, kv_heads: int, groups: int, block_tokens: int, dim: int, chunk: int,
    mode: AttentionMode, streams: bool, wide: bool, writes_scores: bool, untiered: float,
) -> None:  # fmt: skip
    shape = BlockShape(layers, kv_heads, block_tokens, dim, dim, 2)
    try:
        split = split_gpu_budget(
            budget_bytes, shape, slot_bytes=shape.block_bytes, heads=kv_heads * groups, prefill_chunk=chunk,
            mode=mode, streams=streams, wide=wide, writes_scores=writes_scores, untiered_frac=untiered,
        )  # fmt: skip
    except BudgetError:
        return
    assert split.num_slots >= MIN_SLOTS
    assert split.num_slots * split.slot_bytes + split.fixed_bytes + split.untiered_bytes <= budget_bytes
    assert split.untiered_bytes == int(budget_bytes * untiered)
    if mode is AttentionMode.BLOCKWISE:
        assert split.cost.scratch_bytes(split.max_chunk, split.num_pieces) <= split.scratch_bytes
    assert 1 <= split.max_chunk <= chunk
    assert (split.ring_slices >= 2) == streams
    assert mode is AttentionMode.GATHERED or split.gather_bytes == 0


def test_the_minimum_in_the_message_is_enough_and_one_byte_less_is_not() -> None:
    def split(budget_bytes: int, mode: AttentionMode, untiered: float) -> None:
        split_gpu_budget(
            budget_bytes, SMOLLM2, slot_bytes=SMOLLM2.block_bytes, heads=9, prefill_chunk=512, mode=mode, streams=True,
            untiered_frac=untiered,
        )  # fmt: skip

    for mode, untiered in itertools.product(AttentionMode, (0.0, 0.25, 1 / 3, 0.9)):
        with pytest.raises(BudgetError) as caught:
            split(1 << 20, mode, untiered)
        minimum = int(str(caught.value).split("its minimum is ")[1].split("(")[1].split(" ")[0])
        split(minimum, mode, untiered)
        with pytest.raises(BudgetError):
            split(minimum - 1, mode, untiered)


def test_a_small_budget_shortens_the_chunk_and_a_large_one_does_not() -> None:
    def split(mib: int) -> int:
        return split_gpu_budget(
            mib << 20, SMOLLM2, slot_bytes=SMOLLM2.block_bytes, heads=9, prefill_chunk=2048,
            mode=AttentionMode.BLOCKWISE, streams=True,
        ).max_chunk  # fmt: skip

    assert split(16) < 2048
    assert split(1024) == 2048
