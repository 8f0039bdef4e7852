"""Which blocks are of rows that run, and which of those lie on slower tiers. Kept as rows and copies change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

from kvtier.errors import IntegrityError
from kvtier.residency import ResidencyTable
from kvtier.types import CPU, GPU, NVME, BlockId, SequenceId, Tier


class RunningBlocks(Set[BlockId]):
    """The blocks that running rows hold, each counted by rows. O(1) for each operation on one block.

    A step must not walk the blocks of its rows to find out what is due: it asks here.
    """

    def __init__(self, residency: ResidencyTable) -> None:
        self._residency = residency
        self._rows: set[SequenceId] = set()
        self._num_rows: dict[BlockId, int] = {}
        self.has: Callable[[object], bool] = self._num_rows.__contains__
        """As `in`. It is asked for every copy that comes or goes, and for every block that a policy looks at."""
        self.num_copies: dict[Tier, int] = dict.fromkeys(Tier, 0)
        """Copies of them on each tier."""
        self._below_gpu: dict[Tier, dict[BlockId, None]] = {tier: {} for tier in Tier if tier is not GPU}
        """By the fastest tier that has them, where that is not the gpu tier; in the order of their turns to come up."""

    @classmethod
    def _from_iterable(cls, it: Iterable[BlockId]) -> set[BlockId]:  # type: ignore[override]  # of operators
        return set(it)

    def __contains__(self, block: object) -> bool:
        return block in self._num_rows

    def __iter__(self) -> Iterator[BlockId]:
        return iter(self._num_rows)

    def __len__(self) -> int:
        return len(self._num_rows)

    # -- rows ---------------------------------------------------------------------------------------------------------

    def start(self, row: SequenceId, blocks: Iterable[BlockId]) -> None:
        """The row runs, and holds these blocks. Idempotent."""
        if row not in self._rows:
            self._rows.add(row)
            self.gained(row, blocks)

    def stop(self, row: SequenceId, blocks: Iterable[BlockId]) -> None:
        """The row, which holds these blocks, does not run. Idempotent. They still live."""
        if row in self._rows:
            self.lost(row, blocks)
            self._rows.discard(row)

    def gained(self, row: SequenceId, blocks: Iterable[BlockId]) -> None:
        """The row, whether or not it runs, holds these blocks too."""
        if row not in self._rows:
            return
        for block in blocks:
            count = self._num_rows.get(block, 0)
            self._num_rows[block] = count + 1
            if not count:
                record = self._residency[block]
                for tier in record.copies:
                    self.num_copies[tier] += 1
                self._list(block, record.fastest)

    def lost(self, row: SequenceId, blocks: Iterable[BlockId]) -> None:
        """The row, whether or not it runs, does not hold these blocks any more. They still live."""
        if row not in self._rows:
            return
        for block in blocks:
            count = self._num_rows[block] - 1
            if count:
                self._num_rows[block] = count
                continue
            del self._num_rows[block]
            for tier in self._residency[block].copies:
                self.num_copies[tier] -= 1
            self._unlist(block)

    # -- copies -------------------------------------------------------------------------------------------------------

    def copied(self, block: BlockId, tier: Tier) -> None:
        """A copy of the block, which runs, has appeared on `tier`."""
        self._note(block, tier, 1)

    def dropped(self, block: BlockId, tier: Tier) -> None:
        """Its copy on `tier` has gone."""
        self._note(block, tier, -1)

    def _note(self, block: BlockId, tier: Tier, change: int) -> None:
        self.num_copies[tier] += change
        fastest = self._residency[block].fastest
        if fastest is None or fastest is GPU or block not in self._below_gpu[fastest]:
            self._unlist(block)
            self._list(block, fastest)

    def _list(self, block: BlockId, fastest: Tier | None) -> None:
        if fastest is not None and fastest is not GPU:
            self._below_gpu[fastest][block] = None

    def _unlist(self, block: BlockId) -> None:
        for listed in self._below_gpu.values():
            listed.pop(block, None)

    # -- what is asked ------------------------------------------------------------------------------------------------

    @property
    def are_all_on_gpu(self) -> bool:
        """Whether none of their fastest copies lies below the gpu tier."""
        return not any(self._below_gpu.values())

    def num_below(self, tier: Tier) -> int:
        """Blocks whose fastest copy lies below `tier`."""
        count = len(self._below_gpu[NVME])
        return count + len(self._below_gpu[CPU]) if tier is GPU else count if tier is CPU else 0

    def below(self, tier: Tier, is_wanted: Callable[[Tier], bool]) -> Iterator[BlockId]:
        """Blocks whose fastest copy lies below `tier`, on a tier that is wanted: those on the slowest tier first, for
        reading one of them at each token costs most; of one tier in the order in which they got there, or came to run.

        O(1) for each that is taken.
        """
        slower = [each for each in self._below_gpu if each > tier and self._below_gpu[each] and is_wanted(each)]
        return chain.from_iterable(self._below_gpu[each] for each in sorted(slower, reverse=True))

    def check_integrity(self, rows: Mapping[SequenceId, Sequence[BlockId]]) -> None:
        """Raise IntegrityError unless these rows run, with these blocks, and copies agree."""
        if rows.keys() != self._rows:
            raise IntegrityError("other rows run than are listed as running")
        counted: dict[BlockId, int] = {}
        for blocks in rows.values():
            for block in blocks:
                counted[block] = counted.get(block, 0) + 1
        if counted != self._num_rows:
            raise IntegrityError("the blocks of running rows are not those that are listed as running")
        num_copies = dict.fromkeys(Tier, 0)
        for block in counted:
            record = self._residency[block]
            for tier in record.copies:
                num_copies[tier] += 1
            for tier, listed in self._below_gpu.items():
                if (block in listed) is not (record.fastest is tier):
                    raise IntegrityError(f"block {block} runs, and is wrongly listed on {tier.label}")
        if num_copies != self.num_copies or any(each.keys() - counted.keys() for each in self._below_gpu.values()):
            raise IntegrityError("the copies of running blocks were miscounted")
