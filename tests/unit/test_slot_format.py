"""The format of slots and segments: what it is on disk, what is refused. docs/nvme-format.md is compared with it."""

from __future__ import annotations

import re
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs.zstd import NUMBERS
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.slot_format import (
    CODEC_NONE,
    HEADER,
    SLICE,
    SLOT_MAGIC,
    VERSION,
    Bytes,
    Geometry,
    Payload,
    Verdict,
)
from kvtier.stores.superblock import SEGMENT_MAGIC, SUPERBLOCK, SegmentKind, read_superblock, superblock
from kvtier.types import BlockShape, SlotLabel

SHAPE = BlockShape(num_layers=3, kv_heads=2, block_tokens=16, key_dim=16, value_dim=16, element_bytes=2)
GEOMETRY = Geometry.of(SHAPE)
LABEL = SlotLabel(b"n" * 32, b"i" * 32, b"the tokens")
CHECKSUMS = [1, 2**63, 2**64 - 1]
PLAIN = Payload(CODEC_NONE, array("Q", CHECKSUMS))
SIZES = [700, 1, SHAPE.slice_bytes]
ENCODED = Payload(NUMBERS[2], array("Q", CHECKSUMS), array("I", SIZES))
PAGE = (Path(__file__).parents[2] / "docs" / "nvme-format.md").read_text(encoding="utf-8")


def header(label: SlotLabel = LABEL, generation: int = 7, payload: Payload = PLAIN) -> Bytes:
    """One header region, as on disk."""
    data = GEOMETRY.header(label, generation, 123, payload)
    raw = np.zeros(GEOMETRY.header_bytes, np.uint8)
    raw[: len(data)] = data
    return raw


def verdict(raw: Bytes) -> Verdict:
    return Verdict(GEOMETRY.parse(raw[None]).verdicts[0])


def signed(raw: Bytes) -> Bytes:
    """With a checksum that fits: what somebody crafts who knows the format."""
    end = HEADER.itemsize + 3 * SLICE.itemsize + len(LABEL.content)
    raw[end : end + 8] = np.frombuffer(xxhash.xxh3_64_intdigest(raw[:end].tobytes()).to_bytes(8, "little"), np.uint8)
    return raw


def test_a_header_reads_back_as_it_was_written() -> None:
    raw = header()
    parsed = GEOMETRY.parse(raw[None])
    assert verdict(raw) is Verdict.GOOD
    fields = parsed.fields[0]
    assert fields["namespace"].tobytes() == LABEL.namespace
    assert fields["identity"].tobytes() == LABEL.identity
    assert (fields["generation"], fields["written_ns"], fields["codec"]) == (7, 123, CODEC_NONE)
    assert parsed.checksums[0].tolist() == CHECKSUMS
    assert GEOMETRY.content(raw) == LABEL.content


def table(raw: Bytes) -> Any:
    """The slice table of a header region, to read and to change."""
    return raw[HEADER.itemsize : HEADER.itemsize + 3 * SLICE.itemsize].view(SLICE)


@pytest.mark.parametrize("element_bytes", NUMBERS)
def test_encoded_slices_follow_each_other_and_read_back(element_bytes: int) -> None:
    payload = Payload(NUMBERS[element_bytes], array("Q", CHECKSUMS), array("I", SIZES))
    raw = header(payload=payload)
    parsed = GEOMETRY.parse(raw[None])
    assert verdict(raw) is Verdict.GOOD
    assert parsed.fields[0]["codec"] == payload.codec == 1 + 256 * element_bytes
    assert parsed.fields[0]["payload_bytes"] == sum(SIZES)
    assert parsed.sizes[0].tolist() == SIZES and parsed.checksums[0].tolist() == CHECKSUMS
    assert table(raw)["offset"].tolist() == [0, 700, 701] == [payload.place(layer, 1)[0] for layer in range(3)]


CRAFTED_TABLES = {
    "an empty slice": {"stored_bytes": [700, 0, 9], "offset": [0, 700, 700]},
    "a slice longer than it may be": {"stored_bytes": [700, 1, SHAPE.slice_bytes + 1], "offset": [0, 700, 701]},
    "a gap": {"offset": [0, 700, 702]},
    "not from the beginning": {"offset": [1, 701, 702]},
    "an overlap": {"offset": [0, 699, 701]},
    "two in one place": {"offset": [0, 0, 701]},
    "beyond the slot": {"offset": [0, 700, 2**40]},
    "sums that wrap around": {"stored_bytes": [2**64 - 1, 1, 1], "offset": [0, 2**64 - 1, 0]},
}


@pytest.mark.parametrize("crafted", CRAFTED_TABLES)
def test_a_crafted_table_of_encoded_slices_is_refused(crafted: str) -> None:
    raw = header(payload=ENCODED)
    for field, values in CRAFTED_TABLES[crafted].items():
        table(raw)[field] = values
    # As whoever crafts it would: with a sum and a checksum that fit.
    raw[: HEADER.itemsize].view(HEADER)[0]["payload_bytes"] = table(raw)["stored_bytes"].sum()
    assert verdict(signed(raw)) is Verdict.BAD


