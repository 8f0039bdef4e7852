"""From what was found to a config: every line with its reason, in YAML that `load_config` takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvtier.config import KVTierConfig, load_config
from kvtier.config_tiers import MIN_PAGE_CACHE_BYTES
from kvtier.config_yaml import parse_yaml
from kvtier.copy_length import LONG_BYTES, copy_rate, long_block_tokens
from kvtier.doctor.answer import NotMeasured
from kvtier.doctor.disk_rates import Access
from kvtier.doctor.facts import CUDA_LAYER_TOKEN_BYTES, SLICE_BYTES, Facts
from kvtier.rate import Rate
from kvtier.size import Size, size_words, speed_words
from kvtier.terminal import printable
from kvtier.types import IoMode

_MIB, _GIB = 1 << 20, 1 << 30
_LEAST_NVME_BYTES = 256 * _MIB
_MOVING_BYTES = 32 * _MIB  # buffers of up to 16 threads that move blocks, of a mebibyte each, and files beside them
_TIE = 1.1  # as the nvme store: a tie goes to direct, which spends neither page cache nor a copy

# Shares of the available memory. The rest is the model's (weights, activations, logits), which no budget counts.
_CPU_FRAC = 0.5
_GPU_FRAC_WITHOUT_CUDA, _CPU_FRAC_WITHOUT_CUDA = 0.4, 0.1
_NVME_FRAC = 0.5
_DEFAULT_THREADS = 4


@dataclass(frozen=True, slots=True)
class Line:
    """One line of YAML and why it says what it says."""

    depth: int
    key: str
    value: str
    """Empty: a mapping begins, or with `key` empty too, the line is a remark."""
    reason: str

    def __str__(self) -> str:
        text = "  " * self.depth + (f"{self.key}: {self.value}".rstrip() if self.key else "")
        reason = printable(self.reason)  # names of folders are in it: a line break would end the remark
        return f"{text}  # {reason}" if self.key and reason else text + f"# {reason}" * bool(reason)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A config as YAML; it was loaded once already."""

    yaml: str
    values: dict[str, Any]
    """The same without its reasons."""
    config: KVTierConfig


def propose(facts: Facts, path: Path | None, max_writes: Rate | None = None) -> Proposal:
    """A config for this machine.

    Args:
        path: the nvme tier's, where one was asked for.
        max_writes: of the given config. Nothing that is measured here says how much the disk is rated for.

    Raises:
        ConfigError: the folder cannot be written any more.
    """
    text = "\n".join(str(line) for line in _lines(facts, path, max_writes)) + "\n"
    values = dict(parse_yaml(text, "the proposal"))
    return Proposal(text, values, load_config(values))


def faster_mode(facts: Facts) -> tuple[IoMode, str]:
    """Which `io` to take, and why."""
    direct, mmap = (facts.read_rate(mode) for mode in (IoMode.DIRECT, IoMode.MMAP))
    if isinstance(mmap, NotMeasured):
        mode = IoMode.AUTO if isinstance(direct, NotMeasured) else IoMode.DIRECT
        return mode, f"mmap was not measured: {mmap.why}"
    if facts.place.is_memory:
        return IoMode.MMAP, "files there are memory already"
    if isinstance(direct, NotMeasured):
        return IoMode.MMAP, direct.why
    mode = IoMode.MMAP if mmap > direct * _TIE else IoMode.DIRECT
    tie = ", a tie" if mode is IoMode.DIRECT and mmap * _TIE > direct else ""
    words = (
        f"cold random reads of {size_words(SLICE_BYTES)}: direct {speed_words(direct)}, mmap {speed_words(mmap)}{tie}"
    )
    return mode, words


def _lines(facts: Facts, path: Path | None, max_writes: Rate | None) -> Iterator[Line]:
    mode, why_mode = faster_mode(facts)
    nvme = _nvme_bytes(facts)
    yield Line(0, "block_tokens", *_for_copies(facts, *_block_tokens(facts, mode, nvme)))
    if facts.cuda:
        yield Line(0, "", "", "for a smaller model more: `kvtier plan --model` says which block_tokens its copies want")
    yield Line(0, "tiers", "", "")
    available = facts.limits.available_bytes
    free = f"the {size_words(available)} of memory that are available now"
    if facts.cuda:
        gpu = min(facts.cuda, key=lambda gpu: gpu.free_bytes)
        yield Line(1, "gpu", "", "")
        of = f"of what is free on the device once your model is loaded ({size_words(gpu.free_bytes)} are now)"
        yield Line(2, "budget", "60%", f"{of}; the rest is for activations")
        cpu = _round_down(int(available * _CPU_FRAC))
        why_cpu = f"half of {free}; pinned host memory"
    else:
        yield Line(1, "gpu", "", "no CUDA device: this tier is ordinary memory too")
        budget = _round_down(int(available * _GPU_FRAC_WITHOUT_CUDA))
        why = f"{_GPU_FRAC_WITHOUT_CUDA:.0%} of {free}: the rest is for weights, activations, the other budgets"
        yield Line(2, "budget", str(Size(budget)), why)
        cpu = _round_down(int(available * _CPU_FRAC_WITHOUT_CUDA))
        why_cpu = f"{_CPU_FRAC_WITHOUT_CUDA:.0%} of it: without CUDA no faster than nor different from the gpu tier's"
    yield Line(1, "cpu", "", "")
    yield Line(2, "budget", str(Size(cpu)), why_cpu)
    if isinstance(nvme, NotMeasured):
        yield Line(1, "", "", f"no nvme tier: {nvme.why}")
    else:
        yield from _nvme_lines(facts, path, nvme, mode, why_mode)
        if max_writes is not None:
            yield Line(2, "max_writes", str(max_writes), "as in your config")
        yield from _reading_lines(facts, mode)


