"""What was found, as rows for people and programs: a section, a name, a value with its unit, and a note."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass

from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.compute import NARROW_COLUMNS
from kvtier.doctor.facts import Facts
from kvtier.doctor.limits import UNLIMITED
from kvtier.doctor.verdict import EXAMPLE_CPU, EXAMPLE_CUDA


class Unit(enum.StrEnum):
    """What a value counts."""

    BYTES = "bytes"
    BYTES_PER_S = "bytes_per_s"
    TOKENS_PER_S = "tokens_per_s"
    FLOP_PER_S = "flop_per_s"
    FRACTION = "fraction"
    MICROSECONDS = "us"
    COUNT = "count"
    TEXT = "text"


@dataclass(frozen=True, slots=True)
class Row:
    """One thing that was looked at. The rates of the disk, of which there are many, are a table of their own."""

    section: str
    name: str
    value: int | float | str | NotMeasured
    unit: Unit
    note: str = ""


def make_rows(facts: Facts) -> list[Row]:
    """In the order of the page."""
    return [*_place(facts), *_memory(facts), *_gpus(facts), *_host(facts)]


def _place(facts: Facts) -> Iterator[Row]:
    place, disk = facts.place, facts.disk
    nearest = "" if place.measured_in == place.folder else f"measured in {place.measured_in}, since it is not there yet"
    yield Row("disk", "folder", str(place.folder), Unit.TEXT, nearest)
    doubt = "files are memory" if place.is_memory else "network or FUSE" if place.is_remote else ""
    yield Row("disk", "file system", place.kind, Unit.TEXT, doubt)
    yield Row("disk", "size", place.total_bytes, Unit.BYTES)
    yield Row("disk", "free", place.free_bytes, Unit.BYTES)
    yield Row("disk", "may be taken", place.room_bytes, Unit.BYTES, "5 % of the disk always stays free")
    yield Row("disk", "O_DIRECT", _yes(disk.takes_direct), Unit.TEXT)
    emulated = "posix_fallocate writes zeros instead" if disk.preallocates is False else ""
    yield Row("disk", "fallocate", _yes(disk.preallocates), Unit.TEXT, emulated)
    yield Row("disk", "scratch file", disk.scratch_bytes, Unit.BYTES, "removed")
    yield Row("disk", "written meanwhile", disk.written_bytes, Unit.BYTES)
    rate = facts.disk_rate()
    for name, token_bytes, _ in (EXAMPLE_CPU, EXAMPLE_CUDA):
        tokens = rate if isinstance(rate, NotMeasured) else round(rate / token_bytes)
        note = f"of {name}, {token_bytes:,} bytes each; who prefills faster recomputes sooner"
        yield Row("disk", "brings back", tokens, Unit.TOKENS_PER_S, note)


def _memory(facts: Facts) -> Iterator[Row]:
    limits = facts.limits
    yield Row("memory", "RAM", limits.ram_bytes, Unit.BYTES)
    unlimited = isinstance(limits.cgroup_bytes, NotMeasured)
    yield Row("memory", "cgroup limit", "none" if unlimited else limits.cgroup_bytes, Unit.BYTES)
    yield Row("memory", "cgroup used", limits.cgroup_used_bytes, Unit.BYTES, "without page cache")
    yield Row("memory", "may be used", limits.may_use_bytes, Unit.BYTES, "what percentages of the cpu budget are of")
    yield Row("memory", "available now", limits.available_bytes, Unit.BYTES)
    yield _limit(
        "memory", "RLIMIT_MEMLOCK", limits.memlock_bytes, Unit.BYTES, "page-locked memory without CAP_IPC_LOCK"
    )
    locked = limits.locked_probe_bytes
    more = isinstance(locked, int) and locked > limits.memlock_bytes
    note = "beyond RLIMIT_MEMLOCK, so that does not bind" if more else "a probe with mlock(2)"
    yield Row("memory", "page-locked to see", locked, Unit.BYTES, note)
    yield _limit("memory", "RLIMIT_NOFILE", limits.num_files, Unit.COUNT, "open files")


def _limit(section: str, name: str, value: int, unit: Unit, note: str) -> Row:
    if value == UNLIMITED:
        return Row(section, name, "unlimited", Unit.TEXT, note)
    return Row(section, name, value, unit, note)


def _gpus(facts: Facts) -> Iterator[Row]:
    if isinstance(facts.gpus, NotMeasured):
        for name in ("device", "host to device", "device to host"):
            yield Row("gpu", name, facts.gpus, Unit.TEXT if name == "device" else Unit.BYTES_PER_S)
        return
    for gpu in facts.gpus:
        section = f"gpu {gpu.index}"
        yield Row(section, "device", gpu.name, Unit.TEXT)
        yield Row(section, "memory", gpu.total_bytes, Unit.BYTES)
        yield Row(section, "free", gpu.free_bytes, Unit.BYTES, "before a model is loaded")
        for copy in gpu.copies:
            way = "host to device" if copy.to_device else "device to host"
            kind = "pinned" if copy.is_pinned else "pageable"
            name = f"{way}, {kind}, {copy.piece_bytes >> 20} MiB"
            yield Row(section, name, copy.bytes_per_s, Unit.BYTES_PER_S)
        yield from _compute(facts, section, gpu.index)


def _host(facts: Facts) -> Iterator[Row]:
    host = facts.host
    yield Row("processor", "cores", host.cores, Unit.COUNT, "that this process may run on")
    yield Row("processor", "memcpy, one core", host.copy_one, Unit.BYTES_PER_S, "bytes copied")
    yield Row("processor", "memcpy, all cores", host.copy_all, Unit.BYTES_PER_S, "bytes copied")
    yield Row(
        "processor",
        "xxh3, one core",
        host.checksum,
        Unit.BYTES_PER_S,
        "384KiB at a time, from memory; every read is checked",
    )
    yield Row("processor", "zstd-1 compress, one core", host.compress, Unit.BYTES_PER_S, "raw bytes of bf16 noise")
    yield Row("processor", "zstd-1 decompress, one core", host.decompress, Unit.BYTES_PER_S, "bytes that come out")
    yield Row("processor", "zstd-1 leaves", host.compressed_frac, Unit.FRACTION, "of those bytes, planes not split")
    yield from _compute(facts, "processor", None)


def _compute(facts: Facts, section: str, device: int | None) -> Iterator[Row]:
    """What `kvtier plan` reads: planner/rates.py knows these names."""
    for rate in facts.compute:
        if rate.device != device:
            continue
        name = f"{rate.dtype}{_threads(device, rate.num_threads)}"
        yield Row(section, f"matrix x vector, {name}", rate.read_bytes_per_s, Unit.BYTES_PER_S, "as decoding reads")
        yield Row(section, f"matrix x matrix, {name}", rate.flop_per_s, Unit.FLOP_PER_S, "as prefill computes")
        narrow = f"matrix x vector, rows of {NARROW_COLUMNS}, {name}"
        yield Row(section, narrow, rate.narrow_bytes_per_s, Unit.BYTES_PER_S, "as small models have them")
    yield from _decoding(facts, section, device)


def _decoding(facts: Facts, section: str, device: int | None) -> Iterator[Row]:
    """As `_compute`."""
    speed = facts.decoding
    if speed is None:
        return
    for rate in speed.attention:
        if rate.device == device:
            name = f"attention, {rate.heads} query heads, {rate.dtype}{_threads(device, rate.num_threads)}"
            yield Row(section, name, rate.bytes_per_s, Unit.BYTES_PER_S, "on each head of K and V, which are read once")
    for cost in speed.costs:
        if cost.device == device:
            threads, unit = _threads(device, cost.num_threads), Unit.MICROSECONDS
            yield Row(section, f"decoding, a step{threads}", cost.step_us, unit, "of a model that is hardly there")
            yield Row(section, f"decoding, a layer{threads}", cost.layer_us, unit, "more of it")
            yield Row(section, f"decoding, a call of attention{threads}", cost.call_us, unit, "beyond two a layer")
    if device is None:
        yield Row(section, "hand-over to a thread", speed.handover_us, Unit.MICROSECONDS, "and back")


def _threads(device: int | None, num_threads: int) -> str:
    return "" if device is not None else ", one thread" if num_threads == 1 else ", all threads"


def _yes(answer: bool | NotMeasured) -> str | NotMeasured:
    return answer if isinstance(answer, NotMeasured) else "yes" if answer else "no"
