"""The nvme store against fio on the same file system: writes, random slice reads, random block reads.

Each row is one access (write 1 MiB blocks over written ones; read 384 KiB slices; read 1 MiB blocks) in one way:

- `mmap`, `direct`: the store's two ways of I/O, checksums made and verified, into memory on pages as the ring's is;
- `direct, staged`: the same into memory that does not lie on pages, through staging;
- `direct, unchecked`: `direct` with the hash function replaced by one that does nothing: what checksums cost. No user
  can have this;
- `mmap, zstd` and `direct, zstd`: with compression, over KV of the demo's model in fp32 (the others do not care what
  bytes are). Rates are of the KV, not of what is left of it on disk. They have no target: it is paid for room.

fio runs beside them with `direct=1`, the same request size and the same number in flight, by io_uring and by psync. All
take turns in every round, and a ratio is the median over the rounds of ours to fio's in the same round, so that other
work on the machine hits both; of the two engines' ratios the lower one is told. Cold means cold: the page cache of the
files is dropped before each measurement, and a row whose `/proc/self/io` shows less than 95 % of its bytes (as stored)
is invalid. What hashing the demo model's weights costs, for the namespace, is told beside it.
Writes through the page cache end when they are on the device. Run as `python -m kvtier.benchmarks.storage`; needs fio.
Cost: about 7 minutes and eleven times `--payload-mib` of disk; `--quick` two minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import xxhash
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.compression import slices
from kvtier.benchmarks.fio import ENGINES, fio_rate, fio_version
from kvtier.benchmarks.machine import machine
from kvtier.benchmarks.models import LoadedModel, load_model
from kvtier.hf import describe
from kvtier.hf.fingerprint import fingerprint
from kvtier.stores.io_choice import choose_io
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.staging import page_aligned
from kvtier.system import filesystem_kind, io_counters
from kvtier.types import BlockShape, Compression, IoMode, Slot

# Slices of SmolLM2-135M in fp32 (3 heads of 64, 256 tokens), four to a block; and blocks of 1 MiB.
SLICES = BlockShape(num_layers=4, kv_heads=3, block_tokens=256, key_dim=64, value_dim=64, element_bytes=4)
BLOCKS = BlockShape(num_layers=4, kv_heads=2, block_tokens=256, key_dim=64, value_dim=64, element_bytes=4)
TARGETS = {"write 1 MiB": 0.85, "read 384 KiB": 0.80, "read 1 MiB": 0.85}
COLD_FRAC = 0.95


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


def _memory(num_bytes: int, on_pages: bool) -> torch.Tensor:
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


def _drop_cache(store: NvmeStore) -> None:
    """Make the store's files cold: dirty pages cannot be dropped, so they are written first."""
    for path in store.folder.glob("segment-*.kvt"):
        fd = os.open(path, os.O_RDWR)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def measure(
    store: NvmeStore, access: str, depth: int, run_s: float, on_pages: bool, num_slots: int, payload: Payload
) -> Measured:
    """Requests at random places, each place at most once, on `depth` threads for about `run_s` seconds."""
    shape = store.shape
    is_write, per_block = access.startswith("write"), shape.num_layers if "384" in access else 1
    request_bytes = shape.slice_bytes if per_block > 1 else shape.block_bytes
    places = random.sample(range(num_slots * per_block), num_slots * per_block)
    buffers = [_memory(request_bytes, on_pages) for _ in range(depth)]
    for buffer in buffers:
        payload.fill(buffer, store)
    _drop_cache(store)

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
            _drop_cache(store)
        elapsed_s = time.perf_counter() - started_s
    key = "write_bytes" if is_write else "read_bytes"
    num_requests = sum(count for count, _ in done)
    num_bytes = num_requests * request_bytes
    moved = io_counters()[key] - before[key]
    stored_bytes = num_bytes * store.stored_frac
    return Measured(num_bytes / elapsed_s, moved / stored_bytes, sum(busy_s for _, busy_s in done) / num_requests)


