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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from kvtier.benchmarks.cold import COLD_FRAC
from kvtier.benchmarks.command import console_of
from kvtier.benchmarks.fio import ENGINES, fio_rate, fio_version
from kvtier.benchmarks.machine import machine
from kvtier.benchmarks.models import load_model
from kvtier.benchmarks.storage_way import (
    BLOCKS,
    SLICES,
    Measured,
    Payload,
    Way,
    checksum_rate,
    demo_kv,
    hashing,
    measure,
    namespace_rate,
    num_slots_of,
    open_store,
)
from kvtier.stores.io_choice import choose_io
from kvtier.system import filesystem_kind
from kvtier.terminal import print_table
from kvtier.types import Compression, IoMode

TARGETS = {"write 1 MiB": 0.85, "read 384 KiB": 0.80, "read 1 MiB": 0.85}


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
                    with hashing(way.is_checked):
                        way.stores[name] = open_store(folder / f"{way.name}-{name}", way, shape, payload_bytes, payload)
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
    num_slots = num_slots_of(shape, payload_bytes)
    fio_access = "randwrite" if access.startswith("write") else "randread"
    turns: list[Way | str] = [*ways, *ENGINES]
    for number in range(options.rounds):
        for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:  # nobody always follows the same one
            if isinstance(turn, str):
                rate = fio_rate(yardstick, payload_bytes, fio_access, turn, request_bytes, depth, options.seconds)
                theirs[turn].append(rate)
            else:
                store = turn.stores["slices" if shape is SLICES else "blocks"]
                with hashing(turn.is_checked):
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
    console = console_of()
    print_table(table, console)
    console.print(f"auto takes {auto.mode.value}: {auto.reason}. Marked <: below its target.", highlight=False)
    console.print(
        f"The namespace: {namespace_s:.2f} s of one core for each GB of the model's weights.", highlight=False
    )
    found = {"benchmark": "storage", "rows": rows, "auto": {"io": auto.mode.value, "reason": auto.reason}}
    found |= {"namespace_s_per_gb": namespace_s, "fio": version, "filesystem": kind, "load": load, "machine": machine()}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
