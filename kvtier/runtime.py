"""Builds every part from a config for one layer group, and closes them in order. One runtime a wrapped model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from kvtier import system
from kvtier.budget import GpuBudget, split_gpu_budget
from kvtier.config import KVTierConfig, NvmeTierConfig
from kvtier.errors import BudgetError, ClosedError, FolderInUseError
from kvtier.executor import StepExecutor, StepLimits
from kvtier.labels import Labels, Source
from kvtier.log import logger
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.placement import Placement, Watermark
from kvtier.policy import load_eviction, load_prefetch
from kvtier.ring import SliceRing
from kvtier.slots import SlotPool
from kvtier.stores.base import Store
from kvtier.stores.cpu import CpuStore
from kvtier.stores.gpu import GpuStore
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slab import slot_bytes
from kvtier.stores.temporary_folders import sweep_stale, temporary_folder
from kvtier.transfer import TransferEngine
from kvtier.turn import Turn
from kvtier.types import IoMode, LayerGroup, Tier

DIRECT_STREAM_THREADS = 32


class UntieredBytes(Protocol):
    """What one cache keeps beside the tiers."""

    num_bytes: int


def _sweep(root: Path) -> None:
    if root.is_dir():
        for stale in sweep_stale(root):
            logger.info("removed %s, left by a process that died", stale)


def _own_folder(root: Path) -> Path:
    """A new folder that goes with this process, in `root`, without what dead ones left there."""
    _sweep(root)
    return temporary_folder(root)


@contextmanager
def _budget_error(key: str, budget_bytes: int) -> Iterator[None]:
    """Allocation errors, which torch raises as RuntimeError, by the name of the budget that asked for too much."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise BudgetError(f"{key}: {budget_bytes} bytes cannot be allocated: lower it ({error})") from error


