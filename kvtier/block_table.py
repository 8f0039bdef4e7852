"""Which tokens of one sequence are in which block. Knows no tiers."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence

from kvtier.errors import IntegrityError
from kvtier.types import BlockId, SequenceId


class TokenSource(enum.Enum):
    """Whether a sequence's token ids are known."""

    IDS = "ids"
    EMBEDS = "embeds"
    """Fed by `inputs_embeds` at least once: ids unknown, so the sequence cannot be compared or recomputed."""


class BlockTable:
    """One sequence's ordered block ids and committed tokens.

    All blocks but the last are full (`block_tokens` tokens). Forks copy, never share, these lists. 4 bytes a token.
    """

    def __init__(self, sequence: SequenceId, block_tokens: int) -> None:
        self.sequence = sequence
        self.block_tokens = block_tokens
        self.blocks: list[BlockId] = []
        self.num_tokens = 0
        self._ids = array("i")  # of the first tokens: up to the first that was fed as an embedding

    @property
    def source(self) -> TokenSource:
        """Whether the ids of all tokens are known; a crop past the first embedding makes them so again."""
        return TokenSource.IDS if len(self._ids) == self.num_tokens else TokenSource.EMBEDS

    @property
    def tail_tokens(self) -> int:
        """Tokens in the tail; 0 when the last block is full or there is none."""
        return self.num_tokens % self.block_tokens

    @property
    def num_full_blocks(self) -> int:
        """How many leading blocks are full."""
        return self.num_tokens // self.block_tokens

    @property
    def tail(self) -> BlockId | None:
        """The partly filled last block, if there is one."""
        return self.blocks[-1] if self.tail_tokens else None

    def token_ids(self) -> list[int]:
        """The committed token ids, oldest first. Empty if any token was fed as an embedding."""
        return list(self._ids) if self.source is TokenSource.IDS else []

    def first_difference(self, token_ids: Sequence[int]) -> int | None:
        """Index of the first token at which `token_ids` departs from what is held, or None when neither does.

        Compares as many tokens as both have, up to the first that was fed as an embedding.
        """
        length = min(len(token_ids), len(self._ids))
        given = array("i", token_ids[:length])
        if given == self._ids[:length]:
            return None
        return next(i for i, (a, b) in enumerate(zip(given, self._ids, strict=False)) if a != b)

    def append(self, num_tokens: int, token_ids: Sequence[int] | None, new_blocks: Sequence[BlockId]) -> None:
        """Commit `num_tokens` tokens, the later ones of them in `new_blocks`.

        Raises:
            IntegrityError: the blocks do not fit the tokens; nothing changed.
        """
        del self._ids[self.num_tokens :]  # an append that was interrupted here must not name tokens that are not held
        total = self.num_tokens + num_tokens
        if len(self.blocks) + len(new_blocks) != -(-total // self.block_tokens):
            raise IntegrityError(f"{total} tokens do not fill {len(self.blocks) + len(new_blocks)} blocks")
        if token_ids is not None and len(token_ids) != num_tokens:
            raise IntegrityError(f"{len(token_ids)} token ids for {num_tokens} tokens")
        if token_ids is not None and self.source is TokenSource.IDS:
            self._ids.extend(token_ids)
        self.blocks.extend(new_blocks)
        self.num_tokens = total

    def replace_tail(self, block: BlockId) -> BlockId:
        """Put `block` in the tail's place (it holds a copy of its tokens); returns the old one."""
        if not self.tail_tokens:
            raise IntegrityError("there is no tail to replace")
        old, self.blocks[-1] = self.blocks[-1], block
        return old

    def truncate(self, num_tokens: int) -> list[BlockId]:
        """Keep the first `num_tokens` tokens; returns the blocks that the sequence no longer holds.

        O(1) when nothing is dropped. The last kept block may become a tail: its later tokens are never read again.
        """
        if not 0 <= num_tokens <= self.num_tokens:
            raise IntegrityError(f"cannot keep {num_tokens} of {self.num_tokens} tokens")
        if num_tokens == self.num_tokens:
            return []
        keep = -(-num_tokens // self.block_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        del self._ids[num_tokens:]
        self.num_tokens = num_tokens
        return dropped

    def fork(self, sequence: SequenceId) -> BlockTable:
        """A table of its own with the same blocks and tokens. The caller counts the new holder of each block."""
        twin = BlockTable(sequence, self.block_tokens)
        twin.blocks = list(self.blocks)
        twin.num_tokens = self.num_tokens
        twin._ids = array("i", self._ids)
        return twin

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks, tokens and ids disagree."""
        if len(self.blocks) != -(-self.num_tokens // self.block_tokens):
            raise IntegrityError(f"sequence {self.sequence}: {self.num_tokens} tokens in {len(self.blocks)} blocks")
        if len(set(self.blocks)) != len(self.blocks):
            raise IntegrityError(f"sequence {self.sequence} holds a block twice")
        if len(self._ids) > self.num_tokens:
            raise IntegrityError(f"sequence {self.sequence}: {len(self._ids)} ids for {self.num_tokens} tokens")
