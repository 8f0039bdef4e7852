"""Floats split into planes before zstd: sign and exponent apart from the mantissa.

The exponents of KV repeat (the first byte of a float carries 2 to 3 bits of information), mantissas do not. As they
lie, in turns, hardly anything compresses; apart from each other the first bytes do, and the rest is left alone.
Source: byte shuffling, as in Blosc (Alted, Why Modern CPUs Are Starving and What Can Be Done about It, 2010).
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import zstandard

from kvtier.codecs.base import Bytes, Codec

NUMBERS = {element_bytes: 1 | element_bytes << 8 for element_bytes in (2, 4)}
"""The codec's number by the size of an element: each slot on disk says how it is read."""

_LEVEL = 1  # higher ones take longer and gain nothing here
_LENGTH = struct.Struct("<I")


class ZstdCodec(Codec):
    """zstd of every element's most significant byte, the other bytes raw. For little-endian floats of 16 or 32 bits.

    Encoded: the length of the compressed plane (u32, little-endian), the plane, then the planes of the other bytes,
    least significant first.

    Cost: one pass of zstd over a half or a quarter of the bytes, and a pass of shifts for each plane, all of which
    release the GIL. It allocates twice the bytes of a slice.
    """

    def __init__(self, element_bytes: int) -> None:
        """`element_bytes`: 2 or 4."""
        self.number = NUMBERS[element_bytes]
        self._dtype = np.dtype(f"<u{element_bytes}")
        self._local = threading.local()  # zstandard's objects are not for two threads at once

    def encode(self, data: Bytes) -> Bytes:
        elements = data.view(self._dtype)
        shifted = np.empty_like(elements)
        top = self._dtype.itemsize - 1
        # Shifts run over whole elements at once; taking every fourth byte is many times slower.
        np.right_shift(elements, 8 * top, out=shifted)
        plane = self._compressor().compress(shifted.astype(np.uint8).data)
        start = _LENGTH.size + len(plane)
        out = np.empty(start + top * elements.size, dtype=np.uint8)
        if out.nbytes >= data.nbytes:
            return data
        _LENGTH.pack_into(out.data, 0, len(plane))
        out[_LENGTH.size : start] = np.frombuffer(plane, dtype=np.uint8)
        for number, raw in enumerate(out[start:].reshape(top, -1)):
            np.right_shift(elements, 8 * number, out=shifted)
            raw[...] = shifted.astype(np.uint8)  # the low byte
        return out

    def decode(self, encoded: Bytes, out: Bytes) -> None:
        elements = out.view(self._dtype)
        top = self._dtype.itemsize - 1
        start = _LENGTH.size + (_LENGTH.unpack_from(encoded.data)[0] if encoded.nbytes >= _LENGTH.size else 0)
        if encoded.nbytes - start != top * elements.size:
            raise ValueError(f"zstd: {encoded.nbytes} bytes are no encoded slice of {out.nbytes}")
        frame = encoded[_LENGTH.size : start].data
        try:
            # First: zstd would allocate whatever size the frame claims.
            if zstandard.frame_content_size(frame) != elements.size:
                raise ValueError(f"zstd: a plane of another length than {elements.size} bytes")
            plane = self._decompressor().decompress(frame, allow_extra_data=False)
        except zstandard.ZstdError as error:
            raise ValueError(f"zstd: {error}") from error
        shifted = np.empty_like(elements)
        np.left_shift(np.frombuffer(plane, dtype=np.uint8), 8 * top, out=elements, dtype=self._dtype)
        for number, raw in enumerate(encoded[start:].reshape(top, -1)):
            np.left_shift(raw, 8 * number, out=shifted, dtype=self._dtype)
            np.bitwise_or(elements, shifted, out=elements)

    def _compressor(self) -> zstandard.ZstdCompressor:
        if not hasattr(self._local, "compressor"):
            # The checksums in the slot's header cover the encoded bytes, which decide the rest.
            self._local.compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False)
        compressor: zstandard.ZstdCompressor = self._local.compressor
        return compressor

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor()
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor
