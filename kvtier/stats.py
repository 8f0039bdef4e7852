"""What `stats()` says: plain values, documented field by field in docs/stats.md."""

from __future__ import annotations

from typing import Any

from kvtier.bound import measured
from kvtier.runtime import Runtime
from kvtier.stores.nvme import NvmeStore
from kvtier.stores.slab import SlabStore
from kvtier.types import Compression, Tier


def stats(runtime: Runtime) -> dict[str, Any]:
    """Plain values; see docs/stats.md for each field. Commits what has arrived first."""
    with runtime.turn:
        runtime.check_open()
        if not runtime.executor.is_open:  # from a hook: nothing may change place under a running step
            runtime.manager.poll()
        metrics = runtime.metrics
        return {
            "attention": runtime.mode.value,
            "attention_kernels": dict(runtime.attention_kernels),
            "block_tokens": runtime.group.shape.block_tokens,
            "block_bytes": runtime.group.shape.block_bytes,
            "prefill_chunk": runtime.config.prefill_chunk,
            "max_chunk": runtime.executor.limits.max_chunk,
            "tiers": {tier.label: _tier_stats(runtime, tier) for tier in Tier},
            "bytes_moved": metrics.edges(),
            "blocks": runtime.manager.residency_len,
            "sequences": len(runtime.manager.tables),
            "steps": metrics.steps,
            "steps_aborted": metrics.steps_aborted,
            "tokens": metrics.tokens,
            "reused_tokens": {tier.label: metrics.reused_tokens[tier] for tier in Tier},
            "moves_failed": metrics.moves_failed,
            "moves_in_flight": len(runtime.placement.moves) + len(runtime.placement.hung.moves),
            "nvme_sole_reads": metrics.nvme_sole_reads,
            "recomputed_blocks": metrics.recomputed_blocks,
            "dropped_blocks": metrics.dropped_blocks,
            "prefix_cache": runtime.prefix_cache.as_dict(),
            "staging_bytes": runtime.staging.num_bytes,
            "staging_budget_bytes": runtime.staging.budget_bytes,
            "untiered_bytes": runtime.untiered.used_bytes(),
            "stall_s": metrics.stall_s,
            "bound": _bound(runtime),
        }


def _bound(runtime: Runtime) -> dict[str, Any]:
    metrics, timer = runtime.metrics, runtime.step_timer
    timer.settle(wait=True)
    edges = runtime.edges.uses()  # before the clock is read: what is busy in steps is never more than they took
    kinds = {"decode": metrics.decode.as_dict(), "prefill": metrics.prefill.as_dict()}
    return measured(timer.took_s(), kinds, edges, {cause.value: s for cause, s in metrics.stalls.items()})


def _tier_stats(runtime: Runtime, tier: Tier) -> dict[str, Any]:
    store, pool = runtime.stores.get(tier), runtime.placement.pools.get(tier)
    if store is None or pool is None:
        return {"budget_bytes": 0, "used_bytes": 0, "peak_bytes": 0, "ceiling_bytes": 0, "num_slots": 0,
                "used_slots": 0, "hit_frac": 0.0, "slices_read": 0, "state": "absent", "failures": 0,
                **_of_nvme(runtime, tier)}  # fmt: skip
    if isinstance(store, SlabStore):
        used, peak = (num * store.slot_bytes for num in (pool.num_used, pool.peak_used))
        if tier is Tier.GPU:
            used += runtime.gpu_budget.fixed_bytes + runtime.untiered.used_bytes()
            peak += runtime.gpu_budget.fixed_bytes + runtime.untiered.peak_bytes
        elif tier is Tier.CPU:
            staging = runtime.staging.num_bytes  # kept until the end: the most is what there is
            used, peak = used + staging, peak + staging
    else:
        used = store.used_bytes()
        peak = store.peak_bytes() if isinstance(store, NvmeStore) else used
    breaker = runtime.placement.breakers.get(tier)
    stats: dict[str, Any] = {
        "budget_bytes": runtime.budgets[tier],
        "used_bytes": used,
        "peak_bytes": peak,
        "ceiling_bytes": store.ceiling_bytes() if isinstance(store, NvmeStore) else runtime.budgets[tier],
        "num_slots": pool.ceiling,
        "used_slots": pool.num_used,
        "hit_frac": runtime.metrics.hit_frac(tier),
        "slices_read": runtime.metrics.slices_read[tier],
        "state": _state(runtime, tier),
        "failures": 0 if breaker is None else breaker.num_failed,
    }
    if isinstance(store, NvmeStore):
        stats |= {
            "folder": str(store.folder),
            "io": store.io.mode.value,
            "io_reason": store.io.reason,
            "host_bytes": store.host_bytes() + (0 if Tier.CPU in runtime.stores else runtime.staging.num_bytes),
        }
    return {**stats, **_of_nvme(runtime, tier)}


def _state(runtime: Runtime, tier: Tier) -> str:
    breaker = runtime.placement.breakers.get(tier)
    if breaker is not None and breaker.state != "ok":
        return breaker.state
    return "limited" if tier is Tier.NVME and runtime.placement.writes.is_used_up else "ok"


def _of_nvme(runtime: Runtime, tier: Tier) -> dict[str, Any]:
    if tier is not Tier.NVME:
        return {}
    each = runtime.group.shape.block_bytes
    store, writes = runtime.stores.get(tier), runtime.placement.writes
    found, quarantined = (store.num_found, store.num_quarantined) if isinstance(store, NvmeStore) else (0, 0)
    return {
        "found": found,
        "quarantined": quarantined,
        "compression": (store.compression if isinstance(store, NvmeStore) else Compression.NONE).value,
        "stored_frac": store.stored_frac if isinstance(store, NvmeStore) else 1.0,
        "written_bytes": writes.written_bytes,
        "written_in_period_bytes": writes.in_period_bytes(),
        "max_writes": "none" if writes.limit is None else str(writes.limit),
        "only_copy_bytes": runtime.placement.residency.num_only_nvme * each,
        "only_copy_peak_bytes": runtime.placement.residency.peak_only_nvme * each,
    }