def checksum_rate(num_bytes: int) -> float:
    """Bytes a second of the store's checksum on one thread, over more memory than the processor caches."""
    data = _memory(64 << 20, True).numpy()
    data[:] = 1
    pieces = [data[at : at + num_bytes] for at in range(0, data.nbytes - num_bytes, num_bytes)]
    times = []
    for piece in pieces:
        started_s = time.perf_counter()
        xxhash.xxh3_64_intdigest(piece.data)
        times.append(time.perf_counter() - started_s)
    return num_bytes / statistics.median(times)


@contextmanager
def _hashing(is_checked: bool) -> Iterator[None]:
    """With the store's hash, or with one that costs nothing and says the same of all bytes."""
    if is_checked:
        yield
        return
    with patch.object(xxhash, "xxh3_64_intdigest", lambda data: 0):
        yield


def _num_slots(shape: BlockShape, payload_bytes: int) -> int:
    """A few fewer than would fit: headers take room, and each way is to have as many."""
    return payload_bytes // shape.block_bytes - 8


def _open(folder: Path, way: Way, shape: BlockShape, payload_bytes: int, payload: Payload) -> NvmeStore:
    store = NvmeStore(
        shape, payload_bytes, folder, persistent=False, reserve_free_frac=0.0, io=way.mode, compression=way.compression
    )
    block = _memory(shape.block_bytes, True)
    # Written once: the first write into preallocated space is another, slower thing.
    for slot in range(_num_slots(shape, payload_bytes)):
        payload.fill(block, store)
        store.write(Slot(slot), block)
    return store


def run(options: argparse.Namespace, folder: Path, console: Console, payload: Payload) -> list[dict[str, Any]]:
    """All rows. `direct` and `direct, staged` share their stores."""
    payload_bytes, zstd = options.payload_mib << 20, Compression.ZSTD
    ways = [Way("mmap", IoMode.MMAP), Way("direct", IoMode.DIRECT)]
    ways.append(Way("direct, unchecked", IoMode.DIRECT, is_checked=False))
    ways += [Way(f"{mode.value}, zstd", mode, compression=zstd) for mode in (IoMode.MMAP, IoMode.DIRECT)]
    staged = Way("direct, staged", IoMode.DIRECT, on_pages=False, stores=ways[1].stores)
    rows = []
    with ExitStack() as stack:
        yardstick = folder / "fio"
        with console.status("writing the files"):
            with yardstick.open("wb", buffering=0) as file:
                for _ in range(options.payload_mib):
                    file.write(random.randbytes(1 << 20))
                os.fsync(file.fileno())
            for way in ways:
                for name, shape in (("blocks", BLOCKS), ("slices", SLICES)):
                    with _hashing(way.is_checked):
                        way.stores[name] = _open(folder / f"{way.name}-{name}", way, shape, payload_bytes, payload)
                    stack.callback(way.stores[name].close)
        for depth in options.depths:
            for access in TARGETS:
                with console.status(f"{access}, {depth} in flight"):
                    rows += _compare([*ways, staged], access, depth, yardstick, payload, options)
    return rows


