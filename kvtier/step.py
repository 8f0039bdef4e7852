"""What one inner forward appended and has not committed. Outlives its forward never."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvtier.block_table import BlockTable
from kvtier.errors import IntegrityError, UnsupportedError
from kvtier.types import BlockId, Slot


class StepState(enum.Enum):
    """A step is open until it commits as a whole or aborts as a whole."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class Write:
    """Where `count` new tokens go: gpu slot `slot` from token `start` on; they are new tokens `offset …`."""

    slot: Slot
    start: int
    offset: int
    count: int


@dataclass(slots=True)
class Step:
    """One step of one sequence: `num_new` tokens behind `committed` ones.

    `tail_slot` is the gpu slot that holds the tail at the step's start (a copy, if the tail was shared or sealed).
    """

    table: BlockTable
    committed: int
    num_new: int
    writes: tuple[Write, ...]
    new_blocks: tuple[BlockId, ...]
    tail_slot: Slot | None
    tail_copy: BlockId | None
    state: StepState = StepState.OPEN
    appended: dict[int, int] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)

    def length(self, layer: int) -> int:
        """Logical length that `layer` sees: committed plus that layer's pending tokens."""
        return self.committed + self.appended.get(layer, 0)

    def append(self, layer: int, num_tokens: int) -> None:
        """Note that `layer` appended its new tokens.

        Raises:
            UnsupportedError: the layer appends twice in a step, or not exactly the step's tokens (KV shared between
                layers, tokens dropped by the model); nothing is noted.
        """
        if self.state is not StepState.OPEN:
            raise IntegrityError(f"an append to a step that is {self.state.value}")
        if layer in self.appended or num_tokens != self.num_new:
            raise UnsupportedError(
                f"layer {layer} appended {num_tokens} tokens (before: {self.appended.get(layer, 0)}) in a step of "
                f"{self.num_new}: models whose layers append unequally are not supported; use the plain cache"
            )
        self.appended[layer] = num_tokens

    def check_complete(self, num_layers: int) -> None:
        """Raise UnsupportedError unless every layer has appended: the model did not fill the cache it was given."""
        if len(self.appended) != num_layers:
            missing = sorted(set(range(num_layers)) - set(self.appended))
            raise UnsupportedError(
                f"the model ran but did not fill its cache: layers {missing[:8]} of {num_layers} appended nothing; "
                "the cache argument is swallowed somewhere, or the model skips layers"
            )
        if self.attended != set(self.appended):
            missing = sorted(set(self.appended) - self.attended)
            raise UnsupportedError(
                f"layers {missing[:8]} attended without kvtier, to the new tokens alone: the model's attention "
                "implementation was changed after wrapping; close() the TieredKV, set it, and wrap again"
            )
