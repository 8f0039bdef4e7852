"""Repeats a step whose blocks were lost, once the model has computed them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvtier.batch import Batch
from kvtier.block_table import Span
from kvtier.errors import BlockLostError
from kvtier.hf import CacheState, TieredCache
from kvtier.losses import Compute, Losses
from kvtier.runtime import Runtime
from kvtier.step import NewColumns

_Run = Callable[[TieredCache, dict[str, Any]], object]


class Mender:
    """Mends the blocks of one cache with the model's own forward, on a temporary cache of one row."""

    def __init__(self, runtime: Runtime, state: CacheState, run: _Run) -> None:
        """`run` is a whole call of forward with that cache and those arguments, in steps that are not mended."""
        self._runtime, self._state, self._run = runtime, state, run

    def repeat(self, step: Callable[[], Any], new: Sequence[NewColumns]) -> Any:
        """What `step` returns, which is run again, from a state as before it, until it has lost nothing.

        Args:
            new: what the step appends to each row.

        Raises:
            BlockLostError: a block cannot be recomputed; says why. TransferTimeoutError: the device hangs.
            Whatever `step` raises. The batch is as before the step, and nothing temporary is left.
        """
        runtime = self._runtime
        losses = Losses(runtime.manager, self._state.batch, new, self._open_row, runtime.executor.chunk)
        try:
            known = losses.known()
            if known:
                self._mend(losses, known, f"{len(known)} blocks could not be promoted, or were dropped to make room")
            checked = False
            while True:
                try:
                    return losses.with_room(step)
                except BlockLostError as error:
                    lost, why = list(error.blocks), str(error)
                if not checked:  # one step's reads, so as not to repeat the step for each block of a broken file
                    lost = self._all_lost(lost)
                    checked = True
                self._mend(losses, lost, why)
        finally:
            losses.close()

    def _mend(self, losses: Losses, lost: Sequence[int], why: str) -> None:
        obstacle = self._state.obstacle()
        if obstacle is not None:
            raise BlockLostError(f"{why}; it cannot be recomputed: {obstacle}", tuple(lost))
        losses.mend(lost, why)

    def _all_lost(self, lost: list[int]) -> list[int]:
        try:
            found: Sequence[int] = self._runtime.executor.unreadable(self._state.batch)
        except BlockLostError as error:
            found = error.blocks
        return list(dict.fromkeys([*lost, *found]))

    @contextmanager
    def _open_row(self, batch: Batch) -> Iterator[Compute]:
        cache = TieredCache(self._runtime, batch=batch, salt=self._state.salt)
        own, given = cache.state, self._state
        own.weights, own.structure, own.modules = given.weights, given.structure, given.modules
        self._runtime.untiered.is_mending = True
        try:
            yield partial(self._compute, cache)
        finally:
            self._runtime.untiered.is_mending = False
            # Not when the collector finds it: its windows count in the budget.
            self._runtime.untiered.caches.discard(cache.state.untiered)

    @torch.no_grad()
    def _compute(self, cache: TieredCache, span: Span) -> None:
        device = self._runtime.group.device
        arguments: dict[str, Any] = {"input_ids": torch.tensor([span.ids], device=device), "use_cache": True}
        if span.positions is not None:
            arguments["position_ids"] = torch.tensor([span.positions], device=device)
        if not all(span.mask):
            arguments["attention_mask"] = torch.tensor([span.mask], dtype=torch.long, device=device)
        self._run(cache, arguments)
