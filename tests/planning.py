"""Models, configs and a machine to plan with."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvtier.config import KVTierConfig, load_config
from kvtier.planner.card import ModelCard
from kvtier.planner.layout import Layout, lay_out
from kvtier.planner.model_config import DTYPES
from kvtier.planner.models import find_card
from kvtier.planner.rates import DiskRow, Rates


def config(threads: int = 4, **tiers: Any) -> KVTierConfig:
    budgets = {name: {"budget": budget} for name, budget in tiers.items()}
    return load_config({"tiers": budgets, "io_threads": threads})


def card(name: str = "Llama-3.1-8B", **changes: Any) -> ModelCard:
    return dataclasses.replace(find_card(name)[0], **changes)


def a_machine(*, cuda: bool = True, **rows: float) -> Rates:
    """Easy to reckon with: 100 GB/s and 10 TFLOP/s on the device, 20 GB/s to it, 2 GB/s from the disk, 1 to it."""
    found = {
        ("memory", "may be used"): 256e9, ("disk", "free"): 4e12, ("processor", "cores"): 8.0,
        ("processor", "xxh3, one core"): 10e9, ("processor", "zstd-1 decompress, one core"): 1e9,
    }  # fmt: skip
    place, threads = ("gpu 0", "") if cuda else ("processor", ", all threads")
    for dtype in DTYPES:
        found[place, f"matrix x vector, {dtype}{threads}"] = 100e9
        found[place, f"matrix x matrix, {dtype}{threads}"] = 10e12
    if cuda:
        found |= {("gpu 0", "memory"): 80e9, ("gpu 0", "free"): 78e9}
        found |= {("gpu 0", f"{way}, pinned, 64 MiB"): 20e9 for way in ("host to device", "device to host")}
        if "short_copies" in rows:
            found["gpu 0", "host to device, pinned, 1 MiB"] = rows["short_copies"]
    found |= {("memory", "may be used"): rows["host"]} if "host" in rows else {}
    if rows.get("decoding"):
        found |= _decoding(place, threads)
    disk = tuple(
        DiskRow(io, access, 384 << 10, 32, rate / (2 if access == "write" else 1), 4e9 if access == "read" else None)
        for io, rate in (("direct", 2e9), ("mmap", 1e9))
        for access in ("read", "write")
    )
    return Rates("a test", found, disk)


def _decoding(place: str, threads: str) -> dict[tuple[str, str], float]:
    """Short rows at half the rate, attention at 50 and 25 GB/s, 1 ms a step, 100 us a layer, 10 a call, 20 a thread."""
    found = {
        (place, f"decoding, a step{threads}"): 1000.0, (place, f"decoding, a layer{threads}"): 100.0,
        (place, f"decoding, a call of attention{threads}"): 10.0, ("processor", "hand-over to a thread"): 20.0,
    }  # fmt: skip
    for dtype in DTYPES:
        found[place, f"matrix x vector, rows of 512, {dtype}{threads}"] = 50e9
        found[place, f"attention, 1 query heads, {dtype}{threads}"] = 50e9
        found[place, f"attention, 4 query heads, {dtype}{threads}"] = 25e9
    return found


def layout(model: ModelCard | None = None, context: int = 32768, rates: Rates | None = None, **tiers: Any) -> Layout:
    return lay_out(model or card(), config(**(tiers or {"gpu": "4GiB", "cpu": "32GiB"})), context, rates)
