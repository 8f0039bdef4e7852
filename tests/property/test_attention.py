"""Attention in parts equals attention in one, for any cut of the keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.attention import _reference, causal_attention, finish, merge, pack, partial_attention
from kvtier.errors import IntegrityError


def _whole(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, num_past: int) -> torch.Tensor:
    """softmax(q k^T) v in float64, by the definition."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1).double(), values.repeat_interleave(groups, 1).double()
    scores = query.double() @ keys.transpose(-1, -2) * scale
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(num_past + 1)
    return (scores.masked_fill(mask, float("-inf")).softmax(-1) @ values).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    dim=st.sampled_from([8, 16, 24, 64]),
    num_new=st.integers(1, 40),
    pieces=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 33)), max_size=5),
    spread=st.floats(0.1, 30.0),
    seed=st.integers(0, 2**16),
)
def test_any_cut_of_the_keys_gives_the_whole(
    kv_heads: int, groups: int, dim: int, num_new: int, pieces: list[tuple[int, int]], spread: float, seed: int
) -> None:
    torch.manual_seed(seed)
    heads, scale = kv_heads * groups, dim**-0.5
    query = torch.randn(1, heads, num_new, dim) * spread
    past = [(torch.randn(n, kv_heads, t, dim), torch.randn(n, kv_heads, t, dim)) for n, t in pieces]
    new_keys, new_values = torch.randn(1, kv_heads, num_new, dim), torch.randn(1, kv_heads, num_new, dim)
    packed, parts = pack(query, kv_heads), []
    for keys, values in past:
        parts.append(partial_attention(packed, keys, values, scale))
        if seed % 2:
            parts = [merge(parts)]
    parts.append(causal_attention(query, new_keys, new_values, scale))
    rows = [(k[i : i + 1], v[i : i + 1]) for k, v in past for i in range(k.shape[0])]
    all_keys = torch.cat([*(k for k, _ in rows), new_keys], dim=2)
    all_values = torch.cat([*(v for _, v in rows), new_values], dim=2)
    expected = _whole(query, all_keys, all_values, scale, all_keys.shape[2] - num_new)
    got = finish(parts, heads, torch.float32)
    assert got.shape == (1, num_new, heads, dim) and got.is_contiguous()
    # fp32 scores are exact to about 1e-7 of their size, and that error stands in the exponent.
    assert (got - expected).abs().max() < 1e-5 + 3e-6 * spread


@pytest.mark.parametrize("causal", [False, True])
def test_the_kernel_and_the_definition_agree_on_output_and_lse(causal: bool) -> None:
    torch.manual_seed(0)
    query, keys, values = (torch.randn(1, h, 20, 16) for h in (6, 2, 2))
    if causal:
        part, expected = causal_attention(query, keys, values, 0.25), _reference(query, keys, values, 0.25, causal=True)
    else:
        part = partial_attention(pack(query, 2), keys, values, 0.25)
        expected = _reference(query, keys, values, 0.25, causal=False)
    assert torch.allclose(part.output.reshape(-1, 16), expected.output.reshape(-1, 16), atol=1e-5)
    assert torch.allclose(part.lse.reshape(-1), expected.lse.reshape(-1), atol=1e-5)


def test_strided_views_of_a_slab_are_read_in_place() -> None:
    slab = torch.full((5, 3, 2, 2, 16, 8), float("nan"))
    slab[1:4, 1] = torch.randn(3, 2, 2, 16, 8)
    query = torch.randn(1, 4, 1, 8)
    part = partial_attention(pack(query, 2), slab[1:4, 1, 0], slab[1:4, 1, 1], 0.3)
    copied = partial_attention(pack(query, 2), slab[1:4, 1, 0].contiguous(), slab[1:4, 1, 1].contiguous(), 0.3)
    assert torch.equal(part.output, copied.output) and not part.output.isnan().any()


def test_no_keys_is_refused_before_the_kernel_ends_the_process() -> None:
    query, empty = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 0, 8)
    with pytest.raises(IntegrityError):
        partial_attention(query, empty, empty, 1.0)
    with pytest.raises(IntegrityError):
        partial_attention(query, torch.randn(0, 2, 4, 8), torch.randn(0, 2, 4, 8), 1.0)
