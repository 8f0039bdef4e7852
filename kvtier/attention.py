"""Exact attention in parts: partial results with their log-sum-exp, and the merge. Knows no tiers.

Softmax over a set of keys can be computed in pieces: attention over each piece gives `(output, lse)`, and the whole is
the average of the outputs weighted by `softmax(lse)`. Source: Milakov & Gimelshein, Online normalizer calculation for
softmax, 2018, section 3; Dao et al., FlashAttention, 2022, section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kvtier import attention_cuda
from kvtier.errors import IntegrityError

# torch's own name for the kernel: through `torch.ops.aten` a call costs a third more over a short piece.
_flash_on_cpu = torch._scaled_dot_product_flash_attention_for_cpu


class Partial(NamedTuple):
    """Attention over one piece of the keys, for each of `n` pieces.

    `output` is `[n, kv_heads, rows, value_dim]`, `lse` `[n, kv_heads, rows]` in fp32. `rows` are the query heads of a
    kv head times the queries, see `pack`. Pieces of the same queries may have been merged into one: then `n` is 1.
    """

    output: torch.Tensor
    lse: torch.Tensor


def pack(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[1, heads, q, dim]` as `[1, kv_heads, heads // kv_heads * q, dim]`: a kv head is then read once for its group.

    A view where the memory allows it. Valid for unmasked attention only: rows lose their order in time.
    """
    _, heads, num_queries, dim = query.shape
    return query.reshape(1, kv_heads, heads // kv_heads * num_queries, dim)


@dataclass(frozen=True, slots=True)
class Kernel:
    """How scores are made of queries and keys.

    `softcap` bends them by `c * tanh(score / c)` (Gemma 2). `wide` computes in fp32 whatever the dtype: the partial
    results of 16-bit K and V are then rounded once, at the end, as the plain model's are.
    """

    scale: float
    softcap: float | None = None
    wide: bool = False


def partial_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel) -> Partial:
    """Unmasked attention of the same queries over `n` pieces of keys, each a row of one kernel call.

    Args:
        query: `[1, kv_heads, rows, key_dim]`, packed.
        keys: `[n, kv_heads, length, key_dim]`, last stride 1, `n >= 1`, `length >= 1`, every element written.
        values: `[n, kv_heads, length, value_dim]`.

    Cost: reads K and V once; writes `n * kv_heads * rows * (value_dim + 1)` elements.
    """
    num_pieces = keys.shape[0]
    return partial_attention_of(
        query if num_pieces == 1 else query.expand(num_pieces, -1, -1, -1), keys, values, kernel
    )


def partial_attention_of(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel) -> Partial:
    """As `partial_attention`, with queries of its own for each of the `n` pieces: `[n, kv_heads, rows, key_dim]`."""
    num_pieces, _, length, _ = keys.shape
    if num_pieces == 0 or length == 0:
        raise IntegrityError("attention over no keys: the CPU kernel would end the process")
    return _call(queries, keys, values, kernel, causal=False)


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel) -> Partial:
    """Causal attention of the step's new tokens over themselves, packed like `partial_attention`'s result.

    Args:
        query: `[1, heads, q, key_dim]`, not packed.
        keys, values: `[1, kv_heads, q, dim]`: exactly the same tokens.
    """
    kv_heads, num_queries = keys.shape[1], query.shape[2]
    if num_queries != keys.shape[2]:
        raise IntegrityError("the causal tile must be square")
    part = _call(query, keys, values, kernel, causal=True)
    rows = query.shape[1] // kv_heads * num_queries
    return Partial(part.output.reshape(1, kv_heads, rows, -1), part.lse.reshape(1, kv_heads, rows))


