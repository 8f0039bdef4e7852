"""Slices out of a slot: none is handed out whose bytes are not those that were written."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from kvtier.errors import ChecksumError, StoreError
from kvtier.stores.base import EndOfSlices
from kvtier.stores.file_io import EndOfRows, FileIo
from kvtier.stores.segment import Segment, io_error
from kvtier.stores.slot_format import CODEC_NONE, Bytes, Payload, checksum
from kvtier.stores.slot_payload import PayloadCodec
from kvtier.types import BlockShape, Slot


class SlotReader:
    """Reads, verifies, decodes. Keeps nothing between calls; any number of threads at a time."""

    def __init__(self, shape: BlockShape, codec: PayloadCodec) -> None:
        self._slice_bytes, self._codec = shape.slice_bytes, codec

    def read(self, slot: Slot, segment: Segment, start: int, payload: Payload, out: Bytes) -> None:
        """All slices of a slot.

        Args:
            start: where the first slice begins in the segment's file.
            payload: what its slices are.
            out: `[block_bytes]`, or a slot of a joined slab; after an error it holds anything.

        Raises: StoreError; ChecksumError for bytes that were not written so.
        """
        if out.ndim == 1:
            self._read_group(slot, segment, start, payload, 0, out)
            return
        for first, count in self._codec.groups():
            part = out[first : first + count]
            room = self._codec.room(part.nbytes)
            self._read_group(slot, segment, start, payload, first, room)
            np.copyto(part, room.reshape(part.shape))

    def _read_group(self, slot: Slot, segment: Segment, start: int, payload: Payload, first: int, out: Bytes) -> None:
        """As many slices as there is room for, from `first` on, and in one piece."""
        step = self._slice_bytes
        if payload.codec == CODEC_NONE:
            self._read(segment, slot, start + first * step, out)
        for layer, part in enumerate(out.reshape(-1, step), first):
            if payload.codec == CODEC_NONE:
                _verify(part, payload.checksums[layer], slot, layer, segment)
            else:
                self.read_slice(slot, segment, start, payload, layer, part)

    def read_slice(self, slot: Slot, segment: Segment, start: int, payload: Payload, layer: int, out: Bytes) -> None:
        """Read, verify, decode: what is decoded was written so. Arguments and errors as `read`."""
        offset_bytes, num_bytes = payload.place(layer, self._slice_bytes)
        is_encoded = num_bytes < self._slice_bytes
        stored = self._codec.buffer(num_bytes) if is_encoded else out
        self._read(segment, slot, start + offset_bytes, stored)
        _verify(stored, payload.checksums[layer], slot, layer, segment)
        if is_encoded:
            try:
                self._codec.decode(payload.codec, stored, out)
            except ValueError as error:  # a crafted header: its checksums fit whatever lies there
                message = f"nvme store: slot {slot}, layer {layer} of {segment.path}: {error}; nothing was served"
                raise ChecksumError(message) from error

    def begin_slices(
        self, places: Sequence[tuple[Slot, Segment, int, Payload]], io: FileIo, layer: int, out: Bytes
    ) -> EndOfSlices:
        """One slice of each of several slots, into rows of `out` (`[n, slice_bytes]`): together where `io` can do that.

        Args:
            places: slot, segment, start and payload of each, as `read_slice` takes them.

        Returns what ends it, on the same thread: it says what kept each from being read; None: it is there, and is what
        was written.
        """
        wanted, size = [], self._slice_bytes
        for _, segment, start, payload in places:
            offset_bytes, num_bytes = payload.place(layer, size)
            if num_bytes == size:
                wanted.append(segment.place(start + offset_bytes))
        end_rows = io.begin_rows(wanted, out) if len(wanted) == len(places) else None
        return functools.partial(self._end_slices, places, layer, out, end_rows)

    def _end_slices(
        self,
        places: Sequence[tuple[Slot, Segment, int, Payload]],
        layer: int,
        out: Bytes,
        end_rows: EndOfRows | None,
    ) -> list[StoreError | None]:
        filled = [False] * len(places) if end_rows is None else end_rows()
        failures: list[StoreError | None] = []
        for (slot, segment, start, payload), is_filled, row in zip(places, filled, out, strict=True):
            try:
                if is_filled:
                    _verify(row, payload.checksums[layer], slot, layer, segment)
                else:
                    self.read_slice(slot, segment, start, payload, layer, row)
                failures.append(None)
            except StoreError as error:
                failures.append(error)
        return failures

    def _read(self, segment: Segment, slot: Slot, offset_bytes: int, out: Bytes) -> None:
        try:
            segment.read(offset_bytes, out)
        except StoreError:
            raise
        except OSError as error:
            raise io_error(error, f"reading slot {slot}", segment.path) from error


def _verify(data: Bytes, expected: int, slot: Slot, layer: int, segment: Segment) -> None:
    actual = checksum(data)
    if actual != expected:
        raise ChecksumError(
            f"nvme store: slot {slot}, layer {layer} of {segment.path}: read {actual:016x}, wrote {expected:016x}; "
            "the bytes were not served"
        )
