"""Which token prefix has which blocks: sealed blocks by the chained hash of their tokens, in one namespace or several.

Pure bookkeeping on ids: what lies where, and who else holds a block, is not known here.
"""

from __future__ import annotations

import enum
from collections import Counter, OrderedDict

from kvtier.errors import IntegrityError
from kvtier.origin import Sealed
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


class PrefixIndex:
    """Blocks by identity. Identities contain namespace and parent, so a chain of them is a prefix.

    Contents are compared too, so that a collision of hashes is seen. A block is in the index until it is removed; to
    hold it meanwhile is its owner's affair. O(1) for each operation; about 100 bytes a block beside its label, and 100
    for each of the last 65,536 that went.
    """

    MAX_GONE = 65_536

    def __init__(self) -> None:
        self._blocks: dict[bytes, BlockId] = {}
        """By identity."""
        self._sealed: dict[BlockId, Sealed] = {}
        self._leaves: set[bytes] = set()
        """Identities of the entries that no entry continues: few, where prefixes are long."""
        self._others: dict[bytes, int] = {}
        """How many entries continue an identity, in the index or not, beside the first that continues one in it."""
        self._in_namespace: Counter[bytes] = Counter()
        self._of_model: Counter[bytes] = Counter()
        self._by_salt: dict[bytes, dict[BlockId, None]] = {}
        """But for those without a salt, which are the rest."""
        self._gone: OrderedDict[bytes, Miss] = OrderedDict()
        """Why the last ones went."""

    def __len__(self) -> int:
        return len(self._sealed)

    def __contains__(self, block: object) -> bool:
        return block in self._sealed

    def blocks(self) -> list[BlockId]:
        """All of them, those that came first before others."""
        return list(self._sealed)

    def add(self, block: BlockId, sealed: Sealed) -> bool:
        """Enter a sealed block; False, and nothing done, where one of that identity is in already, or this one is."""
        identity, origin = sealed.label.identity, sealed.origin
        if identity in self._blocks or block in self._sealed:
            return False
        self._blocks[identity] = block
        self._sealed[block] = sealed
        self._gone.pop(identity, None)
        self._in_namespace[sealed.label.namespace] += 1
        self._of_model[origin.fingerprint.model] += 1
        if origin.salt:
            self._by_salt.setdefault(origin.salt, {})[block] = None
        num_children = self._others.pop(identity, 0)
        if not num_children:
            self._leaves.add(identity)
        elif num_children > 1:
            self._others[identity] = num_children - 1
        parent = sealed.parent
        if parent in self._leaves:
            self._leaves.remove(parent)
        elif parent is not None:
            self._others[parent] = self._others.get(parent, 0) + 1
        return True

    def remove(self, block: BlockId, why: Miss) -> bool:
        """Take a block out; whether it was in. `why` is what a later look-up is told."""
        sealed = self._sealed.pop(block, None)
        if sealed is None:
            return False
        identity, origin = sealed.label.identity, sealed.origin
        del self._blocks[identity]
        _decrease(self._in_namespace, sealed.label.namespace)
        _decrease(self._of_model, origin.fingerprint.model)
        if origin.salt:
            of_salt = self._by_salt[origin.salt]
            del of_salt[block]
            if not of_salt:
                del self._by_salt[origin.salt]
        if identity in self._leaves:
            self._leaves.remove(identity)
        else:
            self._others[identity] = self._others.get(identity, 0) + 1
        parent = sealed.parent
        if parent in self._others:
            _decrease(self._others, parent)
        elif parent is not None:
            self._leaves.add(parent)
        self.note_gone(identity, why)
        return True

    def note_gone(self, identity: bytes, why: Miss) -> None:
        """Remember why the block of that identity is not to be had."""
        self._gone[identity] = why
        self._gone.move_to_end(identity)
        while len(self._gone) > self.MAX_GONE:
            self._gone.popitem(last=False)

    def reseal(self, block: BlockId, sealed: Sealed) -> None:
        """The block, which is in, was made anew: it has the same label, and is to be proven again."""
        if self._sealed[block].label.identity != sealed.label.identity:
            raise IntegrityError(f"block {block} was made anew, and has become another")
        self._sealed[block] = sealed

    def find(self, label: SlotLabel) -> BlockId | None:
        """The block of these very tokens behind that parent, in this namespace."""
        block = self._blocks.get(label.identity)
        if block is None:
            return None
        sealed = self._sealed[block]
        own = sealed.label  # of that identity
        is_it = own.content == label.content and own.namespace == label.namespace and not sealed.is_refuted
        return block if is_it else None

    def refuted(self, identity: bytes) -> BlockId | None:
        """The block in the index under that identity, if what it was made with was found to have changed meanwhile."""
        block = self._blocks.get(identity)
        return block if block is not None and self._sealed[block].is_refuted else None

    def sealed(self, block: BlockId) -> Sealed | None:
        """What a block in the index is labelled with."""
        return self._sealed.get(block)

    def chain(self, block: BlockId) -> list[BlockId]:
        """The block and those before it as far as they are in the index, first to last. O(chain)."""
        found: list[BlockId] = []
        here: BlockId | None = block if block in self._sealed else None
        while here is not None:
            found.append(here)
            parent = self._sealed[here].parent
            here = None if parent is None else self._blocks.get(parent)
        return found[::-1]

    def is_leaf(self, block: BlockId) -> bool:
        """Whether no other block in the index continues this one: without it nothing else becomes unreachable."""
        sealed = self._sealed.get(block)
        return sealed is not None and sealed.label.identity in self._leaves

    def num_in(self, namespace: bytes) -> int:
        """How many blocks of a namespace are in the index."""
        return self._in_namespace[namespace]

    def num_of_model(self, model: bytes) -> int:
        """How many blocks of a model are in the index, under whatever salt. `model` is `Fingerprint.model`."""
        return self._of_model[model]

    def num_of_salt(self, salt: bytes) -> int:
        """How many blocks of a salt are in the index, of whatever model."""
        if not salt:
            return len(self) - sum(len(blocks) for blocks in self._by_salt.values())
        return len(self._by_salt.get(salt, ()))

    def of_salt(self, salt: bytes) -> list[BlockId]:
        """Those blocks, those that came first before others."""
        if not salt:
            return [block for block, sealed in self._sealed.items() if not sealed.origin.salt]
        return list(self._by_salt.get(salt, ()))

    def miss(self, identity: bytes) -> Miss:
        """Why the block of that identity is not to be found."""
        return self._gone.get(identity, Miss.UNKNOWN)

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks and identities, or counters and entries, disagree."""
        if len(self._blocks) != len(self._sealed):
            raise IntegrityError(f"{len(self._blocks)} prefixes for {len(self._sealed)} blocks")
        children: dict[bytes, int] = {}
        in_namespace: Counter[bytes] = Counter()
        of_model: Counter[bytes] = Counter()
        by_salt: dict[bytes, set[BlockId]] = {}
        for identity, block in self._blocks.items():
            sealed = self._sealed.get(block)
            if sealed is None or sealed.label.identity != identity:
                raise IntegrityError(f"block {block} is indexed by an identity that is not its own")
            in_namespace[sealed.label.namespace] += 1
            of_model[sealed.origin.fingerprint.model] += 1
            if sealed.parent is not None:
                children[sealed.parent] = children.get(sealed.parent, 0) + 1
            if sealed.origin.salt:
                by_salt.setdefault(sealed.origin.salt, set()).add(block)
        if {salt: set(blocks) for salt, blocks in self._by_salt.items()} != by_salt:
            raise IntegrityError("the prefix index has lost track of whose its blocks are")
        leaves = self._blocks.keys() - children.keys()
        others = {each: count - (each in self._blocks) for each, count in children.items()}
        others = {each: count for each, count in others.items() if count}
        counted = self._leaves, self._others, self._in_namespace, self._of_model
        if counted != (leaves, others, in_namespace, of_model):
            raise IntegrityError("the prefix index has lost count of its blocks")


def _decrease(counter: dict[bytes, int], key: bytes) -> None:
    left = counter[key] - 1
    if left > 0:
        counter[key] = left
    else:
        del counter[key]