def padded_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, runs: Sequence[tuple[int, int]], kernel: Kernel
) -> Partial:
    """Attention of a step's new columns over those of them that hold tokens: `runs` of `(first, count)`, not empty.

    Padding is never attended to. As a query it sees the tokens before it, as in the plain cache: a right-padded row's
    last logits are made there. What sees nothing gets zeros, and a log-sum-exp of -inf.

    Args:
        query: `[1, heads, q, key_dim]`, not packed. `keys`, `values`: `[1, kv_heads, q, dim]`, padding included.

    Returns:
        As `causal_attention`, for all `q` columns.
    """
    heads, num_columns = query.shape[1:3]
    kv_heads = keys.shape[1]
    columns = torch.cat([torch.arange(first, first + count, device=query.device) for first, count in runs])
    keys, values = keys.index_select(2, columns), values.index_select(2, columns)
    grid = (1, kv_heads, heads // kv_heads)
    lse = torch.full((*grid, num_columns), float("-inf"), device=query.device)
    tokens = causal_attention(query.index_select(2, columns), keys, values, kernel)
    output = tokens.output.new_zeros((*grid, num_columns, values.shape[-1]))
    output.index_copy_(3, columns, tokens.output.reshape(*grid, len(columns), -1))
    lse.index_copy_(3, columns, tokens.lse.reshape(*grid, len(columns)))
    seen = 0
    for (first, count), (after, _) in zip(runs, [*runs[1:], (num_columns, 0)], strict=True):
        seen += count
        gap = slice(first + count, after)
        if after > first + count:
            part = partial_attention(pack(query[:, :, gap], kv_heads), keys[:, :, :seen], values[:, :, :seen], kernel)
            output[:, :, :, gap] = part.output.reshape(*grid, after - first - count, -1)
            lse[:, :, :, gap] = part.lse.reshape(*grid, after - first - count)
    rows = heads // kv_heads * num_columns
    return Partial(output.reshape(1, kv_heads, rows, -1), lse.reshape(1, kv_heads, rows))


def sink_attention(sinks: torch.Tensor, kv_heads: int, num_queries: int, value_dim: int) -> Partial:
    """The piece that attention sinks are: a key without a value whose score is `sinks[head]` for every query.

    Args:
        sinks: `[heads]`. Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, 2023.
    """
    lse = sinks.float().reshape(1, kv_heads, -1, 1).expand(-1, -1, -1, num_queries).reshape(1, kv_heads, -1)
    return Partial(lse.new_zeros((*lse.shape, value_dim)), lse)


def _call(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel, *, causal: bool) -> Partial:
    if kernel.wide:
        query, keys, values = query.float(), keys.float(), values.float()
    if kernel.softcap is None:
        if query.is_cpu and keys.shape[-1] == values.shape[-1]:
            return Partial(*_flash_on_cpu(query, keys, values, 0.0, causal, scale=kernel.scale))
        if query.is_cuda:
            found = attention_cuda.attend(query, keys, values, kernel.scale, causal=causal)
            if found is not None:
                return Partial(*found)
    return _reference(query, keys, values, kernel, causal=causal)


def _reference(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kernel: Kernel, *, causal: bool
) -> Partial:
    """The definition, in fp32: for what has no kernel that gives log-sum-exp, and for tests."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.float(), values.float()
    if groups > 1:
        keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
    scores = query.float() @ keys.transpose(-1, -2) * kernel.scale
    if kernel.softcap is not None:
        scores = torch.tanh(scores / kernel.softcap) * kernel.softcap
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    return Partial((scores - lse.unsqueeze(-1)).exp() @ values, lse)


def merge(parts: list[Partial]) -> Partial:
    """One piece out of many, in fp32; `[1, kv_heads, rows, value_dim]`. No piece may be empty.

    Cost: reads every output once. A lone piece is returned as it is.
    """
    if len(parts) == 1 and parts[0].lse.shape[0] == 1:
        return parts[0]
    lse = _joined([part.lse for part in parts])
    return Partial(_average(parts), torch.logsumexp(lse, 0, keepdim=True))


def finish(parts: list[Partial], heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Merge, and give the result as a model expects it from its attention: `[1, q, heads, value_dim]`, contiguous."""
    output = _average(parts)
    _, kv_heads, rows, dim = output.shape
    num_queries = rows * kv_heads // heads
    if output.dtype is not dtype:
        output = output.to(dtype)
    if num_queries == 1:
        return output.reshape(1, 1, heads, dim)
    return output.reshape(1, heads, num_queries, dim).transpose(1, 2).contiguous()


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _average(parts: list[Partial]) -> torch.Tensor:
    """The outputs weighted by `softmax(lse)`, in fp32; a lone one as it is.

    The fewer calls the better: behind the kernel each finds the processor's caches full of K and V.
    """
    num_pieces = sum([part.lse.shape[0] for part in parts])  # len() of a tensor is a call of Python
    if num_pieces == 1:
        return parts[0].output
    if num_pieces == len(parts) == 2:  # softmax over two is a sigmoid: no copies side by side
        (output, lse), (other, other_lse) = parts
        wide = lse.dtype  # fp32, but for a model in fp64
        return torch.lerp(output.to(wide), other.to(wide), torch.sigmoid(other_lse - lse).unsqueeze(-1))
    weights = torch.softmax(_joined([part.lse for part in parts]), dim=0).unsqueeze(-1)
    if len(parts) == 1:
        return (parts[0].output.float() * weights).sum(0, keepdim=True)
    return torch.cat([part.output.float() for part in parts]).mul_(weights).sum(0, keepdim=True)
