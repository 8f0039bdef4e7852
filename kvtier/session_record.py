"""What is kept of a conversation on disk: its tokens, whose they are, and how long it stays. Pure: bytes in, bytes out.

`docs/nvme-format.md` has the format, byte by byte. What is decoded may have been crafted: no length in it is used
before it was compared with what is there, and nothing is believed before the checksum was.
"""

from __future__ import annotations

import hashlib
import math
import struct
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.identity import DIGEST_BYTES, block_identity, digest, framed, token_content
from kvtier.types import SlotLabel

MAGIC = b"KVTSESS\0"
VERSION = 1
CHECKSUM_BYTES = 32
_HEAD = struct.Struct("<8sHH")  # magic, version, reserved
_LENGTH = struct.Struct("<Q")
_TIMES = struct.Struct("<ddd")
_HEADS = struct.Struct("<QQQ")  # kv_heads, key_dim, value_dim
_FIELDS = ("name", "salt", "namespace", "block_tokens", "times", "is_pinned", "kv", "token_ids")
_MAX_BLOCK_TOKENS = (1 << 31) - 1
_TOKEN_BYTES = 4


class LaterVersionError(ValueError):
    """Whole, and of a format version that this code does not know, and does not guess at."""


@dataclass(frozen=True, slots=True)
class KvLayout:
    """How the KV of one layer lies in a block: what reading it takes that has no model at hand.

    Raises ValueError: sizes below 1, texts that are empty or not printable.
    """

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    """As torch calls it, without `torch.`."""
    model: str
    """For people; it proves nothing."""

    def __post_init__(self) -> None:
        if not all(1 <= each <= _MAX_BLOCK_TOKENS for each in (self.kv_heads, self.key_dim, self.value_dim)):
            raise ValueError(f"kv is of {self.kv_heads} heads of {self.key_dim} and {self.value_dim}")
        if not all(text and text.isprintable() for text in (self.dtype, self.model)):
            raise ValueError("kv has a dtype or model that is no name")

    def encoded(self) -> bytes:
        """As a record has it."""
        heads = _HEADS.pack(self.kv_heads, self.key_dim, self.value_dim)
        return heads + f"{self.dtype}\0{self.model}".encode(errors="surrogatepass")

    @classmethod
    def decoded(cls, data: bytes) -> KvLayout:
        """What `encoded` was made of. Raises ValueError."""
        dtype, _, model = str(data[_HEADS.size :], "utf-8", "surrogatepass").partition("\0")
        if len(data) < _HEADS.size:
            raise ValueError("has a kv of another size than it has")
        kv_heads, key_dim, value_dim = _HEADS.unpack_from(data)
        return cls(kv_heads, key_dim, value_dim, dtype, model)


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """What is kept of one conversation: enough to find its blocks again, and to compute those that are gone.

    Raises ValueError for what cannot be kept: digests of other lengths, block_tokens below 1, times that are no times.
    """

    name: str
    """Any text. Shown to people only with escapes: see `kvtier.terminal.printable`."""
    salt: bytes
    """32 bytes: digest of the tenant's salt, never the salt itself."""
    namespace: bytes
    """32 bytes: whose KV it is (`origin.Fingerprint`)."""
    block_tokens: int
    token_ids: array[int]
    """`array("i")`, oldest first. Positions count from 0, and there is no padding."""
    created_s: float
    """Seconds since the epoch, as `used_s`."""
    used_s: float
    ttl_s: float
    """Kept for so long after its last use; inf: until it is deleted."""
    is_pinned: bool
    """Kept whatever `ttl_s` says."""
    kv: KvLayout | None = None
    """Of its blocks; None: nothing was computed yet, or it is not in blocks alone."""

    def __post_init__(self) -> None:
        if len(self.salt) != DIGEST_BYTES or len(self.namespace) != DIGEST_BYTES:
            raise ValueError(
                f"salt and namespace are of {len(self.salt)} and {len(self.namespace)} bytes, not {DIGEST_BYTES}"
            )
        if not 1 <= self.block_tokens <= _MAX_BLOCK_TOKENS:
            raise ValueError(f"block_tokens is {self.block_tokens}")
        if self.token_ids.typecode != "i":
            raise ValueError(f"token_ids are an array of type {self.token_ids.typecode!r}, not 'i'")
        if not (math.isfinite(self.created_s) and math.isfinite(self.used_s)):
            raise ValueError(f"created_s and used_s are {self.created_s} and {self.used_s}")
        if not self.ttl_s >= 0:  # not a number neither
            raise ValueError(f"ttl_s is {self.ttl_s}")

    def key(self) -> bytes:
        """What tells it from all others: 32 bytes."""
        return session_key(self.salt, self.name)

    def is_expired(self, now_s: float) -> bool:
        """Whether nobody used it for longer than its time to live. Pinned ones never are."""
        return not self.is_pinned and now_s - self.used_s > self.ttl_s

    def contents(self) -> Iterator[tuple[bytes, bool]]:
        """Content of each block, first to last, and whether it is full: the last may be a tail."""
        for start in range(0, len(self.token_ids), self.block_tokens):
            ids = self.token_ids[start : start + self.block_tokens]
            positions = array("i", range(start, start + len(ids)))
            yield token_content(ids, positions, ()), len(ids) == self.block_tokens

    def labels(self) -> list[SlotLabel]:
        """What its blocks are found by, first to last; a tail's too. One hash a block."""
        labels: list[SlotLabel] = []
        for content, _ in self.contents():
            parent = labels[-1].identity if labels else None
            labels.append(SlotLabel(self.namespace, block_identity(self.namespace, parent, content), content))
        return labels