def _nvme_bytes(facts: Facts) -> int | NotMeasured:
    place = facts.place
    if place.is_memory:
        return NotMeasured(f"{place.folder} is on {place.kind}, where files are memory; give --path on a disk")
    rate = facts.disk_rate()
    if isinstance(rate, NotMeasured):
        return rate
    if isinstance(place.room_bytes, NotMeasured):
        return place.room_bytes
    num_bytes = _round_down(int(place.room_bytes * _NVME_FRAC))
    if num_bytes < _LEAST_NVME_BYTES:
        return NotMeasured(f"only {size_words(place.room_bytes)} may be taken while 5 % of the disk stays free")
    return num_bytes


def _nvme_lines(facts: Facts, path: Path | None, budget: int, mode: IoMode, why_mode: str) -> Iterator[Line]:
    place = facts.place
    assert not isinstance(place.room_bytes, NotMeasured)
    yield Line(1, "nvme", "", "")
    why = f"half of the {size_words(place.room_bytes)} that may be taken while 5 % of the {place.kind} disk stays free"
    yield Line(2, "budget", str(Size(budget)), why)
    if path is None:
        yield Line(2, "", "", f"path: left out: a temporary folder in {json.dumps(str(place.folder))}, gone at the end")
    else:
        yield Line(2, "path", json.dumps(str(path)), "as you gave it; what lies there reveals prompts")
    yield Line(2, "io", mode.value, why_mode)
    available = facts.limits.available_bytes
    page_cache = min(256 * _MIB, max(available // 32, min(_MOVING_BYTES, available // 8)) // _MIB * _MIB)
    page_cache = max(MIN_PAGE_CACHE_BYTES, page_cache)
    why = "enough for the ring to run ahead and for moving threads, and about a 32nd of what is available at most"
    yield Line(2, "page_cache", str(Size(page_cache)), why)


def _block_tokens(facts: Facts, mode: IoMode, nvme: int | NotMeasured) -> tuple[str, str]:
    default = "256", "the default: no disk was measured that would ask for shorter or longer reads"
    if isinstance(nvme, NotMeasured):
        return default
    small, middle, large = (facts.read_rate(mode, size) for size in (64 << 10, SLICE_BYTES, 1 << 20))
    if isinstance(small, NotMeasured) or isinstance(middle, NotMeasured) or isinstance(large, NotMeasured):
        return default
    words = f"cold reads of 64KiB {speed_words(small)}, 384KiB {speed_words(middle)}, 1MiB {speed_words(large)}"
    if small >= 0.8 * large:
        return "128", f"short reads are nearly as fast, and small blocks waste less: {words}"
    if middle < 0.7 * large and facts.limits.available_bytes > 4 * _GIB:
        return "512", f"this disk is fast with long reads only: {words}"
    return "256", f"reads of a block's slice are long enough: {words}"


def _for_copies(facts: Facts, block_tokens: str, why: str) -> tuple[str, str]:
    """No shorter than copies to a device want."""
    least = long_block_tokens(CUDA_LAYER_TOKEN_BYTES, None)
    if not facts.cuda or int(block_tokens) >= least:
        return block_tokens, why
    why = "slices of an 8B model in 16 bits are 1 MiB, which copies to the device should be"
    return str(least), why + reach(facts, LONG_BYTES)


def reach(facts: Facts, piece_bytes: int) -> str:
    """What copies to the device of that size reach, for the end of a sentence; empty where it was not measured."""
    rates = facts.copies_up()
    rate = copy_rate(piece_bytes, rates)
    return "" if rate is None else f": they reach about {speed_words(rate)} of {speed_words(rates[max(rates)])}"


def _reading_lines(facts: Facts, mode: IoMode) -> Iterator[Line]:
    depth = facts.best_depth(mode)
    layers = 4 if depth > _DEFAULT_THREADS else 2  # never below the defaults: a busy moment is no reason
    one = facts.disk.row(mode, Access.READ, SLICE_BYTES, 1).bytes_per_s
    best = facts.read_rate(mode)
    if isinstance(one, NotMeasured) or isinstance(best, NotMeasured):
        why = "the rates of this disk at other depths could not be measured"
    else:
        why = f"{speed_words(best)} at best, nearly so at {depth} at a time; one at a time gives {speed_words(one)}"
    yield Line(0, "prefetch", "", "")
    yield Line(1, "depth", str(layers), f"layers read ahead: {why}")
    threads = 16 if depth > _DEFAULT_THREADS else _DEFAULT_THREADS
    yield Line(
        0,
        "io_threads",
        str(threads),
        f"as many at a time as this disk gains by, at least the default{_by_direct(mode)}",
    )


def _by_direct(mode: IoMode) -> str:
    return "; with direct I/O streaming takes up to 32 anyway" if mode is IoMode.DIRECT else ""


def _round_down(num_bytes: int) -> int:
    """To a figure that people would write; at least 1 MiB."""
    for least, unit in ((16 * _GIB, _GIB), (2 * _GIB, 256 * _MIB), (256 * _MIB, 16 * _MIB)):
        if num_bytes >= least:
            return num_bytes // unit * unit
    return max(_MIB, num_bytes // _MIB * _MIB)
