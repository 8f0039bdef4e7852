"""Which tokens of one sequence are in which block, and where padding lies between them. Knows no tiers."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvtier.errors import IntegrityError
from kvtier.identity import content_of_runs
from kvtier.padding import Padding, PaddingRuns
from kvtier.token_ids import TokenIds
from kvtier.token_runs import TokenRuns
from kvtier.types import BlockId, SequenceId


class TokenSource(enum.Enum):
    """Whether a sequence's token ids are known."""

    IDS = "ids"
    EMBEDS = "embeds"
    """Fed by `inputs_embeds` at least once: ids unknown, so the sequence cannot be compared or recomputed."""


class Made(enum.IntEnum):
    """What the model was given to make a token's K and V, beside the tokens before it and where padding stands."""

    COUNTED = 0
    """Its id; the model counted its position itself."""
    PLACED = 1
    """Its id and its position."""
    OTHERWISE = 2
    """Other inputs too (token types, …), hooks, autocast or something set on the modules since the row began: nobody
    keeps those, and it cannot be computed again."""


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring columns of a row as one call of the model takes them; padding has the id and the position 0."""

    ids: list[int]
    positions: list[int] | None
    """None: the model counts."""
    mask: list[bool]
    """Of the whole row up to here: whether a column is a token."""


class BlockTable:
    """One sequence's ordered block ids and committed tokens.

    A *column* is a place in the padded batch that the caller sees: a token or padding. Blocks hold tokens only. All
    blocks but the last are full (`block_tokens` tokens). Forks copy, never share, these lists. 4 bytes a token, or
    none where a block's label has its ids.
    """

    __slots__ = ("_ids", "_padding", "_runs", "block_tokens", "blocks", "num_tokens", "sequence")

    def __init__(self, sequence: SequenceId, block_tokens: int) -> None:
        self.sequence = sequence
        self.block_tokens = block_tokens
        self.blocks: list[BlockId] = []
        self.num_tokens = 0
        self._padding = PaddingRuns()
        self._ids = TokenIds(block_tokens)
        """Of the first tokens: up to the first that was fed as an embedding."""
        self._runs = TokenRuns()
        """Of each token its position and, as a number, its `Made`."""

    @property
    def length(self) -> int:
        """Columns: tokens and padding."""
        return self.num_tokens + self._padding.num_columns

    @property
    def padding(self) -> Sequence[Padding]:
        """In order; no two at the same token."""
        return self._padding.runs

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

    @property
    def is_counted(self) -> bool:
        """Whether all positions count from 0, and there is no padding."""
        return not self._padding.runs and self._runs.is_counted

    def ids(self) -> array[int]:
        """As `token_ids`, 4 bytes each."""
        return self._ids.slice(0, self.num_tokens) if self.source is TokenSource.IDS else array("i")

    def token_ids(self) -> list[int]:
        """The committed token ids, oldest first, without padding. Empty if any token was fed as an embedding."""
        return self.ids().tolist()

    def first_difference(self, token_ids: Sequence[int]) -> int | None:
        """Index of the first token at which `token_ids` departs from what is held, or None when neither does.

        Compares as many tokens as both have, up to the first that was fed as an embedding.
        """
        length = min(len(token_ids), len(self._ids))
        given, held = array("i", token_ids[:length]), self._ids.slice(0, length)
        if given == held:
            return None
        return next(i for i, (a, b) in enumerate(zip(given, held, strict=True)) if a != b)

    def content(self, index: int, *, with_padding: bool = True) -> bytes | None:
        """What makes full block `index` equal to another sequence's that has the same parent block, or None.

        Ids, positions and, unless that plays no part, padding in front of each token, encoded; None where ids are
        unknown.
        """
        first, last = index * self.block_tokens, (index + 1) * self.block_tokens
        if last > len(self._ids):
            return None
        padding = self._padding.within(first, last) if with_padding else []
        return content_of_runs(self._ids.slice(first, last), self._runs.positions(first, last), padding)

    def share_ids(self, first_block: int, contents: Sequence[bytes]) -> None:
        """What full blocks from number `first_block` on are labelled with, `content` of each: their ids need not be
        kept here too. Raises IntegrityError: these are other tokens'."""
        self._ids.share(first_block, contents)

    def tail_content(self) -> bytes | None:
        """As `content`, of the tail's few tokens, without padding; None where ids are unknown or there is no tail."""
        first = self.num_full_blocks * self.block_tokens
        if not self.tail_tokens or len(self._ids) < self.num_tokens:
            return None
        ids, positions = self._ids.slice(first, self.num_tokens), self._runs.positions(first, self.num_tokens)
        return content_of_runs(ids, positions, ())

    def pieces(self, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """Tokens `first … last - 1` as runs of neighbouring columns: `(column, token, count)`. O(runs)."""
        return self._padding.pieces(first, last)

    def column(self, num_tokens: int) -> int:
        """How many columns end with the first `num_tokens` tokens: padding behind the last of them is not counted."""
        return self._padding.column(num_tokens)

    def obstacle(self, first: int, last: int) -> str | None:
        """Why tokens `first … last - 1` cannot be computed again; None when they can."""
        if last > len(self._ids):
            return "some of its tokens were fed as inputs_embeds, and their ids are not known"
        if any(made == Made.OTHERWISE for _, _, made in self._runs.runs(first, last)):
            return (
                "some of its tokens were computed under hooks or autocast, after something was set on the model's "
                "modules, or with inputs beside ids, positions and a mask (token types, …)"
            )
        return None

    def spans(self, first: int, last: int) -> Iterator[Span]:
        """Tokens `first … last - 1` and the padding in front of each, cut where what they were made from changes.

        `obstacle` must have none. O(columns before `last`) for each.
        """
        while first < last:
            made, end = self._runs.number(first), first
            placed: list[int] = []
            for position, count, each in self._runs.runs(first, last):
                if each != made:
                    break
                placed += range(position, position + count)
                end += count
            begin, columns = self.column(first), self.column(end)
            mask = [False] * columns
            ids, positions = [0] * (columns - begin), [0] * (columns - begin)
            for column, token, count in self.pieces(0, end):
                mask[column : column + count] = [True] * count
                if token + count > first:
                    skipped = max(0, first - token)
                    new = slice(column + skipped - begin, column + count - begin)
                    ids[new] = self._ids.slice(token + skipped, token + count)
                    positions[new] = placed[token + skipped - first : token + count - first]
            yield Span(ids, positions if made == Made.PLACED else None, mask)
            first = end

    def append(
        self,
        num_tokens: int,
        token_ids: Sequence[int] | None,
        new_blocks: Sequence[BlockId],
        *,
        positions: Sequence[int] | None = None,
        padding: Sequence[Padding] = (),
        made: Made = Made.COUNTED,
    ) -> None:
        """Commit `num_tokens` tokens, the later ones of them in `new_blocks`.

        Args:
            token_ids: None when the tokens were fed as embeddings.
            positions: where the model placed them; None: counted on from the tokens held.
            padding: padding columns among them, `at` counted from the first new token; `at == num_tokens` is behind.
            made: what they were made from.

        Raises:
            IntegrityError: the blocks do not fit the tokens; nothing changed.
        """
        first, num_blocks = self.num_tokens, len(self.blocks) + len(new_blocks)
        total = first + num_tokens
        if num_blocks != -(-total // self.block_tokens):
            raise IntegrityError(f"{total} tokens do not fill {num_blocks} blocks")
        if token_ids is not None and len(token_ids) != num_tokens:
            raise IntegrityError(f"{len(token_ids)} token ids for {num_tokens} tokens")
        if positions is not None and len(positions) != num_tokens:
            raise IntegrityError(f"{len(positions)} positions for {num_tokens} tokens")
        # An append that was interrupted here must not name tokens that are not held.
        self._ids.put(first, () if token_ids is None else token_ids)
        self._runs.truncate(first)
        if positions is None:
            self._runs.append(num_tokens, first, made)
        else:
            self._runs.extend(positions, made)
        if new_blocks:
            self.blocks.extend(new_blocks)
        for run in padding:
            self._padding.add(first + run.at, run.count)
        self.num_tokens = total

    def mask_end(self, num_columns: int) -> list[BlockId]:
        """The last columns become padding: their tokens are dropped. Returns the blocks no longer held."""
        dropped = self.truncate(self.length - num_columns)
        if num_columns:
            self._padding.add(self.num_tokens, num_columns)
        return dropped

    def replace(self, index: int, block: BlockId) -> BlockId:
        """Put `block`, which holds the same tokens, in the place of block number `index`; returns the old one."""
        old, self.blocks[index] = self.blocks[index], block
        return old

    def replace_tail(self, block: BlockId) -> BlockId:
        """Put `block` in the tail's place (it holds a copy of its tokens); returns the old one."""
        if not self.tail_tokens:
            raise IntegrityError("there is no tail to replace")
        return self.replace(-1, block)

    def truncate(self, length: int) -> list[BlockId]:
        """Keep the first `length` columns; returns the blocks that the sequence no longer holds.

        O(1) when nothing is dropped. The last kept block may become a tail: its later tokens are never read again.
        """
        if not 0 <= length <= self.length:
            raise IntegrityError(f"cannot keep {length} of {self.length} columns")
        if length == self.length:
            return []
        num_tokens, padding = self._padding.first_columns(length)
        keep = -(-num_tokens // self.block_tokens)
        dropped = self.blocks[keep:]
        del self.blocks[keep:]
        self._ids.truncate(num_tokens)
        self._runs.truncate(num_tokens)
        self._padding = padding
        self.num_tokens = num_tokens
        return dropped

    def fork(self, sequence: SequenceId) -> BlockTable:
        """A table of its own with the same blocks and tokens. The caller counts the new holder of each block."""
        twin = BlockTable(sequence, self.block_tokens)
        twin.blocks = list(self.blocks)
        twin.num_tokens = self.num_tokens
        twin._padding = self._padding.copy()
        twin._ids = self._ids.copy()
        twin._runs = self._runs.copy()
        return twin

    def check_integrity(self) -> None:
        """Raise IntegrityError if blocks, tokens, padding and ids disagree."""
        if len(self.blocks) != -(-self.num_tokens // self.block_tokens):
            raise IntegrityError(f"sequence {self.sequence}: {self.num_tokens} tokens in {len(self.blocks)} blocks")
        if len(set(self.blocks)) != len(self.blocks):
            raise IntegrityError(f"sequence {self.sequence} holds a block twice")
        if len(self._ids) > self.num_tokens or self._runs.num_tokens != self.num_tokens:
            raise IntegrityError(
                f"sequence {self.sequence}: {len(self._ids)} ids and {self._runs.num_tokens} positions for "
                f"{self.num_tokens} tokens"
            )
        if not self._padding.is_among(self.num_tokens):
            raise IntegrityError(f"sequence {self.sequence}: padding {self.padding} in {self.num_tokens} tokens")
