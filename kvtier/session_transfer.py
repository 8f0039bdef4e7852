"""Sessions out into files of their own, and back in: what an archive holds is read from, and written to, the tiers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from kvtier.block_table import BlockTable, TokenSource
from kvtier.errors import ArchiveError, BlockLostError, SessionExistsError, UnsupportedError
from kvtier.hf import TieredCache
from kvtier.identity import token_content
from kvtier.residency import BlockState
from kvtier.runtime import Runtime
from kvtier.sequences import Beginning
from kvtier.session_archive import (
    ArchiveHeader,
    ArchiveReader,
    AsyncArchiveReader,
    write_archive,
    write_archive_async,
    zero_behind,
)
from kvtier.session_record import salt_digest
from kvtier.session_registry import Sessions
from kvtier.types import BlockId, Tier


def export_session(sessions: Sessions, key: bytes, name: str, path: Path, overwrite: bool) -> int:
    """Write a session to a file; how many bytes it has. See `Session.export`."""
    with _lent(sessions, key, name) as export:
        return write_archive(path, export.header, export.blocks(), overwrite=overwrite)


async def export_session_async(sessions: Sessions, key: bytes, name: str, path: Path, overwrite: bool) -> int:
    """As `export_session`; the event loop goes on meanwhile."""
    with _lent(sessions, key, name) as export:
        return await write_archive_async(path, export.header, export.blocks_async(), overwrite=overwrite)


def import_session(sessions: Sessions, path: Path, name: str | None, salt: bytes, overwrite: bool) -> tuple[bytes, str]:
    """Take an exported session in; its key and name. See `TieredKV.import_session`."""
    with ArchiveReader(path) as reader:
        taken = _Import(sessions, path, reader.header, name, salt, overwrite)
        try:
            for data in reader.blocks():
                taken.add(data)
            return taken.finish()
        finally:
            taken.close()


async def import_session_async(
    sessions: Sessions, path: Path, name: str | None, salt: bytes, overwrite: bool
) -> tuple[bytes, str]:
    """As `import_session`; the event loop goes on meanwhile."""
    async with AsyncArchiveReader(path) as reader:
        taken = await asyncio.to_thread(_Import, sessions, path, reader.header, name, salt, overwrite)
        try:
            async for data in reader.blocks():
                await asyncio.to_thread(taken.add, data)
            return await asyncio.to_thread(taken.finish)
        finally:
            taken.close()


@contextmanager
def _lent(sessions: Sessions, key: bytes, name: str) -> Iterator[_Export]:
    """The session as it is now: nobody generates on it meanwhile."""
    cache = sessions.cache(key, name)
    use = cache.state.enter()
    try:
        yield _Export(sessions, key, name, cache)
    finally:
        cache.state.leave(use)


class _Export:
    """One session, to be read."""

    def __init__(self, sessions: Sessions, key: bytes, name: str, cache: TieredCache) -> None:
        """Raises UnsupportedError: it cannot be told from its tokens what its KV is, or it has none."""
        runtime, state = sessions.runtime, cache.state
        table = state.batch.tables[0]
        _check_tiered(runtime, "export")
        if not table.num_tokens:
            raise UnsupportedError(f"session {name!r} holds nothing yet: generate on it before you export it")
        why = state.obstacle() or table.obstacle(0, table.num_tokens)
        if why is not None or table.source is not TokenSource.IDS or not table.is_counted:
            raise UnsupportedError(f"session {name!r} cannot be exported: {why or 'its positions do not count from 0'}")
        about, shape = sessions.about(key, name), runtime.group.shape
        self.header = ArchiveHeader(
            name=name,
            salt=salt_digest(state.salt),
            namespace=_namespace(runtime, state.salt),
            block_tokens=shape.block_tokens,
            block_bytes=shape.block_bytes,
            dtype=sessions.layout.dtype,
            model=sessions.layout.model,
            token_ids=table.ids(),
            created_s=about.created_s,
            ttl_s=about.ttl_s,
        )
        self._runtime, self._table = runtime, table

    def blocks(self) -> Iterator[memoryview]:
        """Each as it is written: what a tail's slot holds behind its tokens is zeros."""
        for index in range(len(self._table.blocks)):
            yield self._block(index)

    async def blocks_async(self) -> AsyncIterator[memoryview]:
        """As `blocks`."""
        for index in range(len(self._table.blocks)):
            yield await asyncio.to_thread(self._block, index)

    def _block(self, index: int) -> memoryview:
        runtime, block = self._runtime, self._table.blocks[index]
        with runtime.turn:
            runtime.check_open()
            placement = runtime.placement
            placement.settle(block)
            record = placement.residency[block]
            tier = record.fastest
            if tier is None or not placement.is_readable(tier):
                raise BlockLostError(
                    f"block {index} of the session is not to be read now: generate on it once more, which computes it "
                    "again, then export it", (block,),
                )  # fmt: skip
            data = torch.empty(runtime.group.shape.block_bytes, dtype=torch.uint8)
            runtime.stores[tier].read(record.copies[tier], data)
        num_tokens = min(runtime.group.shape.block_tokens, _left(self._table, index))
        zero_behind(data.numpy(), runtime.group.shape, num_tokens)
        return data.numpy().data