def salt_digest(salt: bytes) -> bytes:
    """What stands for a tenant's salt where others may see it: 32 bytes. Empty: no salt."""
    return digest("salt", [("salt", salt)])


def session_key(salt: bytes, name: str) -> bytes:
    """32 bytes for a tenant's session of that name; `salt` is the digest that a record has. Says neither of the two."""
    return digest("session", [("salt", salt), ("name", name.encode(errors="surrogatepass"))])


def encode(record: SessionRecord) -> bytes:
    """A record as a file holds it."""
    values = (
        record.name.encode(errors="surrogatepass"),
        record.salt,
        record.namespace,
        _LENGTH.pack(record.block_tokens),
        _TIMES.pack(record.created_s, record.used_s, record.ttl_s),
        bytes([record.is_pinned]),
        b"" if record.kv is None else record.kv.encoded(),
        _little(record.token_ids).tobytes(),
    )
    data = _HEAD.pack(MAGIC, VERSION, 0) + framed(zip(_FIELDS, values, strict=True))
    return data + _checksum(data)


def decode(data: bytes) -> SessionRecord:
    """The record that `encode` made these bytes of.

    Memory: as much as `data`, whatever is in it.

    Raises:
        LaterVersionError: of a later version.
        ValueError: anything else; it says what is wrong.
    """
    if len(data) < _HEAD.size + CHECKSUM_BYTES:
        raise ValueError(f"is of {len(data)} bytes, too few for a session")
    body = memoryview(data)[:-CHECKSUM_BYTES]
    magic, version, reserved = _HEAD.unpack_from(body)
    if magic != MAGIC:
        raise ValueError("does not begin as a session does")
    # Before the version, which is then not one that a flipped bit made. All versions keep magic and checksum in place.
    if data[-CHECKSUM_BYTES:] != _checksum(body):
        raise ValueError("does not have the checksum that it ends with")
    if version > VERSION:
        raise LaterVersionError(f"is of format version {version}, this code knows {VERSION}")
    if version != VERSION or reserved:
        raise ValueError(f"is of format version {version}, which there is not")
    name, salt, namespace, block_tokens, times, is_pinned, kv, token_ids = _unframed(body[_HEAD.size :])
    if len(block_tokens) != _LENGTH.size or len(times) != _TIMES.size or bytes(is_pinned) not in (b"\0", b"\1"):
        raise ValueError("has a field of another size than it has")
    if len(token_ids) % _TOKEN_BYTES:
        raise ValueError(f"has {len(token_ids)} bytes of token ids, which are of {_TOKEN_BYTES} each")
    ids = array("i")
    ids.frombytes(token_ids)
    created_s, used_s, ttl_s = _TIMES.unpack(times)
    return SessionRecord(
        name=str(name, "utf-8", "surrogatepass"),  # a UnicodeDecodeError is a ValueError
        salt=bytes(salt),
        namespace=bytes(namespace),
        block_tokens=_LENGTH.unpack(block_tokens)[0],
        token_ids=_little(ids),
        created_s=created_s,
        used_s=used_s,
        ttl_s=ttl_s,
        is_pinned=bytes(is_pinned) == b"\1",
        kv=KvLayout.decoded(bytes(kv)) if kv else None,
    )


def _unframed(data: memoryview) -> Iterator[memoryview]:
    """The values of `_FIELDS`, in that order, and nothing behind them. Raises ValueError."""
    for name in _FIELDS:
        found, data = _part(data)
        if bytes(found[:32]) != name.encode():
            raise ValueError(f"has another field in the place of {name}")
        value, data = _part(data)
        yield value
    if data:
        raise ValueError(f"has {len(data)} bytes behind its last field")


def _part(data: memoryview) -> tuple[memoryview, memoryview]:
    """What stands behind its length, and the rest."""
    if len(data) < _LENGTH.size:
        raise ValueError("ends in the middle of a length")
    length, rest = _LENGTH.unpack_from(data)[0], data[_LENGTH.size :]
    if length > len(rest):
        raise ValueError(f"has a part of {length} bytes, and {len(rest)} are left")
    return rest[:length], rest[length:]


def _little(numbers: array[int]) -> array[int]:
    """To or from the order of bytes on disk."""
    if sys.byteorder != "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers


def _checksum(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=CHECKSUM_BYTES).digest()
