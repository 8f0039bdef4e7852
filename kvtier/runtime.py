"""Builds every part from a config for one layer group, and closes them in order. One runtime a wrapped model."""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Container
from typing import Any, Protocol

import torch

from kvtier import attention_cuda
from kvtier.config import KVTierConfig
from kvtier.cuda_device import open_device
from kvtier.device import Device
from kvtier.errors import BudgetError, ClosedError, KVTierError, StoreError
from kvtier.executor import StepExecutor, StepLimits
from kvtier.host_attention import HostShare
from kvtier.labels import Labels, Source
from kvtier.load_or_recompute import Meter
from kvtier.log import logger
from kvtier.lower_tiers import budget_error, build_lower, gpu_budget
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.placement import Placement, Watermark
from kvtier.policy import load_eviction, load_prefetch
from kvtier.prefix_cache import PrefixCache
from kvtier.quota import Quota
from kvtier.recomputable import Past
from kvtier.ring import SliceRing
from kvtier.size import size_and_bytes
from kvtier.slots import SlotPool
from kvtier.step_timer import DeviceMark, StepTimer
from kvtier.stores.base import Store
from kvtier.stores.gpu import GpuStore
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slab import SlabStore, joins
from kvtier.timed_files import TimedFiles
from kvtier.transfer import TransferEngine
from kvtier.turn import Turn
from kvtier.types import BlockId, IoMode, LayerGroup, Slot, SlotLabel, Survives, Tier

DIRECT_STREAM_THREADS = 32
TOGETHER_BYTES = 4 << 20  # of slices that one thread reads together: enough for a disk; others verify meanwhile
PREFILL_COLUMNS = 32  # a step of so many new columns a row, or of a whole chunk, is prefill in `stats()`
_LEAVE_WAIT_S = 1.0  # for a step, for reads, and for transfers, one after the other


class UntieredBytes(Protocol):
    """What one cache keeps beside the tiers."""

    num_bytes: int
    row_bytes: int
    """Of one of its rows."""


