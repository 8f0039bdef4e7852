"""How long copies to a device had better be, and what shorter ones reach. Pure: sums of what others measured.

A slice is copied by itself, so its length is that of a copy: `block_tokens` decides it (docs/adr/0034).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

LONG_BYTES = 1 << 20
"""From here on a copy reaches nearly what the bus gives (DESIGN.md section 8)."""
LEAST_BLOCK_TOKENS = 256
_MOST_BLOCK_TOKENS = 2048  # every conversation's last block takes a whole one, and staging one for each thread
_CONTEXT_SHARE = 8


def long_block_tokens(layer_token_bytes: int, context_tokens: int | None) -> int:
    """The least power of two whose slices are LONG_BYTES or more: from 256 to 2,048, and no more than an eighth of the
    context; the largest of those where none is enough.

    Args:
        layer_token_bytes: K and V of one token in one layer.
        context_tokens: the longest that the model takes; None: not known.
    """
    most = min(_MOST_BLOCK_TOKENS, (context_tokens or sys.maxsize) // _CONTEXT_SHARE)
    block_tokens = LEAST_BLOCK_TOKENS
    while block_tokens * layer_token_bytes < LONG_BYTES and 2 * block_tokens <= most:
        block_tokens *= 2
    return block_tokens


def copy_rate(piece_bytes: int, rates: Mapping[int, float]) -> float | None:
    """Bytes a second by copies of so many bytes, queued one behind the other; None without two known rates.

    Each copy costs something beside its bytes, so its time is a line in its length: through the shortest and the
    longest of `rates`, which are by bytes of a copy.
    """
    if len(rates) < 2:
        return None
    short, long = min(rates), max(rates)
    short_s, long_s = short / rates[short], long / rates[long]
    each_byte_s = (long_s - short_s) / (long - short)
    if each_byte_s <= 0:  # a busy moment: no line through these says anything
        return None
    return piece_bytes / (max(0.0, short_s - short * each_byte_s) + piece_bytes * each_byte_s)
