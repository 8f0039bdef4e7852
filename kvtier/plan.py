"""What order slices are needed in, and where each lies, for one step. Decides no residency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvtier.batch import Batch
from kvtier.errors import BlockLostError
from kvtier.residency import ResidencyTable
from kvtier.types import BlockId, Slot, Tier


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Neighbouring slots `first … first + count - 1` of one tier, each holding one full block."""

    first: Slot
    count: int
    tier: Tier = Tier.GPU


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
    """A full block that attention reads where it lies: on the gpu tier, or on the cpu tier by the CPU."""

    index: int
    slot: Slot
    tier: Tier = Tier.GPU


@dataclass(frozen=True, slots=True)
class RowPlan:
    """One row's resident full blocks, in block order, and `runs` of them by tier, in slot order.

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
    def build(batch: Batch, residency: ResidencyTable, host_frac: float = 0.0) -> StepPlan:
        """Read the residency of every full block, O(blocks).

        Args:
            host_frac: of the blocks that the cpu tier is the fastest to hold, the share that attention reads there.

        Raises:
            BlockLostError: blocks have no copy left; names all of them.
        """
        rows: list[RowPlan] = []
        lost: dict[BlockId, None] = {}
        streamed: dict[BlockId, tuple[int, Tier, Slot, list[int]]] = {}
        for row, table in enumerate(batch.tables):
            resident: list[Resident] = []
            num_on_host = 0
            for index, block in enumerate(table.blocks[: table.num_full_blocks]):
                record = residency[block]
                tier = record.fastest
                slot = None if tier is None else record.slot(tier)
                if tier is None or slot is None:
                    lost[block] = None
                    continue
                is_resident = tier is Tier.GPU
                if tier is Tier.CPU and host_frac:
                    num_on_host += 1
                    # Spread over the blocks, so that the share holds however many there are.
                    is_resident = int(num_on_host * host_frac) > int((num_on_host - 1) * host_frac)
                if is_resident:
                    resident.append(Resident(index, slot, tier))
                elif block in streamed:
                    streamed[block][3].append(row)
                else:
                    streamed[block] = index, tier, slot, [row]
            rows.append(RowPlan(tuple(resident), tuple(_runs(resident))))
        if lost:
            raise BlockLostError(f"{len(lost)} blocks of the batch were dropped to make room", tuple(lost))
        sources = (Source(b, index, tier, slot, tuple(users)) for b, (index, tier, slot, users) in streamed.items())
        return StepPlan(tuple(rows), tuple(sources))


class Plans:
    """The plan of the step before, for as long as it is still right: most tokens of a sequence change nothing in it."""

    def __init__(self, residency: ResidencyTable) -> None:
        self._residency = residency
        self._of: tuple[int, float, list[list[BlockId]]] | None = None
        self._plan: StepPlan | None = None

    def get(self, batch: Batch, host_frac: float = 0.0) -> StepPlan:
        """As `StepPlan.build`; the very same object while it names the same blocks in the same places.

        Cost: comparing the lists of full blocks' ids, a microsecond for 500; building it if any copy came or went.
        """
        blocks = [table.blocks[: table.num_full_blocks] for table in batch.tables]
        of = self._residency.version, host_frac, blocks
        if self._plan is None or of != self._of:
            before, self._plan = self._plan, None
            plan = StepPlan.build(batch, self._residency, host_frac)
            # Most copies that come and go are others': what has been made of the plan before stays good.
            self._plan = before if plan == before else plan
            self._of = of
        return self._plan


def _runs(blocks: Iterable[Resident]) -> Iterator[SlotRun]:
    first: Resident | None = None
    count = 0
    for block in sorted(blocks, key=lambda block: (block.tier, block.slot)):
        if first is not None and block.tier is first.tier and block.slot == first.slot + count:
            count += 1
            continue
        if first is not None:
            yield SlotRun(first.slot, count, first.tier)
        first, count = block, 1
    if first is not None:
        yield SlotRun(first.slot, count, first.tier)
