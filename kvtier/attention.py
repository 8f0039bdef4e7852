"""Exact attention in parts: partial results with their log-sum-exp, and the merge. Knows no tiers.

Softmax over a set of keys can be computed in pieces: attention over each piece gives `(output, lse)`, and the whole is
the average of the outputs weighted by `softmax(lse)`. Source: Milakov & Gimelshein, Online normalizer calculation for
softmax, 2018, section 3; Dao et al., FlashAttention, 2022, section 3.1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvtier.errors import IntegrityError


@dataclass(frozen=True, slots=True)
class Partial:
    """Attention over one piece of the keys, for each of `n` pieces.

    `output` is `[n, kv_heads, rows, value_dim]`, `lse` `[n, kv_heads, rows]` in fp32. `rows` are the query heads of a
    kv head times the queries, see `pack`.
    """

    output: torch.Tensor
    lse: torch.Tensor


def pack(query: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """`[1, heads, q, dim]` as `[1, kv_heads, heads // kv_heads * q, dim]`: a kv head is then read once for its group.

    A view where the memory allows it. Valid for unmasked attention only: rows lose their order in time.
    """
    _, heads, num_queries, dim = query.shape
    return query.reshape(1, kv_heads, heads // kv_heads * num_queries, dim)


def partial_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
    """Unmasked attention of the same queries over `n` pieces of keys, each a row of one kernel call.

    Args:
        query: `[1, kv_heads, rows, key_dim]`, packed.
        keys: `[n, kv_heads, length, key_dim]`, last stride 1, `n >= 1`, `length >= 1`, every element written.
        values: `[n, kv_heads, length, value_dim]`.

    Cost: reads K and V once; writes `n * kv_heads * rows * (value_dim + 1)` elements.
    """
    if keys.shape[0] == 0 or keys.shape[2] == 0:
        raise IntegrityError("attention over no keys: the CPU kernel would end the process")
    return _kernel(query.expand(keys.shape[0], -1, -1, -1), keys, values, scale, causal=False)


def causal_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> Partial:
    """Causal attention of the step's new tokens over themselves, packed like `partial_attention`'s result.

    Args:
        query: `[1, heads, q, key_dim]`, not packed.
        keys, values: `[1, kv_heads, q, dim]`: exactly the same tokens.
    """
    kv_heads, num_queries = keys.shape[1], query.shape[2]
    if num_queries != keys.shape[2]:
        raise IntegrityError("the causal tile must be square")
    part = _kernel(query, keys, values, scale, causal=True)
    rows = query.shape[1] // kv_heads * num_queries
    return Partial(part.output.reshape(1, kv_heads, rows, -1), part.lse.reshape(1, kv_heads, rows))


def _kernel(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool) -> Partial:
    if query.device.type == "cpu" and keys.shape[-1] == values.shape[-1]:
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, keys, values, 0.0, causal, scale=scale
        )
        return Partial(output, lse)
    if query.device.type == "cuda":
        groups = query.shape[1] // keys.shape[1]
        if groups > 1:  # the causal tile, not packed; the memory-efficient kernel wants equal heads
            keys, values = keys.repeat_interleave(groups, 1), values.repeat_interleave(groups, 1)
        output, lse, _, _ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, None, True, 0.0, causal, scale=scale
        )
        return Partial(output, lse[..., : query.shape[2]].float())  # its lse is padded to a multiple of 32 rows
    return _reference(query, keys, values, scale, causal=causal)


def _reference(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool) -> Partial:
    """The definition, in fp32: for devices and shapes without a kernel that gives log-sum-exp, and for tests."""
    groups = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(groups, 1).float(), values.repeat_interleave(groups, 1).float()
    scores = query.float() @ keys.transpose(-1, -2) * scale
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    lse = scores.logsumexp(-1)
    output = (scores - lse.unsqueeze(-1)).exp() @ values
    return Partial(output.to(query.dtype), lse)


def merge(parts: list[Partial]) -> Partial:
    """One piece out of many, in fp32; `[1, kv_heads, rows, value_dim]`. No piece may be empty.

    Cost: reads every output once. A lone piece is returned as it is.
    """
    if _is_whole(parts):
        return parts[0]
    lse = torch.cat([part.lse for part in parts])
    return Partial(_average(parts, lse), torch.logsumexp(lse, 0, keepdim=True))


def finish(parts: list[Partial], heads: int, dtype: torch.dtype) -> torch.Tensor:
    """Merge, and give the result as a model expects it from its attention: `[1, q, heads, value_dim]`, contiguous."""
    output = parts[0].output if _is_whole(parts) else _average(parts, torch.cat([part.lse for part in parts]))
    _, kv_heads, rows, dim = output.shape
    num_queries = rows * kv_heads // heads
    return output.to(dtype).reshape(1, heads, num_queries, dim).transpose(1, 2).contiguous()


def _is_whole(parts: list[Partial]) -> bool:
    return len(parts) == 1 and parts[0].output.shape[0] == 1


def _average(parts: list[Partial], lse: torch.Tensor) -> torch.Tensor:
    output = torch.cat([part.output.float() for part in parts])
    return (output * torch.softmax(lse, dim=0).unsqueeze(-1)).sum(0, keepdim=True)
