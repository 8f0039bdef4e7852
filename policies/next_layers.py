"""Fetches the layers that come next."""

from __future__ import annotations

from collections.abc import Sequence


class NextLayers:
    """While a layer runs, the next `depth` layers' slices may be fetched: the order is known, so this is never wrong.

    Depth buys time and costs memory: one layer ahead hides a transfer that is as fast as a layer's compute, two also
    hide its jitter, three the last layer and the model's head, during which the next step's first layers are fetched.

    Source: Sheng et al., "FlexGen", ICML 2023, section 3 (overlapping I/O with the compute of the layer before).
    """

    def __init__(self, depth: int = 3) -> None:
        """`depth`: layers ahead, >= 0; 0 fetches nothing ahead."""
        if depth < 0:
            raise ValueError(f"next_layers: depth must be at least 0, got {depth}")
        self.depth = depth

    def layers_ahead(self, layer: int, num_layers: int) -> Sequence[int]:
        """The next `depth` layers, nearest first, none beyond the last."""
        return range(layer + 1, min(layer + 1 + self.depth, num_layers))
