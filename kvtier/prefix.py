"""Which token prefix has which blocks: sealed blocks by the chained hash of their tokens, in one namespace or several.

Pure bookkeeping on ids: what lies where, and who else holds a block, is not known here.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict
from dataclasses import dataclass

from kvtier.errors import IntegrityError
from kvtier.labels import Sealed
from kvtier.types import BlockId, SlotLabel


class Miss(enum.Enum):
    """Why a prompt's next full block was computed although it might have been found."""

    UNKNOWN = "unknown"
    """Nobody has computed these tokens behind those before them, as far as is remembered."""
    EVICTED = "evicted"
    """It was there, and was given up to make room."""
    CORRUPT = "corrupt"
    """It was there, and could not be read."""
    NAMESPACE = "namespace"
    """Nothing is kept of this model, with these adapters: all that is, is another's."""
    SALT = "salt"
    """Nothing is kept under this salt, for this model. Whether others have the same tokens plays no part in it."""
    TOO_SHORT = "too_short"
    """The prompt has no full block beside its last token."""
    SLOWER = "slower_than_recomputing"
    """It was there, on a tier from which it takes longer to load than to compute, or that hangs."""


@dataclass(slots=True)
class _Entry:
    block: BlockId
    sealed: Sealed


class PrefixIndex:
    """Blocks by identity. Identities contain namespace and parent, so a chain of them is a prefix.

    Contents are compared too, so that a collision of hashes is seen. A block is in the index until it is removed; to
    hold it meanwhile is its owner's affair. O(1) for each operation; about 500 bytes a block, and 100 for each of the
    last 65,536 that went.
    """

    MAX_GONE = 65_536

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._identities: dict[BlockId, bytes] = {}
        self._children: Counter[bytes] = Counter()
        """How many entries have the block of that identity before them, in the index or not."""
        self._in_namespace: Counter[bytes] = Counter()
        self._of_model: Counter[bytes] = Counter()
        self._by_salt: dict[bytes, dict[BlockId, None]] = {}
        self._gone: OrderedDict[bytes, Miss] = OrderedDict()
        """Why the last ones went."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: object) -> bool:
        return block in self._identities

    def blocks(self) -> list[BlockId]:
        """All of them, those that came first before others."""
        return list(self._identities)

    def add(self, block: BlockId, sealed: Sealed) -> bool:
        """Enter a sealed block; False, and nothing done, where one of that identity is in already, or this one is."""
        identity = sealed.label.identity
        if identity in self._entries or block in self._identities:
            return False
        self._entries[identity] = _Entry(block, sealed)
        self._identities[block] = identity
        self._gone.pop(identity, None)
        self._in_namespace[sealed.label.namespace] += 1
        self._of_model[sealed.origin.fingerprint.model] += 1
        self._by_salt.setdefault(sealed.origin.salt, {})[block] = None
        if sealed.parent is not None:
            self._children[sealed.parent] += 1
        return True

    def remove(self, block: BlockId, why: Miss) -> None:
        """Take a block out, if it is in; `why` is what a later look-up is told."""
        identity = self._identities.pop(block, None)
        if identity is None:
            return
        sealed = self._entries.pop(identity).sealed
        _decrease(self._in_namespace, sealed.label.namespace)
        _decrease(self._of_model, sealed.origin.fingerprint.model)
        del self._by_salt[sealed.origin.salt][block]
        if not self._by_salt[sealed.origin.salt]:
            del self._by_salt[sealed.origin.salt]
        if sealed.parent is not None:
            _decrease(self._children, sealed.parent)
        self.note_gone(identity, why)

    def note_gone(self, identity: bytes, why: Miss) -> None:
        """Remember why the block of that identity is not to be had."""
        self._gone.pop(identity, None)
        self._gone[identity] = why
        while len(self._gone) > self.MAX_GONE:
            self._gone.popitem(last=False)

    def reseal(self, block: BlockId, sealed: Sealed) -> None:
        """The block, which is in, was made anew: it has the same label, and is to be proven again."""
        self._entries[self._identities[block]].sealed = sealed

    def find(self, label: SlotLabel) -> BlockId | None:
        """The block of these very tokens behind that parent, in this namespace."""
        entry = self._entries.get(label.identity)
        if entry is None or entry.sealed.label != label or entry.sealed.is_refuted:
            return None
        return entry.block

    def refuted(self, identity: bytes) -> BlockId | None:
        """The block in the index under that identity, if what it was made with was found to have changed meanwhile."""
        entry = self._entries.get(identity)
        return entry.block if entry is not None and entry.sealed.is_refuted else None

    def sealed(self, block: BlockId) -> Sealed | None:
        """What a block in the index is labelled with."""
        identity = self._identities.get(block)
        return None if identity is None else self._entries[identity].sealed

    def chain(self, block: BlockId) -> list[BlockId]:
        """The block and those before it as far as they are in the index, first to last. O(chain)."""
        found: list[BlockId] = []
        identity = self._identities.get(block)
        while identity is not None and identity in self._entries:
            entry = self._entries[identity]
            found.append(entry.block)
            identity = entry.sealed.parent
        return found[::-1]

    def is_leaf(self, block: BlockId) -> bool:
        """Whether no other block in the index continues this one: without it nothing else becomes unreachable."""
        identity = self._identities.get(block)
        return identity is not None and not self._children[identity]

    def num_in(self, namespace: bytes) -> int:
        """How many blocks of a namespace are in the index."""
        return self._in_namespace[namespace]

    def num_of_model(self, model: bytes) -> int:
        """How many blocks of a model are in the index, under whatever salt. `model` is `Fingerprint.model`."""
        return self._of_model[model]

    def num_of_salt(self, salt: bytes) -> int:
        """How many blocks of a salt are in the index, of whatever model."""
        return len(self._by_salt.get(salt, ()))

    def of_salt(self, salt: bytes) -> list[BlockId]:
        """Those blocks, those that came first before others."""
        return list(self._by_salt.get(salt, ()))

    def miss(self, identity: bytes) -> Miss:
        """Why the block of that identity is not to be found."""
        return self._gone.get(identity, Miss.UNKNOWN)

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks and identities, or counters and entries, disagree."""
        if len(self._entries) != len(self._identities):
            raise IntegrityError(f"{len(self._entries)} prefixes for {len(self._identities)} blocks")
        children: Counter[bytes] = Counter()
        in_namespace: Counter[bytes] = Counter()
        of_model: Counter[bytes] = Counter()
        for identity, entry in self._entries.items():
            if self._identities.get(entry.block) != identity or entry.sealed.label.identity != identity:
                raise IntegrityError(f"block {entry.block} is indexed by an identity that is not its own")
            in_namespace[entry.sealed.label.namespace] += 1
            of_model[entry.sealed.origin.fingerprint.model] += 1
            if entry.sealed.parent is not None:
                children[entry.sealed.parent] += 1
        counted = self._children, self._in_namespace, self._of_model
        if counted != (children, in_namespace, of_model):
            raise IntegrityError("the prefix index has lost count of its blocks")


def _decrease(counter: Counter[bytes], key: bytes) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]
