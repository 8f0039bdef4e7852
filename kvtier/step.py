"""What one inner forward appended and has not committed. Outlives its forward never."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from kvtier.batch import Batch
from kvtier.block_table import BlockTable, Made
from kvtier.errors import IntegrityError, UnsupportedError
from kvtier.padding import Padding
from kvtier.types import BlockId, Slot


class StepState(enum.Enum):
    """A step is open until it commits as a whole or aborts as a whole."""

    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Write(NamedTuple):
    """Where `num_tokens` new tokens go: gpu slot `slot` from token `start` on; they are new tokens `offset …`."""

    slot: Slot
    start: int
    offset: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring new columns `first … first + count - 1` of one row that hold tokens, not padding."""

    first: int
    count: int


@dataclass(frozen=True, slots=True)
class NewColumns:
    """What one row gets in a step: `num_columns` columns, of which `runs` are tokens and the rest padding."""

    num_columns: int
    runs: tuple[Run, ...]
    token_ids: list[int] | None = None
    """Of the tokens; None when they are fed as embeddings."""
    positions: list[int] | None = None
    """Of the tokens, as the model places them; None: counted on from the tokens held."""
    made: Made = Made.COUNTED

    @staticmethod
    def of(num_tokens: int, token_ids: list[int] | None = None, positions: list[int] | None = None) -> NewColumns:
        """Tokens alone."""
        return NewColumns(num_tokens, (Run(0, num_tokens),) if num_tokens else (), token_ids, positions)

    @property
    def num_tokens(self) -> int:
        """New tokens, without padding."""
        runs = self.runs
        return runs[0].count if len(runs) == 1 else sum(run.count for run in runs)

    def padding(self) -> list[Padding]:
        """The padding columns, by the number of new tokens before them."""
        found, column, num_tokens = [], 0, 0
        for run in self.runs:
            if run.first > column:
                found.append(Padding(num_tokens, run.first - column))
            column, num_tokens = run.first + run.count, num_tokens + run.count
        if self.num_columns > column:
            found.append(Padding(num_tokens, self.num_columns - column))
        return found


@dataclass(slots=True)
class RowStep:
    """One row's part of a step. Nobody changes it; made as `Move` is.

    `tail_slot` is the gpu slot that holds the tail at the step's start (a copy, if the tail was shared or sealed and
    the row gets new tokens).
    """

    table: BlockTable
    new: NewColumns
    num_tokens: int
    """New tokens, without padding."""
    committed: int
    """Tokens held at the step's start."""
    writes: tuple[Write, ...]
    pinned: tuple[BlockId, ...]
    """The tail, or the copy of it, if there is one; then the new blocks."""
    tail_slot: Slot | None
    tail_copy: BlockId | None

    @property
    def new_blocks(self) -> tuple[BlockId, ...]:
        """Those behind the tail."""
        return self.pinned if self.tail_slot is None else self.pinned[1:]

    @property
    def is_full(self) -> bool:
        """Whether every new column is a token: no padding."""
        return len(self.new.runs) == 1 and self.new.runs[0].count == self.new.num_columns


@dataclass(slots=True)
class Step:
    """One step of a batch: `num_new` columns behind `committed` ones, in each row."""

    batch: Batch
    committed: int
    num_new: int
    rows: tuple[RowStep, ...]
    state: StepState = StepState.OPEN
    appended: dict[int, int] = field(default_factory=dict)
    attended: set[int] = field(default_factory=set)

    def length(self, layer: int) -> int:
        """Logical length that `layer` sees, in columns: committed plus that layer's pending ones."""
        return self.committed + self.appended.get(layer, 0)

    def append(self, layer: int, num_columns: int) -> None:
        """Note that `layer` appended its new columns.

        Raises:
            UnsupportedError: the layer appends twice in a step, or not exactly the step's columns (KV shared between
                layers, tokens dropped by the model); nothing is noted.
        """
        if self.state is not StepState.OPEN:
            raise IntegrityError(f"an append to a step that is {self.state.value}")
        if layer in self.appended or num_columns != self.num_new:
            raise UnsupportedError(
                f"layer {layer} appended {num_columns} tokens (before: {self.appended.get(layer, 0)}) in a step of "
                f"{self.num_new}: models whose layers append unequally are not supported; use the plain cache"
            )
        self.appended[layer] = num_columns

    def check_complete(self, layers: tuple[int, ...]) -> None:
        """Raise UnsupportedError unless every layer has appended: the model did not fill the cache it was given."""
        if len(self.appended) != len(layers):
            missing = sorted(set(layers) - set(self.appended))
            raise UnsupportedError(
                f"the model ran but did not fill its cache: layers {missing[:8]} of {len(layers)} appended nothing; "
                "the cache argument is swallowed somewhere, or the model skips layers"
            )
        if self.attended != set(self.appended):
            missing = sorted(set(self.appended) - self.attended)
            raise UnsupportedError(
                f"layers {missing[:8]} attended without kvtier, to the new tokens alone: the model's attention "
                "implementation was changed after wrapping; close() the TieredKV, set it, and wrap again"
            )
