"""Whose KV a block is: the model as it was hashed before it computed, the salt, and the label that follows from them.

Pure: what hashes the model is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvtier.identity import digest
from kvtier.types import SlotLabel


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a model was at one time, 32 bytes each."""

    weights: bytes
    """Of all that should not change while the model is wrapped: tensors, modules, config, versions, shapes."""
    namespace: bytes
    """Of that, and of the adapters in force and the salt: what makes the KV of given tokens what it is."""
    adapters: bytes = b""
    """The adapters in force, encoded."""

    @property
    def model(self) -> bytes:
        """The same for every salt."""
        return self.weights + self.adapters

    def salted(self, salt: bytes) -> Fingerprint:
        """The same model, for KV that belongs to whoever names this salt."""
        return replace(self, namespace=namespace_of(self.weights, self.adapters, salt))


def namespace_of(weights: bytes, adapters: bytes, salt: bytes) -> bytes:
    """32 bytes: what makes the KV of given tokens what it is, and whose it is."""
    return digest("namespace", [("weights", weights), ("adapters", adapters), ("salt", salt)])


class Source(Protocol):
    """The model, as far as labels need it."""

    def fingerprint(self) -> Fingerprint | None:
        """Hash the model as it is now; None if it has parts that cannot be hashed. Seconds a GB: a fraction of one."""
        ...

    def begin_fingerprint(self) -> Callable[[], Fingerprint | None]:
        """The same, but for the tensors' bytes, which are read when the result is called, by any thread."""
        ...

    def structure(self) -> bytes | None:
        """Of all but the tensors: what the modules are and what is set on them. None if a part cannot be told."""
        ...

    def seen(self) -> bytes | None:
        """Of what the modules are and what is set on them, as seen at the last look at the weights. Costs nothing."""
        ...

    def is_plain(self, arguments: Mapping[str, Any]) -> bool:
        """Whether a call computes the KV of its tokens from ids, positions, padding and the fingerprint alone."""
        ...


@dataclass(eq=False, slots=True, weakref_slot=True)
class Origin:
    """The model that one or several batches' KV is computed with, as hashed before the first of their tokens."""

    fingerprint: Fingerprint
    salt: bytes = b""
    """Whose KV it is."""
    num_proven: int = 0
    """Of all blocks sealed, how many were when the model was last seen to be the same."""
    is_stale: bool = False
    """The model was seen to differ: what was sealed since `num_proven` is of either."""


@dataclass(frozen=True, slots=True)
class Sealed:
    """A sealed block's label, and what is to be proven before it may be used."""

    label: SlotLabel
    parent: bytes | None
    """Identity of the block before it; None for a sequence's first."""
    origin: Origin
    number: int
    """How many blocks had been sealed before; -1 for one that was proven by the process that wrote it."""

    @property
    def is_refuted(self) -> bool:
        """Whether the model was seen to differ from what it was, and that may have been before the block was made."""
        return self.origin.is_stale and self.number >= self.origin.num_proven
