"""Attention in parts equals attention in one, for any cut of the keys."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.attention import (
    Kernel,
    Partial,
    _reference,
    causal_attention,
    finish,
    merge,
    pack,
    padded_attention,
    partial_attention,
    sink_attention,
)
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
    kernel = Kernel(scale)
    query = torch.randn(1, heads, num_new, dim) * spread
    past = [(torch.randn(n, kv_heads, t, dim), torch.randn(n, kv_heads, t, dim)) for n, t in pieces]
    new_keys, new_values = torch.randn(1, kv_heads, num_new, dim), torch.randn(1, kv_heads, num_new, dim)
    packed, parts = pack(query, kv_heads), []
    for keys, values in past:
        parts.append(partial_attention(packed, keys, values, kernel))
        if seed % 2:
            parts = [merge(parts)]
    parts.append(causal_attention(query, new_keys, new_values, kernel))
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
        part, expected = (
            causal_attention(query, keys, values, Kernel(0.25)),
            _reference(query, keys, values, Kernel(0.25), causal=True),
        )
    else:
        part = partial_attention(pack(query, 2), keys, values, Kernel(0.25))
        expected = _reference(query, keys, values, Kernel(0.25), causal=False)
    assert torch.allclose(part.output.reshape(-1, 16), expected.output.reshape(-1, 16), atol=1e-5)
    assert torch.allclose(part.lse.reshape(-1), expected.lse.reshape(-1), atol=1e-5)


def test_strided_views_of_a_slab_are_read_in_place() -> None:
    slab = torch.full((5, 3, 2, 2, 16, 8), float("nan"))
    slab[1:4, 1] = torch.randn(3, 2, 2, 16, 8)
    query = torch.randn(1, 4, 1, 8)
    part = partial_attention(pack(query, 2), slab[1:4, 1, 0], slab[1:4, 1, 1], Kernel(0.3))
    copied = partial_attention(pack(query, 2), slab[1:4, 1, 0].contiguous(), slab[1:4, 1, 1].contiguous(), Kernel(0.3))
    assert torch.equal(part.output, copied.output) and not part.output.isnan().any()


def test_no_keys_is_refused_before_the_kernel_ends_the_process() -> None:
    query, empty = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 0, 8)
    with pytest.raises(IntegrityError):
        partial_attention(query, empty, empty, Kernel(1.0))
    with pytest.raises(IntegrityError):
        partial_attention(query, torch.randn(0, 2, 4, 8), torch.randn(0, 2, 4, 8), Kernel(1.0))


# -- padding, soft-capping, sinks, wide --------------------------------------------------------------------------------

patterns = st.lists(st.booleans(), min_size=1, max_size=24).filter(any)


def _runs(is_token: list[bool]) -> list[tuple[int, int]]:
    runs, column = [], 0
    for token, group in itertools.groupby(is_token):
        count = len(list(group))
        if token:
            runs.append((column, count))
        column += count
    return runs


def _scores(query: torch.Tensor, keys: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    scores = query.double() @ keys.repeat_interleave(query.shape[1] // keys.shape[1], 1).double().transpose(-1, -2)
    scores = scores * kernel.scale
    return scores if kernel.softcap is None else kernel.softcap * torch.tanh(scores / kernel.softcap)


def _masked(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel, seen: torch.Tensor
) -> Partial:
    """The definition in float64, `[1, heads, q, dim]`: zeros, and -inf, where a query sees nothing."""
    scores = _scores(query, keys, kernel).masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1).nan_to_num(0.0)
    values = values.repeat_interleave(query.shape[1] // values.shape[1], 1).double()
    return Partial(weights @ values, scores.logsumexp(-1))


@settings(max_examples=150, deadline=None)
@given(
    is_token=patterns,
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    dims=st.sampled_from([(8, 8), (16, 16), (16, 8)]),
    softcap=st.sampled_from([None, None, 2.0, 30.0]),
    past=st.integers(0, 9),
    seed=st.integers(0, 2**16),
)
def test_padding_is_never_seen_and_sees_the_tokens_before_it(
    is_token: list[bool], kv_heads: int, groups: int, dims: tuple[int, int], softcap: float | None, past: int, seed: int
) -> None:
    torch.manual_seed(seed)
    heads, length, kernel = kv_heads * groups, len(is_token), Kernel(dims[0] ** -0.5, softcap)
    query = torch.randn(1, heads, length, dims[0])
    keys, values = (torch.randn(1, kv_heads, past + length, dim) for dim in dims)
    new_keys, new_values = keys[:, :, past:], values[:, :, past:]
    holds = torch.tensor(is_token)
    new_keys[:, :, ~holds] = float("nan")  # padding's K and V are never read
    new_values[:, :, ~holds] = float("inf")
    part = padded_attention(query, new_keys, new_values, _runs(is_token), kernel)
    seen = torch.ones(length, length, dtype=torch.bool).tril() & holds
    clean_keys, clean_values = (x.nan_to_num(0.0, 0.0) for x in (keys, values))
    expected = _masked(query, clean_keys[:, :, past:], clean_values[:, :, past:], kernel, seen)
    output, lse = part.output.reshape(expected.output.shape), part.lse.reshape(expected.lse.shape)
    blind = ~seen.any(-1)
    assert (output[:, :, blind] == 0).all() and (lse[:, :, blind] == float("-inf")).all()
    assert (output - expected.output).abs().max() < 1e-5
    assert (lse - expected.lse)[:, :, ~blind].abs().max() < 1e-5
    if past:  # merged with what lies before, every query sees something
        before = partial_attention(pack(query, kv_heads), keys[:, :, :past], values[:, :, :past], kernel)
        got = finish([before, part], heads, torch.float32)
        seen = torch.cat([torch.ones(length, past, dtype=torch.bool), seen], dim=1)
        whole = _masked(query, clean_keys, clean_values, kernel, seen)
        assert (got - whole.output.transpose(1, 2)).abs().max() < 1e-5


def test_padding_everywhere_around_a_token() -> None:
    """By hand: equal scores, so that each query sees the mean of the tokens before it."""
    query, keys = torch.zeros(1, 1, 6, 8), torch.zeros(1, 1, 6, 8)
    values = torch.tensor([9.0, 2.0, 9.0, 4.0, 6.0, 9.0]).reshape(1, 1, 6, 1).expand(-1, -1, -1, 8)
    part = padded_attention(query, keys, values, [(1, 1), (3, 2)], Kernel(1.0))
    assert part.output[0, 0, :, 0].tolist() == pytest.approx([0, 2, 2, 3, 4, 4])
    assert part.lse[0, 0].exp().tolist() == pytest.approx([0, 1, 1, 2, 3, 3])


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 2),
    groups=st.integers(1, 3),
    num_new=st.integers(1, 20),
    past=st.lists(st.integers(1, 20), max_size=3),
    softcap=st.sampled_from([None, 5.0]),
    seed=st.integers(0, 2**16),
)
def test_sinks_are_one_more_column_of_the_softmax(
    kv_heads: int, groups: int, num_new: int, past: list[int], softcap: float | None, seed: int
) -> None:
    torch.manual_seed(seed)
    heads, kernel = kv_heads * groups, Kernel(0.25, softcap)
    query, sinks = torch.randn(1, heads, num_new, 16), 3 * torch.randn(heads)
    pieces = [tuple(torch.randn(1, kv_heads, length, 16) for _ in "kv") for length in (*past, num_new)]
    parts = [partial_attention(pack(query, kv_heads), keys, values, kernel) for keys, values in pieces[:-1]]
    parts.append(causal_attention(query, *pieces[-1], kernel))
    got = finish([*parts, sink_attention(sinks, kv_heads, num_new, 16)], heads, torch.float32)
    keys, values = (torch.cat([piece[i] for piece in pieces], dim=2) for i in (0, 1))
    future = torch.ones(num_new, keys.shape[2], dtype=torch.bool).triu(sum(past) + 1)
    scores = _scores(query, keys, kernel).masked_fill(future, float("-inf"))
    column = sinks.double().reshape(1, heads, 1, 1).expand(-1, -1, num_new, -1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    expected = weights @ values.repeat_interleave(groups, 1).double()
    assert (got - expected.transpose(1, 2)).abs().max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(
    groups=st.integers(1, 3),
    num_new=st.integers(1, 12),
    past=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 16)), min_size=1, max_size=4),
    softcap=st.sampled_from([None, 5.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    seed=st.integers(0, 2**16),
)
def test_wide_rounds_the_result_once(
    groups: int, num_new: int, past: list[tuple[int, int]], softcap: float | None, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    kv_heads, kernel = 2, Kernel(0.25, softcap, wide=True)
    heads = kv_heads * groups
    query = (2 * torch.randn(1, heads, num_new, 16)).to(dtype)
    pieces = [[torch.randn(n, kv_heads, t, 16).to(dtype) for _ in "kv"] for n, t in past]
    new_keys, new_values = (torch.randn(1, kv_heads, num_new, 16).to(dtype) for _ in "kv")
    parts: list[Partial] = []
    for keys, values in pieces:
        parts = [merge([*parts, partial_attention(pack(query, kv_heads), keys, values, kernel)])]
    parts.append(causal_attention(query, new_keys, new_values, kernel))
    assert all(part.output.dtype == torch.float32 for part in parts)
    got = finish(parts, heads, dtype)
    rows = [(keys[i : i + 1], values[i : i + 1]) for keys, values in pieces for i in range(len(keys))]
    keys = torch.cat([*(keys for keys, _ in rows), new_keys], dim=2)
    values = torch.cat([*(values for _, values in rows), new_values], dim=2)
    seen = torch.ones(num_new, keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - num_new)
    expected = _masked(query, keys, values, kernel, seen).output.transpose(1, 2)
    assert got.dtype == dtype
    # Half a unit in the last place of the result, and what fp32 makes of the sum.
    half_unit = torch.finfo(dtype).eps / 2 * expected.abs().log2().floor().exp2()
    assert ((got.double() - expected).abs() <= half_unit + 4e-6).all()


def test_softcap_bends_every_score() -> None:
    torch.manual_seed(0)
    query, keys, values = (20 * torch.randn(1, h, 12, 16) for h in (4, 2, 2))
    for softcap in (1.0, 30.0):
        part = causal_attention(query, keys, values, Kernel(0.25, softcap))
        expected = _masked(query, keys, values, Kernel(0.25, softcap), torch.ones(12, 12, dtype=torch.bool).tril())
        assert torch.allclose(part.output.reshape(1, 4, 12, 16).double(), expected.output, atol=1e-4)
        assert torch.allclose(part.lse.reshape(1, 4, 12).double(), expected.lse, atol=1e-5)
        assert (part.lse <= softcap + torch.tensor(12.0).log()).all()
