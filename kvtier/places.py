"""Where a step's attention finds K and V that lie in slabs: views, made once for a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.plan import StepPlan
from kvtier.stores.slab import LayerViews
from kvtier.types import Slot, Tier

KeysValues = tuple[torch.Tensor, torch.Tensor]
Piece = tuple[int, torch.Tensor, torch.Tensor]
"""A row, and K and V that all of its new columns see whole: `[count, kv_heads, block_tokens, dim]`."""


@dataclass(frozen=True, slots=True)
class RowsPiece:
    """Neighbouring slots, each of which `num_rows` rows see whole: one kernel call for all of them."""

    keys: torch.Tensor
    """`[count, kv_heads, tokens, dim]`."""
    values: torch.Tensor
    rows: torch.Tensor
    """`[count * num_rows]`: the rows of the first slot, those of the second, …"""
    num_rows: int

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor, rows: Sequence[tuple[int, ...]]) -> RowsPiece:
        """`rows` says who sees each of the slots: equally many see every one of them."""
        index = torch.tensor([row for each in rows for row in each], device=keys.device)
        return RowsPiece(keys, values, index, len(rows[0]))


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
        self._shared: list[tuple[Tier, Slot, list[tuple[int, ...]]]] | None = None
        self._rows: dict[tuple[int, int], list[RowsPiece]] = {}

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

    def rows_pieces(self, position: int, at_once: int) -> list[RowsPiece]:
        """One layer's resident blocks of all rows: as few pieces as there are runs of neighbouring slots."""
        found = self._rows.get((position, at_once))
        if found is None:
            found = self._rows[position, at_once] = [
                self.rows_piece(position, tier, Slot(first + at), rows[at : at + at_once])
                for tier, first, rows in self._runs_of_rows()
                for at in range(0, len(rows), at_once)
            ]
        return found

    def rows_piece(
        self, position: int, tier: Tier, first: Slot, rows: Sequence[tuple[int, ...]], num_tokens: int | None = None
    ) -> RowsPiece:
        """The slots from `first` on, as `RowsPiece.of`.

        Args:
            num_tokens: how many of each slot's tokens; None: all.
        """
        slab, view = self._slabs[tier], slice(first, first + len(rows))
        keys, values = slab.keys[position][view], slab.values[position][view]
        if num_tokens is not None:
            keys, values = keys.narrow(2, 0, num_tokens), values.narrow(2, 0, num_tokens)
        return RowsPiece.of(keys, values, rows)

    def _runs_of_rows(self) -> list[tuple[Tier, Slot, list[tuple[int, ...]]]]:
        if self._shared is None:
            rows_of: dict[tuple[Tier, Slot], list[int]] = {}
            for number, row in enumerate(self.plan.rows):
                for block in row.resident:
                    rows_of.setdefault((block.tier, block.slot), []).append(number)
            self._shared = [
                (tier, first, rows)
                for (tier, first), rows in runs_of_slots({key: tuple(rows) for key, rows in rows_of.items()})
            ]
        return self._shared


def runs_of_slots(
    rows_of: Mapping[tuple[Tier, Slot], tuple[int, ...]],
) -> Iterable[tuple[tuple[Tier, Slot], list[tuple[int, ...]]]]:
    """Neighbouring slots of one tier that equally many rows see, as runs: the first, and who sees each."""
    first: tuple[Tier, Slot] | None = None
    rows: list[tuple[int, ...]] = []
    for key in sorted(rows_of):
        if first is not None and key == (first[0], first[1] + len(rows)) and len(rows_of[key]) == len(rows[0]):
            rows.append(rows_of[key])
            continue
        if first is not None:
            yield first, rows
        first, rows = key, [rows_of[key]]
    if first is not None:
        yield first, rows
