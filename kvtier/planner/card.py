"""What a plan needs to know of a model, and the formula for its KV. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass

from rich.filesize import decimal

from kvtier.size import size_words
from kvtier.types import BlockShape, LayerGroup


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model's shape, as its config says. Dimensions in elements, heads and layers counted."""

    name: str
    family: str
    """`model_type` of the text model."""
    num_full: int
    """Layers of full attention: those that are tiered. At least 1."""
    num_window: int
    """Layers that attend to a sliding window and keep no more than it."""
    window_tokens: int
    """Its length; 0 where there is none."""
    num_linear: int
    """Layers whose state does not grow (linear attention, convolution). Its size is in no formula here."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Heads of K and of V: fewer than `heads` with grouped-query attention."""
    head_dim: int
    dtype: str
    """As torch names it, without `torch.`."""
    element_bytes: int
    max_tokens: int | None
    """The longest context that the config names; None where it names none."""
    num_parameters: int
    """By formula from the config, or from the bytes that were given."""
    table_parameters: int
    """Of those, one matrix of vocabulary x hidden size: the head, or the input table that is only looked up in."""
    is_tied: bool
    """Whether head and input table are one matrix."""
    writes_scores: bool = False
    """Attention without a fused kernel (soft-capping), as `LayerGroup` has it."""

    @property
    def weights_bytes(self) -> int:
        """Bytes of all weights in `dtype`."""
        return self.num_parameters * self.element_bytes

    @property
    def layer_parameters(self) -> int:
        """Those that every token is multiplied with, in prefill too: neither table nor head."""
        return self.num_parameters - self.table_parameters * (1 if self.is_tied else 2)

    @property
    def read_parameters(self) -> int:
        """Those that a decode step reads: all but the input table, of which it looks up a row."""
        return self.layer_parameters + self.table_parameters

    @property
    def layer_token_bytes(self) -> int:
        """Bytes of K and V of one token in one layer."""
        return self.kv_heads * 2 * self.head_dim * self.element_bytes

    def kept_window_tokens(self, num_tokens: int) -> int:
        """Tokens that a window layer holds of a context of `num_tokens`."""
        return min(num_tokens, self.window_tokens)

    def tiered_bytes(self, num_tokens: int) -> int:
        """KV bytes of one user in the layers that are tiered."""
        return self.num_full * num_tokens * self.layer_token_bytes

    def window_bytes(self, num_tokens: int) -> int:
        """KV bytes of one user in the window layers, which stay beside the tiers. They stop growing at the window."""
        return self.num_window * self.kept_window_tokens(num_tokens) * self.layer_token_bytes

    def kv_bytes(self, num_tokens: int) -> int:
        """KV bytes of one user, states of linear attention excepted."""
        return self.tiered_bytes(num_tokens) + self.window_bytes(num_tokens)

    def formulas(self, num_tokens: int) -> list[str]:
        """The formula with its numbers: a line for each layer group."""
        groups = [("full-attention layers", self.num_full, num_tokens, self.tiered_bytes(num_tokens))]
        if self.num_window:
            kept = self.kept_window_tokens(num_tokens)
            groups.append(("sliding-window layers (not tiered)", self.num_window, kept, self.window_bytes(num_tokens)))
        return [
            f"{count} {kind} x {tokens:,} tokens x {self.kv_heads} KV heads x ({self.head_dim} + {self.head_dim}) x "
            f"{self.element_bytes} bytes ({self.dtype}) = {num_bytes:,} bytes "
            f"({decimal(num_bytes)}), {size_words(num_bytes)}"
            for kind, count, tokens, num_bytes in groups
        ]

    def group(self, block_tokens: int, device: str) -> LayerGroup:
        """The tiered layers, as `kvtier.hf.describe` has them, on `cpu` or `cuda`; their indices are made up."""
        shape = BlockShape(self.num_full, self.kv_heads, block_tokens, self.head_dim, self.head_dim, self.element_bytes)
        num_untiered = self.num_window + self.num_linear
        layers = tuple(range(self.num_full))
        return LayerGroup(layers, shape, device, self.dtype, self.heads, self.writes_scores, num_untiered)
