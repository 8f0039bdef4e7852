"""The rates of a machine, from a saved `kvtier doctor --json`. Pure Python; nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.copy_length import copy_rate
from kvtier.errors import ConfigError
from kvtier.planner.models import read_json
from kvtier.types import IoMode

DOCTOR_FORMAT = 1
HOW = "kvtier doctor --json > rates.json, on the machine that the plan is for, then --rates rates.json"
_MEND = f"Mend: {HOW}"
_WIDE, _NARROW = 4096, 512
"""Elements in a row of the doctor's two matrices that meet a vector."""


@dataclass(frozen=True, slots=True)
class DiskRow:
    """One of the doctor's rates of a disk, bytes a second."""

    io: str
    access: str
    request_bytes: int
    depth: int
    bytes_per_s: float
    core_bytes_per_s: float | None = None
    """Of reads: what one core would read if the disk took no time. None: an older doctor did not say."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What the doctor measured of one machine. A rate that it could not measure is None, never 0."""

    source: str
    rows: Mapping[tuple[str, str], float]
    """By section and name: every row that is a positive number."""
    disk: tuple[DiskRow, ...]

    @property
    def device(self) -> str:
        """`cuda` where the doctor found a CUDA device (the first counts), else `cpu`."""
        return "cuda" if ("gpu 0", "memory") in self.rows else "cpu"

    @property
    def device_bytes(self) -> float | None:
        """Memory in which weights and the gpu tier lie: free on the device, or what the process may use."""
        return self.rows.get(("gpu 0", "free")) if self.device == "cuda" else self.host_bytes

    @property
    def host_bytes(self) -> float | None:
        """Host memory that the process may use."""
        return self.rows.get(("memory", "may be used"))

    @property
    def disk_free_bytes(self) -> float | None:
        """Free where the nvme tier's files would lie."""
        return self.rows.get(("disk", "free"))

    @property
    def cores(self) -> int:
        """Cores that the process may run on; 1 where that is not known."""
        return int(self.rows.get(("processor", "cores"), 1))

    @property
    def checksum(self) -> float | None:
        """Bytes a second that one core verifies."""
        return self.rows.get(("processor", "xxh3, one core"))

    @property
    def decompress(self) -> float | None:
        """Bytes a second that come out of zstd on one core."""
        return self.rows.get(("processor", "zstd-1 decompress, one core"))

    def read_memory(self, dtype: str, num_threads: int | None) -> float | None:
        """Bytes a second of a matrix that is multiplied with a vector, as decoding does; by all threads for None."""
        return self._compute("matrix x vector", dtype, num_threads)

    def read_weights(self, dtype: str, num_threads: int | None, row_elements: int) -> float | None:
        """As `read_memory`, of a matrix with rows of so many elements: each row costs something beside its bytes.

        So the time of a byte grows as rows get shorter, in a line with their number: through the doctor's two points.
        """
        wide = self.read_memory(dtype, num_threads)
        narrow = self._compute(f"matrix x vector, rows of {_NARROW}", dtype, num_threads)
        if wide is None or narrow is None:
            return None
        share = (1 / min(row_elements, _WIDE) - 1 / _WIDE) / (1 / _NARROW - 1 / _WIDE)
        return 1 / (1 / wide + max(0.0, share * (1 / narrow - 1 / wide)))

    def attention(self, dtype: str, num_threads: int | None, heads: int) -> float | None:
        """Bytes of K and V a second that one token's attention reads, at the nearest number of heads.

        Args:
            heads: query heads on each head of K and V.
        """
        rates = {count: self._compute(f"attention, {count} query heads", dtype, num_threads) for count in (4, 1)}
        return rates[min(rates, key=lambda count: abs(math.log(heads / count)))]

    def decoding_s(self, what: str, num_threads: int | None) -> float | None:
        """Seconds of code, whatever the bytes.

        Args:
            what: `step` (without its layers), `layer` (one of them) or `call of attention` (beyond two a layer).
        """
        micros = self._compute(f"decoding, a {what}", "", num_threads)
        return None if micros is None else micros / 1e6

    @property
    def handover_s(self) -> float | None:
        """Seconds until a waiting thread has done nothing and said so."""
        micros = self.rows.get(("processor", "hand-over to a thread"))
        return None if micros is None else micros / 1e6

    def flop(self, dtype: str, num_threads: int | None) -> float | None:
        """Floating-point operations a second of a product of matrices, as prefill does."""
        return self._compute("matrix x matrix", dtype, num_threads)

    def copies(self, *, to_device: bool) -> float | None:
        """Bytes a second between pinned host memory and the device, by 64 MiB; None without CUDA."""
        way = "host to device" if to_device else "device to host"
        return self.rows.get(("gpu 0", f"{way}, pinned, 64 MiB"))

    def copies_up_of(self, piece_bytes: int) -> float | None:
        """As `copies` to the device, in pieces of that size; None without two rates to tell it by."""
        known = {size << 20: self.rows.get(("gpu 0", f"host to device, pinned, {size} MiB")) for size in (1, 64)}
        return copy_rate(piece_bytes, {size: rate for size, rate in known.items() if rate is not None})

    def disk_rate(self, access: str, io: IoMode, request_bytes: int) -> float | None:
        """The best depth's rate at the nearest request size; with `auto` of the faster way.

        Args:
            access: `read` or `write`.
        """
        return max((row.bytes_per_s for row in self._disk_rows(access, io, request_bytes)), default=None)

    def disk_reads(self, io: IoMode, request_bytes: int, depth: int) -> DiskRow | None:
        """As `disk_rate` of reads, at the nearest of the depths."""
        rows = self._disk_rows("read", io, request_bytes)
        nearest = min((row.depth for row in rows), key=lambda each: abs(math.log(each / depth)), default=0)
        return max((row for row in rows if row.depth == nearest), key=lambda row: row.bytes_per_s, default=None)

    def _disk_rows(self, access: str, io: IoMode, request_bytes: int) -> list[DiskRow]:
        rows = [row for row in self.disk if row.access == access and io in (IoMode.AUTO, IoMode(row.io))]
        nearest = min((row.request_bytes for row in rows), key=lambda size: abs(size - request_bytes), default=0)
        return [row for row in rows if row.request_bytes == nearest]

    def _compute(self, what: str, dtype: str, num_threads: int | None) -> float | None:
        """`dtype` may be empty: then it is not in the row's name."""
        name = ", ".join(filter(None, (what, dtype)))
        if self.device == "cuda":
            return self.rows.get(("gpu 0", name))
        num_threads = min(num_threads or self.cores, self.cores)
        if num_threads not in (1, self.cores):
            return None  # between the two: the doctor did not measure it, and neither would be right
        threads = "one thread" if num_threads == 1 else "all threads"
        return self.rows.get(("processor", f"{name}, {threads}"))


