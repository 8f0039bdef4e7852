"""How an exported session lies in a file, byte by byte: docs/session-archive.md. No I/O, no torch.

Whatever is read here may have been crafted: no length is used before it was compared with the file's size, and nothing
is believed whose checksum does not fit. Checksums find accidents and are no signature: who knows the format can make an
archive.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import ValidationError

from kvtier.archive_header import MAX_FIELDS_BYTES, MAX_TOKENS, ArchiveHeader
from kvtier.codecs.zstd import NUMBERS as ZSTD_NUMBERS
from kvtier.codecs.zstd import ZstdCodec
from kvtier.types import Compression

if TYPE_CHECKING:
    from typing_extensions import Buffer

Bytes = npt.NDArray[np.uint8]

VERSION = 1
MAGIC, END_MAGIC = b"KVTSESS\0", b"KVTSEND\0"
CODEC_NONE = 0
ENCODED_BLOCK_LIMIT = 1 << 32  # blocks of so many bytes are stored as they are: a plane's length is of 32 bits
DIGEST_BYTES = 32
NOT_ONE = "give a file that an export wrote"

PREAMBLE = struct.Struct("<8sIIQ")
"""Magic, version, bytes of the fields, number of tokens. Behind it: the fields, the token ids, the head's digest."""

RECORD = struct.Struct("<QQ16s")
"""In front of each block: stored bytes, codec, checksum."""

END = struct.Struct("<8sQ32s")
"""Magic, bytes of the whole file, digest of the head's digest, all records and what is before it here."""

_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_END_OF_MAGIC_AND_SIZE = 16


def _digest(*parts: Buffer) -> bytes:
    hashed = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        hashed.update(part)
    return hashed.digest()


def block_checksum(head_digest: bytes, number: int, codec: int, stored: Bytes) -> bytes:
    """xxh3_128 of a block's stored bytes behind the archive and the place that they belong to."""
    hashed = xxhash.xxh3_128(head_digest + struct.pack("<QQQ", number, stored.nbytes, codec))
    hashed.update(stored.data)
    return hashed.digest()


class InvalidArchive(Exception):
    """Why a file is refused, in words to be put behind its name; and the mend."""

    def __init__(self, reason: str, mend: str = "copy the file again from where it came, or export once more") -> None:
        super().__init__(reason)
        self.mend = mend


class ArchiveEncoder:
    """One archive as pieces of bytes: `head`, then each `block`, then `end`. Whoever has it writes them, in this order.

    Cost: a checksum of each block; with zstd what `ZstdCodec` takes, for a whole block at once.
    """

    def __init__(self, header: ArchiveHeader, compression: Compression) -> None:
        """Raises ArchiveError as `ArchiveHeader.encoded`."""
        fields, ids = header.encoded()
        head = PREAMBLE.pack(MAGIC, VERSION, len(fields), len(header.token_ids)) + fields + ids
        self._digest = _digest(head)
        self.head = head + self._digest
        self.num_bytes = len(self.head)
        """Of the pieces handed out so far."""
        self._header, self._number = header, 0
        self._records = hashlib.blake2b(self._digest, digest_size=DIGEST_BYTES)
        element_bytes = _ELEMENT_BYTES.get(header.dtype.removeprefix("torch."))
        self._codec: ZstdCodec | None = None
        if (
            compression is Compression.ZSTD
            and element_bytes is not None  # any other dtype lies as it is
            and header.block_bytes % element_bytes == 0
            and header.block_bytes < ENCODED_BLOCK_LIMIT
        ):
            self._codec = ZstdCodec(element_bytes)

    def block(self, data: Buffer) -> tuple[bytes, memoryview]:
        """The next block, `[block_bytes]`, contiguous, as two pieces. The second may be a view of `data`.

        Raises:
            ValueError: another length, or one block too many.
        """
        view = memoryview(data)
        if view.nbytes != self._header.block_bytes or self._number == self._header.num_blocks:
            raise ValueError(
                f"archive: block {self._number} of {self._header.num_blocks} has {view.nbytes} bytes; wanted are "
                f"{self._header.num_blocks} of {self._header.block_bytes}"
            )
        raw = np.frombuffer(view, np.uint8)
        stored = raw if self._codec is None else self._codec.encode(raw)
        codec = CODEC_NONE if self._codec is None or stored.nbytes == raw.nbytes else self._codec.number
        record = RECORD.pack(stored.nbytes, codec, block_checksum(self._digest, self._number, codec, stored))
        self._records.update(record)
        self._number += 1
        self.num_bytes += len(record) + stored.nbytes
        return record, stored.data

    def end(self) -> bytes:
        """The last piece. Raises ValueError when blocks are missing."""
        if self._number != self._header.num_blocks:
            raise ValueError(f"archive: {self._number} blocks were given; the tokens take {self._header.num_blocks}")
        self.num_bytes += END.size
        end = END.pack(END_MAGIC, self.num_bytes, b"")[:_END_OF_MAGIC_AND_SIZE]
        self._records.update(end)
        return end + self._records.digest()


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """Where a block lies in the file, and what its record says."""

    number: int
    offset_bytes: int
    stored_bytes: int
    codec: int
    checksum: bytes


