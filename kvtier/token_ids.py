"""A row's token ids, 4 bytes each: those of labelled blocks lie in the labels' own contents, which rows share."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from kvtier.errors import IntegrityError
from kvtier.identity import ids_of


class TokenIds:
    """Ids of the first tokens of a row, in order. Of the first blocks they may lie in contents that others hold too."""

    __slots__ = ("_block_tokens", "_contents", "_rest")

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._contents: list[bytes] = []
        """Of the first full blocks, as `identity.token_content`: never written, so that any number of rows share it."""
        self._rest = array("i")

    def __len__(self) -> int:
        return self._num_shared + len(self._rest)

    @property
    def _num_shared(self) -> int:
        return len(self._contents) * self._block_tokens

    def slice(self, first: int, last: int) -> array[int]:
        """Ids of tokens `first … last - 1`, or as many of them as there are: a copy. O(their blocks)."""
        held, each = self._num_shared, self._block_tokens
        if first >= held:
            return self._rest[first - held : last - held]
        found = array("i")
        for number in range(first // each, min(-(-last // each), len(self._contents))):
            begin = number * each
            found += ids_of(self._contents[number])[max(0, first - begin) : last - begin]
        if last > held:
            found += self._rest[: last - held]
        return found

    def put(self, first: int, ids: Iterable[int]) -> None:
        """Of token number `first` and of those behind it, in place of what is known of those. Nothing is put where ids
        before them are missing."""
        num_ids = len(self._contents) * self._block_tokens + len(self._rest)
        if num_ids > first:
            num_ids = self.truncate(first)
        if num_ids == first:
            self._rest.extend(ids)

    def share(self, first_block: int, contents: Sequence[bytes]) -> None:
        """These contents of full blocks have the ids of block number `first_block` and of those behind it. Nothing is
        done where blocks before them have none: they are shared from the first one on.

        Raises IntegrityError: they have other ids; nothing changed.
        """
        skipped = len(self._contents) - first_block
        new = contents[skipped:] if skipped >= 0 else ()
        if not new:
            return
        ids = array("i")
        for content in new:
            ids += ids_of(content)
        if ids != self._rest[: len(new) * self._block_tokens]:
            raise IntegrityError("a block is labelled with other tokens than those that it holds")
        self._contents += new
        del self._rest[: len(ids)]

    def truncate(self, num_tokens: int) -> int:
        """Keep those of the first tokens; how many ids there are then."""
        held, rest = len(self._contents) * self._block_tokens, self._rest
        if num_tokens >= held:
            if num_tokens < held + len(rest):
                del rest[num_tokens - held :]
            return held + len(rest)
        whole, part = divmod(num_tokens, self._block_tokens)
        self._rest = ids_of(self._contents[whole])[:part]
        del self._contents[whole:]
        return num_tokens

    def copy(self) -> TokenIds:
        """The same, sharing nothing that is ever written."""
        twin = TokenIds(self._block_tokens)
        twin._contents, twin._rest = self._contents[:], self._rest[:]
        return twin
