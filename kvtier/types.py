"""The words that every layer of kvtier shares: identifiers, tiers, shapes, moves, and the two policy interfaces.

Pure Python: importable with torch absent. Policies (`policies/`, and users' own) import this module and nothing else.
"""

from __future__ import annotations

import enum
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NewType, Protocol, runtime_checkable

BlockId = NewType("BlockId", int)
SequenceId = NewType("SequenceId", int)
Slot = NewType("Slot", int)


class Tier(enum.IntEnum):
    """Where bytes can lie. Smaller is faster."""

    GPU = 0
    CPU = 1
    NVME = 2

    @property
    def label(self) -> str:
        """The tier's name in configs, `stats()` and messages: `gpu`, `cpu` or `nvme`."""
        return self.name.lower()


GPU: Final = Tier.GPU
CPU: Final = Tier.CPU
NVME: Final = Tier.NVME
"""The same by plain names, for what a step does forty times: Python 3.11 takes ten times as long for a member of an
enum as for a global."""


class AttentionMode(enum.Enum):
    """`blockwise` merges partial attention by log-sum-exp; `gathered` assembles one layer and calls the model's own."""

    BLOCKWISE = "blockwise"
    GATHERED = "gathered"


class HostAttention(enum.Enum):
    """Whether the CPU attends to blocks of the cpu tier where they lie, instead of having them streamed."""

    NEVER = "never"
    ALWAYS = "always"
    AUTO = "auto"


class IoMode(enum.Enum):
    """How the nvme tier's files are read and written: `mmap` through the page cache, `direct` past it (O_DIRECT).

    `auto` is a wish, never what a store does: it chooses one of the others when it opens.
    """

    AUTO = "auto"
    MMAP = "mmap"
    DIRECT = "direct"


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The bytes of one block: for each of `num_layers` layers, one slice (its K, then its V).

    K is `[kv_heads, block_tokens, key_dim]`, V `[kv_heads, block_tokens, value_dim]`.

    All sizes are in bytes, dims in elements. Slices lie one after the other, without gaps.
    """

    num_layers: int
    kv_heads: int
    block_tokens: int
    key_dim: int
    value_dim: int
    element_bytes: int

    @property
    def key_bytes(self) -> int:
        """Bytes of one slice's K."""
        return self.kv_heads * self.block_tokens * self.key_dim * self.element_bytes

    @property
    def value_bytes(self) -> int:
        """Bytes of one slice's V."""
        return self.kv_heads * self.block_tokens * self.value_dim * self.element_bytes

    @property
    def slice_bytes(self) -> int:
        """Bytes of one layer's part of a block, the unit of streaming."""
        return self.key_bytes + self.value_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a whole block, the unit of residency and disk I/O."""
        return self.num_layers * self.slice_bytes

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token over all layers of the group."""
        return self.num_layers * self.kv_heads * (self.key_dim + self.value_dim) * self.element_bytes


class Survives(enum.Enum):
    """After what the nvme tier's files are still whole."""

    KILL = "kill"
    """The death of the process: the order of writes is enough, the kernel has them all."""
    POWER_LOSS = "power_loss"
    """The death of the machine: each block is flushed to the medium, then its header."""


class Compression(enum.Enum):
    """How blocks lie in the nvme tier's files. Both give the same bytes back."""

    NONE = "none"
    """As they are."""
    ZSTD = "zstd"
    """Each slice in planes, sign and exponent through zstd; as it is where that does not pay."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind on one device, whose blocks live and die together.

    `layers` are the model's layer indices; the position of a layer in this tuple is its slice index in every block.
    """

    layers: tuple[int, ...]
    shape: BlockShape
    device: str
    dtype: str
    heads: int
    """Query heads of each layer."""
    writes_scores: bool = False
    """Whether attention has no kernel that does without writing its scores out (soft-capping)."""
    num_untiered: int = 0
    """Layers of the model beside these, that keep transformers' own cache (windows, linear attention)."""

    @property
    def is_wide(self) -> bool:
        """Whether partial attention computes in fp32 on copies of 16-bit K and V.

        The CPU kernel rounds each piece's output to 16 bits, which the plain model does once. CUDA's kernels would pay
        too much for it.
        """
        return self.shape.element_bytes == 2 and (self.device == "cpu" or self.writes_scores)


@dataclass(frozen=True, slots=True)
class SlotLabel:
    """Whose KV a block in a file is, so that a later process can find it and nobody else's. Opaque to a store."""

    namespace: bytes
    """32 bytes: model, adapters, shapes, formats and salt."""
    identity: bytes
    """32 bytes: the block's tokens and all before them, in this namespace."""
    content: bytes
    """Canonical encoding of the block's own tokens: compared, so that a collision of identities is seen."""


