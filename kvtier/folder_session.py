"""One conversation in an nvme folder, seen without a model: where its blocks lie, and what they hold."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from kvtier.errors import ChecksumError, ConfigError, StoreError
from kvtier.fsck_scan import ScanSegment
from kvtier.session_record import SessionRecord
from kvtier.stores.buffered_io import BufferedIo
from kvtier.stores.file_io import PAGE_BYTES, close_fd
from kvtier.stores.folder_view import FolderView
from kvtier.stores.segment import Segment
from kvtier.stores.slot_format import CODEC_NONE, Bytes, Geometry, Payload, Verdict
from kvtier.stores.slot_payload import PayloadCodec
from kvtier.stores.slot_reader import SlotReader
from kvtier.terminal import printable
from kvtier.types import BlockShape, Compression, Slot, SlotLabel

_PAGE_CACHE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A slot whose header verifies and says that it holds a given block."""

    segment: ScanSegment
    slot: int


@dataclass(slots=True)
class FolderSession:
    """One conversation in a folder."""

    record: SessionRecord
    labels: list[SlotLabel]
    places: list[tuple[Place, ...]] = field(default_factory=list)
    """Of each block: where copies of it lie; none: it is computed again by whoever goes on with the conversation."""

    @property
    def num_found(self) -> int:
        """Blocks that are in the folder, by their headers: their bytes are checked when they are read."""
        return sum(map(bool, self.places))

    @property
    def num_leading(self) -> int:
        """Blocks that are there with all before them: only those are of use."""
        return next((number for number, places in enumerate(self.places) if not places), len(self.places))

    @property
    def num_resumable(self) -> int:
        """Tokens at its beginning that need not be computed again by whoever goes on with it."""
        return min(self.num_leading * self.record.block_tokens, len(self.record.token_ids))

    @property
    def used_bytes(self) -> int:
        """What its blocks take in the folder, those of others too where they are shared."""
        return sum(each.segment.geometry.slot_bytes for places in self.places for each in places)


def read_blocks(view: FolderView, session: FolderSession, num_blocks: int) -> Iterator[Bytes]:
    """The first blocks of a conversation, `[block_bytes]` each, every byte checked.

    Raises StoreError: one is not there whole (any more): the folder may be in use.
    """
    io = BufferedIo(_PAGE_CACHE_BYTES)
    for number in range(num_blocks):
        yield _block(view, session, number, io)


def _block(view: FolderView, session: FolderSession, number: int, io: BufferedIo) -> Bytes:
    error: Exception | None = None
    for place in session.places[number]:
        geometry = place.segment.geometry
        shape = shape_of(geometry, session.record.block_tokens)
        try:
            fd = view.open_file(place.segment.name)
            try:
                size = os.fstat(fd).st_size
                segment = Segment(fd, view.path / place.segment.name, size, io, lambda num_bytes: None)
            except BaseException:  # a Ctrl-C too: no descriptor is left
                close_fd(fd)
                raise
            payload = _payload(segment, place, session.labels[number])
            out = np.empty(geometry.payload_bytes, np.uint8)
            start = PAGE_BYTES + place.slot * geometry.slot_bytes + geometry.header_bytes
            reader = SlotReader(shape, PayloadCodec(shape, Compression.NONE))
            reader.read(Slot(place.slot), segment, start, payload, out)
            return out
        except OSError as failed:  # a store's errors are OSErrors too: another copy may be whole
            error = failed
    why = f": {error}" if error else ""
    raise StoreError(f"session {printable(session.record.name)}: block {number} is not there, or not whole{why}")


def shape_of(geometry: Geometry, block_tokens: int, element_bytes: int = 1) -> BlockShape:
    """A shape of that geometry, which does not tell heads and dimensions: to a store a slice is bytes.

    Raises ConfigError: blocks of so many tokens of such elements have another geometry.
    """
    dims, rest = divmod(geometry.slice_bytes, block_tokens * element_bytes)
    shape = BlockShape(geometry.num_slices, 1, block_tokens, dims // 2, dims - dims // 2, element_bytes)
    if rest or Geometry.of(shape) != geometry:
        raise ConfigError(
            f"slots of {geometry.num_slices} slices of {geometry.slice_bytes} bytes are not for blocks of "
            f"{block_tokens} tokens in elements of {element_bytes} bytes"
        )
    return shape


def _payload(segment: Segment, place: Place, label: SlotLabel) -> Payload:
    """What lies in a slot, if it is still that block. Raises StoreError; OSError."""
    geometry = place.segment.geometry
    raw = np.empty(geometry.header_bytes, np.uint8)
    segment.read(PAGE_BYTES + place.slot * geometry.slot_bytes, raw)
    parsed = geometry.parse(raw[None])
    fields = parsed.fields[0]
    is_good = parsed.verdicts[0] == Verdict.GOOD.value
    if not is_good or label != SlotLabel(
        fields["namespace"].tobytes(), fields["identity"].tobytes(), geometry.content(raw)
    ):
        raise ChecksumError(f"{segment.path}, slot {place.slot}: it holds another block now")
    codec = int(fields["codec"])
    sizes = None if codec == CODEC_NONE else array("I", parsed.sizes[0].tolist())
    return Payload(codec, array("Q", parsed.checksums[0].tolist()), sizes)
