"""What steps have read that eviction policies were not told of yet: docs/adr/0025."""

from __future__ import annotations

from collections.abc import Mapping

from kvtier.batch import Batch
from kvtier.types import EvictionPolicy, Tier


class Reads:
    """Batches that steps have read since the policies were told, in the order of their last steps.

    Each step reads every block of its batch, and reading them again changes nothing that a policy could go by until
    somebody asks it for victims among them. So a step costs O(1) here, and the policies are told when they are asked,
    or when the batch ceases to run.
    """

    def __init__(self, policies: Mapping[Tier, EvictionPolicy]) -> None:
        self._policies = policies
        self._untold: dict[Batch, None] = {}

    def note(self, batch: Batch) -> None:
        """A step has read the batch. O(1)."""
        self._untold.pop(batch, None)
        self._untold[batch] = None

    def tell(self, batch: Batch) -> None:
        """The policies learn what was read of this batch. O(its blocks), the first time since a step."""
        if batch in self._untold:
            del self._untold[batch]
            blocks = dict.fromkeys(block for table in batch.tables for block in table.blocks)
            for policy in self._policies.values():
                policy.touched(blocks)

    def tell_all(self) -> None:
        """The policies learn all of it. O(blocks of batches that steps have read since)."""
        for batch in list(self._untold):
            self.tell(batch)
