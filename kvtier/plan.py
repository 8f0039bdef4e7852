"""What order slices are needed in, and where each lies, for one step. Decides no residency."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvtier.batch import Batch
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
    """A full block that must be streamed: block number `index` of `rows`, at `slot` of a slower tier."""

    block: BlockId
    index: int
    tier: Tier
    slot: Slot
    rows: tuple[int, ...] = (0,)


@dataclass(frozen=True, slots=True)
class Resident:
    """A full block on the gpu tier."""

    index: int
    slot: Slot


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row's resident full blocks, in block order, and `runs` of them in slot order.

    Softmax does not mind the order in which keys are merged.
    """

    resident: tuple[Resident, ...]
    runs: tuple[SlotRun, ...]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The full blocks of a batch at one step's start. The same for each of its layers: blocks span all layers.

    `streamed` names each block once, however many rows share it, in the order of the first row that needs it; slices
    are needed in the order layer 0 of all of them, layer 1 of all of them, …
    """

    rows: tuple[RowPlan, ...]
    streamed: tuple[Source, ...]

    @staticmethod
    def build(batch: Batch, residency: ResidencyTable) -> StepPlan:
        """Read the residency of every full block, O(blocks).

        Raises:
            BlockLostError: blocks have no copy left; names all of them.
        """
        rows: list[RowPlan] = []
        lost: dict[BlockId, None] = {}
        streamed: dict[BlockId, tuple[int, Tier, Slot, list[int]]] = {}
        for row, table in enumerate(batch.tables):
            resident: list[Resident] = []
            for index, block in enumerate(table.blocks[: table.num_full_blocks]):
                copies = residency[block].copies
                tier = min(copies, default=None)
                if tier is None:
                    lost[block] = None
                elif tier is Tier.GPU:
                    resident.append(Resident(index, copies[tier]))
                elif block in streamed:
                    streamed[block][3].append(row)
                else:
                    streamed[block] = index, tier, copies[tier], [row]
            rows.append(RowPlan(tuple(resident), tuple(_runs(block.slot for block in resident))))
        if lost:
            raise BlockLostError(f"{len(lost)} blocks of the batch were dropped to make room", tuple(lost))
        sources = (Source(b, index, tier, slot, tuple(users)) for b, (index, tier, slot, users) in streamed.items())
        return StepPlan(tuple(rows), tuple(sources))


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
