"""Decoding several rows at once: one kernel call for neighbouring slots, whoever of the rows sees them.

Rows that share a block (beams, a common prompt) read it once: their queries are stacked.
Source: Juravsky et al., Hydragen, 2024, section 3 (shared prefixes as one product of matrices).
"""

from __future__ import annotations

import torch

from kvtier.attention import Kernel, Partial, partial_attention_of
from kvtier.places import RowsPiece


class RowsAttention:
    """Attention of one new token in each of `n` rows, piece after piece."""

    def __init__(self, query: torch.Tensor, kv_heads: int, kernel: Kernel) -> None:
        """`query` is `[n, heads, 1, key_dim]`."""
        num_rows, heads, _, dim = query.shape
        self._packed = query.reshape(num_rows, kv_heads, heads // kv_heads, dim)
        self._kernel = kernel
        self._parts: list[Partial] = []
        self._rows: list[torch.Tensor] = []

    def add(self, piece: RowsPiece) -> None:
        """Attend to a piece by the rows that see it."""
        _, kv_heads, heads, dim = self._packed.shape
        count, shared = piece.keys.shape[0], piece.num_rows
        queries = self._packed.index_select(0, piece.rows)
        if shared > 1:
            queries = queries.view(count, shared, kv_heads, heads, dim).transpose(1, 2)
            queries = queries.reshape(count, kv_heads, shared * heads, dim)
        part = partial_attention_of(queries, piece.keys, piece.values, self._kernel)
        if shared > 1:
            output = part.output.reshape(count, kv_heads, shared, heads, -1).transpose(1, 2)
            lse = part.lse.reshape(count, kv_heads, shared, heads).transpose(1, 2)
            part = Partial(output.flatten(0, 1), lse.flatten(0, 1))
        self.add_part(part, piece.rows)

    def add_part(self, part: Partial, rows: torch.Tensor) -> None:
        """What is there already: `[m, kv_heads, heads // kv_heads, dim]`, of those `m` rows."""
        self._parts.append(part)
        self._rows.append(rows)

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """Merge in fp32: `[n, 1, heads, value_dim]`. Each row must have been in a piece."""
        rows = torch.cat(self._rows)
        lse = torch.cat([part.lse for part in self._parts])
        output = torch.cat([part.output.float() for part in self._parts])  # a copy, to be written to
        num_rows, kv_heads, heads, _ = self._packed.shape
        spread = rows.view(-1, 1, 1).expand_as(lse)
        top = lse.new_full((num_rows, kv_heads, heads), float("-inf")).scatter_reduce_(0, spread, lse, "amax")
        weights = (lse - top.index_select(0, rows)).exp()
        total = torch.zeros_like(top).index_add_(0, rows, weights)
        merged = output.new_zeros((num_rows, kv_heads, heads, output.shape[-1]))
        merged.index_add_(0, rows, output.mul_(weights.unsqueeze(-1)))
        merged /= total.unsqueeze(-1)
        return merged.to(dtype).reshape(num_rows, 1, kv_heads * heads, -1)