def read_rates(path: Path) -> Rates:
    """The rates in a file that holds `kvtier doctor --json`.

    Raises:
        ConfigError: it cannot be read, or is not such a document.
    """
    where = f"--rates {path}"
    document = read_json(path, where, _MEND)
    if document.get("format") != DOCTOR_FORMAT:
        raise ConfigError(f"{where}: format: must be {DOCTOR_FORMAT}, got {document.get('format')!r:.80}. {_MEND}")
    rows = {
        (str(row.get("section")), str(row.get("name"))): float(row["value"])
        for row in _list(document, "rows", where)
        if _is_positive(row.get("value"))
    }
    disk = tuple(_disk_row(row, where) for row in _list(document, "disk", where) if row.get("bytes_per_s") is not None)
    if not rows:
        raise ConfigError(f"{where}: rows: hold no figure. {_MEND}")
    return Rates(str(path), rows, disk)


def _list(document: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
    found = document.get(key)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ConfigError(f"{where}: {key}: must be a list of mappings, got {found!r:.80}. {_MEND}")
    return found


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _disk_row(row: Mapping[str, Any], where: str) -> DiskRow:
    for key, is_right in {
        "io": row.get("io") in (IoMode.DIRECT.value, IoMode.MMAP.value),
        "access": row.get("access") in ("read", "write"),
        **{key: _is_positive(row.get(key)) for key in ("request_bytes", "depth", "bytes_per_s")},
    }.items():
        if not is_right:
            raise ConfigError(f"{where}: disk: {key} cannot be {row.get(key)!r:.80}. {_MEND}")
    core = row.get("core_bytes_per_s")
    return DiskRow(
        row["io"],
        row["access"],
        int(row["request_bytes"]),
        int(row["depth"]),
        float(row["bytes_per_s"]),
        float(core) if core is not None and _is_positive(core) else None,
    )
