"""What each tier may take of this machine, the stores in host memory and on disk, and how many read them at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from kvtier import system
from kvtier.budget import GpuBudget, cpu_slots, files_bytes, most_stream_threads, split_gpu_budget
from kvtier.config import KVTierConfig
from kvtier.config_tiers import NvmeTierConfig
from kvtier.errors import BudgetError, FolderInUseError
from kvtier.log import logger
from kvtier.size import size_and_bytes
from kvtier.slice_reads import ReadThreads
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.nvme_layout import min_budget_bytes
from kvtier.stores.slab import slot_bytes
from kvtier.stores.slot_payload import joined_room_bytes
from kvtier.stores.temporary_folders import give_up, sweep_stale, temporary_folder
from kvtier.types import BlockShape, Compression, IoMode, LayerGroup, Tier


@contextmanager
def budget_error(key: str, budget_bytes: int) -> Iterator[None]:
    """Allocation errors, which torch raises as RuntimeError, by the name of the budget that asked for too much."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise BudgetError(f"{key}: {size_and_bytes(budget_bytes)} cannot be allocated: lower it ({error})") from error


def gpu_budget(config: KVTierConfig, group: LayerGroup) -> GpuBudget:
    """What the gpu budget is spent on. Raises BudgetError."""
    device = torch.device(group.device)
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
    else:
        free_bytes = max(0, system.memory_limit_bytes() - system.process_memory_bytes())
    tiers, shape = config.tiers, group.shape
    return split_gpu_budget(
        tiers.gpu.budget.resolve(free_bytes),
        shape,
        slot_bytes=slot_bytes(shape),
        heads=group.heads,
        prefill_chunk=config.prefill_chunk,
        mode=config.attention,
        streams=any(tiers.budget(tier).amount for tier in (Tier.CPU, Tier.NVME)),
        wide=group.is_wide,
        writes_scores=group.writes_scores,
        untiered_frac=tiers.gpu.untiered_frac if group.num_untiered else 0.0,
    )


