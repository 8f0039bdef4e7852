"""Builds every part from a config for one layer group, and closes them in order. One runtime a wrapped model."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Container
from typing import Any

import torch

from kvtier import attention_cuda
from kvtier.budget import staging_bytes
from kvtier.config import KVTierConfig
from kvtier.cuda_device import open_device, timing_mark
from kvtier.device import Device
from kvtier.errors import BudgetError, ClosedError, KVTierError
from kvtier.executor import StepExecutor, StepLimits
from kvtier.host_attention import HostShare
from kvtier.labels import Labels
from kvtier.load_or_recompute import Meter
from kvtier.log import logger
from kvtier.lower_tiers import budget_error, build_lower, gpu_budget, read_threads
from kvtier.manager import TierManager
from kvtier.metrics import Metrics
from kvtier.origin import Source
from kvtier.placement import Placement, Watermark
from kvtier.policy import load_eviction, load_prefetch
from kvtier.prefix_cache import PrefixCache
from kvtier.quota import Quota
from kvtier.recomputable import Past
from kvtier.ring import SliceRing
from kvtier.size import size_and_bytes
from kvtier.slots import SlotPool
from kvtier.step_timer import StepTimer
from kvtier.stores.base import Store
from kvtier.stores.gpu import GpuStore
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slab import SlabStore, joins
from kvtier.timed_files import TimedFiles
from kvtier.transfer import TransferEngine
from kvtier.turn import Turn
from kvtier.types import BlockId, LayerGroup, Survives, Tier
from kvtier.untiered_room import UntieredRoom

PREFILL_COLUMNS = 32  # a step of so many new columns a row, or of a whole chunk, is prefill in `stats()`
_LEAVE_WAIT_S = 1.0  # for a step, for reads, and for transfers, one after the other


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
        self.untiered = UntieredRoom(group.num_untiered, self.gpu_budget.untiered_bytes)
        self.budgets: dict[Tier, int] = {Tier.GPU: self.gpu_budget.budget_bytes}
        place = torch.device(group.device)
        device = self._device = open_device(place)
        joined = not device.is_async and joins(shape, place)
        self.staging = device.staging()
        """Beside slots, of the cpu tier's budget; without that tier, of the page cache's."""
        planned = staging_bytes(config, shape, self.gpu_budget.ring_slices) if device.is_async else 0
        self.staging.budget_bytes = planned
        build_lower(config, group, self.budgets, self.stores, joined=joined, staging=planned)
        dtype: torch.dtype = getattr(torch, group.dtype)
        with budget_error("tiers.gpu.budget", self.gpu_budget.budget_bytes):
            gpu = GpuStore(shape, self.gpu_budget.num_slots, dtype, place, joined)
        self.stores[Tier.GPU] = gpu
        self.stores = dict(sorted(self.stores.items()))
        self._pools = {tier: SlotPool(store.num_slots) for tier, store in self.stores.items()}
        nvme = self.stores.get(Tier.NVME)
        if isinstance(nvme, NvmeStore):
            self._pools[Tier.NVME].hold_back(nvme.held_back())
            if not nvme.persistent and self.labels is not None:  # a share: nothing in it outlives the process
                self.labels.outlives = False
        engine = self._engine = TransferEngine(self.stores, config.io_threads, device)
        self.edges = engine.edges
        self.step_timer = StepTimer(
            self.metrics,
            engine.edges.steps,
            prefill_columns=max(2, min(PREFILL_COLUMNS, self.gpu_budget.max_chunk)),
            mark=timing_mark(device.torch_device),
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
            self.placement.forget_slot = self.files.try_forget
            if config.tiers.nvme is not None and config.tiers.nvme.survives is Survives.KILL:
                # Else a step would wait for the medium: there the model is hashed before a block is written.
                self.placement.label_slot = self.files.try_label
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
                begin_slices=engine.begin_slices,
                prefetch=prefetch,
                metrics=self.metrics,
                threads=read_threads(nvme, config, self.gpu_budget.ring_slices, is_on_host=not device.is_async),
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

    def _watermarks(self) -> dict[Tier, Watermark]:
        tiers = self.config.tiers
        marks = {Tier.GPU: Watermark(tiers.gpu.high, tiers.gpu.low)}
        if tiers.cpu is not None:
            marks[Tier.CPU] = Watermark(tiers.cpu.high, tiers.cpu.low)
        return marks

    def _droppable(self) -> Container[BlockId]:
        """The blocks that could be computed again by the model as it is now: under a hook or autocast none.

        Nor any where layers that are not tiered would have no room left for the temporary row that this takes.
        """
        if self.source is not None and not self.source.is_plain({}):
            return ()
        if not self.untiered.can_mend():
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
