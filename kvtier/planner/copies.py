"""What a plan says of slices that are shorter than a copy to a device should be."""

from __future__ import annotations

from kvtier.copy_length import LONG_BYTES, long_block_tokens
from kvtier.planner.layout import Layout
from kvtier.planner.rates import Rates
from kvtier.size import Size


def short_copies(layout: Layout, rates: Rates | None) -> str:
    """What short slices cost, and which `block_tokens` makes them longer; empty where nothing is to be said."""
    shape, card = layout.shape, layout.card
    if layout.device != "cuda" or len(layout.rooms) < 2 or shape.slice_bytes >= LONG_BYTES:
        return ""
    now = "" if "block_tokens" in layout.config.model_fields_set else ", as it is left out"
    words = f"slices are {Size(shape.slice_bytes)} (block_tokens: {shape.block_tokens}{now}): " + _reach(
        shape.slice_bytes, rates
    )
    longer = long_block_tokens(card.layer_token_bytes, card.max_tokens)
    if longer <= shape.block_tokens:
        return f"{words}. Longer blocks would be more than 2,048 tokens, or than an eighth of the model's context"
    slice_bytes = longer * card.layer_token_bytes
    words += f". block_tokens: {longer} makes them {Size(slice_bytes)}"
    if (rate := None if rates is None else rates.copies_up_of(slice_bytes)) is not None:
        words += f" ({rate / 1e9:.1f} GB/s)"
    nvme = layout.config.tiers.nvme
    if nvme is not None and nvme.path is not None:
        words += f"; blocks of {shape.block_tokens} tokens in tiers.nvme.path are then not found any more"
    return words


def _reach(slice_bytes: int, rates: Rates | None) -> str:
    rate = None if rates is None else rates.copies_up_of(slice_bytes)
    best = None if rates is None else rates.copies(to_device=True)
    if rate is None or best is None:
        return "copies of less than 1MiB to the device reach less than the bus gives"
    return f"copies of that size to the device reach about {rate / 1e9:.1f} of {best / 1e9:.1f} GB/s"
