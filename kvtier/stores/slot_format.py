"""How a slot lies on disk, byte by byte: docs/nvme-format.md; `superblock` has the page before them. No I/O, no torch.

All numbers are little-endian and unsigned. Whatever is read here may have been crafted: no length in it is used before
it was compared with what the geometry allows.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from kvtier.codecs.zstd import NUMBERS as ZSTD_NUMBERS
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.types import BlockShape, SlotLabel

Bytes = npt.NDArray[np.uint8]

VERSION = 1
CODEC_NONE = 0
ENCODED_SLICE_LIMIT = 1 << 32  # slices of so many bytes are stored as they are: encoded lengths are of 32 bits
SLOT_MAGIC = int.from_bytes(b"KVTSLOT\0", "little")
MAX_GENERATION = (1 << 62) - 1  # a crafted one must not leave the next without a number

_U2, _U4, _U8, _32 = "<u2", "<u4", "<u8", ("u1", (32,))

HEADER = np.dtype(
    [
        ("magic", _U8),
        ("version", _U2),
        ("codec", _U2),
        ("length", _U4),
        ("namespace", _32),
        ("identity", _32),
        ("generation", _U8),
        ("written_ns", _U8),
        ("slice_bytes", _U8),
        ("payload_bytes", _U8),
        ("num_slices", _U4),
        ("content_bytes", _U4),
        ("reserved", _U8),
    ]
)
"""The beginning of a slot's header. Behind it: `num_slices` entries of SLICE, the content, the checksum of it all."""

SLICE = np.dtype([("offset", _U8), ("stored_bytes", _U8), ("checksum", _U8)])
"""One slice: where it lies, counted from the end of the header region, its stored length, xxh3_64 of its bytes."""

CHECKSUM_BYTES = 8


