"""A slice comes back bit by bit from every codec, and nothing that is not an encoded slice is taken for one."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import suppress

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from kvtier.codecs.base import Bytes
from kvtier.codecs.zstd import ZstdCodec

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def floats(dtype: torch.dtype, count: int, seed: int) -> Bytes:
    """As KV is: of one scale, with some zeros, infinities and NaNs of odd bits among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator).to(dtype)
    values[::97], values[::389], values[::1013] = 0.0, float("inf"), float("nan")
    return values.view(torch.uint8).numpy()


def round_trip(codec: ZstdCodec, data: Bytes) -> Bytes:
    encoded = codec.encode(data)
    if encoded.nbytes == data.nbytes:
        assert np.array_equal(encoded, data)
        return encoded
    out = np.full_like(data, 0xA5)
    codec.decode(encoded.copy(), out)
    assert np.array_equal(out, data)
    return encoded


@given(st.binary(min_size=4, max_size=600), st.sampled_from([2, 4]), st.integers(0, 3))
def test_any_bytes_come_back(data: bytes, element_bytes: int, offset: int) -> None:
    room = np.empty(len(data) + 8, dtype=np.uint8)
    part = room[offset : offset + len(data) // 4 * 4]  # at any address
    part[...] = np.frombuffer(data, dtype=np.uint8)[: part.size]
    round_trip(ZstdCodec(element_bytes), part)


@pytest.mark.parametrize("dtype", DTYPES)
def test_floats_come_back_smaller(dtype: torch.dtype) -> None:
    data = floats(dtype, 50_000, 1)
    encoded = round_trip(ZstdCodec(dtype.itemsize), data)
    assert encoded.nbytes < 0.9 * data.nbytes


def test_what_does_not_pay_is_left_raw() -> None:
    data = np.random.default_rng(0).integers(0, 256, 40_000, dtype=np.uint8)
    for element_bytes in (2, 4):
        encoded = ZstdCodec(element_bytes).encode(data)
        assert encoded.nbytes == data.nbytes and np.array_equal(encoded, data)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_damaged_length_is_an_error(element_bytes: int) -> None:
    codec, data = ZstdCodec(element_bytes), floats(torch.float32, 300, 2)
    encoded, out = codec.encode(data), np.empty_like(data)
    assert encoded.nbytes < data.nbytes
    for length in range(encoded.nbytes):
        with pytest.raises(ValueError, match="zstd"):
            codec.decode(encoded[:length].copy(), out)
    for start in (2**32 - 1, 0, encoded.nbytes):
        crafted = encoded.copy()
        crafted[:4] = np.frombuffer(start.to_bytes(4, "little"), dtype=np.uint8)
        with pytest.raises(ValueError, match="zstd"):
            codec.decode(crafted, out)


def test_a_frame_that_claims_gigabytes_gets_none() -> None:
    """Its header says 1 GiB; decompressing it would allocate that before any byte is checked."""
    codec, out = ZstdCodec(4), np.empty(4096, dtype=np.uint8)
    frame = zstandard.ZstdCompressor().compress(b"\0" * (1 << 30))
    crafted = np.frombuffer(len(frame).to_bytes(4, "little") + frame + bytes(3 * 1024), dtype=np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="zstd"):
            codec.decode(crafted, out)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@given(st.integers(0, 2**32), st.integers(0, 4000))
def test_flipped_bits_never_do_more_than_change_the_result(seed: int, at: int) -> None:
    """The checksum over the encoded bytes is what sees them; the codec must neither crash nor write elsewhere."""
    codec, data = ZstdCodec(4), floats(torch.float32, 700, 3)
    encoded = codec.encode(data).copy()
    encoded[at % encoded.nbytes] ^= 1 << seed % 8
    room = np.full(data.nbytes + 64, 7, dtype=np.uint8)
    with suppress(ValueError):
        codec.decode(encoded, room[32:-32])
    assert (room[:32] == 7).all() and (room[-32:] == 7).all()


def test_32_threads_on_one_codec() -> None:
    codec, errors = ZstdCodec(4), []

    def work(seed: int) -> None:
        try:
            for turn in range(20):
                round_trip(codec, floats(torch.float32, 5000, 100 * seed + turn))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
