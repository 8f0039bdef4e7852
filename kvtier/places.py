"""Where a step's attention finds K and V that lie in slabs: views, made once for a plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvtier.errors import IntegrityError
from kvtier.plan import StepPlan
from kvtier.stores.slab import LayerViews
from kvtier.types import Slot, Tier

KeysValues = tuple[torch.Tensor, torch.Tensor]
Piece = tuple[int, torch.Tensor, torch.Tensor]
"""A row, and K and V that all of its new columns see whole: `[count, kv_heads, tokens, dim]`."""


@dataclass(frozen=True, slots=True)
class RowsPiece:
    """Neighbouring slots, each of which `num_rows` rows see whole: one kernel call for all of them."""

    keys: torch.Tensor
    """`[count, kv_heads, tokens, dim]`; of a joined slab `[1, kv_heads, …]` where the same rows see all of them."""
    values: torch.Tensor
    rows: torch.Tensor
    """`[count * num_rows]`: the rows of the first slot, those of the second, …"""
    num_rows: int

    @staticmethod
    def of(keys: torch.Tensor, values: torch.Tensor, rows: Sequence[tuple[int, ...]]) -> RowsPiece:
        """`rows` says who sees each of the slots: equally many see every one of them."""
        return RowsPiece(keys, values, _index(rows, keys.device), len(rows[0]))


def _index(rows: Sequence[tuple[int, ...]], device: torch.device) -> torch.Tensor:
    return torch.tensor([row for each in rows for row in each], device=device)


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """Of a row's one new token: where it goes, and what it sees of slabs. By slice index."""

    own: Sequence[KeysValues]
    """Its own place, `[1, kv_heads, 1, dim]`."""
    seen: Sequence[Sequence[KeysValues]]
    """Runs of resident blocks, and last of all the tail with the token in it, behind a run that ends there."""


def _together(rows: Sequence[tuple[int, ...]]) -> list[Sequence[tuple[int, ...]]]:
    """Of neighbouring slots of a joined slab, by who sees each, those that make one piece: seen by the same rows.

    All of them, each a row of one kernel call, where that would make calls of less than `_LEAST_BLOCKS`.
    """
    groups: list[Sequence[tuple[int, ...]]] = [list(group) for _, group in itertools.groupby(rows)]
    return groups if len(rows) >= _LEAST_BLOCKS * len(groups) else [rows]


_LEAST_BLOCKS = 2