class _Import:
    """A session that is being taken in. Its blocks go into gpu slots, and down from there like any others."""

    def __init__(
        self, sessions: Sessions, path: Path, header: ArchiveHeader, name: str | None, salt: bytes, overwrite: bool
    ) -> None:
        runtime = sessions.runtime
        self._sessions, self._runtime, self._header, self._overwrite = sessions, runtime, header, overwrite
        self._name = header.name if name is None else name
        self._key = sessions.key(self._name, salt)
        self._blocks: list[BlockId] = []
        _check_tiered(runtime, "import_session")
        shape, dtype = runtime.group.shape, runtime.group.dtype
        ours, theirs = (shape.block_tokens, shape.block_bytes, dtype), (
            header.block_tokens, header.block_bytes, header.dtype.removeprefix("torch."),
        )  # fmt: skip
        if ours != theirs:
            raise ArchiveError(
                f"{path} holds blocks of {theirs[0]} tokens, {theirs[1]} bytes and {theirs[2]}, this TieredKV has "
                f"blocks of {ours[0]}, {ours[1]} and {ours[2]}. Mend: wrap the model it was made with "
                f"({header.model}), with block_tokens: {theirs[0]}"
            )
        if header.salt != salt_digest(salt):
            raise ArchiveError(f"{path} was exported under another salt. Mend: give import_session that salt")
        if header.namespace != _namespace(runtime, salt):
            raise ArchiveError(
                f"{path} was computed by another model than this one ({header.model}): other weights, adapters, "
                "settings or versions. Mend: wrap the very model that it was exported from"
            )
        if not header.token_ids:
            raise ArchiveError(f"{path} holds a session without tokens. Mend: none is needed, open a new one")
        self._check_free()
        self._cache = sessions.new_cache(salt)
        with runtime.turn:
            self._cache.state.check_weights()

    def _check_free(self) -> None:
        if self._sessions.exists(self._key) and not self._overwrite:
            raise SessionExistsError(
                f"import_session: there is a session {self._name!r} already: give another name=, or overwrite=True "
                "(--overwrite)"
            )

    def add(self, data: memoryview) -> None:
        """The next block. Raises CapacityError: no tier takes it."""
        runtime, index = self._runtime, len(self._blocks)
        gpu = runtime.stores[Tier.GPU]
        with runtime.turn:
            runtime.check_open()
            placement = runtime.placement
            runtime.manager.poll()
            placement.make_room(Tier.GPU, 1)
            slot = placement.pools[Tier.GPU].take()
            assert slot is not None  # there is room
            block = placement.residency.create(self._cache.state.batch.tables[0].sequence, index)
            placement.add_copy(block, Tier.GPU, slot)
            self._blocks.append(block)
            gpu.write(slot, torch.frombuffer(bytearray(data), dtype=torch.uint8))
            self._label(index)  # before it may have to leave for a file

    def finish(self) -> tuple[bytes, str]:
        """It is a session now."""
        runtime, batch, ids = self._runtime, self._cache.state.batch, self._header.token_ids.tolist()
        with runtime.turn:
            self._check_free()
            runtime.manager.attach(batch, [Beginning(0, ids, self._blocks)], len(ids))
            if self._runtime.shares:
                for block in batch.tables[0].blocks:
                    self._runtime.placement.index(block)
            self._sessions.take(self._key, self._name, self._cache, self._header.ttl_s)
        return self._key, self._name

    def _label(self, index: int) -> None:
        each, ids, residency = self._header.block_tokens, self._header.token_ids, self._runtime.placement.residency
        last = (index + 1) * each
        if last > len(ids):
            return
        record = residency[self._blocks[index]]
        record.state = BlockState.SEALED
        labels, origin = self._runtime.labels, self._cache.state.batch.origin
        if labels is None or origin is None:
            return
        parent = residency[self._blocks[index - 1]].sealed if index else None
        content = token_content(ids[last - each : last], range(last - each, last), ())
        record.sealed = labels.seal(origin, parent, content, is_first=index == 0)

    def close(self) -> None:
        """Let go of what the session does not hold."""
        with self._runtime.turn:
            if not self._runtime.closed:
                for block in self._blocks:
                    self._runtime.placement.release(block)
            self._blocks = []


def _check_tiered(runtime: Runtime, operation: str) -> None:
    if runtime.group.num_untiered:
        raise UnsupportedError(
            f"{operation}: {runtime.group.num_untiered} layers of this model are not tiered (windows, linear "
            "attention), and what they keep is not in blocks: only models of full attention alone are exported"
        )


def _namespace(runtime: Runtime, salt: bytes) -> bytes:
    """Whose KV the model as it is now makes, hashed now."""
    found = None if runtime.source is None else runtime.source.fingerprint()
    if found is None:
        raise UnsupportedError("a part of the model cannot be hashed: nobody could tell whose KV a file holds")
    return found.salted(salt).namespace


def _left(table: BlockTable, index: int) -> int:
    return table.num_tokens - index * table.block_tokens
