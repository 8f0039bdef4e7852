"""Where a step's attention finds K and V that lie in slabs: views, made once for a plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvtier.plan import StepPlan
from kvtier.stores.slab import LayerViews
from kvtier.types import Slot, Tier

KeysValues = tuple[torch.Tensor, torch.Tensor]
Piece = tuple[int, torch.Tensor, torch.Tensor]
"""A row, and K and V that all of its new columns see whole: `[count, kv_heads, block_tokens, dim]`."""


class Places:
    """Views of the slots that a plan names. They move nothing and stay right as long as the plan does.

    Making a view takes a microsecond or two, several for each layer: as long as the attention over a short context.
    """

    def __init__(self, plan: StepPlan, slabs: Mapping[Tier, LayerViews]) -> None:
        self.plan, self._slabs = plan, slabs
        self.num_resident = [
            {tier: sum(run.count for run in row.runs if run.tier is tier) for tier in slabs} for row in plan.rows
        ]
        """By row and tier, the blocks that are read where they lie."""
        self._pieces: dict[tuple[Tier, int, int], list[Piece]] = {}
        self._slots: dict[tuple[int, Slot], KeysValues] = {}

    def pieces(self, tier: Tier, position: int, at_once: int) -> list[Piece]:
        """One layer's runs of resident blocks on one tier, row after row, cut into `at_once` blocks at most."""
        key = tier, position, at_once
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._cut(tier, position, at_once)
        return found

    def _cut(self, tier: Tier, position: int, at_once: int) -> list[Piece]:
        if tier not in self._slabs:
            return []
        keys, values = self._slabs[tier].keys[position], self._slabs[tier].values[position]
        return [
            (number, keys[first : min(first + at_once, end)], values[first : min(first + at_once, end)])
            for number, row in enumerate(self.plan.rows)
            for run in row.runs
            if run.tier is tier
            for end in (run.first + run.count,)
            for first in range(run.first, end, at_once)
        ]

    def slot(self, position: int, slot: Slot) -> KeysValues:
        """One layer of a slot of the gpu tier: K and V, `[1, kv_heads, block_tokens, dim]`."""
        found = self._slots.get((position, slot))
        if found is None:
            slab = self._slabs[Tier.GPU]
            one = slice(slot, slot + 1)
            found = self._slots[position, slot] = slab.keys[position][one], slab.values[position][one]
        return found
