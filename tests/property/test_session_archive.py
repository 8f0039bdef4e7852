"""Any session comes back as it was, and no other bytes pass for one."""

from __future__ import annotations

import math
import tempfile
from array import array
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvtier.session_archive import ArchiveHeader, write_archive
from kvtier.types import Compression
from tests.archives import READ, WRITE, block, read, refused_after

PRINTABLE = st.text(min_size=1, max_size=40).filter(str.isprintable)
DIGESTS = st.binary(min_size=32, max_size=32)


@st.composite
def headers(draw: st.DrawFn) -> ArchiveHeader:
    ids = draw(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50))
    return ArchiveHeader(
        name=draw(PRINTABLE),
        salt=draw(DIGESTS),
        namespace=draw(DIGESTS),
        block_tokens=draw(st.integers(1, 60) | st.just(2**31 - 1)),
        block_bytes=draw(st.integers(1, 300)),
        dtype=draw(st.sampled_from(["float32", "torch.bfloat16", "float16", "int8"])),
        model=draw(PRINTABLE),
        token_ids=array("i", ids),
        created_s=draw(st.floats(0, allow_nan=False, allow_infinity=False)),
        ttl_s=draw(st.floats(0, exclude_min=True, allow_nan=False)),
    )


@given(
    headers(), st.sampled_from(Compression), st.sampled_from(sorted(WRITE)), st.sampled_from(sorted(READ)), st.data()
)
def test_any_session_comes_back(
    of: ArchiveHeader, compression: Compression, writing: str, reading: str, data: st.DataObject
) -> None:
    wanted = [
        data.draw(st.binary(min_size=of.block_bytes, max_size=of.block_bytes) | st.just(block(number, of.block_bytes)))
        for number in range(of.num_blocks)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        num_bytes = WRITE[writing](path, of, wanted, compression=compression)
        assert num_bytes == path.stat().st_size
        got, blocks = READ[reading](path)
        assert (got, blocks) == (of, wanted)
        assert math.copysign(1, got.created_s) == math.copysign(1, of.created_s)


@given(headers(), st.sampled_from(Compression), st.data())
def test_no_other_bytes_pass_for_it(of: ArchiveHeader, compression: Compression, data: st.DataObject) -> None:
    """Pieces replaced, dropped, repeated; or bytes that are none of ours."""
    right = [block(number, of.block_bytes) for number in range(of.num_blocks)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a"
        write_archive(path, of, right, compression=compression)
        assert read(path) == (of, right)
        whole = path.read_bytes()
        start = data.draw(st.integers(0, len(whole)))
        stop = data.draw(st.integers(start, min(len(whole), start + 80)))
        piece = data.draw(st.binary(max_size=80) | st.just(whole[start:stop] * 2))
        damaged = whole[:start] + piece + whole[stop:]
        given_out, why = refused_after(path, damaged)
        assert given_out == right[: len(given_out)]
        assert bool(why) is (damaged != whole)