def build_lower(
    config: KVTierConfig,
    group: LayerGroup,
    budgets: dict[Tier, int],
    stores: dict[Tier, Store],
    *,
    joined: bool,
    staging: int,
) -> None:
    """Make the stores below the gpu tier, in host memory and on disk, and say what each may take.

    Args:
        budgets: holds the gpu tier's; those of the others are added, in bytes.
        stores: each is added as soon as it is made; after an error they are the caller's to close.
        joined: how the cpu tier's slab is laid out.
        staging: bytes that the device takes of the cpu tier's budget, without one of the page cache's.

    Raises: ConfigError, BudgetError, FolderInUseError.
    """
    shape, tiers, device = group.shape, config.tiers, torch.device(group.device)
    cpu_bytes = tiers.budget(Tier.CPU).resolve(system.memory_limit_bytes())
    if tiers.nvme is not None and tiers.nvme.budget.amount:
        folder = _nvme_root(tiers.nvme)
        nvme_bytes = tiers.nvme.budget.resolve(system.free_disk_bytes(folder))
        if system.is_memory_backed(system.filesystem_kind(folder)):
            wanted_bytes, nvme_bytes = nvme_bytes, min(nvme_bytes, cpu_bytes // 2)
            if nvme_bytes < min_budget_bytes(shape) <= wanted_bytes:  # not the budget's fault
                raise BudgetError(
                    f"tiers.nvme.path: {folder} is memory, not a disk, so that the nvme tier gets half of "
                    f"tiers.cpu.budget at most, {size_and_bytes(nvme_bytes)}, and its minimum is "
                    f"{size_and_bytes(min_budget_bytes(shape))}: give a folder on a disk, or raise tiers.cpu.budget"
                )
            cpu_bytes -= nvme_bytes
        if cpu_bytes:
            cpu_slots(cpu_bytes, shape, slot_bytes(shape), staging)  # refused before there is a folder
        budgets[Tier.NVME] = nvme_bytes
        page_cache_bytes = files_bytes(
            tiers.nvme.page_cache.resolve(system.memory_limit_bytes()),
            staging=0 if cpu_bytes else staging,
            rooms=config.io_threads * joined_room_bytes(shape) if joined else 0,
        )
        store = _nvme_store(shape, tiers.nvme, nvme_bytes, folder, page_cache_bytes)
        stores[Tier.NVME] = store
        if store.ceiling_bytes() < nvme_bytes:
            logger.warning(
                "tiers.nvme.budget is %s, but the disk of %s has room for %s while 5%% of it stays free: going on with "
                "that", size_and_bytes(nvme_bytes), store.folder, size_and_bytes(store.ceiling_bytes()),
            )  # fmt: skip
    if cpu_bytes:
        num_slots = cpu_slots(cpu_bytes, shape, slot_bytes(shape), staging)
        budgets[Tier.CPU] = cpu_bytes
        in_memory = cpu_bytes + (budgets[Tier.GPU] if device.type == "cpu" else 0)
        if in_memory > system.memory_limit_bytes():
            logger.warning(
                "the budgets in host memory add up to %s, and the process may use %s: lower them, or it may be "
                "killed when they fill", size_and_bytes(in_memory), size_and_bytes(system.memory_limit_bytes()),
            )  # fmt: skip
        with budget_error("tiers.cpu.budget", cpu_bytes):
            stores[Tier.CPU] = CpuStore(shape, num_slots, device.type == "cuda", joined)


def read_threads(nvme: Store | None, config: KVTierConfig, ring_slices: int, *, is_on_host: bool) -> ReadThreads:
    """How reads that are streamed are spread over threads. `is_on_host`: they go straight to where attention is."""
    few = config.io_threads
    if not isinstance(nvme, NvmeStore) or nvme.io.mode is not IoMode.DIRECT or nvme.compression is not Compression.NONE:
        return ReadThreads(few, few)
    reads_together = (lambda: nvme.reads_together) if is_on_host else (lambda: False)
    return ReadThreads(few, most_stream_threads(config, ring_slices), reads_together)


def _nvme_root(nvme: NvmeTierConfig) -> Path:
    """The folder in which those of single processes lie."""
    root = nvme.path if nvme.path is not None else system.cache_folder() / "runs"
    kind = system.filesystem_kind(root)
    if system.is_doubtful(kind):
        detail = "its bytes count against tiers.cpu.budget" if system.is_memory_backed(kind) else "it may be slow"
        logger.warning("the nvme folder %s is on a %s file system: %s", root, kind, detail)
    return root


def _nvme_store(
    shape: BlockShape, nvme: NvmeTierConfig, num_bytes: int, root: Path, page_cache_bytes: int
) -> NvmeStore:
    ways: dict[str, Any] = {
        "io": nvme.io,
        "page_cache_bytes": page_cache_bytes,
        "compression": nvme.compression,
        "max_writes": nvme.max_writes,
    }
    if nvme.path is None:
        return _temporary_store(shape, num_bytes, root, ways)
    shares = root / "shares"
    _sweep(shares)
    try:
        return NvmeStore(
            shape,
            num_bytes,
            root / "kv",  # beside whatever else the user keeps there; all in it is ours
            persistent=True,
            survives=nvme.survives,
            namespace_ttl_s=nvme.namespace_ttl.seconds,
            **ways,
        )
    except FolderInUseError as error:
        if nvme.on_locked == "error":
            raise
        store = _temporary_store(shape, num_bytes, shares, ways)
        logger.info("%s; this one uses %s", error, store.folder)
        return store


def _sweep(root: Path) -> None:
    if root.is_dir():
        for stale in sweep_stale(root):
            logger.info("removed %s, left by a process that died", stale)


def _temporary_store(shape: BlockShape, num_bytes: int, root: Path, ways: dict[str, Any]) -> NvmeStore:
    """A store in a new folder that goes with this process, in `root`, without what dead ones left there."""
    _sweep(root)
    folder = temporary_folder(root)
    try:
        return NvmeStore(shape, num_bytes, folder, persistent=False, **ways)
    except BaseException:  # refused, or a Ctrl-C: nothing of it stays
        give_up(folder)
        raise
