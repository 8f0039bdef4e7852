"""Finding the blocks that a prompt begins with: in the prefix index, or among what lies in files.

Works on ids; touches no tensor. One thread at a time.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvtier.block_table import BlockTable
from kvtier.identity import token_content
from kvtier.origin import Origin, Sealed
from kvtier.placement import Placement
from kvtier.prefix import Miss
from kvtier.types import BlockId, SequenceId, Slot, SlotLabel, Tier

_ADOPTED = -1
"""The number of a block that an earlier process has proven."""


@dataclass(slots=True)
class PrefixMetrics:
    """Counters of one runtime's look-ups since it was built."""

    lookups: int = 0
    """Rows of prompts that were looked up."""
    tokens: int = 0
    """Their tokens."""
    reused_tokens: Counter[Tier] = field(default_factory=Counter)
    """Those that were found and not computed, by the fastest tier that held their block."""
    misses: Counter[Miss] = field(default_factory=Counter)
    """Rows by why the first block that was not found was not."""


@dataclass(frozen=True, slots=True)
class Match:
    """What was found of one prompt."""

    blocks: tuple[BlockId, ...]
    """Its first full blocks, in order. Each is in the prefix index, which holds it."""
    miss: Miss | None
    """Why there are not more of them; None: the prompt has no further full block."""


class Files(Protocol):
    """What a store knows of labelled blocks."""

    @property
    def num_found(self) -> int:
        """Blocks of an earlier process that can be found."""
        ...

    def num_in(self, namespace: bytes) -> int:
        """How many of those, and of this process, are of a namespace."""
        ...

    def find(self, label: SlotLabel) -> Slot | None:
        """The slot that holds this block whole."""
        ...


class PrefixCache:
    """Looks prompts up, and enters what was sealed. Off where there are no labels."""

    def __init__(
        self,
        placement: Placement,
        block_tokens: int,
        files: Files | None = None,
    ) -> None:
        """`files`: the nvme store, if blocks in it can be found."""
        self._placement, self._block_tokens, self._files = placement, block_tokens, files
        self.metrics = PrefixMetrics()

    def as_dict(self) -> dict[str, object]:
        """Plain values, for `stats()`. O(cached blocks)."""
        placement, metrics = self._placement, self.metrics
        blocks = placement.prefixes.blocks()
        return {
            "blocks": len(blocks),
            "cached_blocks": sum(placement.is_cached(block) for block in blocks),
            "lookups": metrics.lookups,
            "tokens": metrics.tokens,
            "reused_tokens": {tier.label: metrics.reused_tokens[tier] for tier in Tier},
            "misses": {miss.value: metrics.misses[miss] for miss in Miss},
        }

    def count(self, token_ids: Sequence[int], match: Match, table: BlockTable, *computed: int) -> None:
        """Note what a look-up gave, and what of it the row begins with.

        `computed`: the first block of those that were computed after all, and the first that was not.
        """
        metrics = self.metrics
        metrics.lookups += 1
        metrics.tokens += len(token_ids)
        if match.miss is not None:
            metrics.misses[match.miss] += 1
        metrics.reused_tokens.update(self.count_held(table, *computed))

    def count_held(self, table: BlockTable, *computed: int) -> Counter[Tier]:
        """Note as reused what a row holds of its prompt, by the fastest tier of each block, and return that.

        `computed`: as `count` takes it. O(blocks).
        """
        residency = self._placement.residency
        held: Counter[Tier] = Counter()
        for index, block in enumerate(table.blocks):
            tier = residency[block].fastest
            if tier is not None and not (computed and index in range(*computed)):
                held[tier] += min(self._block_tokens, table.num_tokens - index * self._block_tokens)
        self._placement.metrics.reused_tokens.update(held)
        self._placement.sequence_metrics[table.sequence].reused_tokens.update(held)
        return held

    # -- finding ------------------------------------------------------------------------------------------------------

    def contents(self, token_ids: Sequence[int]) -> Iterator[bytes]:
        """Of each full block of a prompt whose positions count from 0. Made as they are asked for."""
        each = self._block_tokens
        ids = array("i", token_ids)
        for first in range(0, len(ids) - each + 1, each):
            yield token_content(ids[first : first + each], range(first, first + each), ())

    def match(self, origin: Origin, token_ids: Sequence[int], sequence: SequenceId) -> Match:
        """The longest run of full blocks from the prompt's beginning that can be had.

        Blocks that are found in files are adopted for `sequence`. Nothing is read but headers. O(blocks found).
        """
        if len(token_ids) < self._block_tokens:
            return Match((), Miss.TOO_SHORT)
        labels = self._placement.labels
        if labels is None:
            return Match((), Miss.UNKNOWN)
        found: list[BlockId] = []
        parent: bytes | None = None
        for content in self.contents(token_ids):
            label = labels.name(origin, parent, content)
            block = self._one(label, parent, origin, sequence, len(found))
            if block is None:
                return Match(tuple(found), self._why(origin, label))
            found.append(block)
            parent = label.identity
        return Match(tuple(found), None)

    def match_tail(self, sealed: Sealed, sequence: SequenceId, index: int) -> BlockId | None:
        """The tail of a sequence that an earlier process kept, held once; None where it is not to be found."""
        files = self._files
        slot = None if files is None or not self._placement.is_readable(Tier.NVME) else files.find(sealed.label)
        return None if slot is None else self._placement.adopt_tail(sequence, index, slot)

    def _one(
        self, label: SlotLabel, parent: bytes | None, origin: Origin, sequence: SequenceId, index: int
    ) -> BlockId | None:
        placement = self._placement
        block = placement.prefixes.find(label)
        if block is not None:
            return block if self._is_whole(block) else None
        if self._files is None or not placement.is_readable(Tier.NVME):
            return None
        slot = self._files.find(label)
        return None if slot is None else placement.adopt(sequence, index, Sealed(label, parent, origin, _ADOPTED), slot)

    def _is_whole(self, block: BlockId) -> bool:
        """Whether it has a copy that can be read, as far as is known: attaching one that has none gains nothing.

        Out of the index with one that has none at all. Nothing speaks against what lies on tiers that hang.
        """
        placement = self._placement
        record = placement.residency[block]
        fastest = record.fastest
        if fastest is None or block in placement.unreadable:
            placement.unindex(block, Miss.CORRUPT)
            return False
        return placement.is_readable(fastest) or any(placement.is_readable(tier) for tier in record.copies)

    def _why(self, origin: Origin, label: SlotLabel) -> Miss:
        prefixes, files = self._placement.prefixes, self._files
        if prefixes.find(label) is not None:
            return Miss.SLOWER  # the tier hangs
        num_in_files = 0 if files is None else files.num_found
        if prefixes.num_in(label.namespace) or (num_in_files and files is not None and files.num_in(label.namespace)):
            return prefixes.miss(label.identity)
        if prefixes.num_of_model(origin.fingerprint.model):
            return Miss.SALT
        return Miss.NAMESPACE if len(prefixes) or num_in_files else prefixes.miss(label.identity)