class MovePurpose(enum.Enum):
    """Why a move was started; decides what its commit does."""

    DEMOTE = "demote"
    """Copy down, then evict the source copy."""
    WRITE_BEHIND = "write_behind"
    """Copy a sealed block down early; both copies stay."""
    PROMOTE = "promote"
    """Copy up; the slower copy stays (the block is then clean) unless its slot is needed."""
    COPY_TAIL = "copy_tail"
    """Copy one block's bytes into another block's slot: a forked or reopened tail."""


DEMOTE: Final = MovePurpose.DEMOTE
COPY_TAIL: Final = MovePurpose.COPY_TAIL
"""By plain names, as the tiers."""


@dataclass(slots=True)
class Move:
    """One block-sized copy of `block` between two slots. With COPY_TAIL another block will own the destination.

    Nobody changes one. It is not frozen, for that takes a microsecond to make, and no tuple, whose names take ten times
    as long to read.
    """

    move_id: int
    block: BlockId
    purpose: MovePurpose
    source: Tier
    source_slot: Slot
    dest: Tier
    dest_slot: Slot
    label: SlotLabel | None = None
    """Only towards nvme, of sealed blocks that a later process may find."""


class MoveStatus(enum.Enum):
    """How a move ended. Every started move is reported exactly once."""

    DONE = "done"
    FAILED = "failed"
    """The source could not be read or the destination not written; the destination holds nothing."""
    NO_SPACE = "no_space"
    """The destination tier has less room than its pool believed (a full disk)."""
    WITHDRAWN = "withdrawn"
    """It never began: it was taken back."""


MOVE_DONE: Final = MoveStatus.DONE
"""By a plain name, as the tiers."""


@dataclass(slots=True)
class MoveResult:
    """The outcome of one move, made like it. `error` is a sentence for people, empty when DONE.

    With NO_SPACE only: `available_slots` is how many of the destination's slots have backing, and `retires_slot` says
    that the move's own slot, though below that, cannot be had.
    """

    move: Move
    status: MoveStatus
    error: str = ""
    available_slots: int = 0
    retires_slot: bool = False


class Engine(Protocol):
    """What the tier manager needs of a transfer engine. It never sees a tensor."""

    def start(self, moves: Sequence[Move]) -> None:
        """Queue moves; returns at once. Order between moves is not promised."""
        ...

    def finished(self) -> list[MoveResult]:
        """Results that have arrived since the last call, without waiting."""
        ...

    def wait(self, timeout_s: float) -> list[MoveResult]:
        """Wait until at least one result has arrived or `timeout_s` has passed; empty on time-out."""
        ...

    def withdraw(self, move_ids: Sequence[int]) -> list[MoveResult]:
        """Take back those of these moves that have not begun; their results, all WITHDRAWN. Without waiting.

        It is their report. The others go on, and are reported as ever.
        """
        ...

    def in_flight(self) -> int:
        """How many started moves have not been handed out by `finished`, `wait` or `withdraw`."""
        ...


@runtime_checkable
class EvictionPolicy(Protocol):
    """Names the blocks that one tier should give up. One instance per tier; called by one thread at a time.

    It is told what the tier holds and what was read; it never sees tensors or slots, does no I/O and removes nothing.
    Before it is told anything it is copied (`copy.deepcopy`): blocks that nobody but the prefix index holds have a
    policy of their own.
    """

    def inserted(self, block: BlockId, sequence: SequenceId, index: int) -> None:
        """The tier now holds `block`, block number `index` (from 0) of `sequence`. Told once per stay in the tier."""
        ...

    def touched(self, blocks: Iterable[BlockId]) -> None:
        """These blocks were read by steps, in this order. Blocks that the tier does not hold must be ignored.

        Told when it matters, not at each step: before victims are asked for among blocks of running sequences, and when
        a sequence goes idle. Steps that read the same blocks meanwhile are told once.
        """
        ...

    def removed(self, block: BlockId) -> None:
        """The tier no longer holds `block`."""
        ...

    def victims(self, num_blocks: int, evictable: Container[BlockId]) -> list[BlockId]:
        """Name up to `num_blocks` blocks to give up, best first; change nothing.

        Args:
            num_blocks: how many slots are wanted, >= 1.
            evictable: blocks that may go; every name must be in it and be held by the tier; no name twice.
        """
        ...


@runtime_checkable
class PrefetchPolicy(Protocol):
    """Says which layers' slices may be fetched while a layer computes."""

    def layers_ahead(self, layer: int, num_layers: int) -> Sequence[int]:
        """Layers (slice indices, nearest first) that may be fetched while `layer` runs; `layer` itself is implied.

        Where the next step is expected to read the same slices, `num_layers` counts its layers too: they come behind
        those of this one.
        """
        ...