@pytest.mark.parametrize("codec", [CODEC_NONE, 1, 2, NUMBERS[2] + 1, 0x0801, 65535])
def test_encoded_slices_under_a_codec_that_is_not_theirs_are_refused(codec: int) -> None:
    raw = header(payload=ENCODED)
    raw[: HEADER.itemsize].view(HEADER)[0]["codec"] = codec
    assert verdict(signed(raw)) is Verdict.BAD
    raw = header(payload=ENCODED)
    raw[: HEADER.itemsize].view(HEADER)[0]["payload_bytes"] = GEOMETRY.payload_bytes
    assert verdict(signed(raw)) is Verdict.BAD


def test_an_empty_content_and_the_longest_fit_and_a_longer_one_does_not() -> None:
    room = GEOMETRY.max_content_bytes
    assert room >= 8 * SHAPE.block_tokens + 64
    for content in (b"", b"x", b"y" * room):
        raw = header(SlotLabel(LABEL.namespace, LABEL.identity, content))
        assert verdict(raw) is Verdict.GOOD
        assert GEOMETRY.content(raw) == content
    for wrong in (
        SlotLabel(LABEL.namespace, LABEL.identity, b"y" * (room + 1)),
        SlotLabel(b"n" * 31, LABEL.identity, b""),
        SlotLabel(LABEL.namespace, b"i" * 33, b""),
    ):
        with pytest.raises(ValueError, match="slot label"):
            header(wrong)


@pytest.mark.parametrize("block_tokens", [16, 256, 4096])
@pytest.mark.parametrize("num_layers", [1, 30, 200])
def test_the_header_region_is_whole_pages_with_room_for_the_tokens(block_tokens: int, num_layers: int) -> None:
    shape = BlockShape(num_layers, 3, block_tokens, 64, 64, 2)
    geometry = Geometry.of(shape)
    assert geometry.header_bytes % PAGE_BYTES == geometry.slot_bytes % PAGE_BYTES == 0
    assert geometry.max_content_bytes >= 8 * block_tokens + 64
    assert geometry.slot_bytes - geometry.header_bytes >= shape.block_bytes
    longest = SlotLabel(LABEL.namespace, LABEL.identity, bytes(8 * block_tokens + 64))
    raw = geometry.header(longest, 1, 1, Payload(CODEC_NONE, array("Q", range(num_layers))))
    assert len(raw) <= geometry.header_bytes
    whole = np.zeros((1, geometry.header_bytes), np.uint8)
    whole[0, : len(raw)] = raw
    assert geometry.parse(whole).verdicts[0] == Verdict.GOOD.value


