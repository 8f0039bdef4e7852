"""What the new columns of a step see of the past: full blocks wherever they lie, and the committed tails."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import torch

from kvtier.places import KeysValues, Piece, RowsPiece, TokenPlace, runs_of_slots
from kvtier.plan import Source, StepPlan
from kvtier.step import Step
from kvtier.step_memory import StepMemory
from kvtier.types import Slot, Tier


class Past:
    """The past of one step's rows, layer by layer. Counts what is read of it."""

    def __init__(self, memory: StepMemory, step: Step, plan: StepPlan) -> None:
        self._memory, self._step, self._plan = memory, step, plan
        self.places = memory.places(plan)
        self._metrics = step.batch.metrics
        self.at_once = memory.num_pieces if step.num_new > 1 else memory.num_decode_pieces
        """Blocks of one kernel call at most, each a row of it."""
        # Those of the cpu tier are attended to beside a device, where there is one.
        self._tiers = (Tier.GPU, Tier.CPU) if memory.attender is None else (Tier.GPU,)
        self._tails: list[list[RowsPiece]] | None = None
        self.token: TokenPlace | None = None
        """Where a single row's only new token goes, and what it sees; None for any other step."""
        if step.num_new == len(step.rows) == 1 and step.rows[0].writes:
            write = step.rows[0].writes[0]
            self.token = self.places.token(write.slot, write.start, self._tiers, self.at_once)

    def pieces(self, position: int) -> Iterator[Piece]:
        """Pieces that every new column of a row sees whole, but for those that are attended to beside a device.

        A single new token sees itself too, so it is taken with its tail in one piece.

        Raises:
            BlockLostError, TransferTimeoutError: the step must be aborted.
        """
        step, places = self._step, self.places
        at_once = self._memory.num_joined_pieces if step.num_new > 1 else self.at_once
        for tier in self._tiers:
            yield from places.pieces(tier, position, at_once)
        for number in range(len(step.rows)):
            if (tail := self.tail(number)) is not None:
                slot, length = tail
                keys, values = places.slot(position, slot)
                yield number, keys.narrow(2, 0, length), values.narrow(2, 0, length)
        self._count_resident()
        yield from self._streamed_pieces(position)

    def token_pieces(self, token: TokenPlace, position: int) -> Iterable[KeysValues]:
        """The same for `token`, that is, without the row's number. Errors as `pieces`."""
        self._count_resident()
        if not self._plan.streamed:
            return token.seen[position]
        return chain(token.seen[position], ((keys, values) for _, keys, values in self._streamed_pieces(position)))

    def _streamed_pieces(self, position: int) -> Iterator[Piece]:
        for sources, streamed_keys, streamed_values in self.streamed(position):
            for number in range(len(self._step.rows)):
                for first, last in _entries(sources, number):
                    for start in range(first, last, self.at_once):
                        view = slice(start, min(start + self.at_once, last))
                        yield number, streamed_keys[view], streamed_values[view]

    def rows_pieces(self, position: int) -> Iterator[RowsPiece]:
        """The same for a single new token in each row, of all rows together. Errors as `pieces`."""
        at_once = self.at_once
        yield from self.places.rows_pieces(position, at_once)
        if self._tails is None:
            self._tails = self.places.by_layer(self._runs_of_tails())
        yield from self._tails[position]
        self._count_resident()
        for sources, keys, values in self.streamed(position):
            entries = {(source.tier, Slot(entry)): source.rows for entry, source in enumerate(sources)}
            for (_, first), rows in runs_of_slots(entries):
                for at in range(0, len(rows), at_once):
                    view = slice(first + at, min(first + at + at_once, first + len(rows)))
                    yield RowsPiece.of(keys[view], values[view], rows[at : at + at_once])

    def _runs_of_tails(self) -> Iterator[tuple[Tier, Slot, list[tuple[int, ...]], int]]:
        by_length: dict[int, dict[tuple[Tier, Slot], tuple[int, ...]]] = {}
        for number in range(len(self._step.rows)):
            if (tail := self.tail(number)) is not None:
                slot, length = tail
                rows_of = by_length.setdefault(length, {})
                rows_of[Tier.GPU, slot] = (*rows_of.get((Tier.GPU, slot), ()), number)
        for length, rows_of in by_length.items():
            for (tier, first), rows in runs_of_slots(rows_of):
                for at in range(0, len(rows), self.at_once):
                    yield tier, Slot(first + at), rows[at : at + self.at_once], length

    def tail(self, number: int) -> tuple[Slot, int] | None:
        """Where a row's tail lies, and how many of its tokens all new columns see: a single new token sees itself."""
        row = self._step.rows[number]
        if self._step.num_new == 1 and row.writes:
            return row.writes[0].slot, row.writes[0].start + 1
        return None if row.tail_slot is None else (row.tail_slot, row.table.tail_tokens)

    def blocks(self, position: int) -> Iterator[tuple[int, int, int, torch.Tensor, torch.Tensor]]:
        """Block by block, tails included: row, number, tokens, K `[kv_heads, block_tokens, dim]`, V.

        Valid until the next one is asked for. Errors as `pieces`.
        """
        block_tokens = self._memory.group.shape.block_tokens
        for number, (row, plan) in enumerate(zip(self._step.rows, self._plan.rows, strict=True)):
            for resident in plan.resident:
                slab, slot = self._memory.slabs[resident.tier], resident.slot
                yield number, resident.index, block_tokens, slab.keys[position][slot], slab.values[position][slot]
            if row.tail_slot is not None:
                keys, values = self.places.slot(position, row.tail_slot)
                yield number, row.table.num_full_blocks, row.table.tail_tokens, keys[0], values[0]
        self._count_resident()
        for sources, streamed_keys, streamed_values in self.streamed(position):
            for entry, source in enumerate(sources):
                for number in source.rows:
                    yield number, source.index, block_tokens, streamed_keys[entry], streamed_values[entry]

    def streamed(self, position: int) -> Iterator[tuple[Sequence[Source], torch.Tensor, torch.Tensor]]:
        """Groups of slices as they arrive."""
        ring = self._memory.ring
        if ring is None or not self._plan.streamed:
            return
        slice_bytes, metrics = self._memory.group.shape.slice_bytes, self._memory.metrics
        for group in ring.groups(position):
            yield group.sources, group.keys, group.values
            for tier, num_slices in group.num_slices.items():
                metrics.bytes_moved[(tier, Tier.GPU)] += num_slices * slice_bytes
                self._count(num_slices, tier)
                if tier is Tier.NVME:
                    metrics.nvme_sole_reads += num_slices
                    self._metrics.nvme_read_bytes += num_slices * slice_bytes

    def _count_resident(self) -> None:
        for tier, num_slices in self.places.num_resident:
            self._count(num_slices, tier)

    def _count(self, num_slices: int, tier: Tier) -> None:
        self._memory.metrics.slices_read[tier] += num_slices
        self._metrics.slices_read[tier] += num_slices


def _entries(sources: Sequence[Source], row: int) -> Iterator[tuple[int, int]]:
    """Runs `first … last - 1` of neighbouring sources that belong to the row."""
    first = None
    for entry, source in enumerate(sources):
        if row in source.rows:
            first = entry if first is None else first
        elif first is not None:
            yield first, entry
            first = None
    if first is not None:
        yield first, len(sources)
