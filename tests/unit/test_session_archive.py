"""The format of exported sessions: what is in the file, what is refused. docs/session-archive.md is compared too."""

from __future__ import annotations

import hashlib
import json
import math
import re
import struct
import tracemalloc
from array import array
from pathlib import Path
from typing import Any

import pytest
import xxhash
import zstandard

from kvtier.archive_format import END, PREAMBLE, RECORD, VERSION
from kvtier.archive_header import MAX_FIELDS_BYTES, MAX_TOKENS
from kvtier.codecs.zstd import NUMBERS
from kvtier.errors import ArchiveError, ClosedError
from kvtier.session_archive import ArchiveReader, write_archive
from kvtier.types import Compression
from tests.archives import (
    READ,
    WRITE,
    archive,
    block,
    blocks,
    headed,
    header,
    parts,
    read,
    refused_after,
    resigned,
)

PAGE = (Path(__file__).parents[2] / "docs" / "session-archive.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("reading", READ)
@pytest.mark.parametrize("writing", WRITE)
@pytest.mark.parametrize("compression", Compression)
@pytest.mark.parametrize("num_tokens", [0, 1, 4, 5, 400])
def test_what_was_written_reads_back(
    tmp_path: Path, reading: str, writing: str, compression: Compression, num_tokens: int
) -> None:
    of = header(token_ids=array("i", range(num_tokens)), ttl_s=3600.0, name="Alice 🐇 /../ {}")
    assert of.num_blocks == -(-num_tokens // 4)
    path = tmp_path / "alice"
    assert WRITE[writing](path, of, blocks(of), compression=compression) == path.stat().st_size
    assert READ[reading](path) == (of, blocks(of))
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["alice"]


@pytest.mark.parametrize("compression", Compression)
def test_the_twins_write_the_same_bytes(tmp_path: Path, compression: Compression) -> None:
    of = header()
    for name, write in WRITE.items():
        write(tmp_path / name, of, blocks(of), compression=compression)
    assert (tmp_path / "sync").read_bytes() == (tmp_path / "async").read_bytes()


def test_zstd_makes_it_smaller_where_it_can(tmp_path: Path) -> None:
    def codecs(**changes: Any) -> set[int]:
        data = archive(tmp_path, header(block_bytes=4096, **changes), compression=Compression.ZSTD)
        return {RECORD.unpack(record)[1] for record, _ in parts(data)[1]}

    assert codecs() == codecs(dtype="torch.float16") == {NUMBERS[2]}
    assert codecs(dtype="float64") == codecs(dtype="float8_e4m3fn") == {0}
    odd = header(block_bytes=4095, dtype="float32")
    write_archive(tmp_path / "odd", odd, blocks(odd), compression=Compression.ZSTD)
    assert read(tmp_path / "odd") == (odd, blocks(odd))


def test_blocks_are_any_bytes_in_one_piece(tmp_path: Path) -> None:
    of = header()
    one, two, three = blocks(of)
    as_shorts = memoryview(two).cast("h")
    write_archive(tmp_path / "a", of, [bytearray(one), as_shorts, array("B", three)])
    assert read(tmp_path / "a")[1] == [one, two, three]
    with pytest.raises((ValueError, BufferError)):
        write_archive(tmp_path / "b", of, [one, memoryview(two + two)[::2], three])


@pytest.mark.parametrize("sizes", [[64, 64], [64, 64, 64, 64], [64, 63, 64], [64, 65, 64], [0, 0, 0], []])
@pytest.mark.parametrize("writing", WRITE)
def test_other_blocks_than_the_header_says_are_the_callers_mistake(
    tmp_path: Path, writing: str, sizes: list[int]
) -> None:
    with pytest.raises(ValueError, match="archive: "):
        WRITE[writing](tmp_path / "a", header(), [bytes(size) for size in sizes])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a\x1b[2J"},
        {"name": "a\ud800"},
        {"model": "two\nlines"},
        {"salt": b"s" * 31},
        {"namespace": b""},
        {"block_tokens": 0},
        {"block_bytes": 0},
        {"block_bytes": 1 << 63},
        {"created_s": -1.0},
        {"created_s": math.inf},
        {"ttl_s": 0.0},
        {"ttl_s": math.nan},
        {"ttl_s": -math.inf},
        {"token_ids": array("q", [1])},
    ],
    ids=str,
)
def test_a_header_that_no_archive_can_hold_is_none(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        header(**changes)


def test_names_that_are_too_long_are_refused_by_name(tmp_path: Path) -> None:
    of = header(name="x" * MAX_FIELDS_BYTES)
    with pytest.raises(ArchiveError, match=r"session x{40}… .*Mend: give it a shorter name"):
        write_archive(tmp_path / "a", of, blocks(of))
    of = header(name="🐇" * 10_000)
    write_archive(tmp_path / "a", of, blocks(of))
    assert read(tmp_path / "a")[0] == of


def test_a_reader_outside_its_with_says_so(tmp_path: Path) -> None:
    archive(tmp_path)
    reader = ArchiveReader(tmp_path / "made")
    with pytest.raises(ClosedError, match="made"):
        _ = reader.header
    with reader:
        given = reader.blocks()
        first = next(given)
        assert first.readonly and bytes(first) == block(0)
    for use in (lambda: next(given), lambda: next(reader.blocks()), lambda: reader.header):
        with pytest.raises(ClosedError):
            use()
    assert bytes(first) == block(0)  # its own buffer


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", Compression)
def test_every_truncation_is_refused_before_the_first_block(tmp_path: Path, compression: Compression) -> None:
    data = archive(tmp_path, compression=compression)
    for length in range(len(data)):
        given, why = refused_after(tmp_path / "cut", data[:length])
        assert why and not given, length


@pytest.mark.parametrize("behind", [b"\0", b"x" * 31, b"\0" * 4096])
def test_an_archive_that_goes_on_behind_its_end_is_refused(tmp_path: Path, behind: bytes) -> None:
    data = archive(tmp_path)
    for longer in (data + behind, data + data):
        given, why = refused_after(tmp_path / "longer", longer)
        assert why and not given


@pytest.mark.parametrize("compression", Compression)
def test_every_flipped_bit_is_refused_and_nothing_wrong_is_given_out(tmp_path: Path, compression: Compression) -> None:
    of = header(block_bytes=128)
    data, right = archive(tmp_path, of, compression=compression), blocks(of)
    head, pairs, _ = parts(data)
    start = len(head)
    payloads = []
    for record, stored in pairs:
        payloads.append(range(start + len(record), start + len(record) + len(stored)))
        start = payloads[-1].stop
    assert (RECORD.unpack(pairs[0][0])[1] == 0) is (compression is Compression.NONE)
    for at in range(len(data)):
        bits = range(8) if at < PREAMBLE.size or at >= len(data) - END.size else [at % 8]
        for bit in bits:
            flipped = bytearray(data)
            flipped[at] ^= 1 << bit
            given, why = refused_after(tmp_path / "flipped", flipped)
            # In a block: those before it are right. Anywhere else: none is given.
            wanted = next((number for number, payload in enumerate(payloads) if at in payload), 0)
            assert why and given == right[:wanted], (at, bit)


def test_another_version_is_refused_by_name_whatever_follows(tmp_path: Path) -> None:
    data = archive(tmp_path)
    for version in (0, VERSION + 1, 2**32 - 1):
        other = bytearray(data)
        struct.pack_into("<I", other, 8, version)
        for each in (bytes(other), bytes(other[:24]), bytes(other[:24]) + b"\xff" * 99):
            given, why = refused_after(tmp_path / "other", each)
            assert f"is of format version {version}, and this kvtier reads version 1" in why and not given


@pytest.mark.parametrize(
    "data", [b"", b"K", b"KVTSESS", b"KVTSEGM\0" + bytes(4096), b"PK\3\4" * 50, b"\x80\4\x95" * 50]
)
def test_other_files_are_no_exported_sessions(tmp_path: Path, data: bytes) -> None:
    given, why = refused_after(tmp_path / "foreign", data)
    assert "is no exported session" in why and not given


# -- somebody who knows the format -------------------------------------------------------------------------------------


def test_the_tests_own_signature_is_the_formats(tmp_path: Path) -> None:
    data = archive(tmp_path)
    head, pairs, end = parts(data)
    assert resigned(head, pairs) == data == head + b"".join(map(b"".join, pairs)) + end
    fields_bytes = PREAMBLE.unpack_from(head)[2]
    assert headed(head[24 : 24 + fields_bytes], head[24 + fields_bytes : -32]) == head


def test_blocks_in_another_order_are_refused(tmp_path: Path) -> None:
    head, (one, two, three), end = parts(archive(tmp_path))
    for order in ([two, one, three], [one, three, two], [one, one, three], [one, two], [one, two, three, three]):
        path = tmp_path / "mixed"
        given, why = refused_after(path, head + b"".join(map(b"".join, order)) + end)
        assert why and not given
        given, why = refused_after(path, resigned(head, order))  # but not the checksums, which know their place
        assert why and given == blocks(header())[: len(given)] and len(given) < 3


def test_blocks_of_another_archive_are_refused(tmp_path: Path) -> None:
    """The same sizes and tokens; only the name differs."""
    head, ours, _ = parts(archive(tmp_path))
    others_head, others, _ = parts(archive(tmp_path, header(name="bob"), first=10))
    for place in range(3):
        mixed = [*ours[:place], others[place], *ours[place + 1 :]]
        given, why = refused_after(tmp_path / "mixed", resigned(head, mixed))
        assert f"block {place} of 3" in why and given == blocks(header())[:place]
    given, why = refused_after(tmp_path / "mixed", resigned(others_head, ours))
    assert "block 0 of 3" in why and not given


def fields_of(head: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(head[24 : 24 + PREAMBLE.unpack_from(head)[2]])
    return fields


CRAFTED: dict[str, Any] = {
    "another field": lambda known: known | {"more\x1b[2J": 1},
    "a field less": lambda known: {name: value for name, value in known.items() if name != "namespace"},
    "a number as text": lambda known: known | {"block_tokens": "4"},
    "true for a number": lambda known: known | {"block_tokens": True},
    "a fraction": lambda known: known | {"block_tokens": 4.5},
    "none in a block": lambda known: known | {"block_tokens": 0},
    "negative": lambda known: known | {"block_bytes": -64},
    "beyond 63 bits": lambda known: known | {"block_bytes": 1 << 63},
    "beyond any bits": lambda known: known | {"block_bytes": 10**400},
    "a digest too short": lambda known: known | {"salt": "00"},
    "a digest that is none": lambda known: known | {"salt": "x" * 64},
    "capitals": lambda known: known | {"namespace": "A" * 64},
    "a name that a terminal obeys": lambda known: known | {"name": "a\x1b[2J"},
    "no name": lambda known: known | {"name": ""},
    "a list": list,
    "nothing": lambda known: None,
    "not a number": lambda known: known | {"created_s": math.nan},
    "no time": lambda known: known | {"ttl_s": 0},
}


@pytest.mark.parametrize("crafted", CRAFTED)
def test_crafted_fields_are_refused(tmp_path: Path, crafted: str) -> None:
    head, pairs, _ = parts(archive(tmp_path))
    fields = json.dumps(CRAFTED[crafted](fields_of(head))).encode()
    ids = head[24 + PREAMBLE.unpack_from(head)[2] : -32]
    given, why = refused_after(tmp_path / "crafted", resigned(headed(fields, ids), pairs))
    assert "has a header that this kvtier does not write" in why and why.isprintable() and not given


@pytest.mark.parametrize("fields", [b"", b"{", b"\xff\xfe", b"[" * 60_000, b'{"a":' * 12_000, b"1" * 50_000], ids=len)
def test_fields_that_are_no_json_are_refused(tmp_path: Path, fields: bytes) -> None:
    given, why = refused_after(tmp_path / "crafted", resigned(headed(fields, b""), []))
    assert "has a header that this kvtier does not write" in why and not given


def with_preamble(data: bytes, **changes: int) -> bytes:
    magic, version, fields_bytes, num_tokens = PREAMBLE.unpack_from(data)
    values = {"fields_bytes": fields_bytes, "num_tokens": num_tokens} | changes
    return PREAMBLE.pack(magic, version, *values.values()) + data[PREAMBLE.size :]


def with_block_bytes(data: bytes, block_bytes: int, stored_bytes: int, codec: int) -> bytes:
    """A first block that claims so much, with fields, digests and a checksum that fit."""
    head, pairs, _ = parts(data)
    ids = head[24 + PREAMBLE.unpack_from(head)[2] : -32]
    head = headed(json.dumps(fields_of(head) | {"block_bytes": block_bytes}).encode(), ids)
    stored = pairs[0][1]
    hashed = xxhash.xxh3_128(head[-32:] + struct.pack("<QQQ", 0, stored_bytes, codec) + stored)
    return resigned(head, [(RECORD.pack(stored_bytes, codec, hashed.digest()), stored), *pairs[1:]])


ABSURD: dict[str, Any] = {
    "fields": lambda data: with_preamble(data, fields_bytes=2**32 - 1),
    "fields within bounds": lambda data: with_preamble(data, fields_bytes=MAX_FIELDS_BYTES),
    "tokens": lambda data: with_preamble(data, num_tokens=2**64 - 1),
    "tokens within bounds": lambda data: with_preamble(data, num_tokens=MAX_TOKENS),
    "a block that the file has not": lambda data: with_block_bytes(data, 1 << 40, 1 << 40, 0),
    "the largest block": lambda data: with_block_bytes(data, (1 << 63) - 1, (1 << 63) - 1, 0),
    "stored beyond all": lambda data: with_block_bytes(data, 64, 2**64 - 1, 0),
    "nothing stored": lambda data: with_block_bytes(data, 64, 0, 0),
    "stored as it is, but shorter": lambda data: with_block_bytes(data, 128, 64, 0),
    "a bomb": lambda data: with_block_bytes(data, 1 << 31, 64, NUMBERS[4]),
    "an encoded block as long as it": lambda data: with_block_bytes(data, 64, 64, NUMBERS[2]),
    "an encoded block of half an element": lambda data: with_block_bytes(data, 65, 64, NUMBERS[2]),
    "an unknown codec": lambda data: with_block_bytes(data, 64, 64, 7),
}


@pytest.mark.parametrize("absurd", ABSURD)
def test_absurd_lengths_are_refused_before_memory_is_taken_for_them(tmp_path: Path, absurd: str) -> None:
    data = ABSURD[absurd](archive(tmp_path))
    refused_after(tmp_path / "absurd", data)  # imports and caches
    tracemalloc.start()
    try:
        given, why = refused_after(tmp_path / "absurd", data)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert why and not given
    assert peak_bytes < 300_000  # a file of 800 bytes; opening it takes some of Python's own


@pytest.mark.parametrize("changes", [{"num_tokens": MAX_TOKENS + 1}, {"fields_bytes": MAX_FIELDS_BYTES + 1}], ids=str)
def test_a_file_that_is_long_because_it_has_holes_gets_no_memory(tmp_path: Path, changes: dict[str, int]) -> None:
    path = tmp_path / "sparse"
    path.write_bytes(with_preamble(archive(tmp_path), **changes))
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    tracemalloc.start()
    try:
        with pytest.raises(ArchiveError, match="impossible lengths"):
            ArchiveReader(path).open()
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 300_000


def test_an_encoded_block_that_does_not_decode_is_refused_at_its_place(tmp_path: Path) -> None:
    """With a checksum that fits. One frame is of a MiB."""
    of = header(block_bytes=1024)
    head, pairs, _ = parts(archive(tmp_path, of, compression=Compression.ZSTD))
    codec = NUMBERS[2]
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    stored = struct.pack("<I", len(bomb)) + bomb + bytes(512)
    assert 512 < len(stored) < 1024
    for wrong in (stored, bytes(600), b"\xff" * 1000):
        checksum = xxhash.xxh3_128(head[-32:] + struct.pack("<QQQ", 1, len(wrong), codec) + wrong).digest()
        crafted = [pairs[0], (RECORD.pack(len(wrong), codec, checksum), wrong), pairs[2]]
        given, why = refused_after(tmp_path / "crafted", resigned(head, crafted))
        assert "block 1 of 3" in why and given == blocks(of)[:1]


# -- the page ----------------------------------------------------------------------------------------------------------


def rows(section: str) -> list[tuple[int, int, str]]:
    """Offset, bytes and field of each row of a section's table."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [
        (int(at), int(size), name) for at, size, name in re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", text, re.M)
    ]


def fields(section: str, data: bytes, start: int) -> tuple[dict[str, bytes], int]:
    """The fields that the page says are at `start`, and where they end."""
    table = rows(section)
    found = {name: data[start + at : start + at + size] for at, size, name in table}
    return found, start + table[-1][0] + table[-1][1]


def number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def test_an_archive_can_be_read_by_the_page_alone(tmp_path: Path) -> None:
    of = header(token_ids=array("i", [-5, 0, 2**31 - 1, 7, 8]))
    data = archive(tmp_path, of)
    preamble, at = fields("Preamble", data, 0)
    assert preamble["magic"] == b"KVTSESS\0" and number(preamble["version"]) == 1
    known = json.loads(data[at : at + number(preamble["fields_bytes"])])
    at += number(preamble["fields_bytes"])
    assert list(known) == re.findall(r"^  \| `(\w+)` \|", PAGE, re.M)
    assert known["namespace"] == of.namespace.hex() and known["ttl_s"] is None
    num_tokens = number(preamble["num_tokens"])
    assert list(struct.unpack_from(f"<{num_tokens}i", data, at)) == of.token_ids.tolist()
    at += 4 * num_tokens
    digest = hashlib.blake2b(data[:at], digest_size=32).digest()
    assert data[at : at + 32] == digest
    at += 32
    records = b""
    for place in range(-(-num_tokens // known["block_tokens"])):
        start = at
        record, at = fields("Record", data, at)
        records += data[start:at]
        stored = data[at : at + number(record["stored_bytes"])]
        at += len(stored)
        bound = digest + struct.pack("<Q", place) + record["stored_bytes"] + record["codec"]
        assert xxhash.xxh3_128(bound + stored).digest() == record["checksum"]
        assert stored == block(place) and number(record["codec"]) == 0
    end, stop = fields("End", data, at)
    assert end["magic"] == b"KVTSEND\0" and number(end["file_bytes"]) == stop == len(data)
    assert hashlib.blake2b(digest + records + data[at : at + 16], digest_size=32).digest() == end["digest"]


def test_the_page_names_the_numbers() -> None:
    for value in (MAX_FIELDS_BYTES, MAX_TOKENS, PREAMBLE.size, RECORD.size, END.size, *NUMBERS.values()):
        assert f"{value}" in PAGE
    assert f"version {VERSION}" in PAGE


def test_the_format_has_not_changed(tmp_path: Path) -> None:
    """Files that are out there must stay readable: whoever changes these bytes raises the version."""
    write_archive(tmp_path / "a", header(), [bytes(range(first, first + 64)) for first in (0, 64, 128)])
    digest = hashlib.blake2b((tmp_path / "a").read_bytes(), digest_size=16).hexdigest()
    assert digest == "5386f9aea8704a5c5302c5cf90b7ba64"
