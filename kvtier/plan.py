"""What order slices are needed in, and where each lies, for one step. Decides no residency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.block_table import BlockTable
from kvtier.errors import BlockLostError
from kvtier.residency import ResidencyTable
from kvtier.types import BlockId, Slot, Tier


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neighbouring gpu slots `first … first + count - 1`, each holding one full block."""

    first: Slot
    count: int


@dataclass(frozen=True, slots=True)
class Source:
    """A full block that must be streamed: block number `index` of its sequence, at `slot` of a slower tier."""

    block: BlockId
    index: int
    tier: Tier
    slot: Slot


@dataclass(frozen=True, slots=True)
class Resident:
    """A full block on the gpu tier."""

    index: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The full blocks of one sequence at one step's start. The same for each of its layers: blocks span all layers.

    `runs` covers the resident blocks in slot order: softmax does not mind the order in which keys are merged.
    `streamed` is in block order; slices are needed in the order layer 0 of all of them, layer 1 of all of them, …
    """

    resident: tuple[Resident, ...]
    runs: tuple[SlotRun, ...]
    streamed: tuple[Source, ...]

    @staticmethod
    def build(table: BlockTable, residency: ResidencyTable) -> StepPlan:
        """Read the residency of every full block, O(blocks).

        Raises:
            BlockLostError: a block has no copy left.
        """
        resident: list[Resident] = []
        streamed: list[Source] = []
        for index, block in enumerate(table.blocks[: table.num_full_blocks]):
            record = residency[block]
            tier = record.fastest
            if tier is None:
                raise BlockLostError(f"block {index} of sequence {table.sequence} has no copy on any tier")
            if tier is Tier.GPU:
                resident.append(Resident(index, record.copies[tier]))
            else:
                streamed.append(Source(block, index, tier, record.copies[tier]))
        return StepPlan(tuple(resident), tuple(_runs(block.slot for block in resident)), tuple(streamed))


def _runs(slots: Iterable[Slot]) -> list[SlotRun]:
    runs: list[SlotRun] = []
    first: int | None = None
    last = -2
    for slot in sorted(slots):
        if first is None or slot != last + 1:
            if first is not None:
                runs.append(SlotRun(Slot(first), last - first + 1))
            first = slot
        last = slot
    if first is not None:
        runs.append(SlotRun(Slot(first), last - first + 1))
    return runs