@dataclass(frozen=True, slots=True)
class ArchiveLayout:
    """All of an archive but the blocks' bytes, checked: its length too, so that it is known to be whole."""

    header: ArchiveHeader
    _digest: bytes
    _records: bytes
    _first_offset_bytes: int

    def blocks(self) -> Iterator[StoredBlock]:
        """What is to be read, in order."""
        offset = self._first_offset_bytes
        for number, (stored_bytes, codec, checksum) in enumerate(RECORD.iter_unpack(self._records)):
            offset += RECORD.size
            yield StoredBlock(number, offset, stored_bytes, codec, checksum)
            offset += stored_bytes

    def decoded(self, block: StoredBlock, read: memoryview) -> memoryview:
        """A block's bytes, `[block_bytes]`, of what was read. Raises InvalidArchive: it is not what was written."""
        stored = np.frombuffer(read, np.uint8)
        if block_checksum(self._digest, block.number, block.codec, stored) != block.checksum:
            raise InvalidArchive(
                f"is damaged: block {block.number} of {self.header.num_blocks} is not what was written"
            )
        if block.codec == CODEC_NONE:
            return stored.data.toreadonly()
        out = np.empty(self.header.block_bytes, np.uint8)  # at most twice `stored`: `_is_plausible` has seen to it
        try:
            ZstdCodec(block.codec >> 8).decode(stored, out)
        except ValueError as error:
            raise InvalidArchive(f"is damaged: block {block.number} of {self.header.num_blocks}: {error}") from None
        return out.data.toreadonly()


def read_layout(read: Callable[[int, int], memoryview], size_bytes: int) -> ArchiveLayout:
    """Check an archive from its first byte to its last, less the blocks' own bytes.

    Args:
        read: `(offset, length)` gives so many bytes of the file, or raises.
        size_bytes: of the file. Nothing is read beyond it, nor more than it at once.

    Raises:
        InvalidArchive: why it is refused, to be put behind the file's name.

    Cost: one short read a block.
    """
    if size_bytes < PREAMBLE.size:
        raise InvalidArchive("is no exported session: it is too short", NOT_ONE)
    magic, version, fields_bytes, num_tokens = PREAMBLE.unpack(read(0, PREAMBLE.size))
    if magic != MAGIC:
        raise InvalidArchive("is no exported session", NOT_ONE)
    if version != VERSION:
        reason = f"is of format version {version}, and this kvtier reads version {VERSION}"
        raise InvalidArchive(reason, "read it with the kvtier that wrote it, or a newer one")
    if fields_bytes > MAX_FIELDS_BYTES or num_tokens > MAX_TOKENS:
        raise InvalidArchive("is damaged: its header has impossible lengths")
    signed_bytes = PREAMBLE.size + fields_bytes + 4 * num_tokens
    offset = signed_bytes + DIGEST_BYTES
    if offset + END.size > size_bytes:
        raise InvalidArchive("is damaged: it ends within its header")
    head = read(0, offset)
    digest = bytes(head[signed_bytes:])
    if _digest(head[:signed_bytes]) != digest:
        raise InvalidArchive("is damaged: its header is not what was written")
    ids_at = PREAMBLE.size + fields_bytes
    try:
        header = ArchiveHeader.decoded(bytes(head[PREAMBLE.size : ids_at]), head[ids_at:signed_bytes])
    except ValidationError as error:
        wrong = ", ".join(".".join(map(str, each["loc"])) or "JSON" for each in error.errors(include_input=False))
        raise InvalidArchive(f"has a header that this kvtier does not write: {ascii(wrong)[1:-1]:.200}") from None
    records, first = bytearray(), offset
    for number in range(header.num_blocks):
        if offset + RECORD.size + END.size > size_bytes:
            raise InvalidArchive(f"is damaged: it ends after {number} of its {header.num_blocks} blocks")
        record = read(offset, RECORD.size)
        stored_bytes, codec, _ = RECORD.unpack(record)
        if not _is_plausible(stored_bytes, codec, header.block_bytes):
            raise InvalidArchive(f"is damaged: block {number} has an impossible length or codec")
        offset += RECORD.size + stored_bytes
        records += record
    if offset + END.size != size_bytes:
        what = "it is cut off" if offset + END.size > size_bytes else "something is behind its end"
        raise InvalidArchive(f"is damaged: {what}")
    end = read(offset, END.size)
    magic, file_bytes, whole = END.unpack(end)
    expected = _digest(digest, records, end[:_END_OF_MAGIC_AND_SIZE])
    if magic != END_MAGIC or file_bytes != size_bytes or whole != expected:
        raise InvalidArchive("is damaged: its blocks are not those that were written, or in another order")
    return ArchiveLayout(header, digest, bytes(records), first)


def _is_plausible(stored_bytes: int, codec: int, block_bytes: int) -> bool:
    """Whether a block may be stored so. Of an encoded one only a half or a quarter is compressed, so no bomb fits."""
    if codec == CODEC_NONE:
        return stored_bytes == block_bytes
    for element_bytes, number in ZSTD_NUMBERS.items():
        if codec == number and block_bytes % element_bytes == 0 and block_bytes < ENCODED_BLOCK_LIMIT:
            return (element_bytes - 1) * block_bytes // element_bytes < stored_bytes < block_bytes
    return False