def test_every_flipped_bit_of_a_header_is_seen() -> None:
    raw = header()
    used = HEADER.itemsize + 3 * SLICE.itemsize + len(LABEL.content) + 8
    flipped = np.repeat(raw[None], used * 8, axis=0)
    for bit in range(used * 8):
        flipped[bit, bit // 8] ^= 1 << bit % 8
    verdicts = GEOMETRY.parse(flipped).verdicts
    version_bits = range(8 * 8 + 1, 10 * 8)  # without the one that makes it 0
    for bit, found in enumerate(verdicts):
        assert found == (Verdict.FUTURE if bit in version_bits else Verdict.BAD).value, bit
    raw[used:] ^= 0xFF  # what lies behind the header says nothing
    assert verdict(raw) is Verdict.GOOD


def test_a_header_that_was_taken_back_is_empty_and_half_a_header_is_bad() -> None:
    raw = header()
    assert verdict(np.zeros_like(raw)) is Verdict.EMPTY
    for cut in (1, 8, 100, HEADER.itemsize + 30):
        torn = raw.copy()
        torn[cut:] = 0
        assert verdict(torn) is Verdict.BAD, cut
        torn = raw.copy()
        torn[:cut] = 0
        assert verdict(torn) in (Verdict.BAD, Verdict.EMPTY)


CRAFTED = {
    "length": [0, 1, 8, HEADER.itemsize, 2**32 - 1, GEOMETRY.header_bytes + 1],
    "content_bytes": [2**32 - 1, GEOMETRY.max_content_bytes + 1, 0],
    "num_slices": [0, 1, 4, 2**32 - 1],
    "slice_bytes": [0, 1, 2**64 - 1],
    "payload_bytes": [0, 2**64 - 1],
    "generation": [2**64 - 1, 2**62],
    "codec": [1, 65535],
    "reserved": [1],
}


@pytest.mark.parametrize(("field", "value"), [(name, value) for name in CRAFTED for value in CRAFTED[name]])
def test_crafted_fields_with_a_checksum_that_fits_are_refused(field: str, value: int) -> None:
    raw = header()
    raw[: HEADER.itemsize].view(HEADER)[0][field] = value
    assert verdict(signed(raw)) is Verdict.BAD


@pytest.mark.parametrize("content_bytes", [GEOMETRY.max_content_bytes + 1, 10**6, 2**32 - 300])
def test_an_absurd_content_that_agrees_with_the_length_is_refused(content_bytes: int) -> None:
    raw = header()
    view = raw[: HEADER.itemsize].view(HEADER)[0]
    view["content_bytes"], view["length"] = content_bytes, HEADER.itemsize + 3 * SLICE.itemsize + content_bytes + 8
    assert verdict(signed(raw)) is Verdict.BAD


@pytest.mark.parametrize("field", ["offset", "stored_bytes"])
@pytest.mark.parametrize("value", [1, 2**40, 2**64 - 1])
def test_a_crafted_slice_table_is_refused(field: str, value: int) -> None:
    raw = header()
    raw[HEADER.itemsize : HEADER.itemsize + 3 * SLICE.itemsize].view(SLICE)[1][field] = value
    assert verdict(signed(raw)) is Verdict.BAD


def test_later_versions_are_known_as_such_and_not_guessed_at() -> None:
    for version in (VERSION + 1, 65535):
        raw = header()
        raw[: HEADER.itemsize].view(HEADER)[0]["version"] = version
        assert verdict(signed(raw)) is Verdict.FUTURE
        page = superblock(GEOMETRY, 5)
        page[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0]["version"] = version
        assert read_superblock(page) == (SegmentKind.FUTURE, None, 0)


@given(st.binary(min_size=1, max_size=300), st.integers(0, GEOMETRY.header_bytes - 300))
def test_noise_over_a_header_makes_it_another_or_none(noise: bytes, offset: int) -> None:
    raw, used = header(), HEADER.itemsize + 3 * SLICE.itemsize + len(LABEL.content) + 8
    raw[offset : offset + len(noise)] = np.frombuffer(noise, np.uint8)
    is_same = np.array_equal(raw[:used], header()[:used])
    assert (verdict(raw) is Verdict.GOOD) is is_same
    page = superblock(GEOMETRY, 5)
    page[offset : offset + len(noise)] = np.frombuffer(noise, np.uint8)
    is_same = np.array_equal(page[: SUPERBLOCK.itemsize], superblock(GEOMETRY, 5)[: SUPERBLOCK.itemsize])
    assert (read_superblock(page)[0] is SegmentKind.OURS) is is_same


def test_superblocks() -> None:
    page = superblock(GEOMETRY, 77)
    assert len(page) == PAGE_BYTES
    assert read_superblock(page) == (SegmentKind.OURS, GEOMETRY, 77)
    for length in (0, 1, SUPERBLOCK.itemsize - 1):
        assert read_superblock(page[:length])[0] is SegmentKind.DAMAGED
    for bit in range(SUPERBLOCK.itemsize * 8):
        flipped = page.copy()
        flipped[bit // 8] ^= 1 << bit % 8
        kind = read_superblock(flipped)[0]
        assert kind is (SegmentKind.FUTURE if 64 < bit < 80 else SegmentKind.DAMAGED)


@pytest.mark.parametrize("field", ["slot_bytes", "header_bytes", "slice_bytes", "num_slices"])
@pytest.mark.parametrize("value", [0, 1, 2**32 - 1])
def test_crafted_superblocks_whose_sizes_contradict_each_other_are_refused(field: str, value: int) -> None:
    page = superblock(GEOMETRY, 5)
    page[: SUPERBLOCK.itemsize].view(SUPERBLOCK)[0][field] = value
    end = SUPERBLOCK.itemsize - 8
    page[end : end + 8] = np.frombuffer(xxhash.xxh3_64_intdigest(page[:end].tobytes()).to_bytes(8, "little"), np.uint8)
    assert read_superblock(page)[0] is SegmentKind.DAMAGED


# -- the page ----------------------------------------------------------------------------------------------------------


def rows(section: str) -> list[tuple[int, int, str]]:
    """Offset, bytes and field of each row of a section's table."""
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    return [
        (int(at), int(size), name) for at, size, name in re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", text, re.M)
    ]


@pytest.mark.parametrize(
    ("section", "dtype"), [("Superblock", SUPERBLOCK), ("Slot header", HEADER), ("Slice table", SLICE)]
)
def test_the_page_says_what_the_code_does(section: str, dtype: np.dtype[np.void]) -> None:
    assert dtype.fields is not None and dtype.names is not None
    wanted = [(int(dtype.fields[name][1]), dtype.fields[name][0].itemsize, name) for name in dtype.names]
    assert rows(section) == wanted
    assert sum(size for _, size, _ in wanted) == dtype.itemsize  # no holes


def test_the_page_names_the_numbers() -> None:
    for number in (HEADER.itemsize, SLICE.itemsize, PAGE_BYTES, *NUMBERS.values()):
        assert f"{number}" in PAGE
    assert SEGMENT_MAGIC.to_bytes(8, "little").decode().rstrip("\0") in PAGE
    assert SLOT_MAGIC.to_bytes(8, "little").decode().rstrip("\0") in PAGE
    assert f"version {VERSION}" in PAGE
