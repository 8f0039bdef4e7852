"""What rings are built with in tests."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from kvtier.device import DONE, Event
from kvtier.errors import StoreError
from kvtier.slice_reads import BeginSlices, ReadThreads
from kvtier.types import Slot, Tier


def one_by_one(read_slice: Callable[[Tier, Slot, int, torch.Tensor, Event], Event | None]) -> BeginSlices:
    """A reader of several slices that is called for each; StoreError is what kept it from being read.

    It reads when it is asked to end.
    """

    def read_slices(
        tier: Tier, slots: Sequence[Slot], layer: int, out: torch.Tensor, after: Event
    ) -> tuple[Event, list[StoreError | None]]:
        arrived, failures = DONE, list[StoreError | None]()
        for slot, row in zip(slots, out, strict=True):
            try:
                arrived = read_slice(tier, slot, layer, row, after) or DONE
                failures.append(None)
            except StoreError as error:
                failures.append(error)
        return arrived, failures

    return lambda *arguments: functools.partial(read_slices, *arguments)


def threads(number: int) -> ReadThreads:
    """As many for memory as for files."""
    return ReadThreads(number, number)