class WholeSlab:
    """A slab with all of its layers in one view: a cut is made once, and `unbind` makes a view of it for each layer.

    That takes a sixth of the time of cutting layer by layer, which every token would pay.
    """

    def __init__(self, layers: LayerViews) -> None:
        """Raises IntegrityError unless the layers lie evenly apart in one slab."""
        self._keys, self._values = _over_layers(layers.keys), _over_layers(layers.values)
        self.block_tokens = self._keys.shape[3]
        self.is_joined = _is_joined(self._keys[0]) and _is_joined(self._values[0])
        """Whether neighbouring slots are neighbouring tokens of each head."""

    def cut(self, first: int, count: int, start: int = 0, num_tokens: int | None = None) -> Iterator[KeysValues]:
        """Tokens `start …` of slots `first …`, layer by layer: K `[count, kv_heads, num_tokens, key_dim]`, and V.

        `num_tokens` None: all of a block's.
        """
        keys, values = self._keys.narrow(1, first, count), self._values.narrow(1, first, count)
        if num_tokens is not None:
            keys, values = keys.narrow(3, start, num_tokens), values.narrow(3, start, num_tokens)
        return zip(keys.unbind(0), values.unbind(0), strict=True)

    def run(self, first: int, num_tokens: int) -> Iterator[KeysValues]:
        """The tokens from slot `first` on, layer by layer: K `[1, kv_heads, num_tokens, key_dim]`, and V. Where the
        slab is not joined they must be whole blocks, each of which is a row of K and V then."""
        count = -(-num_tokens // self.block_tokens)
        if not self.is_joined:
            return self.cut(first, count)
        keys, values = self._keys.narrow(1, first, count), self._values.narrow(1, first, count)
        return zip(_joined(keys, num_tokens).unbind(0), _joined(values, num_tokens).unbind(0), strict=True)


def _is_joined(layer: torch.Tensor) -> bool:
    """`layer` is `[num_slots, kv_heads, block_tokens, dim]`."""
    return layer.stride(0) == layer.shape[2] * layer.stride(2)


def _joined(slots: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The first tokens of joined `[…, count, kv_heads, block_tokens, dim]`, as `[…, 1, kv_heads, num_tokens, dim]`."""
    *outer, _, heads, _, dim = slots.shape
    *outer_strides, _, head_stride, token_stride, _ = slots.stride()
    # The stride of a dimension of one is any number: that of a head keeps the view inside of the slab.
    shape, strides = (*outer, 1, heads, num_tokens, dim), (*outer_strides, head_stride, head_stride, token_stride, 1)
    return slots.as_strided(shape, strides)


def _over_layers(layers: Sequence[torch.Tensor]) -> torch.Tensor:
    first = layers[0]
    start = first.storage_offset()
    apart = layers[1].storage_offset() - start if len(layers) > 1 else 0
    whole = first.as_strided((len(layers), *first.shape), (apart, *first.stride()), start)
    if any(
        view.data_ptr() != layer.data_ptr() or view.stride() != layer.stride()
        for view, layer in zip(whole.unbind(0), layers, strict=True)
    ):
        raise IntegrityError("the layers of a slab do not lie evenly apart")
    return whole


_Runs = tuple[list[list[KeysValues]], tuple[Slot, int] | None]


class Places:
    """Views of the slots that a plan names. They move nothing and stay right as long as the plan does.

    Making a view takes a microsecond or two, several for each layer: as long as the attention over a short context.
    """

    def __init__(self, plan: StepPlan, slabs: Mapping[Tier, LayerViews], whole_slabs: Mapping[Tier, WholeSlab]) -> None:
        self.plan, self._slabs, self._whole_slabs = plan, slabs, whole_slabs
        counts = {tier: sum(r.count for row in plan.rows for r in row.runs if r.tier is tier) for tier in slabs}
        self.num_resident = [(tier, count) for tier, count in counts.items() if count]
        """By tier, the blocks that are read where they lie, those of every row."""
        self._runs: dict[
            tuple[tuple[Tier, ...], int, Slot], tuple[list[list[KeysValues]], tuple[Slot, int] | None]
        ] = {}
        self._pieces: dict[tuple[Tier, int, int], list[Piece]] = {}
        self._slots: dict[tuple[int, Slot], KeysValues] = {}
        self._shared: list[tuple[Tier, Slot, list[tuple[int, ...]]]] | None = None
        self._rows: dict[int, list[list[RowsPiece]]] = {}

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
        cuts = [
            (number, slice(first, min(first + at_once, end)))
            for number, row in enumerate(self.plan.rows)
            for run in row.runs
            if run.tier is tier
            for end in (run.first + run.count,)
            for first in range(run.first, end, at_once)
        ]
        if not self._whole_slabs[tier].is_joined:
            return [(number, keys[cut], values[cut]) for number, cut in cuts]
        tokens = self._whole_slabs[tier].block_tokens
        return [
            (number, _joined(keys[cut], num_tokens), _joined(values[cut], num_tokens))
            for number, cut in cuts
            for num_tokens in ((cut.stop - cut.start) * tokens,)
        ]

    def token(self, slot: Slot, start: int, tiers: tuple[Tier, ...], at_once: int) -> TokenPlace:
        """For a single row's new token, which goes to token `start` of `slot`.

        Args:
            tiers: whose resident blocks it sees, in pieces of `at_once` blocks at most.
        """
        slab, key = self._whole_slabs[Tier.GPU], (tiers, at_once, slot)
        if (found := self._runs.get(key)) is None:
            found = self._runs[key] = self._all_runs(tiers, at_once, slot)
        runs, before = found
        if before is None:
            tails = slab.cut(slot, 1, 0, start + 1)
        else:
            first, num_blocks = before
            tails = slab.run(first, num_blocks * slab.block_tokens + start + 1)
        return TokenPlace(
            own=list(slab.cut(slot, 1, start, 1)),
            seen=[[*blocks, tail] for blocks, tail in zip(runs, tails, strict=True)],
        )

    def _all_runs(self, tiers: tuple[Tier, ...], at_once: int, tail: Slot) -> _Runs:
        """By slice index the runs, cut into pieces; and of one that goes on in the tail's slot what is left for its
        last piece, which the tail then belongs to: where that begins, and how many blocks."""
        pieces: list[tuple[Tier, Slot, int]] = []
        before: tuple[Slot, int] | None = None
        for run in self.plan.rows[0].runs:
            if run.tier not in tiers:
                continue
            end = run.first + run.count
            cuts = [(Slot(first), min(at_once, end - first)) for first in range(run.first, end, at_once)]
            if run.tier is Tier.GPU and end == tail and self._whole_slabs[Tier.GPU].is_joined and cuts[-1][1] < at_once:
                before = cuts.pop()
            pieces += [(run.tier, first, count) for first, count in cuts]
        whole = self._whole_slabs
        cut = [whole[tier].run(first, count * whole[tier].block_tokens) for tier, first, count in pieces]
        return [[next(each) for each in cut] for _ in self._slabs[Tier.GPU].keys], before

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
        found = self._rows.get(at_once)
        if found is None:
            found = self._rows[at_once] = self.by_layer(
                (tier, Slot(first + at), rows[at : at + at_once], None)
                for tier, first, rows in self._runs_of_rows()
                for at in range(0, len(rows), at_once)
            )
        return found[position]

    def by_layer(
        self, pieces: Iterable[tuple[Tier, Slot, Sequence[tuple[int, ...]], int | None]]
    ) -> list[list[RowsPiece]]:
        """By slice index, pieces that begin at these slots: the rows as `RowsPiece.of`, and how many of each slot's
        tokens; None: all."""
        by_layer: list[list[RowsPiece]] = [[] for _ in self._slabs[Tier.GPU].keys]
        for tier, first, rows, num_tokens in pieces:
            slab, device = self._whole_slabs[tier], self._slabs[tier].keys[0].device
            start = first
            for group in _together(rows) if slab.is_joined and num_tokens is None else [rows]:
                count = len(group)
                if slab.is_joined and num_tokens is None and len(set(group)) == 1:
                    cut, group = slab.run(start, count * slab.block_tokens), group[:1]
                else:
                    cut = slab.cut(start, count, 0, num_tokens)
                index = _index(group, device)
                for found, (keys, values) in zip(by_layer, cut, strict=True):
                    found.append(RowsPiece(keys, values, index, len(group[0])))
                start = Slot(start + count)
        return by_layer

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
