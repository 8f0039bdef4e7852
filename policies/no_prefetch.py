"""Fetches nothing ahead."""

from __future__ import annotations

from collections.abc import Sequence


class NoPrefetch:
    """Each layer's slices are fetched when it runs: the least memory in flight, and the baseline for every other."""

    def __init__(self, depth: int = 0) -> None:
        """`depth` is accepted, since every prefetch policy is built with one, and must be 0."""
        if depth != 0:
            raise ValueError(f"no_prefetch: depth must be 0, got {depth}; for more use next_layers")
        self.depth = depth

    def layers_ahead(self, layer: int, num_layers: int) -> Sequence[int]:
        """Always empty."""
        return ()