def _compare(
    ways: list[Way], access: str, depth: int, yardstick: Path, payload: Payload, options: argparse.Namespace
) -> list[dict[str, Any]]:
    ours: dict[str, list[Measured]] = {way.name: [] for way in ways}
    theirs: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    payload_bytes, shape = options.payload_mib << 20, SLICES if "384" in access else BLOCKS
    request_bytes = SLICES.slice_bytes if shape is SLICES else BLOCKS.block_bytes
    num_slots = _num_slots(shape, payload_bytes)
    fio_access = "randwrite" if access.startswith("write") else "randread"
    turns: list[Way | str] = [*ways, *ENGINES]
    for number in range(options.rounds):
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:  # nobody always follows the same one
            if isinstance(turn, str):
                rate = fio_rate(yardstick, payload_bytes, fio_access, turn, request_bytes, depth, options.seconds)
                theirs[turn].append(rate)
            else:
                store = turn.stores["slices" if shape is SLICES else "blocks"]
                with _hashing(turn.is_checked):
                    ours[turn.name].append(
                        measure(store, access, depth, options.seconds, turn.on_pages, num_slots, payload)
                    )
    check_s = request_bytes / checksum_rate(request_bytes)
    rows = []
    for name, measured in ours.items():
        by_engine = [
            sorted(m.rate / rate for m, rate in zip(measured, rates, strict=True)) for rates in theirs.values()
        ]
        ratios = min(by_engine, key=statistics.median)
        disk_frac = min(m.disk_frac for m in measured)
        rows.append(
            {
                "access": access,
                "io": name,
                "depth": depth,
                "bytes_per_s": statistics.median(m.rate for m in measured),
                **{f"fio_{engine}_bytes_per_s": statistics.median(rates) for engine, rates in theirs.items()},
                "ratio_to_fio": statistics.median(ratios),
                "ratio_spread": [ratios[0], ratios[-1]],
                "target": None if "zstd" in name else TARGETS[access],
                "disk_frac": disk_frac,
                "is_valid": disk_frac >= COLD_FRAC,
                "checksum_s": check_s,
                "checksum_frac": check_s / statistics.median(m.op_s for m in measured),
            }
        )
    return rows


def main() -> None:
    """Measure, print a table, then one JSON document as the last line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=None, help="where to measure; the temporary folder by default")
    parser.add_argument("--payload-mib", type=int, default=512, help="size of each of the eleven files, in MiB")
    parser.add_argument("--depths", default="8,32", help="comma list of requests in flight")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, at most")
    parser.add_argument("--quick", action="store_true", help="128 MiB, 8 in flight, 0.3 s")
    options = parser.parse_args()
    if options.quick:
        options.payload_mib, options.depths, options.seconds = 128, "8", 0.3
    if options.rounds < 5:
        parser.error("--rounds: a median of fewer than 5 is noise")
    options.depths = [int(depth) for depth in options.depths.split(",")]
    version, load_before = fio_version(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvtier-storage-", dir=options.folder) as name:
        folder = Path(name)
        kind = filesystem_kind(folder)
        auto = choose_io(IoMode.AUTO, folder, 1 << 40, SLICES.slice_bytes)
        console = Console(stderr=True)
        torch.set_num_threads(1)
        loaded = load_model(None, console)
        namespace_s = namespace_rate(loaded, options.rounds)
        payload = Payload(demo_kv(loaded))
        del loaded
        rows = run(options, folder, console, payload)
    load = [round(value, 1) for value in (load_before[0], os.getloadavg()[0])]
    table = Table(title=f"The nvme store and {version} on {kind}; load {load[0]} to {load[1]} on {os.cpu_count()} cpus")
    for column in ("access", "in flight", "io", "GB/s", *(f"fio {e}" for e in ENGINES), "ratio", "spread", "checksum"):
        table.add_column(column, justify="right")
    table.add_column("from disk")
    for row in rows:
        low, high = row["ratio_spread"]
        table.add_row(
            row["access"],
            str(row["depth"]),
            row["io"],
            f"{row['bytes_per_s'] / 1e9:.2f}",
            *(f"{row[f'fio_{engine}_bytes_per_s'] / 1e9:.2f}" for engine in ENGINES),
            f"{row['ratio_to_fio']:.2f}" + (" <" if row["ratio_to_fio"] < (row["target"] or 0) else ""),
            f"{low:.2f} … {high:.2f}",
            f"{row['checksum_s'] * 1e6:.0f} us, {row['checksum_frac']:.0%}",
            f"{row['disk_frac']:.0%}" + ("" if row["is_valid"] else " INVALID"),
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a file has no width, and cells cut short say nothing
    console.print(table)
    console.print(f"auto takes {auto.mode.value}: {auto.reason}. Marked <: below its target.", highlight=False)
    console.print(
        f"The namespace: {namespace_s:.2f} s of one core for each GB of the model's weights.", highlight=False
    )
    found = {"benchmark": "storage", "rows": rows, "auto": {"io": auto.mode.value, "reason": auto.reason}}
    found |= {"namespace_s_per_gb": namespace_s, "fio": version, "filesystem": kind, "load": load, "machine": machine()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
