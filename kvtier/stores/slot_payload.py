"""Blocks to the bytes that slots store, and slices back from them. No I/O."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import numpy as np

from kvtier.codecs.base import Codec
from kvtier.codecs.zstd import NUMBERS as ZSTD_NUMBERS
from kvtier.codecs.zstd import ZstdCodec
from kvtier.errors import ConfigError
from kvtier.stores.file_io import PAGE_BYTES
from kvtier.stores.slot_format import CODEC_NONE, ENCODED_SLICE_LIMIT, Bytes, Payload, checksum, whole_pages
from kvtier.stores.staging import BUFFER_BYTES
from kvtier.types import BlockShape, Compression


class PayloadCodec:
    """Encodes as the config says, and decodes whatever a slot says. Any number of threads at once.

    Memory: a block while one is encoded; for each thread that ever decoded a slice one, and for each that ever moved a
    block of a joined slab `joined_room_bytes`.
    """

    def __init__(self, shape: BlockShape, compression: Compression) -> None:
        """Raises ConfigError for a shape that zstd is not for."""
        self._shape = shape
        self._codecs: dict[int, Codec] = {number: ZstdCodec(size) for size, number in ZSTD_NUMBERS.items()}
        self._encoder: Codec | None = None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._raw_bytes = self._stored_bytes = 0
        self._num_rooms = 0
        if compression is Compression.ZSTD:
            if shape.element_bytes not in ZSTD_NUMBERS or shape.slice_bytes >= ENCODED_SLICE_LIMIT:
                raise ConfigError(
                    f"tiers.nvme.compression: zstd is for KV of 16 or 32 bits in slices below 4 GiB; this model's has "
                    f"elements of {shape.element_bytes} bytes in slices of {shape.slice_bytes}: set it to none"
                )
            self._encoder = self._codecs[ZSTD_NUMBERS[shape.element_bytes]]

    @property
    def stored_frac(self) -> float:
        """Stored bytes of all that was encoded, per byte of KV; 1.0 before anything was."""
        with self._lock:
            return self._stored_bytes / self._raw_bytes if self._raw_bytes else 1.0

    def encode(self, block: Bytes) -> tuple[int, Iterator[Bytes], Payload]:
        """What to write for a block: how many bytes, and one behind the other the parts that they lie in. And what to
        remember of it, which is complete when the last part was asked for; each is valid until the next one is.

        Encoded, it is whole pages, on a page's boundary.
        """
        size = self._shape.block_bytes
        if self._encoder is None:
            self._count(size, size)
            payload = Payload(CODEC_NONE, array("Q"))
            return size, self._raw(block, payload.checksums), payload
        data = _aligned(whole_pages(size))
        checksums, sizes, end = array("Q"), array("I"), 0
        for group in self._groups(block):
            for raw in group.reshape(-1, self._shape.slice_bytes):
                encoded = self._encoder.encode(raw)
                place = data[end : end + encoded.nbytes]
                place[...] = encoded
                checksums.append(checksum(place))
                sizes.append(encoded.nbytes)
                end += encoded.nbytes
        self._count(size, end)
        data[end : whole_pages(end)] = 0  # pages are written whole: nothing of another block's stays in the last one
        return whole_pages(end), iter((data[: whole_pages(end)],)), Payload(self._encoder.number, checksums, sizes)

    def _raw(self, block: Bytes, checksums: array[int]) -> Iterator[Bytes]:
        """Parts that end with a page, but for the last: no page is written twice."""
        if block.ndim == 1:
            checksums.extend(map(checksum, block.reshape(-1, self._shape.slice_bytes)))
            yield block
            return
        held_bytes = 0  # of a page that the group before began
        for first, count in self.groups():
            room = self._copied(block[first : first + count], held_bytes)
            checksums.extend(map(checksum, room[held_bytes:].reshape(-1, self._shape.slice_bytes)))
            is_last = first + count == self._shape.num_layers
            held_bytes = 0 if is_last else room.nbytes % PAGE_BYTES
            whole_bytes = room.nbytes - held_bytes
            yield room[:whole_bytes]
            room[:held_bytes] = room[whole_bytes:]

    def _groups(self, block: Bytes) -> Iterator[Bytes]:
        """A block's bytes, some slices at a time, each time in one piece; a joined one's are copied to be so."""
        if block.ndim == 1:
            yield block
            return
        for first, count in self.groups():
            yield self._copied(block[first : first + count])

    def _copied(self, slices: Bytes, held_bytes: int = 0) -> Bytes:
        """This thread's room with some slices in it, behind what it holds already."""
        room = self.room(held_bytes + slices.nbytes)
        np.copyto(room[held_bytes:].reshape(slices.shape), slices)
        return room

    def groups(self) -> Iterator[tuple[int, int]]:
        """Slices that are moved together where a block does not lie in one piece: the first, and how many."""
        shape = self._shape
        most = max(1, BUFFER_BYTES // shape.slice_bytes)
        for first in range(0, shape.num_layers, most):
            yield first, min(most, shape.num_layers - first)

    def room(self, num_bytes: int) -> Bytes:
        """Room for a group behind a part of a page, on a page's boundary: this thread's own until it asks again."""
        if not hasattr(self._local, "room"):
            self._local.room = _aligned(_room_bytes(self._shape))
            with self._lock:
                self._num_rooms += 1
        room: Bytes = self._local.room
        return room[:num_bytes]

    def rooms_bytes(self) -> int:
        """Host memory of the rooms that were ever made: a thread keeps its own for as long as it runs."""
        with self._lock:
            return self._num_rooms * joined_room_bytes(self._shape)

    def buffer(self, num_bytes: int) -> Bytes:
        """Room for an encoded slice, this thread's own until it asks again."""
        if not hasattr(self._local, "buffer"):
            self._local.buffer = _aligned(self._shape.slice_bytes)
        buffer: Bytes = self._local.buffer
        return buffer[:num_bytes]

    def decode(self, codec: int, encoded: Bytes, out: Bytes) -> None:
        """One slice. Raises ValueError; `out` then holds garbage."""
        self._codecs[codec].decode(encoded, out)

    def _count(self, raw_bytes: int, stored_bytes: int) -> None:
        with self._lock:
            self._raw_bytes += raw_bytes
            self._stored_bytes += stored_bytes


def joined_room_bytes(shape: BlockShape) -> int:
    """Host memory that a thread takes, once and for all, which moves blocks of joined slabs."""
    return _room_bytes(shape) + PAGE_BYTES  # to begin on a page


def _room_bytes(shape: BlockShape) -> int:
    """A slice or a mebibyte, whichever is more, and a part of a page."""
    return max(shape.slice_bytes, min(BUFFER_BYTES, shape.block_bytes)) + PAGE_BYTES


def _aligned(num_bytes: int) -> Bytes:
    room = np.empty(num_bytes + PAGE_BYTES, np.uint8)
    start = -int(room.__array_interface__["data"][0]) % PAGE_BYTES
    return room[start : start + num_bytes]