class Runtime:
    """Stores, pools, manager, engine and executor of one layer group.

    `turn` serialises steps: one thread at a time holds it for one forward. Everything below it is single-threaded.
    """

    def __init__(
        self,
        group: LayerGroup,
        config: KVTierConfig,
        weights_mark: Callable[..., int],
        new_untiered: Callable[[], dict[int, Any]] = dict,
        fingerprints: Source | None = None,
        past: Past = Past.BLOCKS,
    ) -> None:
        """Allocate the gpu and cpu tiers and own the nvme folder.

        Args:
            weights_mark: a number that changes with the model's weights. `closely=True`: seen by a close look.
            new_untiered: empty caches for the layers that are not tiered, by layer index.
            fingerprints: of the model; its tensors are hashed only where the nvme folder outlives the process.
            past: what the model needs to compute a block again.

        Raises:
            ConfigError, BudgetError, FolderInUseError: nothing stays allocated.
        """
        self.group, self.config, self.mode = group, config, config.attention
        self.turn = Turn()
        self.closed = False
        self.pid = os.getpid()
        self.weights_mark, self.new_untiered, self.source = weights_mark, new_untiered, fingerprints
        self._past = past
        self.untiered: weakref.WeakSet[UntieredBytes] = weakref.WeakSet()
        """What each live cache keeps beside the tiers."""
        self.is_mending = False
        """Whether one of them is the temporary row that blocks are computed again on."""
        self.stepping_bytes = 0
        """What the cache of the last step kept there when the step began."""
        self.untiered_peak_bytes = 0
        self.metrics = Metrics()
        nvme = config.tiers.nvme
        persists = nvme is not None and nvme.path is not None and nvme.budget.amount > 0
        self.shares = config.shares_prefixes and past is Past.BLOCKS
        """Whether prompts are looked up."""
        self.can_keep = past is Past.BLOCKS
        """Whether all that a conversation left is in blocks."""
        named = fingerprints is not None and (persists or self.shares)
        self.save_sessions: weakref.WeakMethod[Callable[[], None]] | None = None
        """Keeps what of sessions could not be kept at the end of a turn; weak, for they know their runtime."""
        self.labels = Labels(fingerprints, outlives=persists) if fingerprints is not None and named else None
        """What gives blocks a label; None: nothing outlives the process or is shared in it."""
        self.stores: dict[Tier, Store] = {}
        self._engine: TransferEngine | None = None
        self._device: Device | None = None
        self.files: TimedFiles | None = None
        """The nvme store as it may be asked with the turn held; None where nothing outlives the process."""
        try:
            self._build()
        except BaseException:  # a Ctrl-C too: nothing stays allocated
            self._close_stores(self.config.io_timeout_s)
            raise

    def _build(self) -> None:
        config, group, shape = self.config, self.group, self.group.shape
        # Policies first: they cost nothing, and a misspelt name should not allocate gigabytes.
        policies = {tier: load_eviction(config.eviction.policy(tier), f"eviction.{tier.label}") for tier in Tier}
        # Each prefetch policy has its own default depth: no_prefetch takes none but 0.
        depth = config.prefetch.depth if "depth" in config.prefetch.model_fields_set else None
        prefetch = load_prefetch(config.prefetch.policy, depth, "prefetch.policy")
        self.gpu_budget = gpu_budget(config, group)
        self.budgets: dict[Tier, int] = {Tier.GPU: self.gpu_budget.budget_bytes}
        build_lower(config, group, self.budgets, self.stores)
        dtype: torch.dtype = getattr(torch, group.dtype)
        place = torch.device(group.device)
        with budget_error("tiers.gpu.budget", self.gpu_budget.budget_bytes):
            gpu = GpuStore(shape, self.gpu_budget.num_slots, dtype, place, joined=joins(shape, place))
        self.stores[Tier.GPU] = gpu
        self.stores = dict(sorted(self.stores.items()))
        self._pools = {tier: SlotPool(store.num_slots) for tier, store in self.stores.items()}
        nvme = self.stores.get(Tier.NVME)
        if isinstance(nvme, NvmeStore):
            self._pools[Tier.NVME].hold_back(nvme.held_back())
            if not nvme.persistent and self.labels is not None:  # a share: nothing in it outlives the process
                self.labels.outlives = False
        device = self._device = open_device(place)
        engine = self._engine = TransferEngine(self.stores, config.io_threads, device)
        self.edges = engine.edges
        self.step_timer = StepTimer(
            self.metrics,
            engine.edges.steps,
            prefill_columns=max(2, min(PREFILL_COLUMNS, self.gpu_budget.max_chunk)),
            mark=_device_mark(device.torch_device),
        )
        self.prefill = Meter()
        """Tokens computed, in steps of many."""
        if isinstance(nvme, NvmeStore) and nvme.io.read_bytes_s is not None:
            engine.nvme_reads.add(nvme.io.read_bytes_s, 1.0)  # until it is known better
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
            nvme_writes=nvme.writes if isinstance(nvme, NvmeStore) else None,
        )
        self.manager = TierManager(self.placement, shape.block_tokens, gpu.same_bytes, self._past)
        self.manager.sealer.indexes = self.shares
        self.manager.upkeep.step_slots = -(-config.prefill_chunk // shape.block_tokens)
        files = nvme if isinstance(nvme, NvmeStore) and self.labels is not None and self.labels.outlives else None
        if files is not None:
            self.files = TimedFiles(files, self.placement.breakers[Tier.NVME], config.io_timeout_s)
        self.prefix_cache = PrefixCache(self.placement, shape.block_tokens, self.files)
        if self.files is not None:
            self.placement.forget_slot = functools.partial(_forget, self.files)
            if config.tiers.nvme is not None and config.tiers.nvme.survives is Survives.KILL:
                # Else a step would wait for the medium: there the model is hashed before a block is written.
                self.placement.label_slot = functools.partial(_label, self.files)
        if config.salt_quota is not None and config.salt_quota.amount < shape.block_bytes:
            raise BudgetError(
                f"salt_quota is {config.salt_quota}, its minimum is one block of {shape.block_tokens} tokens, "
                f"{size_and_bytes(shape.block_bytes)}: raise it, lower block_tokens, or leave it out for no limit"
            )
        if config.salt_quota is not None and self.labels is not None:
            self.placement.quota = Quota(int(config.salt_quota.amount) // shape.block_bytes, self.files)
        if config.on_block_loss == "recompute":
            self.placement.droppable = self._droppable
        ring = None
        if self.gpu_budget.ring_slices:
            ring = SliceRing(
                shape,
                self.gpu_budget.ring_slices,
                dtype,
                device,
                read_slices=engine.read_slices,
                prefetch=prefetch,
                metrics=self.metrics,
                **self._streaming(),
                io_timeout_s=config.io_timeout_s,
                breaker=self.placement.breakers.get(Tier.NVME),
            )
            self.placement.leave_slot = ring.leave
        self.attention_kernels = attention_cuda.kernels_for(
            device.torch_device, dtype, shape.key_dim, shape.block_tokens
        )
        """Which kernel attends to what; empty without CUDA."""
        budget = self.gpu_budget
        limits = StepLimits(budget.max_chunk, budget.num_pieces, budget.gather_bytes, budget.cost, budget.scratch_bytes)
        slabs = {t: s.by_layer(dtype) for t, s in self.stores.items() if isinstance(s, SlabStore)}
        share = HostShare(config.host_attention, is_on_host=not device.is_async, link_per_s=self._link_slices_s)
        self.manager.upkeep.reads_in_place = share.is_in_place
        self.executor = StepExecutor(group, self.manager, slabs, ring, self.metrics, self.mode, limits, share)
        for tier, store in self.stores.items():
            logger.info("%s tier: %s, %d blocks", tier.label, size_and_bytes(self.budgets[tier]), store.num_slots)
            if isinstance(store, NvmeStore):
                logger.info("nvme tier: io %s: %s", store.io.mode.value, store.io.reason)

    def _streaming(self) -> dict[str, int]:
        """How reads that are streamed are spread over threads: `num_threads` and `num_together` of the ring."""
        store, num_threads = self.stores.get(Tier.NVME), self.config.io_threads
        if not isinstance(store, NvmeStore) or store.io.mode is not IoMode.DIRECT:
            return {"num_threads": num_threads}
        if store.reads_together:
            return {"num_threads": num_threads, "num_together": max(1, TOGETHER_BYTES // store.shape.slice_bytes)}
        # Past the page cache only many reads at a time keep a disk busy; more than the ring holds would do nothing.
        return {"num_threads": max(num_threads, min(DIRECT_STREAM_THREADS, self.gpu_budget.ring_slices))}

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
                f"{size_and_bytes(held)} in {len(self.untiered)} caches, and tiers.gpu.budget leaves them "
                f"{size_and_bytes(room)}: raise it or tiers.gpu.untiered_frac, drop caches, or use fewer rows"
            )

    def _droppable(self) -> Container[BlockId]:
        """The blocks that could be computed again by the model as it is now: under a hook or autocast none.

        Nor any where layers that are not tiered would have no room left for the temporary row that this takes, unless
        it is that row's own step. It is counted as the largest row that there is, and so is the cache of the step,
        which may be new.
        """
        if self.source is not None and not self.source.is_plain({}):
            return ()
        if self.group.num_untiered:
            row = max((held.row_bytes for held in self.untiered), default=0)
            more_bytes = max(0, row - self.stepping_bytes) + (0 if self.is_mending else row)
            if self.untiered_bytes() + more_bytes > self.gpu_budget.untiered_bytes:
                return ()
        return self.manager.recomputable

    def interpose(self, tier: Tier, wrap: Callable[[Store], Store]) -> None:
        """Let every transfer of a tier go through `wrap(store)`, between steps; as `TransferEngine.interpose`.

        Not for users: it is how the soak injects faults, without this package knowing of them.
        """
        with self.turn:
            self.check_open()
            assert self._engine is not None  # it is open
            self._engine.interpose(tier, wrap)

    def _link_slices_s(self) -> float | None:
        """Slices a second that come up from the cpu tier, at the best rate seen; None: none has."""
        use = self.edges[Tier.CPU, Tier.GPU].use()
        return None if use is None or use.peak_bytes_s is None else use.peak_bytes_s / self.group.shape.slice_bytes

    def load_s(self) -> float | None:
        """Seconds for a block to be loaded from files, as measured; None: it was not."""
        assert self._engine is not None  # it is open
        rate = self._engine.nvme_reads.per_s
        return None if rate is None else self.group.shape.block_bytes / rate

    def compute_s(self) -> float | None:
        """Seconds for a block of a prompt to be computed, as measured; None: it was not."""
        rate = self.prefill.per_s
        return None if rate is None else self.group.shape.block_tokens / rate

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
        """Stop threads, then give memory, files and folder back. Idempotent. Waits `io_timeout_s` for what hangs."""
        with self.turn:
            if self.closed:
                return
            self._keep_cached()
            self.closed = True
            self.placement.droppable = None  # or both would wait for the collector
            self._close_all(self.config.io_timeout_s)

    def _keep_cached(self) -> None:
        """What was computed is to be found by the next process, as far as there is room for it."""
        try:
            self.manager.poll()
            if self.can_keep and self.labels is not None:
                save_sessions = None if self.save_sessions is None else self.save_sessions()
                if save_sessions is not None:
                    save_sessions()
                self.labels.prove()
                self.manager.upkeep.keeper.keep_cached(self.config.io_timeout_s)
        except KVTierError as error:  # closing goes on
            logger.warning("not all that was computed is kept for the next process: %s", error)

    def leave(self) -> None:
        """`close` at the interpreter's end, without waiting long for a step or for what hangs.

        The turn is kept: a daemon thread that generates waits for it until it ends with the process, and finds nothing
        closed under it.
        """
        if self.turn.keep(_LEAVE_WAIT_S) and not self.executor.is_open and not self.closed:
            self._close_all(_LEAVE_WAIT_S)

    def _close_all(self, timeout_s: float) -> None:
        if self.labels is not None:
            self.labels.close(timeout_s)
        have_ended = self.executor.close(timeout_s)
        have_ended = (self.files is None or self.files.close(timeout_s if have_ended else 0.0)) and have_ended
        if not have_ended:
            logger.warning("reads still hang: the nvme folder is left as it is")
        # What hangs was waited for already.
        is_late = not have_ended or bool(self.placement.hung.moves)
        self._close_stores(0.0 if is_late else timeout_s, have_ended)

    def _close_stores(self, timeout_s: float, have_ended: bool = True) -> None:
        """Close the engine, and the stores unless something still reads or writes them: then they stay as they are."""
        if self._engine is not None and not self._engine.close(timeout_s):
            logger.warning("transfers still hang: the nvme folder is left as it is")
            have_ended = False
        if not have_ended:
            return  # a store that is being read or written cannot be taken away
        if self._device is not None:
            self._device.close()
        for store in self.stores.values():
            store.close()


def _device_mark(device: torch.device) -> Callable[[], DeviceMark] | None:
    if device.type != "cuda":
        return None

    def mark() -> DeviceMark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has no types for it
        event.record(torch.cuda.current_stream(device))
        return event

    return mark


def _label(files: TimedFiles, slot: Slot, label: SlotLabel) -> bool:
    try:
        files.put_label(slot, label)
    except StoreError as error:
        logger.info("%s", error)
        return False
    return True


def _forget(files: TimedFiles, slot: Slot) -> None:
    try:
        files.forget(slot)
    except StoreError as error:  # a later process may find it, and sees by its checksums that it is damaged
        logger.info("%s", error)
