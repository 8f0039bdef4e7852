"""One measurement of the nvme store for `benchmarks/storage.py`: ways of I/O, what is written, and how fast it went."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import torch
import xxhash

from kvtier.benchmarks.cold import drop_cache
from kvtier.benchmarks.compression import slices
from kvtier.benchmarks.models import LoadedModel
from kvtier.hf import describe
from kvtier.hf.fingerprint import fingerprint
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.staging import page_aligned
from kvtier.system import io_counters
from kvtier.types import BlockShape, Compression, IoMode, Slot

# Slices of SmolLM2-135M in fp32 (3 heads of 64, 256 tokens), four to a block; and blocks of 1 MiB.
SLICES = BlockShape(num_layers=4, kv_heads=3, block_tokens=256, key_dim=64, value_dim=64, element_bytes=4)
BLOCKS = BlockShape(num_layers=4, kv_heads=2, block_tokens=256, key_dim=64, value_dim=64, element_bytes=4)
_SEGMENTS = "segment-*.kvt"


@dataclass
class Way:
    """One way of I/O, with a store for each access."""

    name: str
    mode: IoMode
    on_pages: bool = True
    is_checked: bool = True
    compression: Compression = Compression.NONE
    stores: dict[str, NvmeStore] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """One measurement of ours."""

    rate: float
    """Bytes a second."""
    disk_frac: float
    """What the disk moved for each byte asked for, as it is stored."""
    op_s: float
    """Mean seconds of one request on its thread."""


def memory(num_bytes: int, on_pages: bool) -> torch.Tensor:
    """Bytes that begin on a page, or in the middle of one."""
    return page_aligned(num_bytes) if on_pages else page_aligned(num_bytes + 64)[64:]


class Payload:
    """What is written: random bytes, and KV where bytes are to be compressed."""

    def __init__(self, kv: bytes) -> None:
        self._kv = memoryview(kv)

    def fill(self, buffer: torch.Tensor, store: NvmeStore) -> None:
        """Fill a whole buffer. KV from a random place of the text, on an element's boundary."""
        num_bytes = buffer.numel()
        if store.compression is Compression.NONE:
            buffer.numpy().data[:] = random.randbytes(num_bytes)
            return
        start = random.randrange(0, len(self._kv) - num_bytes, SLICES.slice_bytes // SLICES.kv_heads)
        buffer.numpy().data[:] = self._kv[start : start + num_bytes]


def demo_kv(loaded: LoadedModel) -> bytes:
    """The KV of 1,024 tokens of Python's documentation in fp32, slice after slice: 45 MiB for the demo's model."""
    from pydoc_data.topics import topics

    ids = loaded.tokenizer("\n".join(topics.values())[:20_480], return_tensors="pt").input_ids[:, :1024]
    return b"".join(each.tobytes() for each in slices(loaded.model, ids.to(loaded.model.device), torch.float32))


def namespace_rate(loaded: LoadedModel, rounds: int) -> float:
    """Seconds of one core that hashing a GB of the model's weights takes: the median of `rounds`."""
    group = describe(loaded.model, SLICES.block_tokens)
    num_bytes = sum(each.numel() * each.element_size() for each in loaded.model.state_dict().values())
    times = []
    for _ in range(rounds):
        started_s = time.process_time()
        fingerprint(loaded.model, group)
        times.append(time.process_time() - started_s)
    return statistics.median(times) / num_bytes * 1e9


def measure(
    store: NvmeStore, access: str, depth: int, run_s: float, on_pages: bool, num_slots: int, payload: Payload
) -> Measured:
    """Requests at random places, each place at most once, on `depth` threads for about `run_s` seconds."""
    shape = store.shape
    is_write, per_block = access.startswith("write"), shape.num_layers if "384" in access else 1
    request_bytes = shape.slice_bytes if per_block > 1 else shape.block_bytes
    places = random.sample(range(num_slots * per_block), num_slots * per_block)
    buffers = [memory(request_bytes, on_pages) for _ in range(depth)]
    for buffer in buffers:
        payload.fill(buffer, store)
    drop_cache(store.folder, _SEGMENTS)

    def work(number: int) -> tuple[int, float]:
        count, begun_s = 0, time.perf_counter()
        for place in places[number::depth]:
            slot, layer = Slot(place // per_block), place % per_block
            if is_write:
                store.write(slot, buffers[number])
            elif per_block > 1:
                store.read_slice(slot, layer, buffers[number])
            else:
                store.read(slot, buffers[number])
            count += 1
            if time.perf_counter() - started_s > run_s:
                break
        return count, time.perf_counter() - begun_s

    with ThreadPoolExecutor(depth) as pool:
        before = io_counters()
        started_s = time.perf_counter()
        done = list(pool.map(work, range(depth)))
        if is_write and store.io.mode is IoMode.MMAP:
            drop_cache(store.folder, _SEGMENTS)
        elapsed_s = time.perf_counter() - started_s
    key = "write_bytes" if is_write else "read_bytes"
    num_requests = sum(count for count, _ in done)
    num_bytes = num_requests * request_bytes
    moved = io_counters()[key] - before[key]
    stored_bytes = num_bytes * store.stored_frac
    return Measured(num_bytes / elapsed_s, moved / stored_bytes, sum(busy_s for _, busy_s in done) / num_requests)


def checksum_rate(num_bytes: int) -> float:
    """Bytes a second of the store's checksum on one thread, over more memory than the processor caches."""
    data = memory(64 << 20, True).numpy()
    data[:] = 1
    pieces = [data[at : at + num_bytes] for at in range(0, data.nbytes - num_bytes, num_bytes)]
    times = []
    for piece in pieces:
        started_s = time.perf_counter()
        xxhash.xxh3_64_intdigest(piece.data)
        times.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(times)


@contextmanager
def hashing(is_checked: bool) -> Iterator[None]:
    """With the store's hash, or with one that costs nothing and says the same of all bytes."""
    if is_checked:
        yield
        return
    with patch.object(xxhash, "xxh3_64_intdigest", lambda data: 0):
        yield


def num_slots_of(shape: BlockShape, payload_bytes: int) -> int:
    """A few fewer than would fit: headers take room, and each way is to have as many."""
    return payload_bytes // shape.block_bytes - 8


def open_store(folder: Path, way: Way, shape: BlockShape, payload_bytes: int, payload: Payload) -> NvmeStore:
    """A store whose slots are written."""
    store = NvmeStore(
        shape, payload_bytes, folder, persistent=False, reserve_free_frac=0.0, io=way.mode, compression=way.compression
    )
    block = memory(shape.block_bytes, True)
    # Written once: the first write into preallocated space is another, slower thing.
    for slot in range(num_slots_of(shape, payload_bytes)):
        payload.fill(block, store)
        store.write(Slot(slot), block)
    return store
