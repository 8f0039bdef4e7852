"""Sessions as files that another process or machine can take in: written whole or not at all, read only if verified.

It knows neither caches nor tiers: blocks are bytes here. The format is docs/session-archive.md. The async twins read
and write with aiofiles, do what else takes time on a thread, and share all but that with the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiofiles
import numpy as np

from kvtier.archive_format import NOT_ONE, ArchiveEncoder, ArchiveLayout, InvalidArchive, read_layout
from kvtier.archive_header import ArchiveHeader
from kvtier.errors import ArchiveError, ClosedError
from kvtier.new_file import NewFile
from kvtier.stores.file_io import close_fd
from kvtier.types import BlockShape, Compression

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = [
    "ArchiveHeader",
    "ArchiveReader",
    "AsyncArchiveReader",
    "write_archive",
    "write_archive_async",
    "zero_behind",
]

_T = TypeVar("_T")


def zero_behind(block: Any, shape: BlockShape, num_tokens: int) -> None:
    """Make all of a block zero but its first tokens: other conversations may have left their KV there.

    Args:
        block: `[block_bytes]` of bytes, changed in place: contiguous, a numpy array or a tensor.
    """
    if num_tokens >= shape.block_tokens:
        return
    for layer in block.reshape(shape.num_layers, shape.slice_bytes):
        for part in (layer[: shape.key_bytes], layer[shape.key_bytes :]):
            part.reshape(shape.kv_heads, shape.block_tokens, -1)[:, num_tokens:] = 0


def write_archive(
    path: Path,
    header: ArchiveHeader,
    blocks: Iterable[Buffer],
    *,
    overwrite: bool = False,
    compression: Compression = Compression.NONE,
) -> int:
    """Write a session to a file of its own, mode 0600; how many bytes it has.

    Args:
        blocks: `header.num_blocks` of them, each of `header.block_bytes` contiguous bytes; each is let go of before the
            next is asked for. They are written as they are: what a tail holds behind its tokens may be another user's,
            and is the caller's to zero.
        overwrite: replace a regular file. Nothing else is ever replaced.
        compression: `zstd` takes 2- and 4-byte floats only; KV of another dtype lies as it is.

    Raises:
        ArchiveError: the path cannot be written, or is taken; or the header's texts are too long.
        ValueError: other blocks than the header says.
        Whatever `blocks` raises.
        After any error, Ctrl-C too, `path` is what it was before, and nothing is left beside it; unless the file was in
        its place by then: it is whole, and an error says "is written" (its folder could not be flushed). After a
        `kill -9` something may be left beside it, which the next write to `path` removes.

    Cost: one checksum of the bytes and one flush; memory for two blocks, with zstd for five.
    """
    encoder = ArchiveEncoder(header, compression)
    with NewFile(path, overwrite=overwrite) as file:
        file.write(encoder.head)
        for data in blocks:
            for piece in encoder.block(data):
                file.write(piece)
            del data, piece
        file.write(encoder.end())
        file.publish()
    return encoder.num_bytes


async def write_archive_async(
    path: Path,
    header: ArchiveHeader,
    blocks: Iterable[Buffer] | AsyncIterable[Buffer],
    *,
    overwrite: bool = False,
    compression: Compression = Compression.NONE,
) -> int:
    """`write_archive`, byte for byte, without keeping the event loop waiting: but a plain iterable is advanced on it.

    Takes memory for a block or two more. Cancelling waits for the write or flush that is under way; then all is as
    after any other error, unless the file had just come to its place. It is whole then.
    """
    encoder = await _to_end(asyncio.to_thread(ArchiveEncoder, header, compression))
    new = NewFile(path, overwrite=overwrite)
    try:
        await _to_end(asyncio.to_thread(new.create))
        # Unbuffered: nothing is left to be written, and to fail, when it is closed.
        async with aiofiles.open(new.fd, "wb", buffering=0, closefd=False) as file:

            async def write(data: Buffer) -> None:
                with new.failing("cannot be written"):
                    view = memoryview(data).cast("B")
                    while view:
                        view = view[await _to_end(file.write(view)) :]

            await write(encoder.head)
            async for data in _each(blocks):
                for piece in await _to_end(asyncio.to_thread(encoder.block, data)):
                    await write(piece)
                del data, piece
            await write(encoder.end())
        await _to_end(asyncio.to_thread(new.publish))
    finally:
        await _to_end(asyncio.to_thread(new.abandon))
    return encoder.num_bytes


class ArchiveReader:
    """An exported session, read. Entering checks all of it but the blocks' own bytes, which are checked as they come.

    So a file that is cut off, or has blocks of another, is refused before the first block. Compare `header` with what
    you expect, namespace, sizes and ids too, before you ask for `blocks`: checksums tell damage, not who made the file.
    """

    def __init__(self, path: Path) -> None:
        """Does nothing yet."""
        self.path = path
        self._fd = -1
        self._layout: ArchiveLayout | None = None

    def open(self) -> None:
        """What entering does.

        Raises:
            ArchiveError: it cannot be read, is no regular file (a FIFO is not waited for), or no whole archive of this
                format. The reader is closed.

        Cost: a short read for each block, and memory for the token ids and 32 bytes a block.
        """
        if "\0" in str(self.path):
            raise ArchiveError(f"{str(self.path)!r} is no path: it has a zero byte in it")
        self.close()
        try:
            with self._naming():
                self._fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
                status = os.fstat(self._fd)
                if not stat.S_ISREG(status.st_mode):
                    raise InvalidArchive("is no regular file, and so no exported session", NOT_ONE)
                self._layout = read_layout(self._read, status.st_size)
        except BaseException:  # a Ctrl-C too: no descriptor is left
            self.close()
            raise

    @property
    def header(self) -> ArchiveHeader:
        """Whose session it is. Raises ClosedError before entering and after leaving."""
        return self._opened().header

    def blocks(self) -> Iterator[memoryview]:
        """The blocks in order, each `[block_bytes]`, read-only, and a buffer of its own.

        Raises:
            ArchiveError: this one is damaged or cannot be read; those before it were right.
            ClosedError: the reader was closed.

        Cost: a read and a checksum of each; memory for two blocks, with zstd for four.
        """
        for block in self._opened().blocks():
            layout = self._opened()  # it may have been closed meanwhile
            with self._naming():
                data = layout.decoded(block, self._read(block.offset_bytes, block.stored_bytes))
            yield data
            del data  # not held while the next one is read

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        if self._fd >= 0:
            close_fd(self._fd)
        self._fd, self._layout = -1, None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _opened(self) -> ArchiveLayout:
        if self._layout is None:
            raise ClosedError(f"{self.path} is not open: use its reader in a `with`")
        return self._layout

    def _read(self, offset_bytes: int, num_bytes: int) -> memoryview:
        """So many bytes, in a buffer of their own. Raises InvalidArchive: the file has become shorter; OSError."""
        out, done = np.empty(num_bytes, np.uint8).data, 0
        while done < num_bytes:
            done += _more(os.preadv(self._fd, [out[done:]], offset_bytes + done))
        return out

    @contextlib.contextmanager
    def _naming(self) -> Iterator[None]:
        """Whatever goes wrong inside as an ArchiveError that names the file."""
        try:
            yield
        except InvalidArchive as error:
            raise ArchiveError(f"{self.path} {error}. Mend: {error.mend}") from None
        except OSError as error:
            mend = "give a file that is there and that you may read"
            raise ArchiveError(error.errno, f"{self.path} cannot be read: {error.strerror}. Mend: {mend}") from error


class AsyncArchiveReader:
    """`ArchiveReader` for `async with` and `async for`; the same checks, errors and bytes."""

    def __init__(self, path: Path) -> None:
        """Does nothing yet."""
        self._reader = ArchiveReader(path)

    @property
    def header(self) -> ArchiveHeader:
        """As `ArchiveReader.header`."""
        return self._reader.header

    async def blocks(self) -> AsyncIterator[memoryview]:
        """As `ArchiveReader.blocks`. Cancelling waits for the read that is under way."""
        reader = self._reader
        layout = reader._opened()
        async with aiofiles.open(reader._fd, "rb", buffering=0, closefd=False) as file:
            for block in layout.blocks():
                reader._opened()
                with reader._naming():
                    await _to_end(file.seek(block.offset_bytes))
                    stored = rest = np.empty(block.stored_bytes, np.uint8).data
                    while rest:
                        rest = rest[_more(await _to_end(file.readinto(rest))) :]
                    data = await _to_end(asyncio.to_thread(layout.decoded, block, stored))
                yield data
                del data, stored, rest

    async def __aenter__(self) -> Self:
        try:
            await _to_end(asyncio.to_thread(self._reader.open))
        except BaseException:  # cancelled when it had just been opened
            self._reader.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._reader.close()


def _more(num_bytes: int | None) -> int:
    """What a read gave, which is something. Raises InvalidArchive at the file's end."""
    if not num_bytes:
        raise InvalidArchive("was cut off while it was read")
    return num_bytes


async def _each(blocks: Iterable[_T] | AsyncIterable[_T]) -> AsyncIterator[_T]:
    if isinstance(blocks, AsyncIterable):
        async for block in blocks:
            yield block
            del block
    else:
        for block in blocks:
            yield block
            del block


async def _to_end(work: Coroutine[Any, Any, _T]) -> _T:
    """Wait for work on a thread, to its end if cancelled meanwhile: it has the file and the buffers until then."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task])  # which does not cancel it
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # seen: it is as nothing beside being cancelled
        raise
    return task.result()
