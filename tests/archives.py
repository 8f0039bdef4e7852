"""Small exported sessions, for tests that write, break and read them."""

from __future__ import annotations

import asyncio
import hashlib
import math
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from kvtier.archive_format import END, PREAMBLE, RECORD
from kvtier.errors import ArchiveError
from kvtier.session_archive import ArchiveHeader, ArchiveReader, AsyncArchiveReader, write_archive, write_archive_async

BLOCK_BYTES = 64


def header(**changes: Any) -> ArchiveHeader:
    """Ten tokens in blocks of four: two full ones and a tail."""
    fields: dict[str, Any] = {
        "name": "alice",
        "salt": b"s" * 32,
        "namespace": b"n" * 32,
        "block_tokens": 4,
        "block_bytes": BLOCK_BYTES,
        "dtype": "bfloat16",
        "model": "LlamaForCausalLM, 30 layers",
        "token_ids": array("i", range(100, 110)),
        "created_s": 1.7e9,
        "ttl_s": math.inf,
    }
    return ArchiveHeader(**fields | changes)


def block(number: int, block_bytes: int = BLOCK_BYTES) -> bytes:
    """Of 2-byte floats whose exponents repeat, as those of KV do: zstd makes it smaller."""
    data = np.random.default_rng(number).integers(0, 256, block_bytes, dtype=np.uint8)
    data[1::2] = 0x3F
    return data.tobytes()


def blocks(of: ArchiveHeader, first: int = 0) -> list[bytes]:
    return [block(first + number, of.block_bytes) for number in range(of.num_blocks)]


def read(path: Path) -> tuple[ArchiveHeader, list[bytes]]:
    with ArchiveReader(path) as reader:
        return reader.header, [bytes(data) for data in reader.blocks()]


def read_async(path: Path) -> tuple[ArchiveHeader, list[bytes]]:
    async def reading() -> tuple[ArchiveHeader, list[bytes]]:
        async with AsyncArchiveReader(path) as reader:
            return reader.header, [bytes(data) async for data in reader.blocks()]

    return asyncio.run(reading())


def write_in_loop(path: Path, of: ArchiveHeader, data: Iterable[bytes], **more: Any) -> int:
    return asyncio.run(write_archive_async(path, of, data, **more))


READ: dict[str, Callable[[Path], tuple[ArchiveHeader, list[bytes]]]] = {"sync": read, "async": read_async}
WRITE: dict[str, Callable[..., int]] = {"sync": write_archive, "async": write_in_loop}


def archive(folder: Path, of: ArchiveHeader | None = None, first: int = 0, **more: Any) -> bytes:
    """The bytes of one."""
    of = of or header()
    path = folder / "made"
    assert write_archive(path, of, blocks(of, first), overwrite=True, **more) == path.stat().st_size
    return path.read_bytes()


def refused_after(path: Path, data: bytes) -> tuple[list[bytes], str]:
    """The blocks that a reader gives out of these bytes before it refuses them, and why; no reason if it does not."""
    path.write_bytes(data)
    given: list[bytes] = []
    try:
        with ArchiveReader(path) as reader:
            given.extend(bytes(each) for each in reader.blocks())
    except ArchiveError as error:
        assert str(path) in str(error) and "Mend: " in str(error)
        return given, str(error)
    return given, ""


# -- for crafting ------------------------------------------------------------------------------------------------------


def parts(data: bytes) -> tuple[bytes, list[tuple[bytes, bytes]], bytes]:
    """The head with its digest, each record and its block, the end. Of an archive that is as it should be."""
    _, _, fields_bytes, num_tokens = PREAMBLE.unpack_from(data)
    at = PREAMBLE.size + fields_bytes + 4 * num_tokens + 32
    head, pairs = data[:at], []
    while at < len(data) - END.size:
        record = data[at : at + RECORD.size]
        at += RECORD.size
        stored = data[at : at + RECORD.unpack(record)[0]]
        at += len(stored)
        pairs.append((record, stored))
    return head, pairs, data[at:]


def resigned(head: bytes, pairs: Iterable[tuple[bytes, bytes]]) -> bytes:
    """An archive of these parts with an end that fits, as somebody makes it who knows the format."""
    pairs = list(pairs)
    body = head + b"".join(record + stored for record, stored in pairs)
    start = END.pack(b"KVTSEND\0", len(body) + END.size, b"")[:16]
    records = b"".join(record for record, _ in pairs)
    return body + start + hashlib.blake2b(head[-32:] + records + start, digest_size=32).digest()


def headed(fields: bytes, ids: bytes, version: int = 1) -> bytes:
    """A head with a digest that fits."""
    head = PREAMBLE.pack(b"KVTSESS\0", version, len(fields), len(ids) // 4) + fields + ids
    return head + hashlib.blake2b(head, digest_size=32).digest()
