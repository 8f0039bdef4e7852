"""What is kept of a conversation: read back as it was, and refused after any change at all."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
import re
import struct
import subprocess
import sys
import tracemalloc
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.block_table import BlockTable
from kvtier.identity import block_identity, framed, token_content
from kvtier.labels import Labels
from kvtier.origin import Fingerprint, Origin
from kvtier.session_record import (
    MAGIC,
    VERSION,
    KvLayout,
    LaterVersionError,
    SessionRecord,
    decode,
    encode,
    session_key,
)
from kvtier.types import BlockId, SequenceId
from tests.sessions import record

DIGESTS = st.binary(min_size=32, max_size=32)
TIMES = st.floats(allow_nan=False, allow_infinity=False)
RECORDS = st.builds(
    SessionRecord,
    name=st.text(st.characters(codec=None)),  # surrogates too: a name may come from bytes that are no text
    salt=DIGESTS,
    namespace=DIGESTS,
    block_tokens=st.integers(1, 2**31 - 1),
    token_ids=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda ids: array("i", ids)),
    created_s=TIMES,
    used_s=TIMES,
    ttl_s=st.floats(min_value=0, allow_nan=False),
    is_pinned=st.booleans(),
    kv=st.none()
    | st.builds(
        KvLayout,
        kv_heads=st.integers(1, 2**31 - 1),
        key_dim=st.integers(1, 2**31 - 1),
        value_dim=st.integers(1, 2**31 - 1),
        dtype=st.sampled_from(["float32", "bfloat16"]),
        model=st.text(st.characters(codec="utf-8", categories=["L", "N", "P"]), min_size=1),
    ),
)
PAGE = (Path(__file__).parents[2] / "docs" / "nvme-format.md").read_text(encoding="utf-8")


def signed(body: bytes) -> bytes:
    """With a checksum that fits: what somebody crafts who knows the format."""
    return body + hashlib.blake2b(body, digest_size=32).digest()


# --- the format


@settings(deadline=None)
@given(RECORDS)
def test_a_record_reads_back_as_it_was(kept: SessionRecord) -> None:
    data = encode(kept)
    again = decode(data)
    assert again == kept and encode(again) == data


@settings(deadline=None)
@given(RECORDS)
def test_every_flipped_bit_is_seen(kept: SessionRecord) -> None:
    data = bytearray(encode(kept))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match=r"^(does not|is of) "):
            decode(bytes(data))
        data[bit // 8] ^= 1 << bit % 8
    assert decode(bytes(data)) == kept


@settings(deadline=None)
@given(RECORDS, st.binary(min_size=1, max_size=9))
def test_every_truncation_and_whatever_is_behind_is_seen(kept: SessionRecord, more: bytes) -> None:
    data = encode(kept)
    for length in range(len(data)):
        with pytest.raises(ValueError, match=r"^(does not|is of) "):
            decode(data[:length])
    with pytest.raises(ValueError):
        decode(data + more)
    with pytest.raises(ValueError):
        decode(more + data)


@given(st.binary(max_size=200))
def test_anything_is_refused_with_a_reason(data: bytes) -> None:
    for crafted in (data, signed(data), signed(MAGIC + data), signed(MAGIC + struct.pack("<HH", VERSION, 0) + data)):
        with pytest.raises(ValueError, match=r"\w"):
            decode(crafted)


KV = KvLayout(2, 16, 8, "float32", "Llama")
HEAD = MAGIC + struct.pack("<HH", VERSION, 0)
GOOD = {
    "name": b"alice", "salt": b"s" * 32, "namespace": b"n" * 32, "block_tokens": struct.pack("<Q", 4),
    "times": struct.pack("<ddd", 1.0, 2.0, 3.0), "is_pinned": b"\0",
    "kv": struct.pack("<QQQ", 2, 16, 8) + b"float32\0Llama", "token_ids": struct.pack("<3i", 7, -8, 9),
}  # fmt: skip


def test_the_format_is_what_the_page_says() -> None:
    kept = decode(signed(HEAD + framed(GOOD.items())))
    assert kept == SessionRecord("alice", b"s" * 32, b"n" * 32, 4, array("i", [7, -8, 9]), 1.0, 2.0, 3.0, False, KV)
    assert encode(kept) == signed(HEAD + framed(GOOD.items()))
    rows = re.findall(r"^\| `(\w+)` \| ([\w .,]+) \|", PAGE.split("## Sessions")[1], re.M)
    assert [name for name, _ in rows] == list(GOOD)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": b"\xff"}, "decode"),
        ({"salt": b"s" * 31}, "salt and namespace are of 31"),
        ({"namespace": b""}, "salt and namespace are of 32 and 0"),
        ({"block_tokens": struct.pack("<Q", 0)}, "block_tokens is 0"),
        ({"block_tokens": struct.pack("<Q", 2**64 - 1)}, "block_tokens is"),
        ({"block_tokens": b"\4"}, "another size"),
        ({"times": struct.pack("<ddd", math.nan, 2, 3)}, "created_s and used_s"),
        ({"times": struct.pack("<ddd", 1, math.inf, 3)}, "created_s and used_s"),
        ({"times": struct.pack("<ddd", 1, 2, math.nan)}, "ttl_s is nan"),
        ({"times": struct.pack("<ddd", 1, 2, -1)}, "ttl_s is -1"),
        ({"is_pinned": b"\2"}, "another size"),
        ({"is_pinned": b""}, "another size"),
        ({"kv": b"12345"}, "another size"),
        ({"kv": struct.pack("<QQQ", 0, 16, 8) + b"float32\0Llama"}, "kv is of 0 heads"),
        ({"kv": struct.pack("<QQQ", 2, 16, 2**64 - 1) + b"float32\0Llama"}, "kv is of 2 heads"),
        ({"kv": struct.pack("<QQQ", 2, 16, 8) + b"float32"}, "no name"),
        ({"kv": struct.pack("<QQQ", 2, 16, 8) + b"float32\0a\x1b[31m"}, "no name"),
        ({"kv": struct.pack("<QQQ", 2, 16, 8) + b"\xff\0Llama"}, "decode"),
        ({"token_ids": b"12345"}, "5 bytes of token ids"),
    ],
)
def test_crafted_fields_are_refused(change: dict[str, bytes], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decode(signed(HEAD + framed({**GOOD, **change}.items())))


def test_crafted_frames_are_refused() -> None:
    fields = list(GOOD.items())
    for crafted in (fields[:-1], fields[1:], [*fields, ("more", b"")], [*fields[1:], fields[0]], [*fields, fields[-1]]):
        with pytest.raises(ValueError):
            decode(signed(HEAD + framed(crafted)))


def test_absurd_lengths_cost_no_memory() -> None:
    body = HEAD + framed(GOOD.items())
    tracemalloc.start()
    try:
        for at in range(len(HEAD), len(body) - 8):
            for length in (2**64 - 1, 2**62, 2**40, len(body)):
                crafted = signed(body[:at] + struct.pack("<Q", length) + body[at + 8 :])
                with contextlib.suppress(ValueError):  # in the middle of a value it is a value like any other
                    decode(crafted)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [13, 16, 2**40, 2**64 - 1])
def test_a_part_that_says_it_is_longer_than_what_is_left_is_refused(length: int) -> None:
    body = HEAD + framed(GOOD.items())
    ids = GOOD["token_ids"]
    crafted = body[: -len(ids) - 8] + struct.pack("<Q", length) + ids
    with pytest.raises(ValueError, match="12 are left"):
        decode(signed(crafted))


@pytest.mark.parametrize("version", [2, 7, 65535])
def test_a_later_version_is_told_from_damage(version: int) -> None:
    with pytest.raises(LaterVersionError, match=f"version {version}"):
        decode(signed(MAGIC + struct.pack("<HH", version, 3) + b"who knows"))
    with pytest.raises(ValueError, match="checksum"):
        decode(MAGIC + struct.pack("<HH", version, 0) + b"who knows" + bytes(32))


def test_version_0_and_reserved_bytes_are_refused() -> None:
    for numbers in ((0, 0), (VERSION, 1)):
        with pytest.raises(ValueError, match="which there is not") as error:
            decode(signed(MAGIC + struct.pack("<HH", *numbers) + framed(GOOD.items())))
        assert not isinstance(error.value, LaterVersionError)


def test_what_cannot_be_kept_is_refused() -> None:
    for change in ({"token_ids": array("q", [1])}, {"block_tokens": 0}, {"ttl_s": -1.0}, {"used_s": math.nan}):
        with pytest.raises(ValueError):
            dataclasses.replace(record(), **change)


# --- what it says


def test_keys_tell_names_and_salts_apart() -> None:
    a, b = b"a" * 32, b"b" * 32
    names = ["", "alice", "Alice", "alice ", "../alice", "\udcff", "\x1b[2J"]
    keys = {session_key(salt, name) for salt in (a, b) for name in names}
    assert len(keys) == 2 * len(names) and {len(key) for key in keys} == {32}
    assert record(name="alice").key() == session_key(record().salt, "alice")


def test_a_key_is_the_same_in_every_process() -> None:
    code = "from kvtier.session_record import session_key as k; print(k(b's' * 32, 'alice').hex())"
    for seed in ("0", "77"):
        done = subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True,
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
        assert done.stdout.strip() == session_key(b"s" * 32, "alice").hex()


def test_time_to_live() -> None:
    kept = record(used_s=100.0, ttl_s=10.0)
    assert not kept.is_expired(110.0) and kept.is_expired(110.1)
    assert not kept.is_expired(0.0)  # a clock that went back
    assert not dataclasses.replace(kept, is_pinned=True).is_expired(1e12)
    assert not dataclasses.replace(kept, ttl_s=math.inf).is_expired(1e300)


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 48, 50])
def test_labels_are_those_that_its_blocks_were_sealed_with(num_tokens: int) -> None:
    kept = record(num_tokens=num_tokens, block_tokens=16)
    table = BlockTable(SequenceId(0), 16)
    num_blocks = -(-num_tokens // 16)
    table.append(num_tokens, list(kept.token_ids), [BlockId(n) for n in range(num_blocks)])
    contents = list(kept.contents())
    assert [is_full for _, is_full in contents] == [(n + 1) * 16 <= num_tokens for n in range(num_blocks)]
    labels, parent = kept.labels(), None
    assert len(labels) == num_blocks
    sealing = Labels(None)  # type: ignore[arg-type]  # sealing asks no model
    origin = Origin(Fingerprint(b"w" * 32, kept.namespace))
    for index in range(num_tokens // 16):
        content = table.content(index)
        assert content is not None and content == contents[index][0]
        parent = sealing.seal(origin, parent, content, is_first=index == 0)
        assert parent is not None and parent.label == labels[index]
    if num_tokens % 16:
        first = num_tokens - num_tokens % 16
        content = token_content(kept.token_ids[first:], array("i", range(first, num_tokens)), ())
        before = labels[-2].identity if num_blocks > 1 else None
        assert labels[-1].content == content
        assert labels[-1].identity == block_identity(kept.namespace, before, content)