def whole_pages(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole pages."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def checksum(data: Bytes | bytes) -> int:
    """xxh3_64 with seed 0."""
    return xxhash.xxh3_64_intdigest(data if isinstance(data, bytes) else data.data)


@dataclass(frozen=True, slots=True)
class Payload:
    """What lies behind a slot's header: slice after slice, without gaps."""

    codec: int
    checksums: array[int]
    """Of each slice, as it is stored."""
    sizes: array[int] | None = None
    """Stored bytes of each slice; None: each lies as it is. One that is as long as a slice does so too."""

    def place(self, layer: int, slice_bytes: int) -> tuple[int, int]:
        """Where a slice begins behind the header region, and how many bytes it takes. O(layers)."""
        if self.sizes is None:
            return layer * slice_bytes, slice_bytes
        return sum(self.sizes[:layer]), self.sizes[layer]


@dataclass(frozen=True, slots=True)
class Geometry:
    """The sizes that all slots of a segment share. Header and slot are whole pages."""

    header_bytes: int
    slot_bytes: int
    slice_bytes: int
    num_slices: int

    @classmethod
    def of(cls, shape: BlockShape) -> Geometry:
        """The header has room for the slice table and for 8 bytes a token, and 64 more, of content."""
        header_bytes = whole_pages(HEADER.itemsize + shape.num_layers * SLICE.itemsize + content_room(shape))
        slot_bytes = header_bytes + whole_pages(shape.block_bytes)
        return cls(header_bytes, slot_bytes, shape.slice_bytes, shape.num_layers)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the slices together."""
        return self.num_slices * self.slice_bytes

    @property
    def max_content_bytes(self) -> int:
        """The longest content that a header of this size can hold."""
        return self.header_bytes - self._content_offset - CHECKSUM_BYTES

    @property
    def _content_offset(self) -> int:
        return HEADER.itemsize + self.num_slices * SLICE.itemsize

    def fits(self, label: SlotLabel) -> bool:
        """Whether a header of this size can hold the label. Raises ValueError for one that none can: a bug."""
        if len(label.namespace) != 32 or len(label.identity) != 32:
            raise ValueError(
                f"slot label: namespace and identity are 32 bytes; got {len(label.namespace)} and {len(label.identity)}"
            )
        return len(label.content) <= self.max_content_bytes

    def header(self, label: SlotLabel, generation: int, written_ns: int, payload: Payload) -> Bytes:
        """A slot's header, padded with zeros to whole pages: no more of them than its content needs.

        Raises ValueError for a label that does not fit.
        """
        if not self.fits(label):
            raise ValueError(f"slot label: {len(label.content)} bytes of content, at most {self.max_content_bytes} fit")
        end = self._content_offset + len(label.content)
        data = np.zeros(whole_pages(end + CHECKSUM_BYTES), np.uint8)
        fields = data[: HEADER.itemsize].view(HEADER)[0]
        fields["magic"], fields["version"], fields["codec"] = SLOT_MAGIC, VERSION, payload.codec
        fields["length"] = end + CHECKSUM_BYTES
        fields["namespace"] = np.frombuffer(label.namespace, np.uint8)
        fields["identity"] = np.frombuffer(label.identity, np.uint8)
        fields["generation"], fields["written_ns"] = generation, written_ns
        fields["slice_bytes"] = self.slice_bytes
        fields["num_slices"], fields["content_bytes"] = self.num_slices, len(label.content)
        table = data[HEADER.itemsize : self._content_offset].view(SLICE)
        table["stored_bytes"] = self.slice_bytes if payload.sizes is None else payload.sizes
        table["offset"] = _starts(table["stored_bytes"])
        table["checksum"] = payload.checksums
        fields["payload_bytes"] = table["stored_bytes"].sum()
        data[self._content_offset : end] = np.frombuffer(label.content, np.uint8)
        data[end : end + CHECKSUM_BYTES].view(_U8)[0] = checksum(data[:end])
        return data

    def parse(self, raw: Bytes) -> Headers:
        """Judge headers, `[n, header_bytes]`, all at once. Whatever the bytes are, it raises nothing."""
        fields = np.ascontiguousarray(raw[:, : HEADER.itemsize]).view(HEADER)[:, 0]
        table = np.ascontiguousarray(raw[:, HEADER.itemsize : self._content_offset]).view(SLICE)
        verdicts = np.full(len(raw), Verdict.BAD.value, np.uint8)
        # A header that was never written, or was taken back: its first bytes are zero.
        verdicts[~raw[:, : HEADER.itemsize].any(axis=1)] = Verdict.EMPTY.value
        ours = fields["magic"] == SLOT_MAGIC
        verdicts[ours & (fields["version"] > VERSION)] = Verdict.FUTURE.value
        plausible = (
            ours
            & (fields["version"] == VERSION)
            & (fields["reserved"] == 0)
            & (fields["slice_bytes"] == self.slice_bytes)
            & (fields["num_slices"] == self.num_slices)
            & (fields["content_bytes"] <= self.max_content_bytes)
            & (fields["length"] == self._content_offset + CHECKSUM_BYTES + fields["content_bytes"].astype(np.uint64))
            & (fields["generation"] <= MAX_GENERATION)
            & self._is_plausible_table(fields, table)
        )
        rows = np.flatnonzero(plausible)
        verdicts[rows[are_signed(raw, rows, fields["length"][rows].astype(np.int64))]] = Verdict.GOOD.value
        return Headers(verdicts, fields, table["checksum"], table["stored_bytes"])

    def _is_plausible_table(self, fields: npt.NDArray[np.void], table: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Which rows have slices that follow each other, none longer than it may be: so none ends beyond the slot."""
        stored, codec = table["stored_bytes"], fields["codec"]
        encoded = np.isin(codec, list(ZSTD_NUMBERS.values())) & (self.slice_bytes < ENCODED_SLICE_LIMIT)
        good = encoded | (codec == CODEC_NONE) & (stored == self.slice_bytes).all(axis=1)
        good &= ((stored >= 1) & (stored <= self.slice_bytes)).all(axis=1)
        good &= (table["offset"] == _starts(stored)).all(axis=1)
        return np.asarray(good & (fields["payload_bytes"] == stored.sum(axis=1)))

    @staticmethod
    def is_magic(fields: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """Which rows of HEADER fields begin as a slot's header of any version does."""
        return np.asarray(fields["magic"] == SLOT_MAGIC)

    def content(self, raw: Bytes) -> bytes:
        """The content of one header, `[header_bytes]`, that was found GOOD."""
        num_bytes = int(raw[: HEADER.itemsize].view(HEADER)[0]["content_bytes"])
        return raw[self._content_offset : self._content_offset + num_bytes].tobytes()


def _starts(sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Where each of these begins if they follow each other. Wraps around for absurd ones."""
    return np.asarray(np.cumsum(sizes, axis=-1, dtype=np.uint64) - sizes)


def are_signed(raw: Bytes, rows: npt.NDArray[np.intp], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which of these rows, cut to these lengths, end with the checksum of what is before."""
    flat = np.ascontiguousarray(raw).reshape(-1)
    starts = rows * raw.shape[1]
    ends = starts + lengths - CHECKSUM_BYTES
    stored = np.ascontiguousarray(flat[ends[:, None] + np.arange(CHECKSUM_BYTES)]).view(_U8)[:, 0]
    view, digest = flat.data, xxhash.xxh3_64_intdigest  # one call a row is what an open of many slots costs
    actual = (digest(view[start:end]) for start, end in zip(starts.tolist(), ends.tolist(), strict=True))
    return np.asarray(np.fromiter(actual, np.uint64, len(rows)) == stored)


class Verdict(enum.Enum):
    """What a header is."""

    EMPTY = 0
    GOOD = 1
    BAD = 2
    """Torn, damaged, of a codec or of sizes that are not ours."""
    FUTURE = 3
    """Of a format version that this code does not know, and does not guess at."""


@dataclass(frozen=True, slots=True)
class Headers:
    """Headers as read, by row. Only GOOD rows may be believed."""

    verdicts: npt.NDArray[np.uint8]
    fields: npt.NDArray[np.void]
    checksums: npt.NDArray[np.uint64]
    """`[n, num_slices]`."""
    sizes: npt.NDArray[np.uint64]
    """`[n, num_slices]`: stored bytes of each slice."""

    @classmethod
    def joined(cls, parts: Sequence[Headers], geometry: Geometry) -> Headers:
        """The rows of several, one after the other."""
        parts = parts or [geometry.parse(np.empty((0, geometry.header_bytes), np.uint8))]
        names = ("verdicts", "fields", "checksums", "sizes")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))

    def where(self, *verdicts: Verdict) -> npt.NDArray[np.intp]:
        """The rows of these verdicts."""
        return np.flatnonzero(np.isin(self.verdicts, [verdict.value for verdict in verdicts]))

    def good_fields(self) -> npt.NDArray[np.void]:
        """HEADER fields of the rows that may be believed."""
        return self.fields[self.where(Verdict.GOOD)]


def content_room(shape: BlockShape) -> int:
    """Bytes for the content and the checksum behind it: an id and a position of 4 bytes each a token, and 64."""
    return 8 * shape.block_tokens + 64 + CHECKSUM_BYTES