class Runtime:
    """Stores, pools, manager, engine and executor of one layer group.

    `turn` serialises steps: one thread at a time holds it for one forward. Everything below it is single-threaded.
    """

    def __init__(
        self,
        group: LayerGroup,
        config: KVTierConfig,
        weights_mark: Callable[[], int],
        new_untiered: Callable[[], dict[int, Any]] = dict,
        fingerprints: Source | None = None,
    ) -> None:
        """Allocate the gpu and cpu tiers and own the nvme folder.

        Args:
            weights_mark: a number that changes with the model's weights.
            new_untiered: empty caches for the layers that are not tiered, by layer index.
            fingerprints: of the model; its tensors are hashed only where the nvme folder outlives the process.

        Raises:
            ConfigError, BudgetError, FolderInUseError: nothing stays allocated.
        """
        self.group, self.config, self.mode = group, config, config.attention
        self.turn = Turn()
        self.closed = False
        self.pid = os.getpid()
        self.weights_mark, self.new_untiered, self.source = weights_mark, new_untiered, fingerprints
        self.untiered: weakref.WeakSet[UntieredBytes] = weakref.WeakSet()
        """What each live cache keeps beside the tiers."""
        self.untiered_peak_bytes = 0
        self.metrics = Metrics()
        nvme = config.tiers.nvme
        persists = nvme is not None and nvme.path is not None and nvme.budget.amount > 0
        self.labels = Labels(fingerprints) if fingerprints is not None and persists else None
        """What gives blocks a label; None: nothing outlives the process, and nothing is hashed."""
        self.stores: dict[Tier, Store] = {}
        self._engine: TransferEngine | None = None
        try:
            self._build()
        except BaseException:  # a Ctrl-C too: nothing stays allocated
            self._close_stores()
            raise

    def _build(self) -> None:
        config, group, shape = self.config, self.group, self.group.shape
        device = torch.device(group.device)
        # Policies first: they cost nothing, and a misspelt name should not allocate gigabytes.
        policies = {tier: load_eviction(config.eviction.policy(tier), f"eviction.{tier.label}") for tier in Tier}
        # Each prefetch policy has its own default depth: no_prefetch takes none but 0.
        depth = config.prefetch.depth if "depth" in config.prefetch.model_fields_set else None
        prefetch = load_prefetch(config.prefetch.policy, depth, "prefetch.policy")
        self.gpu_budget = self._gpu_budget(device)
        self.budgets: dict[Tier, int] = {Tier.GPU: self.gpu_budget.budget_bytes}
        self._build_lower(device)
        dtype: torch.dtype = getattr(torch, group.dtype)
        with _budget_error("tiers.gpu.budget", self.gpu_budget.budget_bytes):
            gpu = GpuStore(shape, self.gpu_budget.num_slots, dtype, device)
        self.stores[Tier.GPU] = gpu
        self.stores = dict(sorted(self.stores.items()))
        self._pools = {tier: SlotPool(store.num_slots) for tier, store in self.stores.items()}
        nvme = self.stores.get(Tier.NVME)
        if isinstance(nvme, NvmeStore):
            self._pools[Tier.NVME].hold_back(nvme.held_back())
            if not nvme.persistent:  # a share: nothing in it outlives the process
                self.labels = None
        engine = self._engine = TransferEngine(self.stores, config.io_threads, device)
        self.placement = Placement(
            self._pools,
            {tier: policies[tier] for tier in self.stores},
            engine,
            self.metrics,
            block_bytes=shape.block_bytes,
            watermarks=self._watermarks(),
            io_timeout_s=config.io_timeout_s,
            labels=self.labels,
            nvme_room=nvme.reachable_slots if isinstance(nvme, NvmeStore) else None,
        )
        self.manager = TierManager(self.placement, shape.block_tokens, gpu.same_bytes)
        ring = None
        if self.gpu_budget.ring_slices:
            ring = SliceRing(
                shape,
                self.gpu_budget.ring_slices,
                dtype,
                device,
                read_slice=engine.read_slice,
                prefetch=prefetch,
                metrics=self.metrics,
                num_threads=self._stream_threads(),
                io_timeout_s=config.io_timeout_s,
            )
        budget = self.gpu_budget
        limits = StepLimits(budget.max_chunk, budget.num_pieces, budget.gather_bytes, budget.cost, budget.scratch_bytes)
        self.executor = StepExecutor(group, self.manager, gpu, ring, self.metrics, self.mode, limits)
        for tier, store in self.stores.items():
            logger.info("%s tier: %d bytes, %d blocks", tier.label, self.budgets[tier], store.num_slots)
            if isinstance(store, NvmeStore):
                logger.info("nvme tier: io %s: %s", store.io.mode.value, store.io.reason)

    # -- budgets ------------------------------------------------------------------------------------------------------

    def _gpu_budget(self, device: torch.device) -> GpuBudget:
        if device.type == "cuda":
            free_bytes = torch.cuda.mem_get_info(device)[0]
        else:
            free_bytes = max(0, system.memory_limit_bytes() - system.process_memory_bytes())
        tiers, shape = self.config.tiers, self.group.shape
        return split_gpu_budget(
            tiers.gpu.budget.resolve(free_bytes),
            shape,
            slot_bytes=slot_bytes(shape),
            heads=self.group.heads,
            prefill_chunk=self.config.prefill_chunk,
            mode=self.mode,
            streams=any(tiers.budget(tier).amount for tier in (Tier.CPU, Tier.NVME)),
            wide=self.group.is_wide,
            writes_scores=self.group.writes_scores,
            untiered_frac=tiers.gpu.untiered_frac if self.group.num_untiered else 0.0,
        )

    def _build_lower(self, device: torch.device) -> None:
        shape, tiers = self.group.shape, self.config.tiers
        cpu_bytes = tiers.budget(Tier.CPU).resolve(system.memory_limit_bytes())
        if tiers.nvme is not None and tiers.nvme.budget.amount:
            folder = self._nvme_root(tiers.nvme)
            nvme_bytes = tiers.nvme.budget.resolve(system.free_disk_bytes(folder))
            if system.is_memory_backed(system.filesystem_kind(folder)):
                nvme_bytes = min(nvme_bytes, cpu_bytes // 2)
                cpu_bytes -= nvme_bytes
            self.budgets[Tier.NVME] = nvme_bytes
            store = self._nvme_store(tiers.nvme, nvme_bytes, folder)
            self.stores[Tier.NVME] = store
            if store.ceiling_bytes() < nvme_bytes:
                logger.warning(
                    "tiers.nvme.budget is %d bytes, but the disk of %s has room for %d while 5%% of it stays free: "
                    "going on with that", nvme_bytes, store.folder, store.ceiling_bytes(),
                )  # fmt: skip
        if cpu_bytes:
            num_slots = cpu_bytes // slot_bytes(shape)
            if num_slots < 1:
                raise BudgetError(
                    f"tiers.cpu.budget is {cpu_bytes} bytes, its minimum is {slot_bytes(shape)}: one block of "
                    f"{shape.block_tokens} tokens. Raise it, lower block_tokens, or leave the cpu tier out"
                )
            self.budgets[Tier.CPU] = cpu_bytes
            in_memory = cpu_bytes + (self.budgets[Tier.GPU] if device.type == "cpu" else 0)
            if in_memory > system.memory_limit_bytes():
                logger.warning(
                    "the budgets in host memory add up to %d bytes, and the process may use %d: lower them, or it may "
                    "be killed when they fill", in_memory, system.memory_limit_bytes(),
                )  # fmt: skip
            with _budget_error("tiers.cpu.budget", cpu_bytes):
                self.stores[Tier.CPU] = CpuStore(shape, num_slots, pin=device.type == "cuda")

    def _nvme_root(self, nvme: NvmeTierConfig) -> Path:
        """The folder in which those of single processes lie."""
        root = nvme.path if nvme.path is not None else system.cache_folder() / "runs"
        kind = system.filesystem_kind(root)
        if system.is_doubtful(kind):
            detail = "its bytes count against tiers.cpu.budget" if system.is_memory_backed(kind) else "it may be slow"
            logger.warning("the nvme folder %s is on a %s file system: %s", root, kind, detail)
        return root

    def _nvme_store(self, nvme: NvmeTierConfig, num_bytes: int, root: Path) -> NvmeStore:
        page_cache_bytes = nvme.page_cache.resolve(system.memory_limit_bytes())
        ways: dict[str, Any] = {
            "io": nvme.io,
            "page_cache_bytes": page_cache_bytes,
            "compression": nvme.compression,
        }
        if nvme.path is None:
            return NvmeStore(self.group.shape, num_bytes, _own_folder(root), persistent=False, **ways)
        shares = root / "shares"
        _sweep(shares)
        try:
            return NvmeStore(
                self.group.shape,
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
            share = _own_folder(shares)
            logger.info("%s; this one uses %s", error, share)
            return NvmeStore(self.group.shape, num_bytes, share, persistent=False, **ways)

    def _stream_threads(self) -> int:
        """Past the page cache only many reads at a time keep a disk busy; more than the ring holds would do nothing."""
        store, num_threads = self.stores.get(Tier.NVME), self.config.io_threads
        if isinstance(store, NvmeStore) and store.io.mode is IoMode.DIRECT:
            return max(num_threads, min(DIRECT_STREAM_THREADS, self.gpu_budget.ring_slices))
        return num_threads

    def _watermarks(self) -> dict[Tier, Watermark]:
        tiers = self.config.tiers
        marks = {Tier.GPU: Watermark(tiers.gpu.high, tiers.gpu.low)}
        if tiers.cpu is not None:
            marks[Tier.CPU] = Watermark(tiers.cpu.high, tiers.cpu.low)
        return marks

    def untiered_bytes(self) -> int:
        """Bytes of the layers that are not tiered, over all live caches."""
        total = sum(held.num_bytes for held in self.untiered)
        self.untiered_peak_bytes = max(self.untiered_peak_bytes, total)
        return total

    def check_untiered(self, more_bytes: int = 0) -> None:
        """Raise BudgetError if those layers hold more than the gpu budget leaves them, or would with `more_bytes`."""
        room = self.gpu_budget.untiered_bytes
        if self.group.num_untiered and (held := self.untiered_bytes() + more_bytes) > room:
            raise BudgetError(
                f"the {self.group.num_untiered} layers that are not tiered (windows, linear attention) would hold "
                f"{held} bytes in {len(self.untiered)} caches, and tiers.gpu.budget leaves them {room}: raise it or "
                "tiers.gpu.untiered_frac, drop caches, or use fewer rows"
            )

    def interpose(self, tier: Tier, wrap: Callable[[Store], Store]) -> None:
        """Let every transfer of a tier go through `wrap(store)`, between steps; as `TransferEngine.interpose`.

        Not for users: it is how the soak injects faults, without this package knowing of them.
        """
        with self.turn:
            self.check_open()
            assert self._engine is not None  # it is open
            self._engine.interpose(tier, wrap)

    # -- what users see -----------------------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise ClosedError after `close`."""
        if self.closed:
            raise ClosedError("this TieredKV was closed: wrap the model again")

    def check_integrity(self) -> None:
        """Raise IntegrityError if any part contradicts itself or another. O(blocks)."""
        with self.turn:
            self.check_open()
            self.manager.check_integrity()
            for store in self.stores.values():
                store.check_integrity()

    def close(self) -> None:
        """Stop threads, then give memory, files and folder back. Idempotent."""
        with self.turn:
            if self.closed:
                return
            self.closed = True
            if not self.executor.close():
                logger.warning("reads still hang after io_timeout_s: the nvme folder is left as it is")
                return
            self._close_stores()

    def _close_stores(self) -> None:
        if self._engine is not None and not self._engine.close(self.config.io_timeout_s):
            logger.warning("transfers still hang after io_timeout_s: the nvme folder is left as it is")
            return  # a store that is being read or written cannot be taken away
        for store in self.stores.values():
            store.close()
