"""What a block is, as bytes that are equal in every process and Python: encodings, and the hashes made of them.

Every field is framed by its length and carries its name, so no two different lists of fields have the same encoding,
and every hash begins with what it is of, so that none of one kind can be taken for one of another.
"""

from __future__ import annotations

import functools
import hashlib
import struct
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

DIGEST_BYTES = 32

FORMATS = {"layout": 1, "codec": 1, "computation": 1}
"""Versions that every namespace contains; raise one and no older block is found.

`layout`: how a block's bytes lie (slices, K then V, head-major). `codec`: what reading gives back of what was written
(all codecs are lossless). `computation`: which K and V this package has a model compute for given tokens, positions and
padding.
"""


def framed(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """Names and values as one string of bytes, each behind its length (8 bytes, little-endian). Injective."""
    parts: list[bytes] = []
    for name, value in fields:
        parts += (_framed_name(name), _LENGTH(len(value)), value)
    return b"".join(parts)


_LENGTH = struct.Struct("<Q").pack


@functools.lru_cache(maxsize=256)
def _framed_name(name: str) -> bytes:
    """The same few names stand in every block's identity."""
    encoded = name.encode()
    return _LENGTH(len(encoded)) + encoded


_IDS, _POSITIONS, _PADDING = _framed_name("ids"), _framed_name("positions"), _framed_name("padding")
_NAMESPACE, _PARENT, _CONTENT = _framed_name("namespace"), _framed_name("parent"), _framed_name("content")
_BLOCK = framed([("kind", b"block")])


def digest(kind: str, fields: Iterable[tuple[str, bytes]]) -> bytes:
    """32 bytes of blake2b over `framed` fields, behind the kind of thing that they are of."""
    return hashlib.blake2b(framed([("kind", kind.encode()), *fields]), digest_size=DIGEST_BYTES).digest()


def canonical(value: object) -> bytes:
    """A plain value as bytes: None, bool, int, float (its bits), str, bytes, and lists, tuples and dicts of them.

    Tuples are encoded as lists and the order of a dict does not count: neither survives JSON.

    Raises:
        TypeError: any other type.
    """
    match value:
        case None | bool():
            return _canonical_word(value)
        case str():
            return _canonical_word(str.__str__(value))  # a subclass may find equal what is not
        case int():
            return framed([("int", b"%d" % value)])
        case float():
            return framed([("float", struct.pack("<d", value))])
        case bytes():
            return framed([("bytes", value)])
        case list() | tuple():
            return framed([("list", _framed_parts(map(canonical, value)))])
        case dict():
            entries = sorted((canonical(key), canonical(each)) for key, each in value.items())
            return framed([("dict", _framed_parts(chain.from_iterable(entries)))])
    raise TypeError(f"a {type(value).__name__} has no canonical encoding")


@functools.lru_cache(maxsize=1024)
def _canonical_word(value: bool | str | None) -> bytes:
    """Of what is unequal wherever its encoding is (not numbers: 0.0 is -0.0, and 1 is True). A model's description has
    the same few words a thousand times."""
    if isinstance(value, str):
        return framed([("str", str.encode(value, errors="surrogatepass"))])
    return framed([("none", b"")]) if value is None else framed([("bool", b"\1" if value else b"\0")])


def _framed_parts(parts: Iterable[bytes]) -> bytes:
    """As `framed`, of fields without a name."""
    nameless = _framed_name("")
    return b"".join([nameless + _LENGTH(len(part)) + part for part in parts])


def token_content(ids: array[int], positions: Sequence[int], padding: Sequence[tuple[int, int]]) -> bytes:
    """Which tokens a block holds, as bytes; equal for equal tokens and for no others.

    Args:
        ids: 32 bits each.
        positions: one a token.
        padding: `(at, count)`: columns of padding in front of the block's token number `at`.

    Cost: about 4 bytes a token where positions are counted on. O(tokens), the faster for positions as a range.
    """
    if isinstance(positions, range) and positions.step == 1:
        return content_of_runs(ids, [(positions.start, len(positions))] if positions else [], padding)
    runs: list[tuple[int, int]] = []
    for position in positions:
        if runs and sum(runs[-1]) == position:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((position, 1))
    return content_of_runs(ids, runs, padding)


def content_of_runs(ids: array[int], runs: Sequence[tuple[int, int]], padding: Sequence[tuple[int, int]]) -> bytes:
    """As `token_content`; `runs`: first position and length of each longest run of neighbouring ones."""
    # As `framed`, of which a block's share is small, and was a third of what looking it up takes.
    fields: list[bytes] = []
    for name, numbers in ((_IDS, ids), (_POSITIONS, array("i", chain(*runs))), (_PADDING, array("i", chain(*padding)))):
        fields += (name, _LENGTH(4 * len(numbers)), _little(numbers))
    return b"".join(fields)


def ids_of(content: bytes) -> array[int]:
    """The ids in a `token_content`. O(tokens), in C."""
    (num_bytes,) = _LENGTH_AT(content, _IDS_AT - 8)
    ids = array("i", content[_IDS_AT : _IDS_AT + num_bytes])
    if sys.byteorder != "little":
        ids.byteswap()
    return ids


_LENGTH_AT = struct.Struct("<Q").unpack_from
_IDS_AT = 8 + len(b"ids") + 8
"""Where they begin in it: behind the lengths of the field's name and of the field."""


def _little(numbers: array[int]) -> bytes:
    if sys.byteorder != "little":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def block_identity(namespace: bytes, parent: bytes | None, content: bytes) -> bytes:
    """32 bytes: which KV a block holds.

    Args:
        namespace: all that makes K and V of given tokens what they are (`hf/fingerprint.py`).
        parent: identity of the block before it; None for a sequence's first.
        content: `token_content` of its own tokens.
    """
    # As `digest`.
    fields = [_BLOCK, _NAMESPACE, _LENGTH(len(namespace)), namespace]
    if parent is not None:
        fields += (_PARENT, _LENGTH(len(parent)), parent)
    fields += (_CONTENT, _LENGTH(len(content)), content)
    return hashlib.blake2b(b"".join(fields), digest_size=DIGEST_BYTES).digest()
